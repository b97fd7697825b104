"""Checkpoints in DeepSpeed's own format, held to DeepSpeed's own programs: its loader, its loop and zero_to_fp32."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch

from rlframework.algorithms.losses import NLLLoss
from rlframework.base.errors import DataError, NotSupported
from rlframework.plugins.manager import create_manager
from rlframework_conformance import PolicyWorkerSuite, cases
from rlframework_conformance.layouts import Layout
from rlframework_deepspeed import process_state

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)
LR = 1e-3


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def worker(models):
    """`worker(stage, **config)`: on a tiny Llama, ended with the test."""
    from rlframework.huggingface.tokenizer import load_tokenizer
    from rlframework_deepspeed.worker import DeepSpeedPolicyWorker

    made = []

    def make(stage, *, model="untied", init_optimizer=True, **config):
        path = str(cases.model(model, models))
        defaults = {"train_global_batch_size": 8, "train_micro_batch_size": 3, "optimizer": {"lr": LR}}
        config = {"model_name": path, "batching": {"mode": "padded"}} | defaults | config
        section = {"zero_optimization": {"stage": stage}}
        made.append(
            DeepSpeedPolicyWorker(config, load_tokenizer(path), init_optimizer=init_optimizer, backend_config=section)
        )
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def train(made, seeds):
    return [float(made.train(cases.batch(seed=seed), NLLLoss())["global_loss"][0]) for seed in seeds]


def weights(made):
    return {name: weight.clone() for name, weight in made.engine.gather_weights(made.engine.weight_specs())}


def moments(made):
    return {
        name: torch.cat((one.exp_avg.flatten(), one.exp_avg_sq.flatten(), torch.tensor([float(one.steps)])))
        for name, one in made.engine.gather_moments()
    }


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def saved(made, folder, *, optimizer=True):
    folder.mkdir()
    made.engine.save_native(folder, optimizer=optimizer)
    return folder


class Plain:
    """A loop on DeepSpeed as one writes it, in the process of a worker, which has joined the process group."""

    def __init__(self, path, stage, *, groups=2):
        import deepspeed
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
        parts = [[p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() <= 1]]
        parts = parts if groups == 2 else [parts[0] + parts[1]]
        decay = [{"params": part, "weight_decay": rate} for part, rate in zip(parts, (0.01, 0.0), strict=False)]
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = torch.optim.AdamW(decay, lr=LR)
        with process_state.quiet():
            self.engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=config, dist_init_required=False
            )

    def train(self, seed):
        batch = cases.batch(seed=seed)
        ids, mask = batch["input_ids"], (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:]
        real = torch.arange(ids.shape[1]) < batch["input_lengths"][:, None]
        logits = self.engine(input_ids=ids, attention_mask=real.long(), use_cache=False).logits
        chosen = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        loss = -(chosen * mask).sum() / mask.sum()
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())

    def close(self):
        self.engine.destroy()


@pytest.fixture
def plain(models):
    """`plain(stage)`: a plain program on the model `untied`, ended with the test."""
    made = []

    def make(stage, **how):
        made.append(Plain(str(cases.model("untied", models)), stage, **how))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("model", "precision"), [("tied", "float32"), ("untied", "bfloat16")])
def test_training_goes_on_to_the_bit(worker, tmp_path, stage, model, precision):
    """In a new worker, and in the one that went further meanwhile; DeepSpeed says of the latter that it may not."""
    first = worker(stage, model=model, precision=precision)
    train(first, range(2))
    folder = saved(first, tmp_path / "saved")
    wanted = train(first, range(2, 4)), weights(first), moments(first)
    second = worker(stage, model=model, precision=precision)
    for made in (first, second):
        made.engine.load_native(folder, optimizer=True)
        got = train(made, range(2, 4)), weights(made), moments(made)
        assert got[0] == wanted[0]
        assert same(got[1], wanted[1])
        assert same(got[2], wanted[2])


@pytest.mark.parametrize("stage", STAGES)
def test_a_plain_program_goes_on_from_a_worker_and_a_worker_from_it(worker, plain, tmp_path, stage):
    made = worker(stage)
    train(made, range(2))
    loop = plain(stage)
    loop.engine.load_checkpoint(str(saved(made, tmp_path / "ours")))
    assert loop.train(2) == pytest.approx(*train(made, [2]), rel=1e-5)
    loop.engine.save_checkpoint(str(tmp_path / "theirs"))
    second = worker(stage)
    second.engine.load_native(tmp_path / "theirs", optimizer=True)
    assert {one.steps for _, one in second.engine.gather_moments()} == {3}
    assert loop.train(3) == pytest.approx(*train(second, [3]), rel=1e-5)
    train(made, [3])
    torch.testing.assert_close(weights(second), weights(made), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(moments(second), moments(made), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("stage", "optimizer"), [(1, True), (2, False), (3, True), (3, False)])
def test_zero_to_fp32_reads_the_weights(worker, tmp_path, stage, optimizer, capsys):
    """DeepSpeed's own program; fp32 ones of a model in half precision, and a tied head by both names."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    made = worker(stage, model="tied", precision="bfloat16")
    train(made, range(2))
    found = get_fp32_state_dict_from_zero_checkpoint(str(saved(made, tmp_path / "saved", optimizer=optimizer)))
    capsys.readouterr()
    right = weights(made)
    assert found.keys() - right.keys() == {"lm_head.weight"}
    assert same({name: found[name] for name in right}, right)


