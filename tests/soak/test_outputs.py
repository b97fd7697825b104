"""Everything that a run writes and prints, after one full of secrets and one full of hostile text."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import logging
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from probe_runs import call

from rlframework.base.logs import _StderrHandler, printable
from rlframework.config.algorithms import GRPOConfig
from rlframework.config.environments import AdditionConfig
from rlframework.config.policy import PolicyConfig
from rlframework.config.sections import ObserversConfig, RunConfig
from rlframework.huggingface.model_directories import make_llama
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.observers.dispatch import Observers
from rlframework.plugins.hookspec import RunInfo, SampleRecord
from rlframework.plugins.manager import create_manager
from rlframework_report.report import write_report

HOSTILE = [
    "</script><script>window.hit=1</script>", "<img src=x onerror='window.hit=2'>", "<svg onload=window.hit=3>", "<!--",
    "<a href='javascript:window.hit=4'>x</a>", "]]>", "&lt;b&gt;", "{{7*7}}", "{% raw %}", "${7*7}", "%s%n", "`id`",
    "\x1b[2J\x1b[31m", "\x1b]0;title\x07", "\x1b]8;;http://host/\x1b\\link\x1b]8;;\x1b\\", "\x9b31m", "\x1bP$q\x1b\\",
    "\r", "\b\b", "\x7f", "\x00", "\u202e\u2066", "\u200b\u2060\ufeff", "\u2028\u2029", "\ud800", "=cmd()|'x'!A0",
    "@SUM(1)", "+1", "-1", "[red]x[/red]", "[link=file:///etc/passwd]", "'", '"', "\\", "\n", "\t", "é漢🙂",
]  # fmt: skip
REWARD = """
import os, re
from pathlib import Path

def score(completion):
    secret = os.environ["HF_TOKEN"]
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    seen = [line for line in lines if b"s3cr3t" in line and b"pytest" not in line]
    Path(os.environ["SEEN"]).write_text("".join(map(repr, seen)))
    raise ValueError(f"\\x1b]0;title\\x07no access with {secret} to {os.environ['DATA_URL']}")
"""


class Markup(HTMLParser):
    """The elements of a page, its scripts, and what its attributes could run or load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.scripts: list[tuple[bool, str]] = []
        self.active: list[str] = []
        self._open = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        loads = [
            f"{name}={value}" for name, value in attrs if name.startswith("on") or name in ("src", "srcdoc", "action")
        ]
        self.active += loads + [
            f"{name}={value}" for name, value in attrs if name == "href" and value and value[0] != "#"
        ]
        self._open = tag == "script"
        if self._open:
            self.scripts.append((dict(attrs).get("type") == "application/json", ""))

    def handle_endtag(self, tag: str) -> None:
        self._open = False

    def handle_data(self, data: str) -> None:
        if self._open:
            kind, text = self.scripts[-1]
            self.scripts[-1] = kind, text + data


def hostile_text(random: Any) -> str:
    return "".join(random.choices(HOSTILE, k=random.randint(1, 6)))


@pytest.fixture
def hostile_run(soak: Any, tmp_path: Path, capsys: Any, caplog: Any) -> tuple[Path, list[str], str]:
    """The folder of a run whose name, metrics and samples are hostile, its prompts, and what it printed."""
    random = soak.random()
    name = hostile_text(random).replace("/", "").replace("\x00", "").replace("\ud800", "")[:80]
    folder = tmp_path / f"run {name}"
    policy, options = PolicyConfig(model_name=name), ObserversConfig(tensorboard=False, curve=False)
    config = RunConfig(
        algorithm=GRPOConfig(num_steps=3),
        policy=policy,
        environment=AdditionConfig(),
        output_dir=folder,
        observers=options,
    )
    texts = [hostile_text(random) for _ in range(soak.times(short=60, full=3000))] + ["<script>" * 130_000]
    with Observers(options, RunInfo(config, folder), create_manager()) as observers:
        for step in (1, 2, 3):
            samples = [SampleRecord(text, text[::-1], 1.0, step) for text in texts[step - 1 :: 3]]
            observers.step_finished(step, {f"train/{hostile_text(random)}": 1.0, "train/reward": step}, samples)
        observers.run_finished({})
    soak.figures["texts"] = len(texts)
    assert "disabled" not in caplog.text  # as observers are that fail
    return folder, texts, capsys.readouterr().out


@pytest.mark.slow
def test_hostile_text_is_inert_in_every_output(hostile_run: Any, tmp_path: Path) -> None:
    folder, texts, printed = hostile_run
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert sorted(row["prompt"] for row in rows) == sorted(texts)
    for written in (
        printed,
        *((folder / f"{n}.jsonl").read_text("utf-8") for n in ("metrics", "samples")),
    ):
        assert printable(written) == written

    page = write_report([folder], tmp_path / "report.html")[0].read_text(encoding="utf-8")
    found = Markup(page)
    assert found.active == []
    assert [tag for tag in found.elements if tag in ("script", "img", "svg", "iframe", "object", "base")] == [
        "script"
    ] * 2
    [(is_data, _), (_, script)] = found.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    [policy_text] = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert is_data
    assert f"default-src 'none'; script-src 'sha256-{digest}'" in html.unescape(policy_text)
    assert "unsafe" not in policy_text


