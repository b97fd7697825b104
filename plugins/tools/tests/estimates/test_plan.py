"""A run is planned for GPUs elsewhere: what the configuration says stays, and what is missing here is a note."""

from __future__ import annotations

import pytest

from rlframework.base.errors import ConfigError
from rlframework.plugins.manager import create_manager
from rlframework_tools.estimates import plan
from rlframework_tools.estimates.plan import PlannedGpus, named_gpu, plan_run
from rlframework_tools.estimates.printing import estimate_run

RUN = {
    "algorithm": {"name": "grpo", "prompts_per_step": 6, "samples_per_prompt": 8},
    "environment": {"name": "addition"},
    "policy": {"train_global_batch_size": 48, "batching": {"mode": "packed"}},
    "generation": {"max_new_tokens": 64},
}


SIXTEEN = ["device=cuda", "worker_group.num_workers=16"]


@pytest.fixture
def planned(tiny_llama, tmp_path):
    """`planned(on, *overrides)`: the plan of a GRPO run of a model without a tokenizer."""
    shape = tmp_path / "shape"
    shape.mkdir()
    (shape / "config.json").write_text((tiny_llama / "config.json").read_text())

    def run(on, *overrides):
        return plan_run(RUN, [f"policy.model_name={shape}", *overrides], PlannedGpus.parse(on))

    return run


@pytest.mark.parametrize(
    ("on", "overrides", "changes"),
    [
        ("1xH100", [], ["device=cuda"]),
        ("8xH100", [], ["device=cuda", "worker_group.num_workers=8", "worker_group.name=processes"]),
        ("8xH100", ["device=cuda", "worker_group.num_workers=4"], ["worker_group.name=processes"]),
        ("8xH100", ["worker_group={name: processes, num_workers: 4}"], ["device=cuda"]),
        ("8xH100", ["worker_group.name=inline"], ["device=cuda"]),
        (
            "8xH100",
            ["generation.workers={group: ray, num_workers: 2}", "worker_group.name=ray"],
            ["device=cuda", "worker_group.num_workers=6"],
        ),
        (
            "8xH100",  # 7 are left, and a replica takes two
            ["generation.workers={group: ray}", "policy.parallelism.tensor=2"],
            ["device=cuda", "worker_group.num_workers=6", "worker_group.name=ray"],
        ),
        (
            "8xH100",  # processes begin at the first GPU, even if others use it
            ["generation.workers={num_workers: 2}"],
            ["device=cuda", "worker_group.num_workers=8", "worker_group.name=processes"],
        ),
        ("16xH100", [], ["device=cuda", "worker_group.num_workers=16", "worker_group.name=ray"]),
        ("16xH100", ["worker_group.num_workers=8"], ["device=cuda", "worker_group.name=processes"]),
        ("2x8xH100", [], [*SIXTEEN, "worker_group.name=ray", "worker_group.workers_per_node=8"]),
        ("2x8xH100", ["worker_group={name: ray, workers_per_node: 4}"], SIXTEEN),
        ("2x8xH100", ["worker_group={name: ray, num_workers: 12}"], ["device=cuda"]),
        (
            "2x8xH100",  # Ray places workers and engines where there is room
            ["generation.workers={group: ray, num_workers: 4}"],
            ["device=cuda", "worker_group.num_workers=12", "worker_group.name=ray"],
        ),
    ],
)
def test_only_what_is_left_open_is_chosen(planned, on, overrides, changes):
    assert list(planned(on, *overrides).changes) == changes


PPO = "algorithm={name: ppo, prompts_per_step: 6, samples_per_prompt: 8}"