@pytest.mark.parametrize(
    ("stage", "other", "optimizer"), [(0, 3, True), (0, 0, False), (1, 0, False), (2, 1, True), (3, 2, False)]
)
def test_weights_alone_are_taken_under_any_stage(worker, tmp_path, capfd, stage, other, optimizer):
    """fp32 ones where there are, also without ZeRO, where DeepSpeed's own reader takes those in half precision."""
    first = worker(stage, precision="bfloat16")
    train(first, range(2))
    folder = saved(first, tmp_path / "saved", optimizer=optimizer)
    second = worker(other, precision="bfloat16")
    train(second, [2])
    before = moments(second)
    capfd.readouterr()
    second.engine.load_native(folder, optimizer=False)
    assert capfd.readouterr() == ("", "")
    assert same(weights(second), weights(first))
    assert same(moments(second), before)
    assert torch.equal(*(made.get_logprobs(cases.batch())["logprobs"] for made in (first, second)))


def test_weights_are_taken_by_a_worker_without_an_optimizer_which_writes_none(worker, tmp_path):
    first = worker(2)
    train(first, [0])
    second = worker(3, init_optimizer=False)
    second.engine.load_native(saved(first, tmp_path / "saved"), optimizer=False)
    assert same(weights(second), weights(first))
    with pytest.raises(NotSupported, match="without"):
        second.engine.save_native(tmp_path, optimizer=False)


def test_hyperparameters_are_those_of_the_configuration(worker, tmp_path):
    """DeepSpeed takes those of the files."""
    first = worker(2)
    train(first, [0])
    folder, own = saved(first, tmp_path / "saved"), {"optimizer": {"lr": LR, "weight_decay": 0.5, "betas": [0.5, 0.9]}}
    second, right = worker(2, **own), worker(2, **own)
    second.engine.load_native(folder, optimizer=True)
    right.engine.load_weights(weights(first))
    right.engine.load_moments(dict(first.engine.gather_moments()))
    for made in (second, right):
        train(made, [1])
    assert same(weights(second), weights(right))


def test_stages_1_and_2_have_the_same_files(worker, tmp_path):
    first, second = worker(1), worker(2)
    train(first, [0])
    second.engine.load_native(saved(first, tmp_path / "saved"), optimizer=True)
    assert same(moments(second), moments(first))


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "config", "said"),
    [
        (0, {}, r"zero_optimization\.stage was 1 or 2; here it is 0.*portable"),
        (3, {}, r"zero_optimization\.stage was 1 or 2; here it is 3.*portable"),
        (2, {"precision": "bfloat16"}, r"policy\.precision was float32; here it is bfloat16"),
        (2, {"model": "tied"}, "of another model"),
    ],
)
def test_what_deepspeed_cannot_go_on_from_is_told_and_changes_nothing(worker, tmp_path, stage, config, said):
    first = worker(2)
    train(first, [0])
    second = worker(stage, **config)
    before = weights(second)
    with pytest.raises(DataError, match=said):
        second.engine.load_native(saved(first, tmp_path / "saved"), optimizer=True)
    assert same(weights(second), before)


