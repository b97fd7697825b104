"""The example of a third-party backend conforms, and stays as small as documented."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlframework import load_config
from rlframework.base.errors import ConfigError
from rlframework_conformance import PolicyWorkerSuite

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp_backend"


class TestPolicyWorker(PolicyWorkerSuite):
    backend = "ddp"
    quick = ("data=1",)  # `make conformance` has data=2 too


def test_its_python_is_about_300_lines():
    lines = sum(len(path.read_text().splitlines()) for path in EXAMPLE.rglob("*.py"))
    assert 150 < lines < 310


def test_a_model_that_takes_images_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llava", "vision_config": {}}')
    policy = {"model_name": str(tmp_path), "backend": "ddp"}
    run = {"algorithm": {"name": "grpo"}, "environment": {"name": "addition"}, "policy": policy}
    with pytest.raises(ConfigError, match=r"policy\.model_name.*trains text-only models"):
        load_config(run)


@pytest.mark.parametrize("megabytes", [0, -1, "many"])
def test_its_section_is_checked(megabytes, tmp_path):
    policy = {"model_name": str(tmp_path), "backend": "ddp", "ddp": {"bucket_megabytes": megabytes}}
    run = {"algorithm": {"name": "grpo"}, "environment": {"name": "addition"}, "policy": policy}
    with pytest.raises(ConfigError, match=r"policy\.ddp\.bucket_megabytes"):
        load_config(run)