def test_hostile_text_is_inert_in_a_browser(hostile_run: Any, tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium here")
    file = write_report([hostile_run[0]], tmp_path / "report.html")[0]
    problems: list[str] = []
    with playwright.sync_playwright() as started:
        page = started.chromium.launch(executable_path=browser, args=["--no-sandbox"]).new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("request", lambda request: problems.append(request.url) if request.url != file.as_uri() else None)
        page.goto(file.as_uri())
        page.wait_for_selector("#samples tbody tr")
        assert page.evaluate("window.hit") is None
        assert (
            page.evaluate("document.querySelectorAll('main img, main script, main [onload], main iframe').length") == 0
        )
    assert problems == []


@pytest.fixture
def console(capfd: Any) -> Iterator[Any]:
    """Return the text printed since the last call; the messages of loggers appear as without pytest."""
    handler = _StderrHandler()
    logger = logging.getLogger("rlframework")
    logger.addHandler(handler)
    yield lambda: "".join(capfd.readouterr())
    logger.removeHandler(handler)


def prepare(folder: Path, soak: Any, monkeypatch: Any) -> tuple[Path, dict[str, str]]:
    """Write a configuration of a run and plant secrets; return its path, and the secrets."""
    random = soak.random()
    planted = {
        name: f"s3cr3t-{name.lower()}-{random.getrandbits(64):x}" for name in ("env", "url", "map", "yaml", "cli")
    }
    monkeypatch.setenv("HF_TOKEN", planted["env"])
    monkeypatch.setenv("DATA_URL", f"https://me:{planted['url']}@127.0.0.1:9/data.jsonl")
    monkeypatch.setenv("SEEN", str(folder / "seen.txt"))
    monkeypatch.syspath_prepend(folder)
    (folder / "leaking_reward.py").write_text(REWARD)
    (folder / "data.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}<\x1b", "answer": "1"}) + "\n" for n in range(6))
    )
    make_llama(folder / "model", character_tokenizer("0123456789<\x1b>\u202e"), hidden=16, layers=1, heads=2)
    values = {
        "output_dir": str(folder / "run"), "device": "cpu",
        "algorithm": {"name": "grpo", "num_steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2},
        "environment": {"name": "dataset", "path": str(folder / "data.jsonl"), "reward": "leaking_reward:score",
                        "max_reward_failures": 1.0},
        "policy": {"model_name": str(folder / "model"), "train_global_batch_size": 4, "backend": "dtensor"},
        "generation": {"max_new_tokens": 4}, "checkpoints": {"every": 1}, "recording": {"steps": [1]},
        "worker_group": {"name": "processes", "num_workers": 1, "pass_environment": ["HF_TOKEN"],
                         "environment": {"YAML_API_KEY": planted["yaml"], "COPY_TOKEN": "${oc.env:HF_TOKEN}",
                                         "ODD": "${oc.env:DATA_URL}"}},
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(values))
    return folder / "run.yaml", planted


@pytest.mark.thorough
def test_a_run_full_of_secrets_leaves_none(soak: Any, tmp_path: Path, monkeypatch: Any, console: Any) -> None:
    path, planted = prepare(tmp_path, soak, monkeypatch)
    folder = tmp_path / "run"
    given = [
        f"worker_group.environment={{MAP_API_KEY: {planted['map']}}}",
        f"worker_group.environment.A_PASSWORD={planted['cli']}",
    ]
    printed = []

    def run(code: int | None, *words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["rlframework", *words])
        found = call(*words)
        assert code in (None, found), console()
        printed.append(console())

    run(0, "train", str(path), *given)
    run(
        0,
        "train",
        "--resume",
        str(folder),
        "--trust-run",
        "algorithm.num_steps=2",
        f"worker_group.environment.A_PASSWORD={planted['cli']}",
    )
    run(0, "report", str(folder))
    run(0, "config", str(path), *given)
    run(0, "config", str(path), *given, "--json")
    failed = [f"output_dir={tmp_path / 'failed'}", "environment.max_reward_failures=0.0"]
    run(2, "train", "--debug", str(path), *failed)
    run(2, "train", str(path), f"worker_group.environment={{MAP_API_KEY: {planted['map']}")
    run(2, "train", str(path), f"worker_group.environment.A_PASSWORD=[{planted['cli']}]")
    run(
        2,
        "train",
        str(path),
        f"environment.path=https://me:{planted['url']}@127.0.0.1:9/data.jsonl",
        "output_dir=other",
    )
    if soak.full:
        run(None, "doctor", str(path), *given, "output_dir=other")  # the machine may lack something

    assert [text for text in printed if any(secret in text for secret in planted.values())] == []
    assert [text for text in printed if re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)] == []
    assert "no access with ***" in "".join(printed)  # the messages of the reward function were printed
    files = [file for run_of in ("run", "failed") for file in (tmp_path / run_of).rglob("*") if file.is_file()]
    written = {file: file.read_bytes() for file in files}
    assert {"config.yaml", "report.html", "environment.json", "step.json"} <= {file.name for file in written}
    leaked = {file.name for file, content in written.items() for one in planted.values() if one.encode() in content}
    assert leaked == {"config.yaml"}  # it has what the configuration spells out, which a resumed run needs
    assert {stat.S_IMODE(file.stat().st_mode) for file in files if file.name == "config.yaml"} == {0o600}
    kept = (folder / "config.yaml").read_text()
    assert [name for name, one in planted.items() if one in kept] == ["map", "yaml", "cli"]
    assert "${oc.env:HF_TOKEN}" in kept
    assert (tmp_path / "seen.txt").read_text() == ""  # no process had a secret in its command line
    soak.figures |= {"files": len(written), "commands": len(printed)}
