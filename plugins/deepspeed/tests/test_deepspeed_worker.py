"""Requirements of the deepspeed worker beyond the conformance suite: clean-up, and past bugs."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from rlframework.algorithms.losses import NLLLoss
from rlframework.base.errors import DataError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework_conformance.oracle import Oracle
from rlframework_conformance.policies import read_weights

STAGES = (0, 1, 2, 3)
WORDS = "0123456789abcdefghijklmnopqrstuvwxyz+=?"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """A random Llama with grouped heads and a head of its own."""
    from rlframework.huggingface.model_directories import make_llama
    from rlframework.huggingface.tokenizer import character_tokenizer

    path = tmp_path_factory.mktemp("models") / "llama"
    return make_llama(path, character_tokenizer(WORDS), hidden=32, layers=2, heads=4, kv_heads=2, init_std=0.2)


@pytest.fixture
def worker(model_path):
    """`worker(stage, **config)`: on the model of the test, ended at its end."""
    from rlframework.huggingface.tokenizer import load_tokenizer
    from rlframework_deepspeed.worker import DeepSpeedPolicyWorker

    made = []

    def make(stage, *, init_optimizer=True, reference=True, **config):
        defaults = {
            "model_name": str(model_path),
            "train_global_batch_size": 8,
            "train_micro_batch_size": 3,
            "optimizer": {"lr": 1e-3},
            "batching": {"mode": "padded"},
        }
        made.append(
            DeepSpeedPolicyWorker(
                defaults | config,
                load_tokenizer(str(model_path)),
                init_optimizer=init_optimizer,
                init_reference_model=reference,
                backend_config={"zero_optimization": {"stage": stage}},
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def batch(seed: int = 0, rows: int = 8, width: int = 14) -> BatchedDataDict:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, width + 1, (rows,), generator=generator)
    real = torch.arange(width) < lengths[:, None]
    return BatchedDataDict(
        {
            "input_ids": torch.randint(3, len(WORDS), (rows, width), generator=generator) * real,
            "input_lengths": lengths,
            "token_mask": real.float(),
            "sample_mask": torch.ones(rows),
        }
    )


class FailsAt(NLLLoss):
    """Fails in the microbatch number `at`, when those before it have left gradients."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __call__(self, *args, **kwargs):
        if not self.left:
            raise RuntimeError("this loss fails")
        self.left -= 1
        return super().__call__(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_a_call_that_failed_are_not_in_the_next(worker, model_path, stage):
    made, oracle = worker(stage), Oracle(model_path, lr=1e-3)
    with pytest.raises(RuntimeError, match="this loss fails"):
        made.train(batch(1), FailsAt(2))
    for number in range(2):
        result, right = made.train(batch(number), NLLLoss()), oracle.step(batch(number), "nll")
        assert result["grad_norm"][0] == pytest.approx(right.grad_norm, rel=1e-5)
        assert result["global_loss"][0] == pytest.approx(right.loss, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_weights_in_half_precision_are_those_of_the_files(worker, model_path, stage, tmp_path):
    """DeepSpeed makes its fp32 weights of rounded ones; these are read again."""
    made = worker(stage, precision="bfloat16")
    made.save_pretrained(str(tmp_path / "saved"))
    right = read_weights(model_path)
    got = read_weights(tmp_path / "saved")
    assert got.keys() == right.keys()
    assert all(torch.equal(got[name], weight) for name, weight in right.items())


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_first_step_is_the_first(worker, model_path, stage, precision):
    """Without ZeRO DeepSpeed takes one by itself in half precision, after which AdamW's first update is smaller."""
    made = worker(stage, precision=precision, optimizer={"lr": 1e-3, "weight_decay": 0.0})
    made.train(batch(), NLLLoss())
    assert {moments.steps for _, moments in made.engine.gather_moments()} == {1}
    before, name = read_weights(model_path), "model.layers.0.self_attn.q_proj.weight"
    [(_, after)] = made.engine.gather_weights([name])
    assert float((after - before[name]).abs().mean()) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_reference_comes_back_to_the_bit(worker, stage, precision):
    """Small weights too, of which ZeRO-3 keeps whole copies."""
    made, data = worker(stage, precision=precision, optimizer={"lr": 1e-2}), batch()
    original = made.get_logprobs(data)["logprobs"]
    made.train(batch(1), NLLLoss())
    moved = made.get_logprobs(data)["logprobs"]
    assert not torch.equal(moved, original)
    assert torch.equal(made.get_reference_policy_logprobs(data)["reference_logprobs"], original)
    assert torch.equal(made.get_logprobs(data)["logprobs"], moved)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_nothing_of_deepspeed_stays_in_the_process(worker, monkeypatch, stage):
    monkeypatch.setenv("LOCAL_RANK", "7")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    linear = torch.nn.functional.linear
    made = worker(stage)
    made.train(batch(), NLLLoss())
    made.shutdown()
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    assert torch.nn.functional.linear is linear
    assert os.environ["LOCAL_RANK"] == "7"
    assert "DS_ACCELERATOR" not in os.environ
    assert comm.cdb is None
    assert groups._WORLD_GROUP is None
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_nothing_is_compiled_on_a_cpu(worker, monkeypatch):
    from deepspeed.ops.op_builder.builder import OpBuilder

    def load(self, verbose=True):
        raise AssertionError(f"{self.name} would be compiled")

    monkeypatch.setattr(OpBuilder, "load", load)
    worker(2).train(batch(), NLLLoss())


@pytest.mark.slow
def test_several_policies_live_in_one_process(worker):
    """Made, used and ended in any order: they share a process group and DeepSpeed's communication."""
    first, second = worker(3), worker(2)
    right = first.get_logprobs(batch())["logprobs"]
    first.train(batch(1), NLLLoss())
    first.shutdown()
    torch.testing.assert_close(second.get_logprobs(batch())["logprobs"], right)
    assert second.train(batch(1), NLLLoss())["skipped"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_worker_without_an_optimizer_scores(worker, model_path, stage):
    made = worker(stage, init_optimizer=False, reference=False)
    torch.testing.assert_close(made.get_logprobs(batch())["logprobs"], Oracle(model_path).logprobs(batch()))


def test_a_damaged_weights_file_is_told(worker, model_path, tmp_path):
    shutil.copytree(model_path, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(DataError, match="damaged"):
        worker(2, model_name=str(tmp_path / "model"))


def test_no_such_model_says_which(worker):
    with pytest.raises(DataError, match=r"policy\.model_name='/no/such/model'"):
        worker(2, model_name="/no/such/model")
