"""Tiny models and batches for the suites: small enough for a CPU, without symmetries that hide bugs.

Weights are large enough for attention and positions to matter (a freshly initialized model answers nearly the same
whatever it attends to), norms are not all one, biases not all zero, the vocabulary size is odd, key-value heads are
grouped, and every configuration with dropout has a high one, which no result may show. Windows and limits are shorter
than most rows of `batch`.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlframework.base.files import replacing_directory
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.batch.packed_tensor import PackedTensor
from rlframework.huggingface.model_directories import quiet_transformers

ALPHABET = string.digits + string.ascii_lowercase + "+-=? "
MAX_POSITIONS = 64
LAYERS = 2
WIDTH = 14


def tokenizer() -> Any:
    """Return a tokenizer with one token per character."""
    from rlframework.huggingface.tokenizer import character_tokenizer

    return character_tokenizer(ALPHABET)


@cache
def _tokens() -> int:
    """The number of tokens; a tokenizer takes longer to make than a batch."""
    return len(tokenizer())


_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
}
"""Sizes of the models with rotary positions."""


def _rotary(family: str, task: str = "CausalLM", **changes: Any) -> Callable[[int], Any]:
    """Return a function that makes a model of a `transformers` family with rotary positions from a vocabulary size."""

    def make(vocabulary: int) -> Any:
        import transformers

        config = getattr(transformers, f"{family}Config")(vocab_size=vocabulary, **{**_SIZES, **changes})
        return getattr(transformers, f"{family}For{task}")(config)

    return make


WINDOW = 4
"""Tokens that a token of a model with windows attends to."""
SHORT = 10
"""The longest rows for the first of the two sets of frequencies of `lengths`."""

_DROPOUT: dict[str, Any] = {"attention_dropout": 0.5}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
_FEW_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_CAPS: dict[str, Any] = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0}
_TWO_SETS: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.2, 1.4, 1.6],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "factor": MAX_POSITIONS / SHORT,
    "original_max_position_embeddings": SHORT,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": MAX_POSITIONS / SHORT,
    "original_max_position_embeddings": SHORT,
}


def _gpt2(vocabulary: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": MAX_POSITIONS}
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, **sizes, bos_token_id=None, eos_token_id=None))


IMAGES = (1, 1, 1, 2, 0, 0, 0, 1)
"""Pictures in each row of `image_batch`; with two ranks and three rows in a microbatch, the second begins with text."""
_VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
_PATCHES: dict[str, Any] = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2,
                            "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}  # fmt: skip


def image_token() -> int:
    """Return the token that stands for a part of an image: the first after those of `tokenizer`."""
    return len(tokenizer())


def _images(vocabulary: int) -> Any:
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    sizes: dict[str, Any] = {
        "vision_config": {**_VISION, "num_hidden_layers": 1, "image_size": 16, "patch_size": 4},
        "text_config": {"model_type": "llama", "vocab_size": vocabulary + 1, **_SIZES},
        "image_token_id": vocabulary,
        "scale_factor": 2,
        "pad_token_id": 0,
    }
    return SmolVLMForConditionalGeneration(SmolVLMConfig(**sizes))


def _patches(vocabulary: int, sections: Sequence[int] = (1, 1, 2), **sizes: int) -> Any:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    rotary = {"rope_type": "default", "mrope_section": list(sections), "rope_theta": 100.0}
    text: dict[str, Any] = {"vocab_size": vocabulary + 1, **_SIZES, **sizes, "rope_parameters": rotary}
    config = Qwen2VLConfig(
        vision_config={**_PATCHES, "hidden_size": text["hidden_size"]},
        text_config=text,
        image_token_id=vocabulary,
        video_token_id=vocabulary + 1,
        vision_start_token_id=vocabulary + 1,
        vision_end_token_id=vocabulary + 1,
    )
    return Qwen2VLForConditionalGeneration(config)


MODELS: Mapping[str, Callable[[int], Any]] = {
    "untied": _rotary("Llama", **_DROPOUT),
    "tied": _rotary("Llama", **_DROPOUT, tie_word_embeddings=True),
    "learned_positions": _gpt2,
    "norms_of_heads": _rotary("Qwen3", head_dim=8, **_DROPOUT),
    "experts": _rotary("Qwen3Moe", head_dim=8, **_DROPOUT, **_EXPERTS),
    "reward": _rotary("Llama", "SequenceClassification", num_labels=1, **_DROPOUT),
    "windows": _rotary("Qwen3", head_dim=8, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "windows_of_the_mask": _rotary(
        "Qwen2Moe", use_sliding_window=True, sliding_window=WINDOW, shared_expert_intermediate_size=24, **_EXPERTS
    ),
    "router_noise": _rotary("Mixtral", router_jitter_noise=0.5, **_FEW_EXPERTS),
    "lengths": _rotary("Llama", rope_parameters=_TWO_SETS),
    "caps": _rotary("Gemma2", head_dim=8, query_pre_attn_scalar=12, sliding_window=WINDOW, **_CAPS),
    "sinks": _rotary("GptOss", head_dim=8, sliding_window=WINDOW, rope_parameters=_YARN, **_FEW_EXPERTS),
    "images": _images,
    "patches": _patches,
    "patches_wide_heads": partial(_patches, sections=(4, 6, 6), hidden_size=64, num_attention_heads=2),
}
"""Models by purpose.

