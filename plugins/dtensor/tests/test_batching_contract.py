"""Contract 2 over random batches: how rows are cut into microbatches changes neither losses nor gradients.

Held against plain torch and transformers on all rows at once, padded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlframework.algorithms.losses import ClippedPGLoss, NLLLoss
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.algorithms import ClippedPGLossConfig
from rlframework.interfaces.data_processor import MicrobatchRule
from rlframework_dtensor.engine import DTensorEngine
from rlframework_dtensor.worker import DTensorPolicyWorker

MODES = ("padded", "dynamic", "packed")
WIDTH = 20


class RecordingEngine(DTensorEngine):
    """Keeps the gradients where a step would be taken, and takes none."""

    gradients: dict[str, torch.Tensor]
    few_shapes = False

    def microbatch_rule(self) -> MicrobatchRule:
        return replace(super().microbatch_rule(), few_shapes=self.few_shapes)

    def clip_and_step(self, max_grad_norm: float | None, lr: float) -> tuple[float, bool]:
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        norm = torch.stack([gradient.norm() for gradient in self.gradients.values()]).norm()
        self.model.zero_grad(set_to_none=True)
        return float(norm), False


class Recorder(DTensorPolicyWorker):
    engine_class = RecordingEngine

    def set(self, *, few_shapes: bool = False, **keys: Any) -> Recorder:
        """This worker with other keys of `policy`, and the shapes of a GPU with `few_shapes`."""
        self.engine.few_shapes = few_shapes
        config = self.engine.config
        self.engine.config = type(config).model_validate(config.model_dump() | keys)
        return self


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    from rlframework.huggingface.model_directories import make_llama
    from rlframework.huggingface.tokenizer import character_tokenizer

    tokenizer = character_tokenizer("0123456789abcdefghijklmnopqrstuvwxyz+=?")
    return make_llama(
        tmp_path_factory.mktemp("models") / "llama", tokenizer, hidden=32, layers=2, heads=4, kv_heads=2, init_std=0.2
    )


@pytest.fixture(scope="module")
def worker(path):
    from rlframework.huggingface.tokenizer import load_tokenizer

    made = Recorder({"model_name": str(path)}, load_tokenizer(str(path)), init_reference_model=False)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def plain(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@st.composite
def batches(draw: Any) -> BatchedDataDict[Any]:
    """Ragged rows; masks that leave whole rows out; padding up to twice the longest row."""
    lengths = torch.tensor(draw(st.lists(st.integers(0, WIDTH), min_size=1, max_size=12)))
    width = max(1, int(lengths.max())) + draw(st.integers(0, WIDTH))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    real = torch.arange(width) < lengths[:, None]
    share = draw(st.sampled_from([0.0, 0.3, 1.0]))
    shape = (len(lengths), width)
    return BatchedDataDict(
        {
            "input_ids": torch.randint(3, 40, shape, generator=generator) * real,
            "input_lengths": lengths,
            "token_mask": ((torch.rand(shape, generator=generator) < share) & real).float(),
            "sample_mask": (torch.rand(len(lengths), generator=generator) < 0.8).float(),
            "advantages": torch.randn(shape, generator=generator),
        }
    )


def expected(model: Any, batch: BatchedDataDict[Any], weights: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    ids, mask = batch["input_ids"], (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:]
    logprobs = torch.log_softmax(model(ids).logits[:, :-1], -1).gather(2, ids[:, 1:, None])[..., 0]
    loss = -(logprobs * weights[:, 1:] * mask).sum() / mask.sum()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def distance(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """L2 of the difference over L2, all tensors together."""
    assert got.keys() == wanted.keys()
    squares = [((got[name] - wanted[name]).square().sum(), wanted[name].square().sum()) for name in wanted]
    return float((sum(d for d, _ in squares) / sum(w for _, w in squares)).sqrt())


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=batches(), mode=st.sampled_from(MODES), rows=st.integers(1, 12), tokens=st.integers(WIDTH, 90), data=st.data()
)
def test_losses_and_gradients_do_not_depend_on_microbatches_order_or_padding(
    worker, plain, batch, mode, rows, tokens, data
):
    order = torch.tensor(data.draw(st.permutations(range(batch.size))))
    policy_gradient = data.draw(st.booleans())
    loss_fn = ClippedPGLoss(ClippedPGLossConfig()) if policy_gradient else NLLLoss()
    shuffled = batch.select_indices(order)
    recorder = worker.set(few_shapes=data.draw(st.booleans()), batching={"mode": mode, "tokens": tokens})
    result = recorder.train(shuffled, loss_fn, gbs=batch.size, mbs=rows)
    valid = (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:]
    assert result["global_valid_toks"] == valid.sum()
    if not valid.any():
        assert result["global_loss"].tolist() == [0.0]
        return
    weights = batch["advantages"] if policy_gradient else torch.ones_like(batch["token_mask"])
    loss, gradients = expected(plain, batch, weights)
    if not policy_gradient:
        assert float(result["global_loss"][0]) == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert distance(worker.engine.gradients, gradients) < 1e-5


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=batches(),
    mode=st.sampled_from(MODES),
    rows=st.integers(1, 12),
    tokens=st.integers(WIDTH, 90),
    few=st.booleans(),
)
def test_logprobs_come_back_in_the_order_of_the_rows(worker, plain, batch, mode, rows, tokens, few):
    recorder = worker.set(few_shapes=few, batching={"mode": mode, "tokens": tokens})
    got = recorder.get_logprobs(batch, micro_batch_size=rows)["logprobs"]
    ids = batch["input_ids"]
    with torch.no_grad():
        wanted = torch.log_softmax(plain(ids).logits[:, :-1], -1).gather(2, ids[:, 1:, None])[..., 0]
    wanted = torch.nn.functional.pad(wanted, (1, 0)) * (torch.arange(ids.shape[1]) < batch["input_lengths"][:, None])
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "most"), [("packed", 4), ("dynamic", 8), ("padded", 6)])
def test_the_model_sees_few_shapes_and_gives_the_same_gradients(worker, mode, most):
    """512 tokens at most: multiples of 128; up to 4 rows of 128, 2 of 256, 1 of 384 or 512; 2 or 4 rows of 3 widths."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[bool, set[tuple[int, ...]]] = {True: set(), False: set()}
    embedding = worker.engine.model.get_input_embeddings()
    for _ in range(12):
        lengths = torch.randint(2, 300, (6,), generator=generator)
        real = torch.arange(300) < lengths[:, None]
        masks = {"token_mask": real.float(), "sample_mask": torch.ones(6)}
        ids = torch.randint(3, 40, real.shape, generator=generator) * real
        batch: BatchedDataDict[Any] = BatchedDataDict({"input_ids": ids, "input_lengths": lengths, **masks})
        found = []
        for few, seen in shapes.items():
            hook = embedding.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.add(tuple(inputs[0].shape)))
            recorder = worker.set(few_shapes=few, batching={"mode": mode, "tokens": 512})
            found.append((recorder.train(batch, NLLLoss(), gbs=6, mbs=4)["global_loss"], worker.engine.gradients))
            hook.remove()
        torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=0)
        assert distance(found[0][1], found[1][1]) < 1e-6
    assert len(shapes[True]) <= most < len(shapes[False])
