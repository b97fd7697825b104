"""Cases of the dtensor worker that the conformance suite does not cover: messages, large files, FSDP2's
unsharded root.
"""

from __future__ import annotations

import shutil
import string
from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rlframework.algorithms.losses import NLLLoss
from rlframework.base.errors import BatchError, DataError, NotSupported, RefitError, UserError
from rlframework.config.sections import GenerationConfig
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.policy.host_buffers import HostBuffers
from rlframework.workers import process_groups
from rlframework_dtensor.offload import move_model, move_optimizer
from rlframework_dtensor.shards import local_tensor
from rlframework_dtensor.worker import DTensorPolicyWorker, get_cpu_state_dict, unshard_fsdp2_model


@pytest.fixture
def worker(model_path, tokenizer):
    """`worker(**config)`: a worker on the test's model, shut down after the test."""
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
                generation_target="rlframework_transformers.engine:TransformersEngine",
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("call", ["train", "save_checkpoint", "load_checkpoint", "save_pretrained"])
def test_what_needs_the_policy_is_rejected_inside_use_reference_model(worker, batches, tmp_path, call):
    """It would train, save or replace the weights of the reference. Evaluating them is fine."""
    made, (batch,) = worker(), batches(1)
    given = (batch, NLLLoss()) if call == "train" else (str(tmp_path / "saved"),)
    with made.use_reference_model():
        with pytest.raises(UserError, match=f"{call} needs the weights of the policy.*leave the block first"):
            getattr(made, call)(*given)
        made.train(batch, NLLLoss(), eval_mode=True)
    assert not (tmp_path / "saved").exists()
    assert (made.progress.train_calls, made.progress.weights_version) == (0, 0)
    made.train(batch, NLLLoss())


@pytest.mark.slow
def test_the_trainer_waits_for_receivers_less_long_than_the_driver_for_the_trainer(worker):
    """So the error says who is missing, and the trainer survives it."""
    made = worker(generation=GenerationConfig(refit={"deadline": 60}))
    made.engine.context = replace(made.engine.context, deadline=1.0)
    _, port = made.reserve_refit_address()
    with pytest.raises(RefitError, match=r"within 0.8 s .*ranks \[1\] have not answered"):
        made.init_collective("127.0.0.1", port, 2)


@pytest.mark.slow
def test_bfloat16_restores_the_reference_after_scoring(worker, batches):
    """FSDP keeps unsharded copies after a forward without gradients; a swap must not leave them stale."""
    first, second = batches(2)
    made = worker(precision="bfloat16", optimizer={"lr": 1e-2})
    original = made.get_logprobs(first)["logprobs"]
    made.train(second, NLLLoss())
    moved = made.get_logprobs(first)["logprobs"]
    assert torch.equal(made.get_reference_policy_logprobs(first)["reference_logprobs"], original)
    assert torch.equal(made.get_logprobs(first)["logprobs"], moved)


@pytest.mark.slow
def test_a_worker_without_an_optimizer_only_evaluates(worker, batch):
    made = worker(init_optimizer=False)
    assert made.train(batch, NLLLoss(), eval_mode=True)["grad_norm"] is None
    with pytest.raises(NotSupported, match="without an optimizer"):
        made.train(batch, NLLLoss())


