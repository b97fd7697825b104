"""What a generation engine must do: sample what the model says, and with the weights that it was given last.

The specification is `rlframework.interfaces.generation`. Numbers are compared with whole forwards of one row at a time
(`suites.plain_decoding`). Left out: speed, memory, and what happens to a refit whose trainer ends.
"""

from __future__ import annotations

from typing import ClassVar

from rlframework.conformance.suites.generation.decoding import Decoding
from rlframework.conformance.suites.generation.layout import OutputLayout
from rlframework.conformance.suites.generation.refit import Refits
from rlframework.conformance.suites.generation.refusals import Refusals
from rlframework.conformance.suites.generation.sampling import Sampling
from rlframework.conformance.suites.generation.weights import Weights
from rlframework.conformance.suites.generation.workbench import GenerationBench

__all__ = ["GenerationEngineSuite"]


class GenerationEngineSuite(Decoding, Sampling, OutputLayout, Weights, Refits, Refusals, sealed=True):
    """For the class that a `GenerationEngineRecord` names."""

    kind: ClassVar[str] = "generation_engine"
    bench_class = GenerationBench
