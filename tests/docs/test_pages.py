"""Pages of the documentation are run as a reader would: their files are written, their commands are run, in order.

- A block with `title="NAME"` is the file NAME.
- A `shell` block is run (see `probe_shell`), and must end well; a line that begins with `! ` must fail.
- Each line of a `text` block behind it stands in what it printed.
- Other blocks are to be read.

Another page is another test at the end, which calls `execute`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_vlm_directories
from probe_shell import run_shell

from rlframework.plugins.manager import create_manager
from rlframework.plugins.types import Capability
from rlframework_conformance import suite_of
from rlframework_conformance.mutants import mutants_of

DOCS = Path(__file__).parents[2] / "docs"
COMMANDS = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

_BLOCK = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'\s*title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file that it is (empty: none), its text, and the line where it starts."""

    language: str
    title: str
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    """The fenced blocks of `page`, in order."""
    found = []
    for match in _BLOCK.finditer(page):
        title = _TITLE.fullmatch(match[2])
        found.append(Block(match[1], title[1] if title else "", match[3], page.count("\n", 0, match.start()) + 1))
    return found


def execute(path: Path, folder: Path) -> str:
    """Do what the page at `path` says, in `folder`; all that its commands printed. What goes wrong names its line."""
    printed, everything = "", ""
    for block in blocks(path.read_text(encoding="utf-8")):
        where = f"{path.name}, line {block.line}"
        if block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "shell":
            printed = run_shell(block.text, folder, where, {"PATH": COMMANDS})
            everything += printed
        elif block.language == "text":
            for line in block.text.splitlines():
                assert line in printed, f"{where}: {line!r} is not in what was printed:\n{printed}"
    return everything


def test_what_a_page_shows_and_does_not_do_is_found(tmp_path: Path) -> None:
    """The runner itself can fail: at a command, at one that should have failed, at a line that was not printed."""
    page = tmp_path / "page.md"
    good = '```text title="a.txt"\none\n```\n\n```shell\ncat a.txt\n! cat b.txt\n```\n\n```text\none\n```\n'
    page.write_text(good)
    assert execute(page, tmp_path).startswith("one\n")
    for change in (("cat a.txt", "cat c.txt"), ("! cat b", "! cat a"), ("```text\none", "```text\ntwo")):
        page.write_text(good.replace(*change))
        with pytest.raises(AssertionError, match=r"page\.md, line (5|10)"):
            execute(page, tmp_path)


def rows_of(folder: Path, run: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.thorough
def test_episodes(tmp_path: Path) -> None:
    example = next(block for block in blocks((DOCS / "episodes.md").read_text()) if block.title == "guess.py")
    assert len([line for line in example.text.splitlines() if line]) <= 15
    execute(DOCS / "episodes.md", tmp_path)


@pytest.mark.thorough
def test_your_own_reward_function(tmp_path: Path) -> None:
    execute(DOCS / "your_own.md", tmp_path)
    execute(DOCS / "own_parts.md", tmp_path)
    rows = rows_of(tmp_path, "own")
    first, last = rows[1]["train/reward"], rows[-1]["train/reward"]
    assert first < 0.15
    assert last > 0.5  # the page says from some 0.04 to some 0.7
    assert all(row["train/reward_failures"] == 0 for row in rows[1:])
    assert (tmp_path / "runs/own/model/model.safetensors").exists()
    assert not (tmp_path / "runs/fragile/model").exists()
    assert (tmp_path / "runs/chat/model/chat_template.jinja").read_text() == (
        tmp_path / "my_template.jinja"
    ).read_text()


THOROUGH = ("optimizers.md", "data.md", "python.md", "faq.md", "exact_tokens.md")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        *("tools.md", "bring_your_environment.md", "plugins.md"),
        *(pytest.param(page, marks=pytest.mark.thorough) for page in THOROUGH),
    ],
)
def test_a_page_does_what_it_shows(page: str, tmp_path: Path) -> None:
    execute(DOCS / page, tmp_path)


