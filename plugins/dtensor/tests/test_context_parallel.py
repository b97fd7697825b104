"""Context parallelism: how work is divided, rejected models, and steps of models that the conformance suite lacks."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from rlframework.base.errors import NotSupported
from rlframework.config.policy import PolicyConfig
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.models.forward import QueryBlock, query_blocks, ranges
from rlframework.plugins.manager import create_manager
from rlframework_conformance import PolicyWorkerSuite, cases
from rlframework_conformance.layouts import Layout
from rlframework_dtensor.config import DTensorConfig
from rlframework_dtensor.mesh import Sizes
from rlframework_dtensor.model_builder import build_model
from rlframework_dtensor.worker import DTensorPolicyWorker

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral, sliding window": ("Mistral", {**SIZES, "sliding_window": 4}),
    "qwen3, norms of heads": ("Qwen3", {**SIZES, "head_dim": 8}),
}


def config_of(family: str, **changes: Any) -> Any:
    tokens = {"vocab_size": len(cases.tokenizer()), "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    return getattr(transformers, f"{family}Config")(**{**tokens, "num_hidden_layers": 2, **changes})


# -- who computes what ------------------------------------------------------------------------------------------------


def test_each_rank_gets_chunks_from_both_ends():
    assert [ranges(24, rank, 2) for rank in (0, 1)] == [[(0, 6), (18, 24)], [(6, 18)]]
    assert [ranges(12, rank, 3) for rank in (0, 1, 2)] == [[(0, 2), (10, 12)], [(2, 4), (8, 10)], [(4, 8)]]


def test_adjacent_sequences_of_equal_length_share_one_attention_call():
    assert query_blocks([0, 2, 4, 6, 13, 24], [(0, 6), (18, 24)]) == (QueryBlock(2, 2, 0, 3), QueryBlock(6, 11, 13))


def test_separated_sequences_of_equal_length_do_not_share_a_call():
    assert query_blocks([0, 4, 20, 24], [(0, 4), (20, 24)]) == (QueryBlock(4, 4, 0), QueryBlock(4, 4, 20))


@pytest.mark.slow
@given(
    size=st.integers(1, 4),
    chunk=st.integers(1, 5),
    cuts=st.lists(st.integers(0, 40), max_size=6),
)
def test_every_query_sees_the_keys_of_its_sequence_up_to_its_own(size, chunk, cuts):
    length = 2 * size * chunk
    bounds = sorted({0, length, *(cut for cut in cuts if cut < length)})
    seen = {}
    for rank in range(size):
        parts = ranges(length, rank, size)
        columns = [column for first, last in parts for column in range(first, last)]
        for piece in query_blocks(bounds, parts):
            for number in range(piece.count):
                first = piece.first_key + number * piece.keys
                for query in range(piece.queries):
                    last = first + piece.keys - piece.queries + query
                    seen[columns.pop(0)] = list(range(first, last + 1))
        assert not columns
    expected = {
        column: list(range(max(bound for bound in bounds if bound <= column), column + 1)) for column in range(length)
    }
    assert seen == expected


@given(size=st.integers(1, 6), chunk=st.integers(1, 7))
def test_all_ranks_do_the_same_work(size, chunk):
    length = 2 * size * chunk
    work = [sum(column + 1 for part in ranges(length, rank, size) for column in range(*part)) for rank in range(size)]
    assert len(set(work)) == 1
    assert sum(work) == length * (length + 1) // 2


# -- steps of other models --------------------------------------------------------------------------------------------


@pytest.fixture
def harness(tmp_path, monkeypatch):
    """That of the suite's tests for two context ranks, on the families beside the suite's own models."""
    for name, (family, sizes) in FAMILIES.items():
        monkeypatch.setitem(
            cases.MODELS,
            name,
            lambda vocabulary, family=family, sizes=sizes: transformers.AutoModelForCausalLM.from_config(
                config_of(family, **sizes)
            ),
        )
    manager = create_manager()
    record = manager.select("policy_worker", "dtensor").record
    folders = {"folder": tmp_path / "test", "models": tmp_path / "models"}
    folders["folder"].mkdir()
    made = PolicyWorkerSuite.open_harness(record, Layout.parse("context=2"), manager=manager, device="cpu", **folders)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_step_matches_the_oracle(harness, name):
    batching = {"mode": "packed", "tokens": 30}
    harness.first_step(
        harness.batch(), name, kind="nll", model=name, batching=batching, activation_checkpointing="selective"
    )


@pytest.mark.slow
def test_window_across_ranks_matches_the_oracle(harness):
    harness.first_step(harness.batch(), "padded", kind="nll", model="mistral, sliding window")


# -- what is refused --------------------------------------------------------------------------------------------------


def built(path, **section):
    """Up to where a model is loaded, as if there were two workers; no process group is there, nor needed."""
    config = PolicyConfig(model_name=str(path), parallelism={"context": 2})
    context, sizes = WorkerContext(rank=0, world_size=2), Sizes(1, 1, 2, 1)
    return build_model(config, DTensorConfig(**section), context, sizes, cases.tokenizer(), torch.device("cpu"))


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("Mamba", {"hidden_size": 32}, "MambaForCausalLM: its attention cannot be replaced"),
        ("Bloom", {"hidden_size": 32, "n_head": 4}, "BloomForCausalLM: its attention cannot be replaced"),
    ],
)
def test_unsupported_models_are_rejected_before_weights_are_loaded(tmp_path, family, changes, said):
    config_of(family, **changes).save_pretrained(tmp_path)  # no weights: reading them would raise another error
    with pytest.raises(NotSupported, match=rf"(?s)context parallelism.*{said}.*policy\.parallelism\.context to 1"):
        built(tmp_path)


# -- torch's own ------------------------------------------------------------------------------------------------------


def test_without_a_context_nothing_changes():
    before = torch.backends.cuda.math_sdp_enabled()
    with DTensorPolicyWorker.train_context():
        assert torch.backends.cuda.math_sdp_enabled() == before


def test_torch_context_is_entered_with_the_kernels_it_supports():
    seen = []

    @contextmanager
    def context():
        seen.append(torch.backends.cuda.math_sdp_enabled())
        yield
        seen.append("left")

    with DTensorPolicyWorker.train_context(context()):
        assert seen == [False]
    assert seen == [False, "left"]
