"""Single checks, each on a machine that is made up."""

from __future__ import annotations

import resource
import socket
from collections import namedtuple
from importlib import metadata

import pytest
from probe_findings import GIB, levels

from rlframework.doctor import machine, packages
from rlframework.doctor.checks import Context, Level, ProbeError
from rlframework.observers.host import Gpu

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
    ("quota", "level"), [("max 100000", []), ("150000 100000", [Level.WARNING]), ("800000 100000", []), ("", [])]
)
def test_a_container_that_may_use_fewer_cores_than_it_sees(found, monkeypatch, tmp_path, quota, level):
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(machine, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(machine, "cpu_count", lambda: 8)
    first, *others = found("machine", "processor")
    assert first.level is Level.OK
    assert levels(others) == level


@pytest.mark.parametrize(("free", "level"), [(GIB, Level.WARNING), (9 * GIB, Level.OK), (None, Level.UNKNOWN)])
def test_free_memory(found, monkeypatch, free, level):
    monkeypatch.setattr(machine.host, "available_memory", lambda: free)
    assert levels(found("machine", "memory")) == [level]


@pytest.mark.parametrize(
    ("total", "free", "level"), [(100, 50, Level.OK), (100, 4, Level.WARNING), (1000, 40, Level.WARNING)]
)
def test_little_room_and_a_disk_that_ray_would_not_write_to(found, monkeypatch, total, free, level):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: Usage(total * GIB, 0, free * GIB))
    assert set(levels(found("machine", "disk"))) == {level}


@pytest.mark.parametrize(
    ("free", "overrides", "level"),
    [
        (64 << 20, None, Level.WARNING),
        (64 << 20, ["worker_group.name=ray"], Level.WARNING),
        (64 << 20, ["worker_group.name=processes"], Level.NOTE),
        (2 * GIB, None, Level.OK),
    ],
)
def test_shared_memory_of_a_container_is_too_little_for_ray(found, monkeypatch, with_config, free, overrides, level):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: Usage(free, 0, free))
    context = None if overrides is None else with_config(*overrides)
    assert levels(found("machine", "shared memory", context)) == [level]


@pytest.mark.parametrize(
    ("limits", "level"), [((1024, 1024), Level.WARNING), ((1024, 65536), Level.NOTE), ((65536, -1), Level.OK)]
)
def test_open_files(found, monkeypatch, limits, level):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: limits)
    assert levels(found("machine", "open files")) == [level]


@pytest.mark.parametrize(("tasks", "level"), [("max", Level.OK), ("512", Level.WARNING), ("99999", Level.OK)])
def test_a_container_s_limit_of_processes(found, monkeypatch, tmp_path, tasks, level):
    (tmp_path / "pids.max").write_text(tasks)
    monkeypatch.setattr(machine, "_TASKS", tmp_path / "pids.max")
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, -1))
    assert levels(found("machine", "processes")) == [level]


def test_a_name_without_an_address(found, monkeypatch):
    real = socket.getaddrinfo

    def lookup(name, *arguments):
        if name == "node-7":
            raise socket.gaierror("not known")
        return real(name, *arguments)

    monkeypatch.setattr(machine.socket, "gethostname", lambda: "node-7")
    monkeypatch.setattr(machine.socket, "getaddrinfo", lookup)
    assert levels(found("machine", "network")) == [Level.OK, Level.WARNING]


def test_a_proxy_that_is_asked_for_this_machine(found, monkeypatch):
    assert found("machine", "proxies") == []
    monkeypatch.setenv("https_proxy", "http://me:secret@proxy:3128")
    [finding] = found("machine", "proxies")
    assert finding.level is Level.WARNING
    assert "secret" not in finding.text
    monkeypatch.setenv("no_proxy", "localhost, 127.0.0.1")
    assert levels(found("machine", "proxies")) == [Level.OK]


