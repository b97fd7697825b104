"""Checkpoints in megatron-core's own format: to the bit, under other layouts, and read by megatron-core itself."""

from __future__ import annotations

import pickle
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forked_ranks import complaints

from rlframework.base.errors import DataError, NotSupported
from rlframework.policy.engine import Moments
from rlframework_conformance import cases

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("native_ranks.py")
RANKS = SimpleNamespace(**runpy.run_path(str(PROGRAM)))
differences, make_worker, told, train = RANKS.differences, RANKS.make_worker, RANKS.told, RANKS.train
OPTIMIZERS = ("plain", "distributed", "plain-bf16", "distributed-bf16")
CASES = (
    "start-plain:tensor=2:plain",
    "start-plain:pipeline=2:plain",
    "start-distributed:data=2:distributed",
    "start-distributed-bf16:tensor=2:distributed-bf16",
)
"""Layouts under which two ranks resume a checkpoint of one worker."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("native")


@pytest.fixture(scope="module")
def model(folder):
    """A tied head, and a vocabulary of an odd number of tokens."""
    return str(cases.model("tied", folder))


@pytest.fixture(scope="module")
def written(folder, model):
    """`written[optimizer]`: a checkpoint after two steps of one worker."""
    made = {}
    for optimizer in OPTIMIZERS:
        worker = make_worker(model, "data=1", optimizer)
        for seed in range(2):
            train(worker, "data=1", seed)
        made[optimizer] = folder / f"start-{optimizer}"
        made[optimizer].mkdir()
        worker.engine.save_native(made[optimizer], optimizer=True)
        torch.save(told(worker), folder / f"start-{optimizer}.pt")
        worker.shutdown()
    return made


@pytest.fixture
def worker_of(model):
    made = []

    def make(optimizer="plain", of=model):
        made.append(make_worker(of, "data=1", optimizer))
        return made[-1]

    yield make
    for worker in made:
        worker.shutdown()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_worker_resumes_to_the_bit(written, worker_of, optimizer, tmp_path):
    worker, other = worker_of(optimizer), worker_of(optimizer)
    worker.engine.load_native(written[optimizer], optimizer=True)
    assert not differences(told(worker), torch.load(f"{written[optimizer]}.pt"))
    worker.engine.save_native(tmp_path, optimizer=True)
    other.engine.load_native(tmp_path, optimizer=True)
    for one in (worker, other):
        train(one, "data=1", 2)
    assert not differences(told(other), told(worker))


def test_before_the_first_step_moments_are_zeros(worker_of, tmp_path):
    worker, other = worker_of(), worker_of()
    worker.engine.save_native(tmp_path, optimizer=True)
    train(other, "data=1", 0)
    other.engine.load_native(tmp_path, optimizer=True)
    assert not any(moments.steps or moments.exp_avg.any() for _, moments in other.engine.gather_moments())
    for one in (worker, other):
        train(one, "data=1", 2)
    assert not differences(told(other), told(worker))


def test_settings_are_those_of_the_policy_that_reads(written, worker_of):
    worker = worker_of()
    before = [{**group, "params": None} for group in worker.engine._optimizer.inner.param_groups]
    for group in worker.engine._optimizer.inner.param_groups:
        group["weight_decay"], group["betas"] = 0.75, (0.5, 0.5)
    worker.engine.load_native(written["plain"], optimizer=True)
    after = worker.engine._optimizer.inner.param_groups
    assert [(group["weight_decay"], group["betas"]) for group in after] == [(0.75, (0.5, 0.5))] * len(before)


def test_weights_alone_go_into_a_worker_with_or_without_an_optimizer(written, worker_of):
    wanted = torch.load(f"{written['plain']}.pt")["weights"]
    worker = worker_of()
    worker.engine.load_native(written["plain"], optimizer=False)
    found = told(worker)
    assert not differences({"weights": found["weights"]}, {"weights": wanted})
    assert not any(found["steps"].values())


def test_bfloat16_weights_that_are_loaded_alone_are_the_fp32_weights_too(written, worker_of):
    worker = worker_of("distributed-bf16")
    worker.engine.load_native(written["distributed-bf16"], optimizer=False)
    wanted = torch.load(f"{written['distributed-bf16']}.pt")["weights"]
    for name, weight in worker.engine.gather_weights(worker.engine.weight_specs()):
        assert torch.equal(weight, wanted[name].bfloat16().float()), name


@pytest.mark.thorough
def test_two_ranks_resume_under_other_layouts_and_one_after_them(folder, model, written, worker_of):
    """The same numbers under each layout, to the bit; see `native_ranks.py`."""
    assert complaints(PROGRAM, str(folder), model, *CASES) == {case: {} for case in CASES}
    for case in CASES:
        worker = worker_of(case.rsplit(":")[-1])
        worker.engine.load_native(folder / case, optimizer=True)
        assert not differences(told(worker), torch.load(folder / f"{case}.pt")), case


def test_a_plain_program_of_megatron_core_reads_it(written, worker_of):
    """A GPTModel with megatron-core's own layers and its `load`: the logits of our worker."""
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    worker, data = worker_of(), cases.batch()
    worker.engine.load_native(written["plain"], optimizer=True)
    with worker.engine._megatron(), torch.no_grad():
        plain = GPTModel(
            TransformerConfig(
                num_layers=2,
                hidden_size=32,
                ffn_hidden_size=64,
                num_attention_heads=4,
                num_query_groups=2,
                normalization="RMSNorm",
                layernorm_epsilon=1e-6,
                activation_func=torch.nn.functional.silu,
                gated_linear_unit=True,
                add_bias_linear=False,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                use_cpu_initialization=True,
                bias_dropout_fusion=False,
                bias_activation_fusion=False,
                masked_softmax_fusion=False,
            ),
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=43,
            max_sequence_length=64,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=True,
        )
        loaded = dist_checkpointing.load({"model": plain.sharded_state_dict()}, str(written["plain"]))
        plain.load_state_dict(loaded["model"])
        length = data["input_ids"].shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        logits = plain(data["input_ids"], torch.arange(length).expand(8, length), mask)
    found = logits.log_softmax(-1)[:, :-1].gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    wanted = worker.get_logprobs(data)["logprobs"][:, 1:]
    real = torch.arange(1, length) < data["input_lengths"][:, None]
    torch.testing.assert_close(found[real], wanted[real], rtol=1e-4, atol=1e-4)


