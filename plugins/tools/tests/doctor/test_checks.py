"""Single checks, each on a machine that is made up."""

from __future__ import annotations

import resource
from collections import namedtuple
from importlib import metadata
from types import SimpleNamespace

import pytest
from probe_findings import GIB, levels

from rlframework.generation.engine_environment import ProbeError
from rlframework.observers.host import Gpu
from rlframework_tools.doctor import machine
from rlframework_tools.doctor.checks import Context

Usage = namedtuple("Usage", "total used free")
TORCH = {
    "torch": "2.13.0",
    "cuda": None,
    "cuda_available": False,
    "gpus": [],
    "nccl": None,
    "gloo_error": None,
    "warnings": [],
}
ON_CUDA = TORCH | {"cuda": "13.0", "cuda_available": True, "nccl": "2.28.3"}


# -- machine -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quota", "level"), [("max 100000", []), ("150000 100000", ["warning"]), ("800000 100000", []), ("", [])]
)
def test_a_container_that_may_use_fewer_cores_than_it_sees(found, monkeypatch, tmp_path, quota, level):
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(machine, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(machine, "cpu_count", lambda: 8)
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (0.5, 0.5, 0.5))
    first, *others = found("machine", "processor")
    assert first.level == "ok"
    assert levels(others) == level


@pytest.mark.parametrize(("threads", "load", "level"), [(None, 5.0, ["note"]), (None, 3.9, []), ("1", 5.0, [])])
def test_a_busy_machine_needs_one_thread_for_small_models(found, monkeypatch, threads, load, level):
    monkeypatch.setattr(machine, "cpu_count", lambda: 8)
    monkeypatch.setattr(machine, "_words", lambda path: [])
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert levels(found("machine", "processor")[1:]) == level


@pytest.mark.parametrize(
    ("name", "attribute", "value", "level"),
    [
        ("memory", "host.available_memory", GIB, "warning"),
        ("memory", "host.available_memory", 9 * GIB, "ok"),
        ("memory", "host.available_memory", None, "unknown"),
        ("disk", "shutil.disk_usage", Usage(100 * GIB, 0, 50 * GIB), "ok"),
        ("disk", "shutil.disk_usage", Usage(100 * GIB, 0, 4 * GIB), "warning"),
        ("disk", "shutil.disk_usage", Usage(1000 * GIB, 0, 40 * GIB), "warning"),  # Ray would not write to it
        ("open files", "resource.getrlimit", (1024, 1024), "warning"),
        ("open files", "resource.getrlimit", (1024, 65536), "note"),
        ("open files", "resource.getrlimit", (65536, -1), "ok"),
        ("open files", "resource.getrlimit", (-1, -1), "ok"),
        ("processes", "resource.getrlimit", (512, -1), "warning"),
        ("processes", "resource.getrlimit", (99999, -1), "ok"),
        ("processes", "_words", ["max"], "ok"),
        ("processes", "_words", ["512"], "warning"),
        ("processes", "_words", ["99999"], "ok"),
    ],
)
def test_resources_of_the_machine(found, monkeypatch, name, attribute, value, level):
    monkeypatch.setattr(machine, "_words", lambda path: [])  # no limit of a container
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, -1))
    monkeypatch.setattr(f"rlframework_tools.doctor.machine.{attribute}", lambda *arguments: value)
    assert set(levels(found("machine", name))) == {level}


@pytest.mark.parametrize(
    ("free", "overrides", "level"),
    [
        (64 << 20, None, "warning"),
        (64 << 20, ["worker_group.name=ray"], "warning"),
        (64 << 20, ["worker_group.name=processes"], "note"),
        (2 * GIB, None, "ok"),
    ],
)
def test_shared_memory_of_a_container_is_too_little_for_ray(found, monkeypatch, with_config, free, overrides, level):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: Usage(free, 0, free))
    context = None if overrides is None else with_config(*overrides)
    assert levels(found("machine", "shared memory", context)) == [level]


def test_a_proxy_that_is_asked_for_this_machine(found, monkeypatch):
    assert found("machine", "proxies") == []
    monkeypatch.setenv("https_proxy", "http://me:secret@proxy:3128")
    [finding] = found("machine", "proxies")
    assert finding.level == "warning"
    assert "secret" not in finding.text
    monkeypatch.setenv("no_proxy", "localhost, 127.0.0.1")
    assert levels(found("machine", "proxies")) == ["ok"]