@pytest.mark.parametrize(
    ("on", "overrides", "workers", "group"),
    [
        ("16xH100", ["critic={head: value}"], 8, "ray"),
        ("16xH100", ["critic={head: value, worker_group: {name: processes, num_workers: 4}}"], 16, "ray"),
        ("16xH100", ["critic={head: value}", "generation.workers={group: ray, num_workers: 4}"], 6, "ray"),
        ("8xH100", ["critic={head: value}"], 8, "processes"),  # which share each GPU
    ],
)
def test_ray_gives_each_policy_gpus_of_its_own(planned, on, overrides, workers, group):
    run = planned(on, PPO, *overrides)
    assert (run.config.worker_group.num_workers, run.config.worker_group.name) == (workers, group)
    assert "does not fit" not in estimate_run(run.config, planned=run.gpus).verdict()


def test_a_cpu_is_no_gpu(planned):
    with pytest.raises(ConfigError, match="device=cpu needs none"):
        planned("1xH100", "device=cpu")


def test_an_engine_that_shares_a_gpu_is_counted_on_it(planned):
    engines = "generation.workers={num_workers: 2}"
    run, small = planned("8xH100", engines), PlannedGpus(8, "x", 2**30)
    found = estimate_run(run.config, planned=small)
    assert found.engines is not None
    assert found.engine_bytes == 0
    assert found.taken == 8
    alone = estimate_run(
        planned("8xH100", "generation.workers={group: ray}", "worker_group.num_workers=8").config, planned=small
    )
    assert found.needed_bytes == alone.needed_bytes + found.engines.device_bytes
    assert found.verdict().startswith("does not fit on 8 x x")
    assert "Give the engines GPUs without workers" in found.warnings()[0]


def test_engines_on_a_gpu_of_their_own_that_is_too_small_are_found(planned):
    run = planned("8xH100", "generation.workers={group: ray, num_workers: 2}")
    found = estimate_run(run.config, planned=PlannedGpus(8, "x", 600 << 20))
    [warning] = [each for each in found.warnings() if "an engine may need" in each]
    assert "Give each engine several GPUs (generation.name=vllm" in warning
    assert found.verdict().startswith("does not fit")


def test_gpus_that_are_idle_or_too_few_are_told(planned):
    def found(on, *overrides):
        run = planned(on, *overrides)
        return estimate_run(run.config, planned=run.gpus)

    two = found("4xH100", "worker_group={name: processes, num_workers: 2}")
    assert two.idle_gpus() == "note: 2 workers leave 2 of the 4 GPUs idle"
    one = found("4xH100", "worker_group.name=inline")
    assert one.idle_gpus() == "note: 1 worker leaves 3 of the 4 GPUs idle"
    engines = "generation.workers={group: ray, num_workers: 4}"
    assert found("8xH100", engines).verdict().startswith("fits on 8 x H100")
    many = found("8xH100", engines, "worker_group={name: ray, num_workers: 8}")
    assert many.verdict() == "does not fit on 8 x H100: 8 workers and 4 engines take 12 GPUs"


VLLM = ("generation.name=vllm", "generation.workers={group: ray, num_workers: 2, python: /nowhere/bin/python}")


def test_vllm_that_is_not_here_is_a_note(planned):
    run = planned("8xH100", *VLLM, "generation.vllm.tensor_parallel_size=2")
    [note] = run.notes
    assert "note: not checked on this machine: `generation.workers.python`: /nowhere/bin/python does not answer" in note
    found = estimate_run(run.config, planned=run.gpus)
    assert (found.config.worker_group.num_workers, found.taken) == (4, 8)


def test_a_plugin_that_is_not_installed_is_a_note_too(planned, monkeypatch):
    manager = create_manager()
    plugins = [plugin for plugin in manager._plugins if plugin.name != "vllm"]
    monkeypatch.setattr(plan, "manager_of", lambda tree: type(manager)(plugins, frozenset()))
    run = planned("8xH100", *VLLM, "generation.vllm.tensor_parallel_size=2")
    [note] = run.notes
    assert "the estimate counts core's own engine in its place" in note
    assert "plugins/vllm" in note
    found = estimate_run(run.config, planned=run.gpus)
    assert (found.engines.gpus, found.taken) == (2, 8)


