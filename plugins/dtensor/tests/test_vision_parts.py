"""Training of one part of a vision-language model: `policy.freeze`, and adapters in one part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_vlms
import torch
from test_multimodal import Recorder
from tiny_vlms import TOKENIZER, assert_gradients, expected_step, save

from rlframework.algorithms.losses import NLLLoss
from rlframework.base.errors import ConfigError, NotSupported
from rlframework.config.policy import PolicyConfig
from rlframework.huggingface.model_directories import make_llama, quiet_transformers

pytestmark = pytest.mark.slow
TOWER = {"llava": ".vision_tower.", "qwen2_vl": ".visual."}
PROJECTOR = ".multi_modal_projector."


@pytest.fixture(params=sorted(TOWER))
def family(request):
    return request.param


@pytest.fixture
def worker(family, tmp_path):
    made = []

    def make(**keys: Any) -> Recorder:
        config = {"model_name": str(save(family, tmp_path)), "train_global_batch_size": 4, "optimizer": {"lr": 1e-2},
                  "train_micro_batch_size": 2, "batching": {"mode": "padded"}, **keys}  # fmt: skip
        made.append(Recorder(config, TOKENIZER, init_reference_model=False))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def rows_of(family: str) -> Any:
    """The first microbatch has images, and the second is text."""
    return tiny_vlms.make_rows(family, [1, 2, 0, 0])


@pytest.mark.parametrize("part", ["vision", "language"])
def test_gradients_are_those_of_the_other_part(family, worker, part):
    rows, plain = rows_of(family), tiny_vlms.make_model(family)
    loss, gradients = expected_step(plain, rows)
    trained = {
        name: gradient
        for name, gradient in gradients.items()
        if PROJECTOR in name or (TOWER[family] in name) != (part == "vision")
    }
    assert 0 < len(trained) < len(gradients)
    made = worker(freeze=part)
    assert float(made.train(rows, NLLLoss())["global_loss"][0]) == pytest.approx(loss, rel=1e-5)
    assert_gradients(made.engine.gradients, trained)
    with_gradients = [name for name, one in made.engine.model.named_parameters() if one.requires_grad]
    assert set(with_gradients) >= set(trained)
    assert len(list(made.engine.gather_moments())) == len(with_gradients)


@pytest.mark.parametrize("part", ["vision", "language"])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # which peft reads
def test_adapters_are_in_one_part_and_peft_reads_them(family, worker, part, tmp_path):
    """Training changes the log-probabilities, and peft computes the same with the saved adapters."""
    import peft

    targets = {"vision": {"llava": ["q_proj", "fc1"], "qwen2_vl": ["qkv", "fc1"]}[family],
               "language": ["q_proj", "down_proj"]}[part]  # fmt: skip
    rows, plain = rows_of(family), tiny_vlms.make_model(family)
    made = worker(lora={"rank": 2, "part": part, "target_modules": targets})
    names = set(made.engine.adapter_specs())
    assert names
    assert all((TOWER[family] in name) == (part == "vision") for name in names)
    made.train(rows, NLLLoss())
    trained = {name: 0.1 * torch.randn(spec.shape) for name, spec in made.engine.adapter_specs().items()}
    made.engine.take_adapters(trained)
    found = made.get_logprobs(rows)["logprobs"]
    made.save_adapter(str(tmp_path / "adapter"))
    with quiet_transformers():
        adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected, before = tiny_vlms.alone(adapted, rows), tiny_vlms.alone(tiny_vlms.make_model(family), rows)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    seen = (found - before).abs().amax(1) > 1e-3
    assert seen.tolist() == ([True, True, False, False] if part == "vision" else [True] * 4)


def test_a_model_of_text_has_no_parts(tmp_path: Path):
    make_llama(tmp_path, TOKENIZER, hidden=16, layers=1)
    for keys in ({"freeze": "vision"}, {"lora": {"part": "language"}}):
        with pytest.raises(NotSupported, match="LlamaForCausalLM has no image encoder"):
            Recorder({"model_name": str(tmp_path), **keys}, TOKENIZER, init_reference_model=False)


def test_a_part_is_not_frozen_with_adapters():
    with pytest.raises((ConfigError, ValueError), match="with lora only adapters are trained"):
        PolicyConfig(model_name="x", freeze="vision", lora={"rank": 2})