`untied` and `tied`, which most tests use, have dropout. `learned_positions` reveals errors that rotary
positions, being relative, hide. `norms_of_heads` has weights shared by all heads, whose gradient ranks with some heads
each see in part. `experts` is a mixture that sends each token to two of four experts. `windows` has one layer without
and one with a window, which the layer passes to its attention; in `windows_of_the_mask` it is in the mask only.
`router_noise` multiplies the inputs of its routers by random numbers in training. The frequencies of the rotary
embeddings of `lengths` are others for rows of more than `SHORT` tokens. `caps` squashes the scores of attention and the
logits, and `sinks` has a further score for each head of attention. `images` takes pictures of one size, and `patches`
pictures of any size, whose parts it numbers by height and width. `patches_wide_heads` is that with heads of 32
dimensions, the fewest that some engines take.
"""


def model(name: str, folder: Path, *, layers: int = LAYERS) -> Path:
    """Return the directory of the model `name` under `folder`, created on first use. Do not write to it."""
    path = folder / (name if layers == LAYERS else f"{name}-{layers}-layers")
    if path.exists():
        return path
    tokens = tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = MODELS[name](len(tokens))
        if layers != LAYERS:
            made = _of_layers(made, layers)
        randomize(made)
    for of in filter(None, (made.config, getattr(made, "generation_config", None))):
        for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(of, token, getattr(tokens, token))
    with replacing_directory(path) as directory, quiet_transformers():
        made.save_pretrained(directory)
        tokens.save_pretrained(directory)
    return path


def load(path: Path | str, task: str = "CausalLM") -> Any:
    """Return the model in the directory `path`, in fp32 and evaluation mode; `task` ends the name of its auto class."""
    import transformers

    with quiet_transformers():
        module: Any = getattr(transformers, f"AutoModelFor{task}").from_pretrained(path, dtype=torch.float32)
    return module.eval()


def _of_layers(made: Any, layers: int) -> Any:
    """Return a model like `made` with the given number of layers, whose kinds repeat."""
    made.config.num_hidden_layers = layers
    if kinds := getattr(made.config, "layer_types", None):
        made.config.layer_types = [kinds[number % len(kinds)] for number in range(layers)]
    return type(made)(made.config)


@torch.no_grad()
def randomize(made: torch.nn.Module) -> None:
    """Draw weights that matter: matrices with standard deviation 0.2, norms around 1, biases around 0."""
    for name, parameter in made.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, 0.2)
        else:
            parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)


def batch(rows: int = 8, *, seed: int = 0, width: int = WIDTH, vocabulary: int | None = None) -> BatchedDataDict[Any]:
    """Return ragged rows of random tokens with all fields that losses read; row 1 is masked if there are several.

    Rows are not sorted by length, and one has full width. Padding holds a regular token's id, the masks select about
    half of the tokens, and advantages are around 1, so that a loss is not a small difference of large numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    vocabulary = vocabulary or _tokens()
    lengths = torch.randint(3, width + 1, (rows,), generator=generator)
    lengths[rows // 2] = width
    real = torch.arange(width) < lengths[:, None]
    asked = torch.rand(rows, width, generator=generator) > 0.4
    asked[torch.arange(rows), lengths - 1] = True
    sample_mask = torch.ones(rows)
    if rows > 1:
        sample_mask[1] = 0.0
    ids = torch.randint(3, vocabulary, (rows, width), generator=generator)
    return BatchedDataDict(
        {
            "input_ids": torch.where(real, ids, 5),
            "input_lengths": lengths,
            "token_mask": (real & asked).float(),
            "sample_mask": sample_mask,
            "advantages": 1.0 + 0.5 * torch.randn(rows, width, generator=generator),
            "prev_logprobs": torch.zeros(rows, width),
        }
    )


def with_prev_logprobs(data: BatchedDataDict[Any], logprobs: Tensor, seed: int = 0) -> BatchedDataDict[Any]:
    """Set `prev_logprobs` near `logprobs`, so that some ratios are clipped and others are not."""
    noise = 0.15 * torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(seed))
    return BatchedDataDict({**data, "prev_logprobs": logprobs + noise * (logprobs != 0)})


