"""Opening stored log-probabilities of a teacher for a run."""

from __future__ import annotations

from typing import Any

from rlframework.algorithms.sft import open_token_data
from rlframework.base.errors import ConfigError
from rlframework.config.algorithms import SFTConfig
from rlframework.config.distillation_algorithms import DistillationConfig
from rlframework.datasets.teacher_data import TeacherData
from rlframework.rollout.parts import Parts


def open_teacher_data(config: DistillationConfig, parts: Parts) -> TeacherData:
    """Open `algorithm.teacher_data` and verify everything in it, before any work.

    Raises a `DataError` if it is damaged, and a `ConfigError` if its rows were made with another tokenizer or other
    settings (see `open_token_data`), or if the teacher scored them at another temperature than that of the run.
    """
    assert config.teacher_data is not None
    stored = TeacherData(config.teacher_data)
    rows: dict[str, Any] = {"token_data": stored.tokens.path, "train_on": config.train_on}
    open_token_data(SFTConfig(**rows, max_tokens=config.max_tokens), parts)
    stored.verify()
    temperature = parts.config.generation.temperature or 1.0
    if stored.meta.temperature != temperature:
        raise ConfigError(
            f"algorithm.teacher_data={str(config.teacher_data)!r} has log-probabilities at temperature "
            f"{stored.meta.temperature:g}, but generation.temperature={temperature:g}; set it to that, or score again"
        )
    return stored