def test_variables_are_shown_and_secrets_are_not(found, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SOMETHING_ELSE", "x")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shown, empty = found("machine", "variables")
    assert shown.facts["variables"]["NCCL_DEBUG"] == "INFO"
    assert shown.facts["variables"]["RAY_AUTH_TOKEN"] == "***"
    assert "SOMETHING_ELSE" not in shown.facts["variables"]
    assert empty.level is Level.NOTE


# -- devices -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(n)`: so many, half of whose memory and more is free."""

    def make(count: int, free: int = 140) -> None:
        monkeypatch.setattr("rlframework.observers.host.gpus", lambda: [Gpu("H200", 140 * GIB, free * GIB)] * count)
        monkeypatch.setattr("rlframework.observers.host.command_output", lambda words: "580.1\n" * count or None)

    return make


def test_gpus_are_told_with_their_driver(found, gpus):
    gpus(2)
    texts = [finding.text for finding in found("devices", "GPUs")]
    assert texts == [f"GPU {n}: H200, 140.0 GiB, 140.0 GiB free; driver 580.1" for n in (0, 1)]
    gpus(1, free=10)
    assert levels(found("devices", "GPUs")) == [Level.WARNING]


def test_no_gpu_is_a_note_unless_the_run_wants_one(found, gpus, with_config):
    gpus(0)
    assert levels(found("devices", "GPUs")) == [Level.NOTE]
    assert levels(found("devices", "GPUs", with_config("device=cuda"))) == [Level.BROKEN]


def test_a_torch_that_cannot_be_imported_is_broken(found, probed):
    context = probed({"torch_devices": ProbeError("the process ended with signal SIGSEGV: no error output")})
    [finding] = found("devices", "torch", context)
    assert finding.level is Level.BROKEN
    assert "SIGSEGV" in finding.text
    assert found("devices", "gloo", context) == found("devices", "NCCL", context) == []


def test_a_torch_without_cuda_beside_a_gpu(found, probed, gpus):
    gpus(1)
    assert levels(found("devices", "torch", probed({"torch_devices": TORCH}))) == [Level.OK, Level.BROKEN]


def test_a_driver_that_is_too_old_is_told_in_torch_s_words(found, probed, gpus):
    gpus(1)
    said = TORCH | {"cuda": "13.0", "warnings": ["The NVIDIA driver on your system is too old"]}
    _, finding = found("devices", "torch", probed({"torch_devices": said}))
    assert finding.level is Level.BROKEN
    assert "driver on your system is too old" in finding.text


def test_a_run_on_the_cpu_does_not_mind_a_torch_without_cuda(found, probed, gpus, with_config):
    gpus(1)
    context = probed({"torch_devices": TORCH}, with_config().config)
    assert levels(found("devices", "torch", context)) == [Level.OK, Level.WARNING]


def test_gpus_that_do_not_compute_or_lack_bfloat16(found, probed, gpus):
    gpus(2)
    old = {"name": "V100", "capability": [7, 0], "error": None}
    sick = {"name": "H200", "capability": [9, 0], "error": "RuntimeError: uncorrectable ECC error"}
    context = probed({"torch_devices": ON_CUDA | {"gpus": [old, sick]}})
    _, first, second = found("devices", "torch", context)
    assert (first.level, second.level) == (Level.WARNING, Level.BROKEN)
    assert "uncorrectable ECC error" in second.text


def test_nccl_and_gloo(found, probed):
    assert levels(found("devices", "NCCL", probed({"torch_devices": ON_CUDA}))) == [Level.OK]
    assert levels(found("devices", "NCCL", probed({"torch_devices": ON_CUDA | {"nccl": None}}))) == [Level.BROKEN]
    assert found("devices", "NCCL", probed({"torch_devices": TORCH})) == []
    assert levels(found("devices", "gloo", probed({"torch_devices": TORCH}))) == [Level.OK]


def test_an_interface_that_is_not_there(found, probed, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    [finding] = found("devices", "gloo", probed({"torch_devices": TORCH | {"gloo_error": "no such interface"}}))
    assert finding.level is Level.BROKEN
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

        packages._required.cache_clear()
        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(metadata, "requires", requires)

    yield make
    packages._required.cache_clear()


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
    assert [str(clash) for clash in packages.clashes([CORE])] == [
        "rlframework-core requires ray>=2.50, but 2.40.0 is installed",
        "torch requires numpy>=2, but 1.26 is installed",
        "six requires shiny, but it is not installed",
    ]


def test_what_we_need_is_broken_and_what_others_need_a_warning(found, installed):
    installed({CORE: ("1", ["torch", "ray>=2.50"]), "ray": ("2.40", []), "torch": ("2", ["numpy"])})
    assert levels(found("packages", "requirements")) == [Level.BROKEN, Level.WARNING]
    installed({CORE: ("1", ["ray>=2.50"]), "ray": ("2.60", [])})
    assert levels(found("packages", "requirements")) == [Level.OK]


def test_a_backend_of_another_version_is_broken_only_for_runs_that_use_it(found, installed, with_config):
    context = with_config()
    installed({CORE: ("2", []), "rlframework-megatron": ("1", ["rlframework-core==1"])})
    assert levels(found("packages", "requirements")) == [Level.BROKEN]
    assert levels(found("packages", "requirements", context)) == [Level.WARNING]


def test_missing_extras_are_named_with_the_command(found, installed):
    needs = [f"rlframework-{name}; extra == '{name}'" for name in ("dtensor", "deepspeed", "megatron")]
    installed({CORE: ("1", [*needs, "wandb; extra == 'wandb'"]), "rlframework-dtensor": ("1", [])})
    [finding] = found("packages", "extras")
    assert finding.text == "not installed: deepspeed, megatron, wandb"
    assert finding.remedy == "To use them: pip install 'rlframework-core[deepspeed,megatron,wandb]'"


def test_a_stranger_s_package_of_our_name(found, installed):
    installed({CORE: ("1", []), "rlframework": ("0.3", [])})
    assert levels(found("packages", "name")) == [Level.BROKEN]


def test_compilers_are_wanted_for_deepspeed_only(found, installed, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    installed({CORE: ("1", [])})
    assert found("packages", "compilers") == []
    installed({CORE: ("1", []), "deepspeed": ("0.19", [])})
    [finding] = found("packages", "compilers")
    assert finding.level is Level.NOTE  # it trains without
    assert finding.text.startswith("g++ and ninja not found")
    for tool in ("g++", "ninja"):
        (tmp_path / tool).touch(mode=0o755)
    assert levels(found("packages", "compilers")) == [Level.OK]


# -- plugins -----------------------------------------------------------------------------------------------------------


def test_a_broken_plugin_is_told_with_its_own_error(found, monkeypatch, tmp_path):
    from rlframework.plugins.manager import create_manager

    (tmp_path / "plugin_of_doctor.py").write_text("import nothing_of_that_name")
    monkeypatch.syspath_prepend(str(tmp_path))
    context = Context()
    context.manager = create_manager(["plugin_of_doctor"])
    first, second = found("plugins", "found", context)
    assert "inline, processes, ray" in first.text
    assert second.level is Level.BROKEN
    assert "No module named 'nothing_of_that_name'" in second.text


def test_a_plugin_that_is_switched_off_is_a_note(found, monkeypatch):
    monkeypatch.setenv("RLFRAMEWORK_DISABLE_PLUGINS", "megatron")
    assert Level.NOTE in levels(found("plugins", "found"))
