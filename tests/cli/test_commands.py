"""The command line: what it prints, its exit codes, and that a mistake writes nothing."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, NoReturn

import pytest
from probe_runs import call

import rlframework
from rlframework.algorithms.algorithm import RunResult
from rlframework.base.errors import UserError, WorkerError
from rlframework.config.policy import PolicyConfig
from rlframework.plugins.configure import load_config

BACKEND = """
from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import Capability, PolicyWorkerRecord


@hookimpl
def rlframework_policy_workers():
    return [PolicyWorkerRecord("toy", "toy:Worker", 1, capabilities=frozenset({Capability.DATA_PARALLEL}))]
"""
CONFIG = """
plugins: [toy_backend_for_cli]
output_dir: out
policy: {model_name: m, backend: toy}
algorithm: {name: grpo}
environment: {name: addition}
"""
HEAVY = ["datasets", "matplotlib", "omegaconf", "pydantic", "ray", "rich", "torch", "transformers", "yaml"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a configuration `run.yaml` that is right."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy_backend_for_cli.py").write_text(BACKEND)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version") == 0
    assert capsys.readouterr().out == f"rlframework {rlframework.__version__}\n"


@pytest.mark.slow
def test_the_resolved_configuration_is_printed_and_loads_again(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert call("config", "run.yaml", "policy.optimizer.lr=1e-5", "seed=4") == 0
    (folder / "again.yaml").write_text(capsys.readouterr().out)
    expected = load_config("run.yaml", ["policy.optimizer.lr=1e-5", "seed=4"])
    assert load_config("again.yaml") == expected
    assert call("config", "again.yaml", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["seed"] == 4
    assert load_config(printed) == expected
    assert not (folder / "out").exists()
    assert set(printed["policy"]) <= set(PolicyConfig.model_fields)  # no section of a backend that is not selected
    assert call("config", "run.yaml", "--json", "policy.backend=dtensor", "policy.dtensor.replicate=1") == 0
    assert set(json.loads(capsys.readouterr().out)["policy"]) - set(printed["policy"]) == {"dtensor"}


@pytest.mark.parametrize(
    ("columns", "terminal", "width"),
    [("60", 0, 60), (None, 0, 120), (None, 90, 90), ("0", 0, 20), ("999999999", 0, 1000)],
)
def test_a_table_has_the_width_of_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str | None, terminal: int, width: int
) -> None:
    """That of COLUMNS, or, in a pipe, that behind standard error; within bounds."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "isatty", lambda descriptor: bool(terminal) and descriptor == 2)
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size((terminal, 30)))
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert call("plugins") == 0
    lines = capsys.readouterr().out.splitlines()
    longest = max(map(len, lines))
    assert longest <= width
    assert longest == width or columns in ("0", "999999999")


@pytest.mark.slow
def test_the_plugins_are_listed_and_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("plugins", "--json") == 0
    rows = {(row["kind"], row["name"]): row for row in json.loads(capsys.readouterr().out)}
    assert rows["algorithm", "grpo"]["distribution"] == "rlframework-core"
    assert rows["algorithm", "grpo"]["status"] == "active"
    assert call("schema") == 0
    assert "policy" in json.loads(capsys.readouterr().out)["properties"]


MISTAKES = {
    "gone.yaml": "configuration file not found: gone.yaml\n",
    "rum.yml": "configuration file not found: rum.yml. Did you mean 'run.yaml'?",
    "run.yaml policy.lr=1": "`policy.lr`: unknown key (given 1 in override `policy.lr=1`). "
    "Did you mean `policy.optimizer.lr`?\n",
    "run.yaml policy.backend=tow": "policy.backend: there is no backend 'tow'. Did you mean 'toy'?",
    "run.yaml worker_group.name=ray worker_group.num_workers=3": (
        "`policy.train_global_batch_size`: must be a multiple of 3, the number of data-parallel workers "
        "(given 64). Try 63 or 66, or change worker_group.num_workers.\n"
    ),
    "run.yaml lr": "`lr` is not a valid override: write `key=value`",
    "bad.yaml": "bad.yaml:2:1: not valid YAML: ",
}


@pytest.mark.slow
@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_message_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str], folder: Path, words: str
) -> None:
    (folder / "bad.yaml").write_text("seed: 1\n\tx: 2\n")
    before = sorted(folder.rglob("*.yaml"))
    assert call("train", *words.split(" ")) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {MISTAKES[words]}")
    assert "Traceback" not in captured.err
    assert sorted(folder.rglob("*.yaml")) == before
    assert not (folder / "out").exists()