def image_batch(model: str, *, seed: int = 0, images: Sequence[int] = IMAGES) -> BatchedDataDict[Any]:
    """Return rows for the model `images` or `patches` with `images` different pictures in each, row 1 masked."""
    generator = torch.Generator().manual_seed(seed)
    rows = [_image_row(model, count, generator) for count in images]
    ids, media = [row for row, _ in rows], [found for _, found in rows]
    data = batch(len(rows), seed=seed, width=max(map(len, ids)))
    data["input_lengths"] = torch.tensor([len(row) for row in ids])
    data["input_ids"] = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=5)
    real = torch.arange(data["input_ids"].shape[1]) < data["input_lengths"][:, None]
    is_image = data["input_ids"] == image_token()
    data["token_mask"] = (real & ~is_image).float()
    if model == "patches":
        data["mm_token_type_ids"] = is_image.int()
    for name in ("pixel_values", "image_grid_thw")[: 1 + (model == "patches")]:
        data[name] = PackedTensor([found.get(name) for found in media], dim_to_pack=int(model == "images"))
    return data


def _image_row(model: str, images: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the tokens of a row, and its pictures joined."""

    def draw(least: int, most: int) -> int:
        return int(torch.randint(least, most, (), generator=generator))

    tokens: list[int] = []
    pixels, grids = [], []
    for _ in range(images):
        height, width = (2 * draw(1, 4), 2 * draw(1, 4)) if model == "patches" else (4, 4)
        shape = (height * width, 3 * 2 * 4 * 4) if model == "patches" else (1, 1, 3, 16, 16)
        pixels.append(torch.randn(shape, generator=generator))
        grids.append(torch.tensor([[1, height, width]]))
        tokens += [*(draw(3, image_token()) for _ in range(draw(1, 4))), *[image_token()] * (height * width // 4)]
    tokens += [draw(3, image_token()) for _ in range(draw(3, 8))]
    media = {}
    if images:
        media = {"pixel_values": torch.cat(pixels, int(model == "images")), "image_grid_thw": torch.cat(grids)}
    return torch.tensor(tokens), media
