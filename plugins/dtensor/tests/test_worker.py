"""What the conformance suite does not ask of the dtensor worker: its messages, large files, a trap of FSDP2."""

from __future__ import annotations

import shutil
import string

import pytest
import torch

from rlframework.algorithms.losses import NLLLoss
from rlframework.errors import BatchError, DataError, NotSupported
from rlframework_dtensor.worker import DTensorPolicyWorker


@pytest.fixture
def worker(model_path, tokenizer):
    """`worker(**config)`: on the model of the test, ended at its end."""
    made = []

    def make(*, generation=None, init_optimizer=True, backend_config=None, **config):
        defaults = {
            "model_name": str(model_path),
            "train_global_batch_size": 8,
            "train_micro_batch_size": 3,
            "optimizer": {"lr": 1e-4},
            "batching": {"mode": "packed", "tokens": 40},
        }
        made.append(
            DTensorPolicyWorker(
                defaults | config,
                tokenizer,
                init_optimizer=init_optimizer,
                backend_config=backend_config,
                generation=generation,
                generation_target="rlframework.generation.transformers_engine:TransformersEngine",
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def test_bfloat16_restores_the_reference_after_scoring(worker, batches):
    """FSDP keeps whole copies after a forward without gradients; a swap behind them must not leave them stale."""
    first, second = batches(2)
    made = worker(precision="bfloat16", optimizer={"lr": 1e-2})
    original = made.get_logprobs(first)["logprobs"]
    made.train(second, NLLLoss())
    moved = made.get_logprobs(first)["logprobs"]
    assert torch.equal(made.get_reference_policy_logprobs(first)["reference_logprobs"], original)
    assert torch.equal(made.get_logprobs(first)["logprobs"], moved)


def test_a_worker_without_an_optimizer_evaluates_and_says_why_it_does_not_train(worker, batch):
    made = worker(init_optimizer=False)
    assert made.train(batch, NLLLoss(), eval_mode=True)["grad_norm"] is None
    with pytest.raises(NotSupported, match="without an optimizer"):
        made.train(batch, NLLLoss())


def test_large_models_are_saved_in_several_files(worker, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    from rlframework.policy.checkpoint import pretrained

    monkeypatch.setattr(pretrained, "SHARD_BYTES", 20_000)
    made = worker()
    made.save_pretrained(str(tmp_path / "saved"))
    assert len(list((tmp_path / "saved").glob("model-*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for name, weight in made.gather_weights(made.weight_specs()):
        assert torch.equal(dict(loaded.named_parameters())[name], weight)


def test_rows_that_do_not_divide_are_an_error(worker, batches):
    made = worker()
    with pytest.raises(BatchError, match=r"8 rows.*no multiple of its 5 rows"):
        made.train(batches(1)[0], NLLLoss(), gbs=5)


def test_missing_masks_are_named(worker, batch):
    made = worker()
    del batch["sample_mask"]
    with pytest.raises(AssertionError, match="sample_mask must be present in the data!"):
        made.train(batch, NLLLoss())


def test_a_tokenizer_of_another_model_is_told(worker, model_path):
    from rlframework.huggingface.tokenizer import character_tokenizer

    with pytest.raises(DataError, match=r"tokenizer has 102 tokens and the model embeddings for 41.*tokenizer_name"):
        DTensorPolicyWorker({"model_name": str(model_path)}, character_tokenizer(string.printable))


def test_a_damaged_weights_file_is_told(worker, model_path, tmp_path):
    shutil.copytree(model_path, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(DataError, match="cannot be loaded as a causal language model"):
        worker(model_name=str(tmp_path / "model"))


def test_no_such_model_says_which_and_what_to_do(worker):
    with pytest.raises(DataError, match=r"policy\.model_name='/no/such/model'"):
        worker(model_name="/no/such/model")


def test_what_gathers_weights_or_moments_brings_them_back_first(worker, tmp_path, monkeypatch):
    """Collectives of a GPU do not take what lies in CPU memory."""
    made = worker()
    brought = []
    monkeypatch.setattr(
        made, "move", lambda device, *, model=False, optimizer=False: brought.append((model, optimizer)) or 0
    )

    def called(method, *paths):
        made.offload_after_refit()
        brought.clear()
        getattr(made, method)(*(str(tmp_path / path) for path in paths))
        return sorted(brought)

    model, optimizer = (True, False), (False, True)
    assert called("save_pretrained", "plain") == [model]
    assert called("save_checkpoint", "weights") == [model]
    assert called("save_checkpoint", "model", "optimizer") == [optimizer, model]
    assert called("load_checkpoint", "model", "optimizer") == [optimizer, model]
    assert called("load_checkpoint", "model") == [model]
