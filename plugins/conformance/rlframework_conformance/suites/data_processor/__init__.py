"""Requirements on data processors: global batches with the counts losses divide by, and microbatches for the model.

The specification is `rlframework.interfaces.data_processor`. Every expectation is computed row by row in plain Python
(`processor_harness`), never by index arithmetic on tensors. Not covered: images, and the dummy microbatches a worker
adds so that all ranks run the same number of forwards.
"""

from __future__ import annotations

from typing import ClassVar

from rlframework_conformance.suites.data_processor.contents import GlobalBatches, HeadPlaces, ModelInputs
from rlframework_conformance.suites.data_processor.grouping import GroupedRows, Grouping
from rlframework_conformance.suites.data_processor.processor_harness import ProcessorHarness

__all__ = ["DataProcessorSuite"]


class DataProcessorSuite(GlobalBatches, Grouping, GroupedRows, ModelInputs, HeadPlaces, sealed=True):
    """The conformance suite of the class named by a `DataProcessorRecord`."""

    kind: ClassVar[str] = "data_processor"
    harness_class = ProcessorHarness
