"""A completion with its reward, as observers get it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SampleRecord:
    """One completion of a step as text, with what it was worth."""

    prompt: str
    completion: str
    reward: float
    step: int
    kind: Literal["train", "validation"] = "train"