def test_a_service_that_is_not_installed_is_a_note(planned, monkeypatch):
    monkeypatch.setattr("rlframework_report.services._installed", lambda name: False)
    run = planned("1xH100", "observers.wandb={}")
    assert "rlframework-core[wandb]" in " ".join(estimate_run(run.config, planned=run.gpus).notes)
    with pytest.raises(ConfigError, match=r"observers\.wandb is set"):
        estimate_run(run.config)


@pytest.mark.parametrize(("mode", "rows", "noted"), [("packed", 4, True), ("packed", 8, False), ("padded", 4, False)])
def test_rows_of_a_microbatch_that_tokens_bound_are_a_note(planned, mode, rows, noted):
    """8 is the default, which the configuration of a run has too."""
    run = planned("1xH100", f"policy.batching.mode={mode}", f"policy.train_micro_batch_size={rows}")
    notes = " ".join(estimate_run(run.config, planned=run.gpus).notes)
    note = "mode=packed, policy.batching.tokens bounds microbatches, not policy.train_micro_batch_size=4"
    assert (note in notes) == noted


def test_gpus_of_several_machines():
    two, one = PlannedGpus.parse("2x8xH100"), PlannedGpus.parse("16xH100")
    assert (two.count, two.memory_bytes, two.machines) == (one.count, one.memory_bytes, 2)
    assert (str(two), str(one)) == ("2 x 8 x H100", "16 x H100")
    for wrong in ("0x8xH100", "2x0xH100", "2x2x2xH100"):
        with pytest.raises(ConfigError, match="2x8xH100 for two machines"):
            PlannedGpus.parse(wrong)


def test_an_answer_that_no_microbatch_has_room_for_is_an_error(planned):
    run = planned("1xH100", "policy.batching.tokens=63")
    with pytest.raises(ConfigError, match=r"a row may have 64 tokens or more, but policy\.batching\.tokens=63"):
        estimate_run(run.config, planned=run.gpus)
    for allowed in ("environment.max_episode_tokens=63", "policy.batching.mode=padded", "policy.batching.tokens=64"):
        run = planned("1xH100", "policy.batching.tokens=63", allowed)
        estimate_run(run.config, planned=run.gpus)


@pytest.mark.parametrize(
    ("text", "name", "gibibytes"),
    [
        ("A100-40", "A100 40GB", 39),
        ("A100-SXM4-80GB", "A100", 79),
        ("H100-80", "H100", 79),
        ("H100 96GB", "H100 96GB", 96),
        ("NVIDIA H100 80GB HBM3", "H100", 79),
        ("H100-PCIe", "H100 PCIe", 79),
        ("GeForce RTX 4090-24GB", "RTX 4090", 23.5),
        ("gh200 480gb", "GH200 480GB", 94),
    ],
)
def test_a_gpu_is_found_by_what_a_person_calls_it(text, name, gibibytes):
    found = named_gpu(text)
    assert found is not None
    assert (found.name, found.memory_gib) == (name, gibibytes)


@pytest.mark.parametrize("text", ["A100-40-PG", "H100 NVL 40 GB x", "RTX", "H100-0GB", ""])
def test_a_word_that_is_not_understood_is_no_gpu(text):
    assert named_gpu(text) is None


@pytest.mark.parametrize(
    ("on", "group", "told"),
    [
        ("2x8xH100", "processes", "starts all 16 workers on one machine"),
        ("2x4xH100", "processes", "starts all 8 workers on one machine"),
        ("8xH100", "inline", "worker_group.name=processes worker_group.num_workers=8 has one on each GPU"),
        ("2x4xH100", "inline", "worker_group.name=ray worker_group.num_workers=8 has one on each GPU"),
        ("8xH100", None, None),
        ("1x16xH100", None, None),
        ("2x8xH100", None, None),
    ],
)
def test_a_group_that_does_not_fit_the_machines_is_a_note(planned, on, group, told):
    notes = planned(on, *([f"worker_group.name={group}"] if group else [])).notes
    assert [told in note for note in notes] == ([True] if told else [])