def test_weights_of_another_model_are_told(worker, tmp_path):
    folder = saved(worker(2, model="tied"), tmp_path / "saved")
    with pytest.raises(DataError, match=r"for another model: it lacks \['transformer\."):
        worker(2, model="learned_positions").engine.load_native(folder, optimizer=False)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_optimizer_with_other_groups_is_told(worker, plain, tmp_path, stage):
    """A plain program with one group of parameters: its moments have no places here, its weights have."""
    made = worker(stage)
    loop = plain(stage, groups=1)
    loop.train(0)
    loop.engine.save_checkpoint(str(tmp_path / "theirs"))
    with pytest.raises(DataError, match="other groups"):
        made.engine.load_native(tmp_path / "theirs", optimizer=True)
    made.engine.load_native(tmp_path / "theirs", optimizer=False)
    loop.train(1)
    right = worker(stage)
    train(right, [0])
    torch.testing.assert_close(weights(made), weights(right), rtol=1e-4, atol=2e-3)


def test_damaged_files_are_told(worker, tmp_path):
    made = worker(2)
    whole = saved(made, tmp_path / "saved")
    [model], [state] = (list((whole / "training").glob(f"*{kind}_states.pt")) for kind in ("model", "optim"))
    for damage, said in (
        (lambda path: (path / "latest").unlink(), "not a DeepSpeed checkpoint"),
        (lambda path: (path / "training" / model.name).unlink(), "not a DeepSpeed checkpoint"),
        (lambda path: (path / "training" / state.name).unlink(), "incomplete"),
        (lambda path: (path / "training" / state.name).write_bytes(state.read_bytes()[:999]), "damaged"),
    ):
        folder = Path(shutil.copytree(whole, tmp_path / "damaged"))
        damage(folder)
        with pytest.raises(DataError, match=said):
            made.engine.load_native(folder, optimizer=True)
        shutil.rmtree(folder)


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("stage", STAGES)
def test_files_that_would_run_code_are_told_and_do_not(worker, tmp_path, stage):
    """In either file, for all of its uses: resuming, and reading the weights alone with DeepSpeed's own program."""
    marker, made = tmp_path / "marker", worker(stage)
    folder = saved(made, tmp_path / "saved")
    before = weights(made)
    for name in ("*_model_states.pt", "*_optim_states.pt")[: 1 + (stage > 0)]:
        (path,) = (folder / "training").glob(name)
        kept = path.read_bytes()
        torch.save({**torch.load(path, weights_only=False), "more": Evil(marker)}, path)
        for optimizer in (True, False):
            with pytest.raises(DataError, match="made to run code"):
                made.engine.load_native(folder, optimizer=optimizer)
        assert not marker.exists()
        path.write_bytes(kept)
    assert same(weights(made), before)
    made.engine.load_native(folder, optimizer=True)
    pickle.loads(pickle.dumps(Evil(marker)))  # noqa: S301 - the attack works
    assert marker.exists()


def test_adapters_are_not_written(worker, tmp_path):
    made = worker(2, lora={"rank": 2})
    for form in ("native", "sharded"):
        with pytest.raises(NotSupported, match="portable"):
            made.save_checkpoint(str(tmp_path / form), form=form)
        assert not (tmp_path / form).exists()
    (tmp_path / "native.json").write_text("{}")
    with pytest.raises(NotSupported, match="portable"):
        made.load_checkpoint(str(tmp_path))


# -- several workers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_two_workers_write_files_for_two(worker, stage, tmp_path, models):
    """They go on to the bit, and one takes the weights of the two but not their optimizer."""
    section = {"zero_optimization": {"stage": stage}}
    suite = type("Native", (PolicyWorkerSuite,), {"backend": "deepspeed", "section": section})
    manager = create_manager()
    record = manager.select("policy_worker", "deepspeed").record
    harness = suite.open_harness(
        record, Layout.parse("data=2"), manager=manager, device="cpu", folder=tmp_path, models=models
    )
    try:
        two = harness.policy("tied", optimizer={"lr": LR})
        train(two, range(2))
        two.save_checkpoint(str(tmp_path / "weights"), str(tmp_path / "optimizer"), form="native")
        right, wanted = harness.weights(two), train(two, [2])
        after = harness.weights(two)
        two.load_checkpoint(str(tmp_path / "weights"), str(tmp_path / "optimizer"))
        assert train(two, [2]) == wanted
        assert same(harness.weights(two), after)
    finally:
        harness.close()
    one, folder = worker(stage, model="tied"), tmp_path / "weights" / "engine"
    with pytest.raises(DataError, match="number of workers that ZeRO shards over was 2; here it is 1"):
        one.engine.load_native(folder, optimizer=True)
    one.engine.load_native(folder, optimizer=False)
    assert same(weights(one), right)
    max((folder / "training").glob("*_optim_states.pt")).unlink()
    with pytest.raises(DataError, match="damaged or incomplete: Expected 2 of"):
        one.engine.load_native(folder, optimizer=False)
