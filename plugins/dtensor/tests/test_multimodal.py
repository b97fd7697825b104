"""Tiny vision-language models: the worker against each row processed alone, in one process and in two gloo
processes.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import tiny_vlms
import torch
from probe_forked import run_program
from selected_cases import selected_cases
from tiny_vlms import TOKENIZER, assert_gradients, expected_step, save

from rlframework.algorithms.losses import NLLLoss
from rlframework.base.errors import BatchError, DataError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.batch.packed_tensor import PackedTensor
from rlframework.huggingface.vision_models import PACKS_IMAGES
from rlframework_dtensor.engine import DTensorEngine
from rlframework_dtensor.worker import DTensorPolicyWorker

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("multimodal")]  # the two ranks are started once for all tests

IMAGES = [1, 0, 2, 0, 0, 1, 3, 1]
MODES = ["padded", "dynamic", "auto"]
"""`auto` packs rows of the kinds that can be packed."""


@pytest.fixture(scope="module", params=tiny_vlms.FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def path(family, tmp_path_factory):
    return save(family, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def models():
    """Each family's model as transformers makes it."""
    return {family: tiny_vlms.make_model(family) for family in tiny_vlms.FAMILIES}


@pytest.fixture
def plain(family, models):
    return models[family]


@pytest.fixture(scope="module")
def rows(family):
    made = tiny_vlms.make_rows(family, IMAGES)
    made["sample_mask"][5] = 0.0
    return made


class RecordingEngine(DTensorEngine):
    """Keeps the whole gradients where a step would be taken, and takes none."""

    gradients: dict[str, torch.Tensor]
    packed: bool

    def forward_backward(self, microbatches: Any, *args: Any, **how: Any) -> Any:
        self.packed = all(one.cu_seqlens is not None for one in microbatches)
        return super().forward_backward(microbatches, *args, **how)

    def clip_and_step(self, max_grad_norm: float | None, lr: float) -> tuple[float, bool]:
        with_gradient = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.gradients = {
            k: (g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for k, g in with_gradient.items()
        }
        return super().clip_and_step(max_grad_norm, lr=0.0)


class Recorder(DTensorPolicyWorker):
    engine_class = RecordingEngine


@pytest.fixture
def worker(path):
    """`worker(mode, **keys of policy)`: on the model of the test, ended at its end."""
    made = []

    def make(mode: str, **keys: Any) -> Recorder:
        config = {
            "model_name": str(path),
            "train_global_batch_size": 8,
            "train_micro_batch_size": 3,
            "logprob_batch_size": 3,
            "batching": {"mode": mode, "tokens": 60},
            "optimizer": {"lr": 1e-3},
            **keys,
        }
        made.append(Recorder(config, TOKENIZER, init_reference_model=False))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


# -- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_loss_and_gradients_match_each_row_alone(family, worker, plain, rows, mode):
    with torch.no_grad():
        expected = tiny_vlms.alone(plain, rows)
    made = worker(mode, activation_checkpointing=mode == "auto")
    torch.testing.assert_close(made.get_logprobs(rows)["logprobs"], expected, rtol=1e-5, atol=1e-5)
    order = [6, 1, 0, 7, 3, 2, 4, 5]
    shuffled = made.get_logprobs(rows.select_indices(order))["logprobs"]
    torch.testing.assert_close(shuffled, expected[order], rtol=1e-5, atol=1e-5)
    loss, gradients = expected_step(plain, rows)
    assert any("vision" in name or "visual" in name for name in gradients)
    result = made.train(rows, NLLLoss())
    assert made.engine.packed == (mode == "auto" and family in PACKS_IMAGES)
    assert float(result["global_loss"][0]) == pytest.approx(loss, rel=1e-5)
    assert_gradients(made.engine.gradients, gradients)


def test_rows_of_text_are_packed(family, worker, plain, rows):
    """A batch without keys of media is text for any model, and `auto` packs it."""
    text = rows.select_indices([1, 3, 4])
    text = BatchedDataDict({key: text[key] for key in ("input_ids", "input_lengths", "token_mask", "sample_mask")})
    with torch.no_grad():
        expected = tiny_vlms.alone(plain, text)
    made = worker("packed")
    assert made.get_info()["batching"] == "packed"
    torch.testing.assert_close(made.get_logprobs(text)["logprobs"], expected, rtol=1e-5, atol=1e-5)
    loss, gradients = expected_step(plain, text)
    assert float(made.train(text, NLLLoss(), gbs=3)["global_loss"][0]) == pytest.approx(loss, rel=1e-5)
    assert_gradients(made.engine.gradients, gradients)  # and none for the vision tower


def test_packing_images_that_see_each_other_is_rejected(tmp_path):
    rows = tiny_vlms.make_rows("gemma3", IMAGES)
    folder = str(save("gemma3", tmp_path))
    config = {"model_name": folder, "batching": {"mode": "packed"}, "train_global_batch_size": 8}
    made = DTensorPolicyWorker(config, TOKENIZER, init_reference_model=False)
    for call in (made.get_logprobs, lambda batch: made.train(batch, NLLLoss())):
        with pytest.raises(
            BatchError, match=r"multimodal rows .*pixel_values.* cannot be packed; set policy\.batching"
        ):
            call(rows)


def test_bfloat16_comes_close(worker, plain, rows):
    with torch.no_grad():
        expected = tiny_vlms.alone(plain, rows)
    loss, _ = expected_step(plain, rows)
    made = worker("dynamic", precision="bfloat16")
    got = made.get_logprobs(rows)["logprobs"]
    assert float((got - expected).abs().mean()) < 0.05
    assert float(made.train(rows, NLLLoss())["global_loss"][0]) == pytest.approx(loss, rel=0.03)


def test_saved_files_are_the_weights_bit_for_bit(worker, tmp_path):
    from transformers import AutoModelForImageTextToText

    from rlframework.huggingface.model_directories import quiet_transformers
    from rlframework.models.file_weights import by_file_names

    made = worker("auto")
    made.save_pretrained(str(tmp_path / "saved"))
    with quiet_transformers():
        loaded, info = AutoModelForImageTextToText.from_pretrained(
            tmp_path / "saved", dtype=torch.float32, output_loading_info=True
        )
    assert not any(info.values())
    held = dict(made.engine.gather_weights(made.engine.weight_specs()))
    written = by_file_names(loaded, dict(loaded.named_parameters()))
    assert written.keys() == held.keys()
    for name, parameter in written.items():
        assert torch.equal(parameter, held[name]), name


def test_a_configuration_of_neither_kind_is_rejected(tmp_path):
    from transformers import CLIPVisionConfig

    CLIPVisionConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="cannot be loaded as a causal language model"):
        DTensorPolicyWorker({"model_name": str(tmp_path)}, TOKENIZER)