@pytest.mark.thorough
def test_bring_your_agent(tmp_path: Path) -> None:
    page = DOCS / "bring_your_agent.md"
    execute(page, tmp_path)
    written = {block.title: block.text for block in blocks(page.read_text(encoding="utf-8"))}
    settings = [line for line in written["agent.yaml"].splitlines() if line.startswith("environment")]
    assert len([line for line in written["my_agent.py"].splitlines() if line] + settings) < 20
    rows = rows_of(tmp_path, "agent")
    rewards = [row["train/reward"] for row in rows if "train/reward" in row]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    assert {(row["train/episode_turns"], row["train/failed_episodes"]) for row in rows if "train/reward" in row} == {
        (2.0, 0.0)
    }
    assert (tmp_path / "runs/agent/model/model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.thorough
def test_vision(tmp_path: Path) -> None:
    tiny_vlm_directories.save("qwen2_vl", tmp_path / "model")
    execute(DOCS / "vision.md", tmp_path)
    rows = rows_of(tmp_path, "grpo")
    assert [row["train/tokens"] > 0 for row in rows if row["step"]] == [True] * 3
    assert (tmp_path / "runs/grpo/model/preprocessor_config.json").exists()
    assert "data:image/jpeg;base64," in (tmp_path / "runs/grpo/report.html").read_text()


@pytest.mark.thorough
def test_the_quickstart(tmp_path: Path) -> None:
    """GRPO with the page's own settings raises the reward: from some 0.32 over the first ten steps to some 0.51."""
    execute(DOCS / "quickstart.md", tmp_path)
    rows = rows_of(tmp_path, "grpo")
    rewards = [row["train/reward"] for row in rows if 1 <= row["step"] <= 100]
    assert len(rewards) == 100
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.1
    assert (tmp_path / "runs/grpo/model/model.safetensors").exists()
    assert not (tmp_path / "runs/no").exists()


@pytest.mark.thorough
def test_best_of_n(tmp_path: Path) -> None:
    """Training on the best of the model's own completions raises the accuracy on held-out prompts."""
    execute(DOCS / "best_of_n.md", tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "best.jsonl").read_text().splitlines()]
    assert all(row["completion"] == row["answer"] and row["reward"] == 1.0 for row in rows)
    (compared,) = (tmp_path / "evaluations").glob("*/comparison.json")
    (other,) = json.loads(compared.read_text())["differences"]
    assert other["metrics"]["accuracy"]["low"] > 0.0


@pytest.mark.thorough
def test_distillation(tmp_path: Path) -> None:
    """The student comes closer to the teacher, with the teacher and with what it has stored."""
    execute(DOCS / "algorithms" / "distillation.md", tmp_path)
    for name, metric in (("student", "validation/divergence"), ("offline", "train/divergence")):
        values = [row[metric] for row in rows_of(tmp_path, name) if metric in row]
        assert values[-1] < values[0], name


@pytest.mark.thorough
def test_write_an_algorithm(tmp_path: Path) -> None:
    page = DOCS / "write_an_algorithm.md"
    execute(page, tmp_path)
    (source,) = (block.text for block in blocks(page.read_text(encoding="utf-8")) if block.title == "my_reinforce.py")
    assert 50 <= len([line for line in source.splitlines() if line]) <= 70  # the page says about 60
    rows = rows_of(tmp_path, "reinforce")
    assert rows[1]["train/reward"] < 0.1
    assert rows[40]["train/reward"] > 0.4
    other = rows_of(tmp_path, "deepspeed")
    assert other[1]["train/loss"] == pytest.approx(rows[1]["train/loss"], rel=1e-5)


@pytest.mark.slow
def test_the_example_of_the_readme(tmp_path: Path) -> None:
    execute(DOCS.parent / "README.md", tmp_path)
    rows = rows_of(tmp_path, "evens")
    assert rows[1]["train/reward"] < 0.5
    assert rows[-1]["train/reward"] > 0.9


def test_the_readme_counts_tests_and_mutants() -> None:
    kinds = ("policy_worker", "data_processor", "worker_group", "generation_engine", "environment")
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert f"[{sum(len(suite_of(kind).tests()) for kind in kinds)} tests]" in text
    assert f"[{sum(len(mutants_of(kind)) for kind in kinds)} deliberately broken parts]" in text


def test_the_readme_has_what_backends_declare() -> None:
    """The matrix of backends and features follows the records."""
    manager = create_manager()
    backends = [manager.select("policy_worker", name).record for name in ("dtensor", "deepspeed", "megatron")]
    rows = {
        "tensor / sequence / context parallel": (
            Capability.TENSOR_PARALLEL,
            Capability.SEQUENCE_PARALLEL,
            Capability.CONTEXT_PARALLEL,
        ),
        "pipeline / expert parallel": (Capability.PIPELINE_PARALLEL, Capability.EXPERT_PARALLEL),
        "LoRA / reward-model scoring": (Capability.LORA, Capability.SCORING),
        "checkpoints: portable / sharded / native": (
            Capability.PORTABLE_OPTIMIZER_STATE,
            Capability.SHARDED_CHECKPOINTS,
            Capability.NATIVE_CHECKPOINTS,
        ),
    }
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    for title, wanted in rows.items():
        cells = [" / ".join("yes" if one in record.capabilities else "-" for one in wanted) for record in backends]
        assert f"| {title} | {' | '.join(cells)} |" in text
    common = {Capability.PACKING, Capability.ACTIVATION_CHECKPOINTING, Capability.CPU_OFFLOAD}
    assert all(common <= record.capabilities for record in backends)
