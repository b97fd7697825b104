"""The dtensor worker in one process against the oracle: scoring, training, the reference, files."""

from __future__ import annotations

import shutil
import string

import pytest
import torch

from rlframework.algorithms.losses import ClippedPGLoss, NLLLoss
from rlframework.config.algorithms import ClippedPGLossConfig
from rlframework.config.sections import GenerationConfig
from rlframework.distributed.batched_data_dict import BatchedDataDict
from rlframework.errors import BatchError, DataError, NonFiniteGradients, NotSupported
from rlframework_dtensor.worker import DTensorPolicyWorker

MODES = ["padded", "dynamic", "packed"]


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


def batching(mode: str, tokens: int = 40) -> dict:
    return {"mode": mode, "tokens": tokens}


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_are_the_oracles(worker, oracle, batch, mode):
    expected = oracle().logprobs(batch).detach()
    got = worker(batching=batching(mode)).get_logprobs(batch)["logprobs"]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert (got[:, 0] == 0).all()
    assert (got[torch.arange(14) >= batch["input_lengths"][:, None]] == 0).all()


def test_logprobs_at_masked_positions_and_at_the_sampling_temperature(worker, oracle, batch):
    expected = oracle().logprobs(batch, temperature=0.5).detach() * batch["token_mask"]
    made = worker(generation=GenerationConfig(temperature=0.5))
    got = made.get_logprobs(batch, positions="token_mask")["logprobs"]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_one_step_has_the_loss_norm_and_update_of_the_oracle(worker, oracle, batch, mode, checkpointing, weights_close):
    plain = oracle(max_grad_norm=0.5)
    loss, norm = plain.step(batch, "nll")
    made = worker(batching=batching(mode), activation_checkpointing=checkpointing, max_grad_norm=0.5)
    result = made.train(batch, NLLLoss())
    assert float(result["global_loss"][0]) == pytest.approx(loss, rel=1e-5)
    assert float(result["grad_norm"][0]) == pytest.approx(norm, rel=1e-5)
    assert norm > 0.5  # so clipping was at work
    weights_close(dict(made.gather_weights(made.weight_specs())), plain.weights())


def test_twenty_steps_end_at_the_weights_of_the_oracle(worker, oracle, batches, weights_close):
    plain, made = oracle(), worker()
    loss_fn = ClippedPGLoss(ClippedPGLossConfig())
    for batch in batches(20):
        result = made.train(batch, loss_fn)
        expected_loss, expected_norm = plain.step(batch, "pg")
        reported = -result["global_loss"][0]  # on-policy, the value of the loss is minus the mean advantage
        mask = (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:]
        assert float(reported) == pytest.approx(float((batch["advantages"][:, 1:] * mask).sum() / mask.sum()), abs=1e-5)
        assert float(result["grad_norm"][0]) == pytest.approx(expected_norm, rel=1e-4)
        assert expected_loss != 0
    weights_close(dict(made.gather_weights(made.weight_specs())), plain.weights())


def test_several_global_batches_are_several_steps(worker, oracle, batches, weights_close):
    parts = batches(3)
    plain, made = oracle(), worker()
    expected = [plain.step(batch, "nll") for batch in parts]
    result = made.train(BatchedDataDict.from_batches(parts), NLLLoss(), gbs=8)
    assert result["global_loss"].tolist() == pytest.approx([loss for loss, _ in expected], rel=1e-4)
    assert result["grad_norm"].tolist() == pytest.approx([norm for _, norm in expected], rel=1e-4)
    weights_close(dict(made.gather_weights(made.weight_specs())), plain.weights())


def test_evaluation_has_the_loss_and_changes_nothing(worker, oracle, batch):
    made = worker(init_optimizer=False)
    before = {name: weight.clone() for name, weight in made.gather_weights(made.weight_specs())}
    result = made.train(batch, NLLLoss(), eval_mode=True)
    assert float(result["global_loss"][0]) == pytest.approx(oracle().loss(batch, "nll").item(), rel=1e-5)
    assert result["grad_norm"] is None
    for name, weight in made.gather_weights(made.weight_specs()):
        assert torch.equal(weight, before[name])
    with pytest.raises(NotSupported, match="without an optimizer"):
        made.train(batch, NLLLoss())


def test_entropy_and_metrics_do_not_depend_on_the_cut(worker, oracle, batch):
    logits = oracle().model(batch["input_ids"]).logits[:, :-1].log_softmax(-1)
    mask = (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:]
    entropy = ((-(logits.exp() * logits).sum(-1) * mask).sum() / mask.sum()).item()
    loss_fn = ClippedPGLoss(ClippedPGLossConfig())
    for mode, tokens in (("padded", 40), ("packed", 20)):
        metrics = worker(batching=batching(mode, tokens)).train(batch, loss_fn, eval_mode=True)["metrics"]
        assert metrics["entropy"] == pytest.approx(entropy, rel=1e-5)
        assert metrics["num_valid_samples"] == 7


