"""Directories with the `config.json` of models, from which their memory is estimated without downloading them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DENSE = {
    "Qwen3-0.6B": (1024, 28, 16, 3072, True),
    "Qwen3-1.7B": (2048, 28, 16, 6144, True),
    "Qwen3-4B": (2560, 36, 32, 9728, True),
    "Qwen3-8B": (4096, 36, 32, 12288, False),
    "Qwen3-14B": (5120, 40, 40, 17408, False),
    "Qwen3-32B": (5120, 64, 64, 25600, False),
}
"""Hidden size, layers, heads, intermediate size, tied head; 8 key-value heads of 128."""

SPARSE = {"Qwen3-30B-A3B": (2048, 48, 32, 768), "Qwen3-235B-A22B": (4096, 94, 64, 1536)}
"""Hidden size, layers, heads, intermediate size of an expert; 4 key-value heads of 128, 128 experts, 8 per token."""

_VISION = {
    "Qwen2-VL-2B-Instruct": {
        "model_type": "qwen2_vl",
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
        "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16, "mlp_ratio": 4},
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "intermediate_size": 8960,
    }
}


@contextmanager
def model_shapes() -> Iterator[dict[str, Path]]:
    """Directories with the `config.json` of each model, by its name."""
    common = {"head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960, "torch_dtype": "bfloat16"}
    configs: dict[str, dict[str, Any]] = {}
    for name, (hidden, layers, heads, intermediate, tied) in DENSE.items():
        configs[name] = (
            common | _kind("qwen3", "Qwen3ForCausalLM") | {"num_key_value_heads": 8, "tie_word_embeddings": tied}
        )
        configs[name] |= _widths(hidden, layers, heads, intermediate)
    for name, (hidden, layers, heads, intermediate) in SPARSE.items():
        experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": intermediate}
        configs[name] = (
            common
            | _kind("qwen3_moe", "Qwen3MoeForCausalLM")
            | {"num_key_value_heads": 4, "tie_word_embeddings": False}
        )
        configs[name] |= experts | _widths(hidden, layers, heads, 3 * hidden)
    configs |= _VISION
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / name for name in configs}
        for name, path in paths.items():
            path.mkdir()
            (path / "config.json").write_text(json.dumps(configs[name]), encoding="utf-8")
        yield paths


def _kind(model_type: str, architecture: str) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [architecture]}


def _widths(hidden: int, layers: int, heads: int, intermediate: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
    }