@pytest.mark.slow
def test_large_models_are_saved_in_several_files(worker, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    from rlframework.policy.checkpoint import pretrained

    monkeypatch.setattr(pretrained, "SHARD_BYTES", 20_000)
    made = worker()
    made.save_pretrained(str(tmp_path / "saved"))
    assert len(list((tmp_path / "saved").glob("model-*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for name, weight in made.engine.gather_weights(made.engine.weight_specs()):
        assert torch.equal(dict(loaded.named_parameters())[name], weight)


@pytest.mark.slow
def test_indivisible_rows_are_an_error(worker, batches):
    made = worker()
    with pytest.raises(BatchError, match=r"8 rows.*not a multiple of 5"):
        made.train(batches(1)[0], NLLLoss(), gbs=5)


@pytest.mark.slow
def test_missing_masks_are_named(worker, batch):
    made = worker()
    del batch["sample_mask"]
    with pytest.raises(AssertionError, match="sample_mask must be present in the data!"):
        made.train(batch, NLLLoss())


@pytest.mark.slow
def test_a_tokenizer_of_another_model_is_rejected(worker, model_path):
    from rlframework.huggingface.tokenizer import character_tokenizer

    with pytest.raises(
        DataError, match=r"tokenizer has a token with the id 101 and the model embeddings for 41.*tokenizer_name"
    ):
        DTensorPolicyWorker({"model_name": str(model_path)}, character_tokenizer(string.printable))


def test_a_damaged_weights_file_is_reported(worker, model_path, tmp_path):
    shutil.copytree(model_path, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"model\.safetensors is damaged or truncated"):
        worker(model_name=str(tmp_path / "model"))


def test_a_missing_model_is_named(worker):
    with pytest.raises(DataError, match=r"policy\.model_name='/no/such/model'"):
        worker(model_name="/no/such/model")


@pytest.mark.slow
def test_calls_onload_what_they_gather(worker, tmp_path, monkeypatch):
    """GPU collectives do not accept tensors in CPU memory."""
    made = worker()
    moved = []
    monkeypatch.setattr(
        made.engine, "move", lambda device, *, model=False, optimizer=False: moved.append((model, optimizer)) or 0
    )

    def called(method, *paths):
        made.offload_after_refit()
        moved.clear()
        getattr(made, method)(*(str(tmp_path / path) for path in paths))
        return sorted(moved)

    model, optimizer = (True, False), (False, True)
    assert called("save_pretrained", "plain") == [model]
    assert called("save_checkpoint", "weights") == [model]
    assert called("save_checkpoint", "model", "optimizer") == [optimizer, model]
    assert called("load_checkpoint", "model", "optimizer") == [optimizer, model]
    assert called("load_checkpoint", "model") == [model]


# -- names of NeMo-RL -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_state_dict_is_the_modules_own(worker, precision):
    """Live tensors in fp32: a plain module in one process, DTensors as soon as FSDP shards it."""
    made = worker(precision=precision)
    state = made.return_state_dict()
    assert state.keys() == made.engine.model.state_dict().keys()
    name, weight = next((name, weight) for name, weight in state.items() if name.endswith("q_proj.weight"))
    assert isinstance(weight, DTensor) == (precision == "bfloat16")
    assert weight.dtype == torch.float32
    local_tensor(weight).fill_(0.5)
    assert torch.equal(dict(made.engine.gather_weights([name]))[name], torch.full(weight.shape, 0.5))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_noise_has_the_stated_distribution_and_changes_the_next_forward(worker, batch, precision):
    """The scoring beforehand leaves FSDP2's root unsharded; noise behind that copy would not reach the embedding."""
    made = worker(precision=precision, optimizer={"lr": 0.0})
    before = {name: weight.clone() for name, weight in made.engine.gather_weights(made.engine.weight_specs())}
    scores = made.get_logprobs(batch)["logprobs"]
    made._add_noise_to_weights()
    found = made.get_logprobs(batch)["logprobs"]  # before anything else reshards the root
    after = {name: weight.clone() for name, weight in made.engine.gather_weights(made.engine.weight_specs())}
    noise = torch.cat([(after[name] - before[name]).flatten() for name in before])
    count = len(noise)
    assert abs(float(noise.mean())) < 5 * 0.01 / count**0.5  # five standard errors
    assert abs(float(noise.std()) / 0.01 - 1) < 5 / (2 * count) ** 0.5
    assert all(not torch.equal(after[name], before[name]) for name in before)
    assert not torch.equal(found, scores)
    made.engine.load_weights(after)  # the same numbers by another path
    assert torch.equal(made.get_logprobs(batch)["logprobs"], found)
    made._add_noise_to_weights()
    again = dict(made.engine.gather_weights(made.engine.weight_specs()))
    assert all(not torch.equal(again[name] - after[name], after[name] - before[name]) for name in before)


@pytest.mark.slow
def test_noise_leaves_gradients_the_optimizer_and_random_numbers_alone(worker, batch):
    made = worker(optimizer={"lr": 1e-3})
    made.train(batch, NLLLoss())
    for parameter in made.engine.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    moments = {name: (state.steps, state.exp_avg.clone()) for name, state in made.engine.gather_moments()}
    random_state = torch.get_rng_state()
    made._add_noise_to_weights()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(bool((parameter.grad == 1).all()) for parameter in made.engine.model.parameters())
    for name, state in made.engine.gather_moments():
        assert state.steps == moments[name][0]
        assert torch.equal(state.exp_avg, moments[name][1])


@pytest.mark.slow
def test_noise_reaches_trainable_parameters_only(worker):
    made = worker(lora={"rank": 2})
    before = {name: parameter.clone() for name, parameter in made.engine.model.named_parameters()}
    made._add_noise_to_weights()
    changed = {
        name for name, parameter in made.engine.model.named_parameters() if not torch.equal(parameter, before[name])
    }
    assert changed == {name for name in before if "lora_" in name}


def test_cpu_state_dict_copies_local_shards_in_dtype_and_shape():
    process_groups.join(WorkerContext(), torch.device("cpu"))
    try:
        mesh = init_device_mesh("cpu", (1,))
        state = {
            "matrix": torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16, requires_grad=True),
            "count": torch.tensor(7),
            "sharded": distribute_tensor(torch.tensor([1.0, 2.0, 3.0]), mesh, [Shard(0)]),
        }
        copies = get_cpu_state_dict(iter(state.items()), pin_memory=True)  # ignored without a GPU
    finally:
        process_groups.leave()
    assert list(copies) == ["matrix", "count", "sharded"]
    assert {type(copy) for copy in copies.values()} == {torch.Tensor}
    assert not any(copy.requires_grad for copy in copies.values())
    with torch.no_grad():
        state["matrix"].zero_()
        state["count"].zero_()
    assert copies["matrix"].dtype == torch.bfloat16
    assert copies["matrix"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert (copies["count"].dtype, copies["count"].shape, int(copies["count"])) == (torch.int64, torch.Size(()), 7)
    assert copies["sharded"].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.slow
def test_unsharding_a_model_lasts_for_the_context_also_after_an_error(worker):
    made = worker(precision="bfloat16")
    made.return_state_dict()  # everything is sharded

    def unsharded():
        return {not isinstance(parameter, DTensor) for parameter in made.engine.model.parameters()}

    assert unsharded() == {False}
    with unshard_fsdp2_model(made.engine.model):
        assert unsharded() == {True}
    assert unsharded() == {False}
    with pytest.raises(RuntimeError, match="inside"), unshard_fsdp2_model(made.engine.model):
        raise RuntimeError("inside")
    assert unsharded() == {False}


@pytest.mark.slow
def test_shards_move_without_changing_the_models_parameters(worker, batches):
    """To a device without memory, for want of another: what the optimizer, ties and FSDP refer to must stay."""
    made = worker(precision="bfloat16")
    made.train(batches(1)[0], NLLLoss())
    model, optimizer, meta = made.engine.model, made.engine._optimizer, torch.device("meta")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    shards = {name: (parameter.shape, local_tensor(parameter).shape) for name, parameter in parameters.items()}
    weights = sum(local_tensor(parameter).nbytes for parameter in set(parameters.values()))
    tables = sum(buffer.nbytes for buffer in model.buffers())
    assert move_model(model, meta, HostBuffers()) == weights + tables
    assert move_optimizer(optimizer, meta, HostBuffers()) == 2 * weights + 4 * len(optimizer.state)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert parameter is parameters[name]
        assert isinstance(parameter, DTensor)
        assert parameter.requires_grad
        assert (parameter.shape, local_tensor(parameter).shape) == shards[name]
        assert local_tensor(parameter).is_meta
        assert all(local_tensor(value).is_meta for value in optimizer.state[parameter].values())
        assert isinstance(optimizer.state[parameter]["exp_avg"], DTensor)
    assert all(buffer.is_meta for buffer in model.buffers())
    assert move_model(model, meta, HostBuffers()) == move_optimizer(optimizer, meta, HostBuffers()) == 0
