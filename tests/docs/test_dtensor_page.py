"""docs/dtensor.md: the keys that it names are there, and its program runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml
from pydantic import BaseModel

from rlframework.config.policy import PolicyConfig
from rlframework_conformance import cases
from rlframework_conformance.oracle import Oracle
from rlframework_dtensor.config import DTensorConfig

PAGE = (Path(__file__).parents[2] / "docs" / "dtensor.md").read_text(encoding="utf-8")
PROGRAM = re.search(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
KEYS = sorted(set(re.findall(r"`policy\.([a-z_]+(?:\.[a-z_]+)?)", PAGE)))


@pytest.mark.parametrize("key", KEYS)
def test_the_keys_that_the_page_names_are_there(key):
    first, _, second = key.partition(".")
    if first == "dtensor":
        assert second in DTensorConfig.model_fields
        return
    annotation = PolicyConfig.model_fields[first].annotation
    if second:
        sections = [one for one in get_args(annotation) or (annotation,) if one is not type(None)]
        assert all(isinstance(one, type) and issubclass(one, BaseModel) for one in sections)
        assert any(second in one.model_fields for one in sections)


@pytest.mark.slow
def test_the_program_of_the_page_gives_scores(tmp_path, monkeypatch):
    model, batch = cases.model("reward", tmp_path), cases.batch()
    run = {"algorithm": {"name": "sft"}, "environment": {"name": "addition"}, "device": "cpu"}
    (tmp_path / "judge.yaml").write_text(yaml.safe_dump({**run, "policy": {"model_name": str(model), "head": "score"}}))
    monkeypatch.chdir(tmp_path)
    assert PROGRAM is not None
    names = {"batch": batch}
    exec(PROGRAM[1], names)  # noqa: S102 - the page is ours
    right = Oracle(model, head="checkpoint").last_values(batch)
    torch.testing.assert_close(names["scores"], right.detach(), rtol=1e-5, atol=1e-5)
