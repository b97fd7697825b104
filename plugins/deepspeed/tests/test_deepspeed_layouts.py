"""A step of several workers beside the oracle's, for each stage of ZeRO and each way to split a model.

The whole suite in these layouts is in `make conformance` (plugins/conformance/tests/all_parts.py).
"""

from __future__ import annotations

import pytest
import torch
import transformers

from rlframework.models.forward import HeadShard, ranges
from rlframework.plugins.manager import create_manager
from rlframework_conformance import PolicyWorkerSuite, cases
from rlframework_conformance.layouts import Layout
from rlframework_conformance.suites.policy_worker.model_kinds import first_image_step

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deepspeed layouts")]  # processes serve one test after another

CASES = [(stage, "data=2") for stage in range(4)] + [(2, "tensor=2"), (3, "tensor=2"), (2, "context=2")]


@pytest.fixture
def harness(tmp_path, conformance_models):
    """`harness(layout, section)`: that of the suite for this backend, ended with the test."""
    manager, made = create_manager(), []
    record = manager.select("policy_worker", "deepspeed").record

    def open_harness(layout, section):
        suite = type("Steps", (PolicyWorkerSuite,), {"backend": "deepspeed", "section": section})
        folders = {"folder": tmp_path, "models": conformance_models}
        made.append(suite.open_harness(record, Layout.parse(layout), manager=manager, device="cpu", **folders))
        made[-1].contract = 3
        return made[-1]

    yield open_harness
    for each in made:
        each.close()


@pytest.mark.parametrize(("stage", "layout"), CASES)
def test_a_step_of_several_workers_is_that_of_the_oracle(harness, stage, layout):
    opened = harness(layout, {"zero_optimization": {"stage": stage}})
    opened.first_step(opened.batch(), f"stage {stage}, {layout}", batching={"mode": "packed"})


# -- heads exchanged ---------------------------------------------------------------------------------------------------

ONE_FOR_BOTH = "a key-value head for two ranks, and a window"


@pytest.mark.parametrize(("mode", "model"), [("packed", "untied"), ("padded", ONE_FOR_BOTH), ("packed", ONE_FOR_BOTH)])
def test_a_step_with_heads_exchanged_is_that_of_the_oracle(harness, monkeypatch, mode, model):
    monkeypatch.setitem(cases.MODELS, ONE_FOR_BOTH, mistral)
    opened = harness("context=2", {"sequence_exchange": "ulysses"})
    keys = {"batching": {"mode": mode}, "activation_checkpointing": True}
    opened.first_step(opened.batch(), f"ulysses, {mode}", kind="nll", model=model, **keys)


def mistral(vocabulary):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 1}
    tokens = {"vocab_size": vocabulary, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    config = transformers.MistralConfig(**sizes, **tokens, num_hidden_layers=2, sliding_window=4)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_columns_of_the_ranks_are_put_into_the_order_of_the_row_and_back(size):
    """Each rank has the chunks that `ranges` says, from both ends of the row."""
    length = 4 * size
    of_ranks = [column for rank in range(size) for part in ranges(length, rank, size) for column in range(*part)]
    share = HeadShard(0, size, torch.tensor([]), exchange=None, segments=None)
    given = torch.stack((torch.tensor(of_ranks), 100 + torch.tensor(of_ranks)))[..., None]  # [b, L, 1]
    row = share.in_row_order(given)
    assert row[:, :, 0].tolist() == [list(range(length)), list(range(100, 100 + length))]
    assert torch.equal(share.in_rank_order(row), given)


# -- images ------------------------------------------------------------------------------------------------------------


IMAGE_CASES = [(2, "data=2"), (3, "data=2"), (0, "data=2"), (1, "data=1"), (1, "data=2")]


@pytest.mark.thorough  # test_deepspeed_images has one worker
@pytest.mark.parametrize(("stage", "layout"), IMAGE_CASES)
def test_a_step_with_images_is_that_of_the_oracle(harness, stage, layout):
    """Each worker needs the image encoder at the same steps, of ZeRO-3 its weights too."""
    opened = harness(layout, {"zero_optimization": {"stage": stage}})
    first_image_step(opened, "images", {"mode": "padded"})
    first_image_step(opened, "patches", {"mode": "auto", "tokens": 60})