# -- two processes ----------------------------------------------------------------------------------------------------

CASES = {  # images of each of 8 rows; the first four are rank 0's
    "only the first rank": [1, 2, 0, 1, 0, 0, 0, 0],
    "only the second rank": [0, 0, 0, 0, 0, 2, 0, 1],
    "mixed": [1, 0, 0, 2, 0, 1, 0, 0],
    "no images": [0] * 8,
}
UNCOUNTED = {  # rows with a zero mask
    "the only images do not count": ([0, 0, 0, 0, 1, 2, 1, 1], [4, 5, 6, 7]),
    "a rank has nothing but a dummy with an image": ([1, 0, 0, 1, 1, 1, 1, 1], [4, 5, 6, 7]),
    "a rank has nothing but a dummy of text": ([1, 0, 0, 1, 0, 0, 0, 0], [4, 5, 6, 7]),
}

TENSOR = "tensor"
"""The mode in which both ranks have all rows, and share the language model."""
RUN_ON_RANKS: dict[str, dict[str, tuple[str, ...]]] = {
    "qwen2_vl": dict.fromkeys(MODES, (*CASES, *UNCOUNTED)) | {TENSOR: ("mixed",)},
    **{family: {"auto": ("mixed",), TENSOR: ("mixed",)} for family in ("llava", "gemma3")},
    "qwen3_vl": {"auto": ("mixed",)},  # transformers has no tensor-parallel plan of its language model
}
"""The batches of each kind, by mode; what the ranks do depends little on the kind."""

