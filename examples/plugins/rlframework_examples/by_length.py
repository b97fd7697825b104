"""A batching mode in one file: a fixed number of rows, sorted by length, so that a microbatch has little padding.

    rlframework train run.yaml 'plugins=[rlframework_examples.by_length]' \
        policy.data_processor=by_length policy.batching.longest_first=true
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field
from rlframework.config.policy import BatchingConfig
from rlframework.interfaces.data_processor import Batching
from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import DataProcessorRecord
from rlframework.policy.microbatches.data_processor import MicrobatchProcessor
from rlframework.policy.microbatches.modes import Padded

if TYPE_CHECKING:
    from rlframework.interfaces.data_processor import BatchPlan, MicrobatchRule
    from torch import Tensor


class ByLengthConfig(BatchingConfig):
    """`policy.batching` with a further mode, and a key of it."""

    mode: Literal["auto", "padded", "dynamic", "packed", "by_length"] = "by_length"  # type: ignore[assignment] # wider
    longest_first: bool = Field(False, description="begin with the longest rows, so that a lack of memory shows early")

    @property
    def limited(self) -> Literal["rows", "tokens"] | None:
        """See `BatchingConfig.limited`."""
        return "rows" if self.mode == "by_length" else super().limited


class ByLength(Padded):
    """Rows by length. Of a loss that needs groups, these keep their order: a group is in one microbatch."""

    config: ByLengthConfig

    def group(self, lengths: list[int], ids: Tensor | None, limits: BatchPlan, rule: MicrobatchRule) -> list[list[int]]:
        """See `RowBatching.group`."""
        if ids is not None:
            return super().group(lengths, ids, limits, rule)
        rows = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=self.config.longest_first)
        return [rows[start : start + limits.rows] for start in range(0, len(rows), limits.rows)]


class ByLengthProcessor(MicrobatchProcessor):
    """Core's data processor with one mode more."""

    modes: ClassVar[Mapping[str, type[Batching] | str]] = {**MicrobatchProcessor.modes, "by_length": ByLength}


@hookimpl
def rlframework_data_processors() -> list[DataProcessorRecord]:
    """`policy.data_processor: by_length`."""
    target = "rlframework_examples.by_length:ByLengthProcessor"
    return [DataProcessorRecord(name="by_length", target=target, api_version=1, config_model=ByLengthConfig)]
