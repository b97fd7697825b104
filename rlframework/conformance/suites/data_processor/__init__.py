"""What a data processor must do: global batches with the counts that losses divide by, and microbatches for the model.

The specification is `rlframework.interfaces.data_processor`. Every expectation is worked out row by row in plain Python
(`rows`), never by index arithmetic on tensors. Left out: images beside the text, and what a worker adds so that all
ranks run as many forwards (dummies).
"""

from __future__ import annotations

from typing import ClassVar

from rlframework.conformance.suites.data_processor.counts import GlobalBatches
from rlframework.conformance.suites.data_processor.grouping import Grouping
from rlframework.conformance.suites.data_processor.head import HeadPlaces
from rlframework.conformance.suites.data_processor.inputs import ModelInputs
from rlframework.conformance.suites.data_processor.workbench import ProcessorBench

__all__ = ["DataProcessorSuite"]


class DataProcessorSuite(GlobalBatches, Grouping, ModelInputs, HeadPlaces, sealed=True):
    """For the class that a `DataProcessorRecord` names."""

    kind: ClassVar[str] = "data_processor"
    bench_class = ProcessorBench
