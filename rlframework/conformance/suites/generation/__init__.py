"""Requirements on generation engines: sample from the model's distribution, with the weights received last.

The specification is `rlframework.interfaces.generation`. Numbers are compared with whole forwards of one row at a time
(`suites.plain_decoding`). Not covered: speed, memory, and a refit whose trainer ends.
"""

from __future__ import annotations

from typing import ClassVar

from rlframework.conformance.suites.generation.decoding import Decoding, Sampling
from rlframework.conformance.suites.generation.harness import GenerationHarness
from rlframework.conformance.suites.generation.layout import OutputLayout
from rlframework.conformance.suites.generation.refit import Refits
from rlframework.conformance.suites.generation.rejections import Rejections
from rlframework.conformance.suites.generation.weights import Weights

__all__ = ["GenerationEngineSuite"]


class GenerationEngineSuite(Decoding, Sampling, OutputLayout, Weights, Refits, Rejections, sealed=True):
    """The conformance suite of the class named by a `GenerationEngineRecord`."""

    kind: ClassVar[str] = "generation_engine"
    harness_class = GenerationHarness