RANKS = """
import datetime, json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
import test_multimodal as tests
from rlframework.algorithms.losses import NLLLoss
from rlframework.interfaces.worker_group import WorkerContext

folder, batches = Path(sys.argv[1]), json.loads(sys.argv[2])
rank = 0 if os.fork() else 1
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=120)
)
context = WorkerContext(rank=rank, world_size=2, local_rank=rank)
for family, modes in batches.items():
    config = {"model_name": str(folder / family), "train_global_batch_size": 8, "optimizer": {"lr": 1e-3}}
    found = {}
    for mode, names in modes.items():
        keys = {"batching": {"mode": mode, "tokens": 40}, "train_micro_batch_size": 2, "logprob_batch_size": 2}
        if mode == tests.TENSOR:
            keys["batching"]["mode"], keys["parallelism"] = "auto", {"tensor": 2}
        worker = tests.Recorder(config | keys, tests.TOKENIZER, context=context, init_reference_model=False)
        for name in names:
            shard = tests.batch_of(family, name)
            shard = shard if mode == tests.TENSOR else shard.slice(4 * rank, 4 * rank + 4)
            logprobs = worker.get_logprobs(shard)["logprobs"]
            loss = worker.train(shard, NLLLoss())["global_loss"].item()
            found[name, mode] = logprobs, loss, worker.engine.gradients
        worker.shutdown()
    torch.save(found, folder / f"{family}-{rank}.pt")
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    sys.exit(os.wait()[1])
"""


def batch_of(family: str, name: str) -> BatchedDataDict[Any]:
    images, uncounted = UNCOUNTED.get(name) or (CASES[name], [])
    rows = tiny_vlms.make_rows(family, images, seed=len(name))
    rows["sample_mask"][uncounted] = 0.0
    return rows


@pytest.fixture(scope="module")
def ran(request, tmp_path_factory):
    """The folder with what the two ranks found, after one start of them for all cases that are selected."""
    folder = tmp_path_factory.mktemp("ranks")
    batches = {}
    for case in selected_cases(request, "test_two_ranks_match_the_loss_and_gradients_of_one"):
        batches.setdefault(case["family"], {}).setdefault(case["mode"], []).append(case["name"])
    for family in batches:
        save(family, folder)
    done = run_program(RANKS, folder, json.dumps(batches))
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.parametrize(
    ("family", "mode", "name"),
    [(family, mode, name) for family, modes in RUN_ON_RANKS.items() for mode, names in modes.items() for name in names],
)
def test_two_ranks_match_the_loss_and_gradients_of_one(family, models, ran, mode, name):
    rows, plain = batch_of(family, name), models[family]
    with torch.no_grad():
        logprobs = tiny_vlms.alone(plain, rows)
    loss, gradients = expected_step(plain, rows)
    got = [torch.load(ran / f"{family}-{rank}.pt")[name, mode] for rank in range(2)]
    if mode == TENSOR:
        logprobs = torch.cat([logprobs, logprobs])
    torch.testing.assert_close(torch.cat([each[0] for each in got]), logprobs, rtol=1e-5, atol=1e-5)
    for each in got:
        assert each[1] == pytest.approx(loss, rel=1e-5)
        assert_gradients(each[2], gradients)
    seen = any(count for count, valid in zip(_images(name), rows["sample_mask"].tolist(), strict=True) if valid)
    assert any("vision" in key or "visual" in key for key in gradients) == seen


def _images(name: str) -> list[int]:
    return UNCOUNTED[name][0] if name in UNCOUNTED else CASES[name]


@pytest.mark.parametrize("packed", [False, True])
def test_media_of_two_kinds(packed):
    """If ranks have images and videos, a microbatch gets a row for each kind that it lacks."""
    from rlframework.policy.microbatches import aligned_media as media
    from rlframework.policy.microbatches.data_processor import make_microbatch

    rows = tiny_vlms.make_rows("qwen2_vl", [1, 0, 1]).select_indices([0, 1, 2])
    films = PackedTensor([None, None, torch.ones(2, 2)], dim_to_pack=0)
    rows["films"] = films
    sample = media._shortest("films", [make_microbatch(rows, torch.tensor([0, 1, 2]), packed=False, positions="all")])
    length = int(rows["input_lengths"][2])
    assert sample["input_ids"].tolist() == [rows["input_ids"][2, :length].tolist()]
    text = make_microbatch(rows, torch.tensor([1]), packed=packed, positions="all")
    grown = media._with_media(text, {"films"}, {"films": sample})
    own = int(rows["input_lengths"][1])
    assert grown.processed_inputs.input_ids.shape == ((1, own + length) if packed else (2, max(own, length)))
    assert grown.cu_seqlens is None or grown.cu_seqlens.tolist() == [0, own, own + length]
    assert grown.processed_inputs.vlm_kwargs["films"].shape == (2, 2)
    own = grown.processed_inputs.input_ids.flatten()[grown.head_positions + 1]
    assert torch.equal(own, text.targets)
