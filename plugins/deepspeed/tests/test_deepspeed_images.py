"""Tiny vision-language models: log-probabilities, loss and gradients beside each row processed alone.

Steps of two workers are in `test_deepspeed_layouts.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_vlms
import torch
from tiny_vlms import TOKENIZER, assert_gradients, expected_step, save

from rlframework.algorithms.losses import NLLLoss
from rlframework.base.errors import NotSupported
from rlframework.huggingface.vision_models import PACKS_IMAGES
from rlframework.interfaces.worker_group import WorkerContext
from rlframework_deepspeed.engine import DeepSpeedEngine
from rlframework_deepspeed.worker import DeepSpeedPolicyWorker

pytestmark = pytest.mark.slow


class RecordingEngine(DeepSpeedEngine):
    """Keeps the whole gradients where a step would be taken."""

    gradients: dict[str, torch.Tensor]
    packed: bool

    def forward_backward(self, microbatches: Any, *args: Any, **how: Any) -> Any:
        self.packed = all(one.cu_seqlens is not None for one in microbatches)
        return super().forward_backward(microbatches, *args, **how)

    def clip_and_step(self, max_grad_norm: float | None, lr: float) -> tuple[float, bool]:
        found = {id(parameter): part.clone() for parameter, part in self._shards.gradients()}
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self.gradients = {
            names[id(parameter)]: self._shards.all_of(parameter, found[id(parameter)].reshape(-1))
            for parameter in self.model.parameters()
            if id(parameter) in found
        }
        return super().clip_and_step(max_grad_norm, lr)


class Recorder(DeepSpeedPolicyWorker):
    engine_class = RecordingEngine


@pytest.fixture
def worker(tmp_path: Path):
    """`worker(family, stage, **keys of policy)`, ended with the test."""
    made = []

    def make(family: str, stage: int, **keys: Any) -> Recorder:
        config = {"model_name": str(save(family, tmp_path)), "train_global_batch_size": 8, "train_micro_batch_size": 3,
                  "logprob_batch_size": 3, "batching": {"mode": "auto", "tokens": 60}, **keys}  # fmt: skip
        section = {"zero_optimization": {"stage": stage}}
        made.append(Recorder(config, TOKENIZER, init_reference_model=False, backend_config=section))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


@pytest.mark.parametrize(
    ("family", "stage"),
    [(family, number % 4) for number, family in enumerate(tiny_vlms.FAMILIES)],
)
def test_logprobs_loss_and_gradients_match_each_row_alone(family, stage, worker):
    rows, plain = tiny_vlms.make_rows(family, [1, 0, 2, 0, 0, 1, 3, 1]), tiny_vlms.make_model(family)
    rows["sample_mask"][5] = 0.0
    with torch.no_grad():
        expected = tiny_vlms.alone(plain, rows)
    loss, gradients = expected_step(plain, rows)
    made = worker(family, stage)
    torch.testing.assert_close(made.get_logprobs(rows)["logprobs"], expected, rtol=1e-5, atol=1e-5)
    assert float(made.train(rows, NLLLoss())["global_loss"][0]) == pytest.approx(loss, rel=1e-5)
    assert made.engine.packed == (family in PACKS_IMAGES)
    found = made.engine.gradients
    assert_gradients(found, gradients)  # and none of layers whose output the model does not use


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_counts_of_steps_are_resumed_of_each_parameter(stage, worker, tmp_path):
    """A step of text does not count for the image encoder; in DeepSpeed's files there is one count for all."""
    keys = {"optimizer": {"lr": 1e-2, "eps": 1.0, "weight_decay": 0.1}}
    pictures, text = (tiny_vlms.make_rows("qwen2_vl", images) for images in ([1, 0, 2, 0, 0, 1, 3, 1], [0] * 8))
    made = worker("qwen2_vl", stage, **keys)
    for rows in (pictures, text):
        made.train(rows, NLLLoss())
    counts = {name: moments.steps for name, moments in made.engine.gather_moments()}
    assert {("visual" in name, count) for name, count in counts.items()} == {(True, 1), (False, 2)}
    made.engine.save_native(tmp_path / "native", optimizer=True)
    made.save_checkpoint(str(tmp_path / "weights"), str(tmp_path / "optimizer"))
    made.train(pictures, NLLLoss())
    expected = {name: weight.clone() for name, weight in made.engine.gather_weights(made.engine.weight_specs())}
    made.shutdown()
    for form in ("native", "portable"):
        other = worker("qwen2_vl", stage, **keys)
        if form == "native":
            other.engine.load_native(tmp_path / "native", optimizer=True)
        else:
            other.load_checkpoint(str(tmp_path / "weights"), str(tmp_path / "optimizer"))
        assert {name: moments.steps for name, moments in other.engine.gather_moments()} == counts, form
        other.train(pictures, NLLLoss())
        for name, weight in other.engine.gather_weights(other.engine.weight_specs()):
            assert weight.equal(expected[name]), (form, name)
        other.shutdown()


def test_tensor_parallelism_is_rejected_by_name(tmp_path: Path):
    config = {"model_name": str(save("llava", tmp_path)), "parallelism": {"tensor": 2}}
    with pytest.raises(NotSupported, match=r"LlavaForCon.* is multimodal, .*set policy\.parallelism\.tensor to 1"):
        DeepSpeedPolicyWorker(config, TOKENIZER, init_reference_model=False, context=WorkerContext(world_size=2))
