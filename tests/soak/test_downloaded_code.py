"""Every command on runs that somebody prepared: whatever their files ask for, no code in them runs without a flag."""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from probe_runs import call
from safetensors.torch import load_file

from rlframework import run
from rlframework.policy.checkpoint.manifest import MANIFEST, write_manifest

pytestmark = pytest.mark.slow

NAME = "downloaded"
MODULE = "import pathlib\npathlib.Path({marker!r}).touch()\n"
SANDBOXED = "{{{{ cycler.__init__.__globals__.os.close(cycler.__init__.__globals__.os.open({marker!r}, 65)) }}}}"


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def configure(folder: Path, changes: dict) -> None:
    """Change dotted keys of the run's own configuration."""
    path = folder / "config.yaml"
    values = yaml.safe_load(path.read_text())
    for key, value in changes.items():
        *sections, last = key.split(".")
        target = values
        for section in sections:
            target = target.setdefault(section, {})
        target[last] = value
    path.write_text(yaml.safe_dump(values))


def models(folder: Path) -> list[Path]:
    return [folder / "model", *folder.glob("checkpoints/*/model")]


def own_model_code(folder: Path, marker: Path) -> None:
    """Code among the files of each model, which the configuration of the run allows to run."""
    for model in models(folder):
        (model / "modeling_evil.py").write_text(MODULE.format(marker=str(marker)))
        config = json.loads((model / "config.json").read_text())
        names = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
        (model / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": names}))
    configure(folder, {"policy.trust_remote_code": True, "policy.model_name": str(folder / "model")})


def own_model_code_unasked(folder: Path, marker: Path) -> None:
    """The same without the key in the configuration."""
    own_model_code(folder, marker)
    configure(folder, {"policy.trust_remote_code": False})


def own_model_code_beside_a_known_kind(folder: Path, marker: Path) -> None:
    """The same, in a model that transformers can build without it."""
    own_model_code_unasked(folder, marker)
    for model in models(folder):
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))


def own_tokenizer_code(folder: Path, marker: Path) -> None:
    """Code among the files of the tokenizer."""
    for model in models(folder):
        (model / "tokenization_evil.py").write_text(MODULE.format(marker=str(marker)))
        path = model / "tokenizer_config.json"
        names = {"AutoTokenizer": ["tokenization_evil.Tokenizer", "tokenization_evil.Tokenizer"]}
        path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "Evil", "auto_map": names}))
    configure(folder, {"policy.trust_remote_code": True, "policy.model_name": str(folder / "model")})


def pickled_weights(folder: Path, marker: Path) -> None:
    """Weights in a pickle instead of safetensors."""
    for model in models(folder):
        for path in model.glob("*.safetensors"):
            torch.save({**load_file(path), "more": Evil(marker)}, model / "pytorch_model.bin")
            path.unlink()
    configure(folder, {"policy.model_name": str(folder / "model")})


def pickled_index(folder: Path, marker: Path) -> None:
    """The index of a sharded checkpoint, a pickle."""
    for model in models(folder):
        (model / ".metadata").write_bytes(pickle.dumps(Evil(marker)))


def chat_template(folder: Path, marker: Path) -> None:
    """A template that leaves its sandbox, if there is none."""
    for model in models(folder):
        (model / "chat_template.jinja").write_text(SANDBOXED.format(marker=str(marker)))
    configure(folder, {"policy.model_name": str(folder / "model")})


def plugin(folder: Path, marker: Path) -> None:
    """A plugin in the run's folder."""
    (folder / "evil.py").write_text(MODULE.format(marker=str(marker)))
    configure(folder, {"plugins": [f"{NAME}.evil"]})


def environment(folder: Path, marker: Path) -> None:
    """An environment in the run's folder."""
    (folder / "evil.py").write_text(MODULE.format(marker=str(marker)))
    configure(folder, {"environment": {"name": f"{NAME}.evil:Task"}})


def algorithm(folder: Path, marker: Path) -> None:
    """An algorithm in the run's folder."""
    (folder / "evil.py").write_text(MODULE.format(marker=str(marker)))
    configure(folder, {"algorithm": {"name": f"{NAME}.evil:Training"}})


def reward(folder: Path, marker: Path) -> None:
    """A reward function in the run's folder."""
    (folder / "evil.py").write_text(MODULE.format(marker=str(marker)) + "def score(completion): return 1.0\n")
    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 40)
    rows = {"name": "dataset", "path": str(folder / "rows.jsonl"), "reward": f"{NAME}.evil:score"}
    configure(folder, {"environment": rows, "algorithm.name": "grpo"})


def loss(folder: Path, marker: Path) -> None:
    """A function of the standard library, with arguments, as the loss."""
    configure(folder, {"algorithm.loss": {"name": "subprocess:call", "args": ["touch", str(marker)]}})


