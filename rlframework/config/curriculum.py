"""The section `algorithm.curriculum`: which prompts are drawn, by their measured success."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from rlframework.config.base import Section
from rlframework.config.numbers import Count, Fraction


class CurriculumConfig(Section):
    """Skip prompts that the policy solves nearly always or nearly never, for some passes over the data.

    The success of a prompt is the mean `accuracy` of its last group of completions in this run. Prompts without a
    measurement are drawn.
    """

    min_success: Fraction = Field(0.1, description="a prompt with a lower success is too hard")
    max_success: Fraction = Field(0.9, description="a prompt with a higher success is too easy")
    skip_epochs: Count = Field(
        3, description="passes over the data in which such a prompt is skipped, before it is drawn and measured again"
    )
    measured: Path | None = Field(
        None,
        description="completions.jsonl of `rlframework evaluate --split train`, with measurements to start from; null: "
        "all prompts are drawn at first",
    )

    @model_validator(mode="after")
    def _is_band(self) -> Self:
        if self.min_success > self.max_success:
            raise ValueError(f"min_success is {self.min_success}, but must be at most max_success = {self.max_success}")
        return self
