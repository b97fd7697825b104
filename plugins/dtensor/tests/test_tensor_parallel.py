"""Tensor and sequence parallelism by model family: a step of two workers matches the oracle, or the model is
rejected.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rlframework.base.errors import ConfigError, NotSupported
from rlframework.plugins.manager import create_manager
from rlframework_conformance import PolicyWorkerSuite, cases
from rlframework_conformance.layouts import Layout
from rlframework_dtensor.config import DTensorConfig
from rlframework_dtensor.mesh import Sizes
from rlframework_dtensor.model_builder import build_model

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("dtensor tensor")]  # processes serve one test after another

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2, biases": ("Qwen2", SIZES),
    "qwen3, norms of heads": ("Qwen3", {**SIZES, "head_dim": 8}),
    "mistral, sliding window": ("Mistral", {**SIZES, "sliding_window": 4}),
    "gemma, tied and scaled embedding": ("Gemma", {**SIZES, "head_dim": 8, "tie_word_embeddings": True}),
    "gemma3, four norms": ("Gemma3Text", {**SIZES, "head_dim": 8, "sliding_window": 4}),
    "phi3, its own plan": ("Phi3", SIZES),
}


def make(family: str, sizes: dict[str, Any], vocabulary: int) -> Any:
    # transformers gives the tokenizers of some families one token more
    tokens = {"vocab_size": vocabulary + 2, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    config = getattr(transformers, f"{family}Config")(**tokens, num_hidden_layers=2, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.fixture
def harness(tmp_path, monkeypatch):
    """`harness(layout, **section)`: that of the suite's tests, on the families beside the suite's own models."""
    for name, (family, sizes) in FAMILIES.items():
        maker = lambda vocabulary, family=family, sizes=sizes: make(family, sizes, vocabulary)  # noqa: E731
        monkeypatch.setitem(cases.MODELS, name, maker)
    manager = create_manager()
    record = manager.select("policy_worker", "dtensor").record
    opened = []

    def open_harness(layout, **section):
        folder = tmp_path / str(len(opened))
        folder.mkdir()
        made = PolicyWorkerSuite.open_harness(
            record,
            Layout.parse(layout),
            manager=manager,
            device="cpu",
            folder=folder,
            models=tmp_path / "models",
        )
        made.section = section
        opened.append(made)
        return made

    yield open_harness
    for made in opened:
        made.close()


@pytest.mark.parametrize("name", [name for name in FAMILIES if "own plan" not in name])
def test_sequence_parallel_step_matches_the_oracle(harness, name):
    made = harness("tensor=2,sequence")
    made.first_step(made.batch(), name, kind="nll", model=name, batching={"mode": "auto", "tokens": 30})


@pytest.mark.parametrize("name", ["qwen3, norms of heads", "phi3, its own plan", "gemma, tied and scaled embedding"])
def test_tensor_parallel_step_matches_the_oracle(harness, name):
    made = harness("tensor=2")
    made.first_step(made.batch(), name, kind="nll", model=name, activation_checkpointing="selective")


@pytest.mark.parametrize("layout", ["tensor=2", "tensor=2,sequence"])
def test_gpt2_with_its_own_plan_matches_the_oracle(harness, layout):
    """The suite leaves it to layouts without tensor parallelism, since other backends have no plan for it."""
    made = harness(layout)
    made.first_step(made.batch(), "gpt2", model="learned_positions", batching={"mode": "packed", "tokens": 30})


@pytest.mark.parametrize("layout", ["data=2", "data=2,tensor=2"])
def test_hybrid_sharding_matches_the_oracle(harness, layout):
    made = harness(layout, replicate=2)
    made.first_step(made.batch(), "two copies")


def test_a_plan_can_be_given_by_import_path(harness, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    made = harness("tensor=2", custom_parallel_plan="plan_of_tests:only_the_mlp")
    made.first_step(made.batch(), "MLP and vocabulary split, attention not")


def built(path, sizes, **section):
    """Build as if there were that many workers, up to sharding; needs no process group."""
    from rlframework.config.policy import PolicyConfig
    from rlframework.interfaces.worker_group import WorkerContext

    config = PolicyConfig(model_name=str(path), parallelism={"tensor": sizes.tensor})
    context = WorkerContext(rank=0, world_size=sizes.tensor * sizes.data)
    return build_model(config, DTensorConfig(**section), context, sizes, cases.tokenizer(), torch.device("cpu"))


@pytest.fixture
def without_weights(tmp_path):
    """`without_weights(family, **sizes)`: a directory with only a configuration, so that reading weights would fail."""

    def save(family, **sizes):
        make(family, {**SIZES, **sizes}, len(cases.tokenizer())).config.save_pretrained(tmp_path)
        return tmp_path

    return save


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"num_key_value_heads": 1}, "1 key-value heads, not divisible by policy.parallelism.tensor=2"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}, "3 attention heads"),
        ({"intermediate_size": 33}, "33 units of the MLP"),
    ],
)
def test_indivisible_sizes_are_rejected_before_weights_are_loaded(without_weights, sizes, said):
    with pytest.raises(ConfigError, match=said):
        built(without_weights("Llama", **sizes), Sizes(1, 1, 1, 2))


def test_unpackable_models_are_rejected_before_weights_are_loaded(without_weights):
    from rlframework.config.policy import PolicyConfig
    from rlframework.interfaces.worker_group import WorkerContext

    path = without_weights("Bloom", n_layer=2, n_head=4)
    config = PolicyConfig(model_name=str(path), batching={"mode": "packed"})
    with pytest.raises(NotSupported, match=r"BloomForCausalLM.*does not keep packed sequences apart"):
        build_model(config, DTensorConfig(), WorkerContext(), Sizes(1, 1, 1, 1), cases.tokenizer(), torch.device("cpu"))