def program(folder: Path, marker: Path) -> None:
    """A program as the Python of the workers."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\ntouch {marker}\n")
    path.chmod(0o755)
    configure(folder, {"worker_group": {"name": "ray", "num_workers": 1, "python": str(path)}})


def variables(folder: Path, marker: Path) -> None:
    """A variable with which the workers' Python imports a module of the run."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(MODULE.format(marker=str(marker)))
    group = {"name": "processes", "num_workers": 1, "environment": {"PYTHONPATH": str(folder / "site")}}
    configure(folder, {"worker_group": group})


def hidden_modules(folder: Path, marker: Path) -> None:
    """Modules that hide installed ones where the run's folder is the current directory."""
    for name in ("torch", "signal", "selectors", "apex", "kernels"):
        (folder / f"{name}.py").write_text(MODULE.format(marker=str(marker)))
    configure(folder, {"worker_group": {"name": "processes", "num_workers": 1}})


ARTEFACTS = (
    own_model_code,
    own_model_code_unasked,
    own_model_code_beside_a_known_kind,
    own_tokenizer_code,
    pickled_weights,
    pickled_index,
    chat_template,
    plugin,
    environment,
    algorithm,
    reward,
    loss,
    program,
    variables,
    hidden_modules,
)
COMMANDS = {
    "generate": ("generate", "RUN", "1+1=", "--max-new-tokens", "1"),
    "evaluate": ("evaluate", "RUN", "--samples", "2", "--out", "OUT"),
    "resume": ("train", "--resume", "RUN", "algorithm.num_steps=3"),
    "replay": ("parity", "dtensor", "--replay", "RUN", "--step", "1"),
    "convert": ("convert", "RUN", "OUT", "--to", "sharded"),
    "report": ("report", "RUN", "--out", "OUT.html"),
}


@pytest.fixture(scope="module")
def finished(make_config, tmp_path_factory):
    """A finished run with a checkpoint and a recorded step."""
    config = make_config(
        tmp_path_factory.mktemp("finished"),
        "sft",
        "plugins=[]",
        "algorithm.num_steps=2",
        "algorithm.validation.samples=2",
        "checkpoints.every=1",
        "recording.steps=[1]",
    )
    run(config)
    return config.output_dir


@pytest.fixture
def attacked(finished, tmp_path, monkeypatch):
    """`attacked(artefact)`: prepare the folder `downloaded` in the current directory, and return the marker's path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    before = set(sys.modules)

    def prepare(artefact) -> Path:
        shutil.rmtree(NAME, ignore_errors=True)
        for path in tmp_path.glob("out*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        folder = shutil.copytree(finished, tmp_path / NAME)
        artefact(folder, tmp_path / "marker")
        for path in folder.rglob(MANIFEST):  # whoever prepares files can compute their checksums too
            path.unlink()
            write_manifest(path.parent)
        if artefact is hidden_modules:
            monkeypatch.chdir(folder)
        return tmp_path / "marker"

    yield prepare
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == NAME:
            del sys.modules[name]


def attack(command: str, tmp_path: Path, *more: str) -> int:
    """The exit code of the command on the prepared run."""
    folder = "." if Path.cwd().name == NAME else NAME
    places = {"RUN": folder, "OUT": str(tmp_path / "out"), "OUT.html": str(tmp_path / "out.html")}
    return call(*(places.get(word, word) for word in COMMANDS[command]), *more)


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_no_command_runs_code_of_a_run(attacked, soak, tmp_path, monkeypatch, capsys):
    pairs = list(itertools.product(COMMANDS, ARTEFACTS))
    chosen = soak.random().sample(pairs, soak.times(short=8, full=len(pairs)))
    codes = {0: 0, 1: 0, 2: 0}
    for command, artefact in chosen:
        monkeypatch.chdir(tmp_path)
        marker = attacked(artefact)
        code = attack(command, tmp_path)
        said = capsys.readouterr()
        assert not marker.exists(), (command, artefact.__name__)
        assert code in (0, 2), (command, artefact.__name__, said.err)
        assert "Traceback" not in said.err, (command, artefact.__name__)
        codes[code] += 1
    soak.figures |= {"commands": len(chosen), "refused": codes[2]}


def test_a_known_model_is_generated_with_and_its_code_is_not_run(attacked, tmp_path, capsys):
    marker = attacked(own_model_code_beside_a_known_kind)
    assert attack("generate", tmp_path) == 0, capsys.readouterr().err
    assert not marker.exists()


FLAGGED = [("generate", own_model_code), ("evaluate", plugin), ("resume", loss), ("resume", plugin)]


@pytest.mark.parametrize(("command", "artefact"), FLAGGED, ids=lambda value: getattr(value, "__name__", value))
def test_the_flag_allows_it(attacked, tmp_path, capsys, command, artefact):
    """The same attacks succeed with the flag, so they are ones; what they run fails afterwards."""
    marker = attacked(artefact)
    assert attack(command, tmp_path) == 2
    assert "--trust-run" in capsys.readouterr().err
    assert not marker.exists()
    assert attack(command, tmp_path, "--trust-run") in (1, 2)
    assert marker.exists()