def test_a_batch_without_any_valid_row_changes_nothing(worker, batches):
    """AdamW would go on along its old momentum."""
    first, empty = batches(2)
    empty["sample_mask"] = torch.zeros(8)
    made, loss_fn = worker(optimizer={"lr": 1e-2}), ClippedPGLoss(ClippedPGLossConfig())
    expected = made.train(first, loss_fn)["metrics"]
    before = {name: weight.clone() for name, weight in made.gather_weights(made.weight_specs())}
    result = made.train(empty, loss_fn)
    assert result["global_loss"].tolist() == result["grad_norm"].tolist() == [0.0]
    for name, weight in made.gather_weights(made.weight_specs()):
        assert torch.equal(weight, before[name]), name
    mixed = BatchedDataDict.from_batches([empty, first])
    assert made.train(mixed, loss_fn, eval_mode=True)["metrics"]["ratio"] == pytest.approx(expected["ratio"], rel=1e-5)


def test_the_reference_stays_and_the_policy_comes_back(worker, oracle, batches):
    first, *others = batches(3)
    expected = oracle().logprobs(first).detach()
    made = worker(optimizer={"lr": 1e-2})
    for batch in others:
        made.train(batch, NLLLoss())
    moved = made.get_logprobs(first)["logprobs"]
    reference = made.get_reference_policy_logprobs(first)["reference_logprobs"]
    torch.testing.assert_close(reference, expected, rtol=1e-5, atol=1e-5)
    assert (moved - expected).abs().max() > 0.01
    assert torch.equal(made.get_logprobs(first)["logprobs"], moved)


def test_the_policy_comes_back_when_the_body_raises(worker, batches):
    first, second = batches(2)
    made = worker(optimizer={"lr": 1e-2})
    made.train(second, NLLLoss())
    before = made.get_logprobs(first)["logprobs"]
    with pytest.raises(ZeroDivisionError), made.use_reference_model():
        raise ZeroDivisionError
    assert torch.equal(made.get_logprobs(first)["logprobs"], before)


class Exploding(NLLLoss):
    """A loss that is not finite."""

    def __call__(self, *arguments):
        loss, metrics = super().__call__(*arguments)
        return loss * float("inf"), metrics


def test_a_gradient_that_is_not_finite_is_skipped_counted_and_ends_the_run(worker, oracle, batches, weights_close):
    first, second = batches(2)
    made = worker(non_finite_gradients={"stop_after": 2})
    plain = oracle()
    assert made.train(first, Exploding())["skipped"] == 1
    assert made.train(second, NLLLoss())["skipped"] == 0
    plain.step(second, "nll")
    weights_close(dict(made.gather_weights(made.weight_specs())), plain.weights())
    made.train(first, Exploding())
    with pytest.raises(NonFiniteGradients, match="2 steps in a row"):
        made.train(first, Exploding())


def test_bfloat16_keeps_fp32_weights_and_comes_close(worker, oracle, batch):
    made = worker(precision="bfloat16")
    torch.testing.assert_close(
        made.get_logprobs(batch)["logprobs"], oracle().logprobs(batch).detach(), rtol=0.05, atol=0.1
    )
    result = made.train(batch, NLLLoss())
    assert float(result["global_loss"][0]) == pytest.approx(oracle().loss(batch, "nll").item(), rel=0.02)
    assert {spec.dtype for spec in made.weight_specs().values()} == {torch.float32}


def test_bfloat16_restores_the_reference_after_scoring(worker, batches):
    """FSDP keeps whole copies after a forward without gradients; a swap behind them must not leave them stale."""
    first, second = batches(2)
    made = worker(precision="bfloat16", optimizer={"lr": 1e-2})
    original = made.get_logprobs(first)["logprobs"]
    made.train(second, NLLLoss())
    moved = made.get_logprobs(first)["logprobs"]
    assert torch.equal(made.get_reference_policy_logprobs(first)["reference_logprobs"], original)
    assert torch.equal(made.get_logprobs(first)["logprobs"], moved)


def test_saved_files_are_the_weights_bit_for_bit(worker, batches, tmp_path, tokenizer):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = worker()
    for batch in batches(2):
        made.train(batch, NLLLoss())
    made.save_pretrained(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    held = dict(made.gather_weights(made.weight_specs()))
    assert {name for name, _ in loaded.named_parameters()} == held.keys()
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, held[name]), name
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").get_vocab() == tokenizer.get_vocab()


def test_large_models_are_saved_in_several_files(worker, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    from rlframework.policy import weights

    monkeypatch.setattr(weights, "SHARD_BYTES", 20_000)
    made = worker()
    made.save_pretrained(str(tmp_path / "saved"))
    assert len(list((tmp_path / "saved").glob("model-*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for name, weight in made.gather_weights(made.weight_specs()):
        assert torch.equal(dict(loaded.named_parameters())[name], weight)


def test_the_engine_generates_with_the_trainers_weights(worker, oracle, batches):
    made = worker(generation=GenerationConfig(max_new_tokens=3), optimizer={"lr": 1e-2})
    for batch in batches(2):
        made.train(batch, NLLLoss())
    prompts = BatchedDataDict(
        {
            "input_ids": torch.tensor([[5, 6, 7], [8, 9, 0]]),
            "input_lengths": torch.tensor([3, 2]),
            "seeds": torch.tensor([1, 2]),
        }
    )
    output = made.generate(prompts)
    rows = BatchedDataDict({"input_ids": output["output_ids"], "input_lengths": output["unpadded_sequence_lengths"]})
    scored = made.get_logprobs(rows)["logprobs"]
    sampled = output["logprobs"] != 0
    torch.testing.assert_close(output["logprobs"][sampled], scored[sampled], rtol=1e-5, atol=1e-5)
    assert sampled.sum() == output["generation_lengths"].sum()


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
    from rlframework.data.tokenizer import character_tokenizer

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
