"""The pages on checkpoints, resuming and observers: their sections are valid, and their commands run."""

from __future__ import annotations

import json
import logging
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from probe_runs import call, rows_of
from test_pages import DOCS, blocks

from rlframework import load_config, run
from rlframework.base.errors import ConfigError
from rlframework.plugins.configure import config_yaml

PAGES = ("resume.md", "checkpoints.md", "observers.md")
HERE = {
    "runs/grpo": "runs/run",
    "step-000050": "step-000001",
    "num_steps=400": "num_steps=2",
    "models/base": "runs/run/model",
    "CONFIG": "run.yaml",
}
"""Names in the commands of the pages, with their values after a run of one step."""


def sections(page: str) -> list[dict[str, Any]]:
    """The `yaml` blocks of `page` as mappings. Each line of a block of alternatives is one."""
    found = []
    for block in blocks((DOCS / page).read_text(encoding="utf-8")):
        if block.language == "yaml":
            lines = block.text.splitlines()
            alternatives = all(line.startswith("checkpoints: ") for line in lines)
            found += [yaml.safe_load(text) for text in (lines if alternatives else [block.text])]
    return found


def commands(page: str) -> list[list[str]]:
    """The words of the commands of `page`, with `HERE` in place of its names."""
    text = "".join(each.text for each in blocks((DOCS / page).read_text(encoding="utf-8")) if not each.language)
    for name, here in HERE.items():
        text = text.replace(name, here)
    return [shlex.split(line, comments=True)[1:] for line in text.splitlines() if line.startswith("rlframework ")]


@pytest.mark.parametrize("page", PAGES)
def test_the_sections_of_a_page_are_valid(page: str, run_config: Any) -> None:
    values = run_config("sft").model_dump(mode="json", by_alias=True)
    found = sections(page)
    assert found
    for section in found:
        native = section.get("checkpoints", {}).get("format") == "native"  # which `dtensor` does not have
        load_config(values | section, ["policy.backend=deepspeed"] if native else [])
        (name,) = section
        with pytest.raises(ConfigError, match="unknown key"):
            load_config(values | {name: section[name] | {"misspelled": 1}})


@pytest.mark.slow
def test_the_commands_do_what_the_pages_say(run_config: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    short = ("algorithm.num_steps=1", "algorithm.validation={at_start: false, at_end: false, every: 0}")
    config = run_config("sft", *short, "output_dir=runs/run", "checkpoints={every: 1, format: sharded}")
    run(config)
    uploaded = next(each["checkpoints"] for each in sections("checkpoints.md") if "upload" in each["checkpoints"])
    uploaded |= {"every": 1, "upload": f"file://{tmp_path}/bucket"}
    other = run_config("sft", *short, "output_dir=runs/uploaded", f"checkpoints={json.dumps(uploaded)}")
    Path("run.yaml").write_text(config_yaml(other))
    Path("models").mkdir()
    done = {page: commands(page) for page in PAGES}
    assert {page: len(each) for page, each in done.items()} == {"resume.md": 2, "checkpoints.md": 4, "observers.md": 1}
    for page, each in done.items():
        for words in each:
            assert call(*words) == 0, (page, words, capsys.readouterr())
    assert [row["step"] for row in rows_of(Path("runs/run")) if row["step"]] == [1, 2]
    assert [path.name for path in Path("bucket").glob("step-*")] == ["step-000001"]
    assert Path("models/grpo/model.safetensors").is_file()
    assert Path("portable-50/model/model.safetensors").is_file()
    assert list(Path("sharded-base").rglob("*.distcp"))


def test_messages_of_a_run_can_be_written_to_a_file(tmp_path: Path, monkeypatch: Any) -> None:
    (snippet,) = (
        each.text for each in blocks((DOCS / "observers.md").read_text(encoding="utf-8")) if each.language == "python"
    )
    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger("rlframework")
    handlers, level = list(logger.handlers), logger.level
    try:
        exec(snippet, {"logging": logging})  # noqa: S102 - the page's own lines
        logging.getLogger("rlframework.algorithms").info("a message")
    finally:
        for handler in set(logger.handlers) - set(handlers):
            handler.close()
            logger.removeHandler(handler)
        logger.setLevel(level)
    assert Path("run.log").read_text() == "a message\n"