def test_variables_are_shown_and_secrets_are_not(found, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SOMETHING_ELSE", "x")
    [shown] = found("machine", "variables")
    assert shown.facts["variables"]["NCCL_DEBUG"] == "INFO"
    assert shown.facts["variables"]["RAY_AUTH_TOKEN"] == "***"
    assert "SOMETHING_ELSE" not in shown.facts["variables"]


# -- devices -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(count, free)`: GPUs of 140 GiB with `free` GiB free."""

    def make(count: int, free: int = 140) -> None:
        monkeypatch.setattr("rlframework.observers.host.gpus", lambda: [Gpu("H200", 140 * GIB, free * GIB)] * count)
        monkeypatch.setattr("rlframework.observers.host.command_output", lambda words: "580.1\n" * count or None)

    return make


def test_gpus_are_told_with_their_driver(found, gpus):
    gpus(2)
    texts = [finding.text for finding in found("devices", "GPUs")]
    assert texts == [f"GPU {n}: H200, 140.0 GiB, 140.0 GiB free; driver 580.1" for n in (0, 1)]
    gpus(1, free=10)
    assert levels(found("devices", "GPUs")) == ["warning"]


def test_no_gpu_is_a_note_unless_the_run_wants_one(found, gpus, with_config):
    gpus(0)
    assert levels(found("devices", "GPUs")) == ["note"]
    assert levels(found("devices", "GPUs", with_config("device=cuda"))) == ["broken"]


def test_a_torch_that_cannot_be_imported_is_broken(found, probed):
    context = probed({"torch_devices": ProbeError("the process ended with signal SIGSEGV: no error output")})
    [finding] = found("devices", "torch", context)
    assert finding.level == "broken"
    assert "SIGSEGV" in finding.text


def test_a_torch_that_cannot_use_the_gpu(found, probed, gpus, with_config):
    gpus(1)
    assert levels(found("devices", "torch", probed({"torch_devices": TORCH}))) == ["ok", "broken"]
    on_cpu = probed({"torch_devices": TORCH}, with_config().config)
    assert levels(found("devices", "torch", on_cpu)) == ["ok", "warning"]
    said = TORCH | {"cuda": "13.0", "nccl": "2.28.3", "warnings": ["The NVIDIA driver on your system is too old"]}
    _, finding = found("devices", "torch", probed({"torch_devices": said}))
    assert finding.level == "broken"
    assert "driver on your system is too old" in finding.text


def test_gpus_that_do_not_compute_or_lack_bfloat16(found, probed, gpus):
    gpus(2)
    old = {"name": "V100", "capability": [7, 0], "error": None}
    sick = {"name": "H200", "capability": [9, 0], "error": "RuntimeError: uncorrectable ECC error"}
    context = probed({"torch_devices": ON_CUDA | {"gpus": [old, sick]}})
    _, first, second = found("devices", "torch", context)
    assert (first.level, second.level) == ("warning", "broken")
    assert "uncorrectable ECC error" in second.text


@pytest.mark.parametrize(
    ("answer", "workers", "level", "remedy"),
    [
        ({"cuda": "13.0"}, 0, "broken", "Install the official torch wheels"),
        ({"gloo_error": "no address"}, 0, "broken", "Give this machine's hostname an address"),
        ({"gloo_error": "no address"}, 1, "warning", "Give this machine's hostname an address"),
        ({"gloo_error": "no address"}, 2, "broken", "Give this machine's hostname an address"),
    ],
)
def test_communication_that_is_missing(found, probed, gpus, with_config, monkeypatch, answer, workers, level, remedy):
    gpus(0)
    options = ("worker_group.name=processes", f"worker_group.num_workers={workers}")
    config = with_config(*options).config if workers else None
    _, finding = found("devices", "torch", probed({"torch_devices": TORCH | answer}, config))
    assert finding.level is level
    assert finding.remedy.startswith(remedy)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    _, finding = found("devices", "torch", probed({"torch_devices": TORCH | {"gloo_error": "no such interface"}}))
    assert "it is 'eth7'" in finding.remedy


# -- packages ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    """`installed({name: (version, [requirements])})`: instead of what is."""

    def make(known):
        def version(name):
            try:
                return known[name][0]
            except KeyError:
                raise metadata.PackageNotFoundError(name) from None

        def requires(name):
            version(name)
            return known[name][1]

        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(metadata, "requires", requires)

    return make


CORE = "rlframework-core"


def test_requirements_that_are_not_met_are_found_through_all_packages(installed):
    installed(
        {
            CORE: ("1", ["torch>=2.11,<2.14", "ray>=2.50", "gone; python_version < '3'", "wandb; extra == 'wandb'"]),
            "torch": ("2.13.0+cpu", ["numpy>=2", "six[fancy]"]),
            "ray": ("2.40.0", ["never-looked-at"]),
            "numpy": ("1.26", []),
            "six": ("1", ["shiny; extra == 'fancy'"]),
        }
    )
    assert [*machine.clashes([CORE])] == [
        (CORE, "ray>=2.50", "2.40.0"),
        ("torch", "numpy>=2", "1.26"),
        ("six", "shiny", "not installed"),
    ]


def test_what_we_need_is_broken_and_what_others_need_a_warning(found, installed):
    installed({CORE: ("1", ["torch", "ray>=2.50"]), "ray": ("2.40", []), "torch": ("2", ["numpy"])})
    ours, theirs = found("packages", "requirements")
    assert (ours.level, ours.text) == ("broken", f"{CORE} requires ray>=2.50, but 2.40 is installed")
    assert (theirs.level, theirs.text) == ("warning", "torch requires numpy, but it is not installed")
    installed({CORE: ("1", ["ray>=2.50"]), "ray": ("2.60", []), "rlframework": ("0.3", [])})  # a stranger of our name
    assert levels(found("packages", "requirements")) == ["ok", "broken"]


def test_a_backend_of_another_version_is_broken_only_for_runs_that_use_it(found, installed, with_config):
    context = with_config()
    installed({CORE: ("2", []), "rlframework-megatron": ("1", ["rlframework-core==1"])})
    assert levels(found("packages", "requirements")) == ["broken"]
    assert levels(found("packages", "requirements", context)) == ["warning"]


def test_compilers_are_wanted_for_deepspeed_only(found, installed, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    installed({CORE: ("1", [])})
    assert found("packages", "compilers") == []
    installed({CORE: ("1", []), "deepspeed": ("0.19", [])})
    [finding] = found("packages", "compilers")
    assert finding.level == "note"  # it trains without
    assert finding.text.startswith("g++ and ninja not found")
    for tool in ("g++", "ninja"):
        (tmp_path / tool).touch(mode=0o755)
    assert levels(found("packages", "compilers")) == ["ok"]


# -- plugins -----------------------------------------------------------------------------------------------------------


def test_a_broken_plugin_is_told_with_its_own_error(found, monkeypatch, tmp_path):
    from rlframework.plugins.manager import create_manager

    (tmp_path / "plugin_of_doctor.py").write_text("import nothing_of_that_name")
    monkeypatch.syspath_prepend(str(tmp_path))
    context = Context()
    context.manager = create_manager(["plugin_of_doctor"])
    first, second = found("plugins", "found", context)
    assert "inline, processes, ray" in first.text
    assert second.level == "broken"
    assert "No module named 'nothing_of_that_name'" in second.text


def test_a_plugin_that_is_switched_off_is_a_note(found, monkeypatch):
    monkeypatch.setenv("RLFRAMEWORK_DISABLE_PLUGINS", "megatron")
    assert "note" in levels(found("plugins", "found"))


def test_generation_engines_are_shown_with_their_capabilities(found, with_config):
    from rlframework.plugins.listing import PluginListing

    def listed(name, kind, capabilities, status="active"):
        return PluginListing(name, kind, "some-distribution", "0.3", 2, capabilities, status)

    rows = [
        listed("fast", "generation_engine", ("collective_refit", "ipc_refit")),
        listed("transformers", "generation_engine", ()),
        listed("broken", "generation_engine", (), "broken"),
        listed("dtensor", "policy_worker", ("packing",)),
    ]
    context, of_run = Context(), with_config()
    context.manager = of_run.manager = SimpleNamespace(listing=lambda: rows)
    fast, own = found("plugins", "generation engines", context)
    assert fast.text == "fast (some-distribution 0.3): collective_refit, ipc_refit"
    assert fast.facts == {"name": "fast", "capabilities": ["collective_refit", "ipc_refit"]}
    assert own.text == "transformers (some-distribution 0.3): no capabilities"
    assert found("plugins", "generation engines", of_run) == [own]  # the one that it selects