def test_incompatible_checkpoints_are_rejected(folder, written, worker_of, tmp_path):
    worker = worker_of()
    before = told(worker)
    for other in ("distributed", "plain-bf16"):
        with pytest.raises(DataError, match=r"distributed_optimizer and policy\.precision"):
            worker.engine.load_native(written[other], optimizer=True)
    with pytest.raises(DataError, match="not a megatron-core checkpoint"):
        worker.engine.load_native(tmp_path, optimizer=True)
    alone = tmp_path / "alone"
    alone.mkdir()
    worker.engine.save_native(alone, optimizer=False)
    with pytest.raises(DataError, match="without the optimizer's state"):
        worker.engine.load_native(alone, optimizer=True)
    assert not differences(told(worker), before)
    with pytest.raises(DataError, match="not a megatron-core checkpoint of this model"):
        worker_of(of=str(cases.model("norms_of_heads", folder))).engine.load_native(written["plain"], optimizer=True)


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def evil_index(path, marker):
    """The index `path` with another object in it."""
    index = pickle.loads(path.read_bytes())  # noqa: S301 - our own file
    index.planner_data = Evil(marker)
    path.write_bytes(pickle.dumps(index))


def evil_common(path, marker):
    """The plain values in `path` with another object beside them."""
    torch.save({**torch.load(path, weights_only=False), "more": Evil(marker)}, path)


def evil_shards(path, marker):
    """The file `path` of shards, which begins with a pickle that creates the marker."""
    call = pickle.dumps(Evil(marker))
    content = path.read_bytes()
    path.write_bytes(call + content[len(call) :])


@pytest.mark.parametrize("optimizer", OPTIMIZERS[:2])
def test_files_that_would_run_code_do_not(written, worker_of, tmp_path, optimizer):
    marker, worker = tmp_path / "marker", worker_of(optimizer)
    attacks = {".metadata": evil_index, "common.pt": evil_common, "__0_0.distcp": evil_shards}
    for name, attack in attacks.items():
        folder = shutil.copytree(written[optimizer], tmp_path / name.strip("."))
        attack(folder / name, marker)
        with pytest.raises(DataError, match=r"made to run code|damaged|is not a megatron-core checkpoint"):
            worker.engine.load_native(folder, optimizer=True)
        assert not marker.exists(), name
    pickle.loads(pickle.dumps(Evil(marker)))  # noqa: S301 - the attack works
    assert marker.exists()


def test_different_step_counts_are_rejected(worker_of, tmp_path):
    """Another backend's checkpoint may have different step counts."""
    worker = worker_of()
    zeros = {name: torch.zeros(spec.shape) for name, spec in worker.engine.weight_specs().items()}
    worker.engine.load_moments(
        {name: Moments(number % 2, zero, zero) for number, (name, zero) in enumerate(zeros.items())}
    )
    with pytest.raises(NotSupported, match=r"one count of optimizer steps.*\[0, 1\]"):
        worker.engine.save_native(tmp_path, optimizer=True)
    assert not list(tmp_path.iterdir())