@pytest.mark.parametrize("args", [["--debug", "config", "gone.yaml"], ["config", "gone.yaml", "--debug"]])
def test_debug_shows_the_traceback_before_or_after_the_command(
    capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    assert call(*args) == 2
    text = capsys.readouterr().err
    assert text.startswith("Traceback (most recent call last):")
    assert text.endswith("error: configuration file not found: gone.yaml\n")


@pytest.mark.parametrize("args", [["nosuch"], ["train"], ["config", "run.yaml", "--nosuch"]])
def test_wrong_arguments_end_with_2(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    assert call(*args) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "args", [["config", "\udcff.yaml"], ["config", "run.yaml", "a=\0"], ["\udcff"], ["report", "--out", "\0" * 9]]
)
def test_arguments_that_are_no_text_end_with_2(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    assert call(*args) == 2
    assert capsys.readouterr().err.startswith("error: the argument '")


@pytest.mark.slow
@pytest.mark.parametrize("words", [["new-backend", "x", "--directory"], ["report"], ["report", ".", "--out"]])
def test_a_path_that_no_file_can_have_ends_with_2(
    capsys: pytest.CaptureFixture[str], folder: Path, words: list[str]
) -> None:
    (folder / "loop").symlink_to("loop")
    assert call(*words, "loop") == 2
    assert call(*words, "x" * 5000) == 2
    assert "unexpected" not in capsys.readouterr().err


class _Full(io.StringIO):
    """Standard output on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--version"], ["--help"], ["schema"], ["plugins"]])
def test_output_on_a_full_disk_is_one_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", _Full())
    assert call(*words) == 1
    text = capsys.readouterr().err
    assert "no space left on the device" in text
    assert "Traceback" not in text


def test_characters_that_the_locale_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert call("config", "run.yaml", "output_dir=caf\u00e9") == 0
    out.flush()
    assert b"output_dir: caf\\xe9\n" in out.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def train_with(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a function in the place of `rlframework.runner.launch.run`."""

    def replace(function: Any) -> None:
        module = types.ModuleType("rlframework.runner.launch")
        module.run = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "rlframework.runner.launch", module)

    return replace


@pytest.mark.slow
def test_train_runs_the_resolved_configuration_and_sums_up(capsys: pytest.CaptureFixture[str], train_with: Any) -> None:
    seen = []

    def run(config: Any, overwrite: bool = False) -> RunResult:
        seen.append(config)
        return RunResult({"step": 12.0, "train/reward": 0.12345, "time/step": 3.0, "validation/accuracy": 0.5})

    train_with(run)
    assert call("train", "run.yaml", "seed=9") == 0
    assert seen == [load_config("run.yaml", ["seed=9"])]
    assert capsys.readouterr().out == "done: train/reward=0.1235, validation/accuracy=0.5; in out\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("take less"), 2, "error: take less\n"),
        (WorkerError("rank 1 failed"), 1, "error: rank 1 failed\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (
            ZeroDivisionError("oh"),
            1,
            f"error: ZeroDivisionError: oh\nin {__file__}:LINE, run\nThis is an unexpected error. Use --debug to show",
        ),
        (OSError(5, "disk"), 1, "error: cannot write a file or the output: the device reports an input/output error;"),
    ],
)
def test_what_a_run_raises_becomes_a_message_and_a_code(
    capsys: pytest.CaptureFixture[str], train_with: Any, error: BaseException, code: int, message: str
) -> None:
    def run(config: Any, overwrite: bool = False) -> NoReturn:
        raise error

    train_with(run)
    assert call("train", "run.yaml") == code
    text = capsys.readouterr().err
    assert text.startswith(message.replace("LINE", str(run.__code__.co_firstlineno + 1)))
    assert "Traceback" not in text
    assert call("train", "run.yaml", "--debug") == code
    assert "in run\n    raise error\n" in capsys.readouterr().err


def modules_after(code: str) -> set[str]:
    """The top-level modules of a fresh interpreter that ran `code`."""
    script = f"{code}\nimport sys\nprint('\\n' + ' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}


CALL = "from rlframework.cli import main\ntry: main({args!r})\nexcept SystemExit as end: assert not end.code, end.code"


WITHOUT_TORCH = {"torch", "transformers", "ray", "datasets", "matplotlib"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "absent"),
    [
        ([], {*HEAVY}),  # the import of the package alone
        (["--help"], {*HEAVY}),
        (["--version"], {*HEAVY}),
        (["train", "--help"], {*HEAVY} - {"pydantic"}),  # typer itself needs it
        (["tokenize", "--help"], WITHOUT_TORCH),  # a plugin's
        (["plugins"], WITHOUT_TORCH),
        (["plugins", "--json"], WITHOUT_TORCH),
        (["schema"], WITHOUT_TORCH),
        (["config", "run.yaml", "device=cpu"], WITHOUT_TORCH),
    ],
)
def test_nothing_is_imported_before_it_is_needed(args: list[str], absent: set[str]) -> None:
    assert modules_after(CALL.format(args=args) if args else "import rlframework").isdisjoint(absent)


def test_the_exported_names_are_there() -> None:
    from rlframework.config.sections import RunConfig

    assert rlframework.load_config is load_config
    assert rlframework.RunConfig is RunConfig
    assert set(rlframework.__all__) <= set(dir(rlframework))
    with pytest.raises(AttributeError, match="module 'rlframework' has no attribute 'lode_config'"):
        _ = rlframework.lode_config


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", ["from rlframework import build_parts", "import rlframework.cli, rlframework.runner.launch"]
)
def test_every_exported_name_can_be_had_in_any_order(first: str) -> None:
    code = (
        f"{first}\n"
        "import rlframework, types\n"
        "for name in reversed(rlframework.__all__):\n"
        "    assert not isinstance(getattr(rlframework, name), types.ModuleType), name\n"
    )
    assert "rlframework" in modules_after(code)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("train", "model.yaml"),
        ("train", "model.yaml", "--dry-run"),
        ("generate", "broken", "hello"),
        ("evaluate", "broken", "environment.name=addition"),
        ("convert", "broken", "new", "--to", "portable"),
    ],
)
def test_a_model_directory_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str], folder: Path, command: tuple[str, ...]
) -> None:
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("[]")
    (folder / "broken" / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    parts = "algorithm: {name: grpo}\nenvironment: {name: addition}\noutput_dir: out\n"
    (folder / "model.yaml").write_text(f"policy: {{model_name: ./broken}}\n{parts}")
    assert call(*command) == 2
    told = capsys.readouterr().err
    assert "broken/config.json must be a JSON object, but is of type list" in told or "broken/model.safet" in told
    assert "Traceback" not in told
    assert not (folder / "out").exists()
    assert not (folder / "new").exists()
