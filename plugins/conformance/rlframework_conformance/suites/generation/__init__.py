"""Requirements on generation engines: serve requests with the model's distribution and the weights received last.

The specification is `rlframework.interfaces.generation`. Numbers are compared with whole forwards of one row at a time
(`suites.plain_decoding`). Not covered: speed, memory, several GPUs, videos, and a refit whose trainer ends.
"""

from __future__ import annotations

from typing import ClassVar

from rlframework_conformance.suites.generation.decoding import Decoding, Images, Sampling
from rlframework_conformance.suites.generation.engine_harness import GenerationHarness
from rlframework_conformance.suites.generation.refit import Refits
from rlframework_conformance.suites.generation.requests import Rejections, Requests
from rlframework_conformance.suites.generation.results import Results
from rlframework_conformance.suites.generation.updates import Updates
from rlframework_conformance.suites.generation.weights import Weights

__all__ = ["GenerationEngineSuite"]


class GenerationEngineSuite(
    Decoding, Sampling, Results, Requests, Weights, Updates, Refits, Images, Rejections, sealed=True
):
    """The conformance suite of the class named by a `GenerationEngineRecord`."""

    kind: ClassVar[str] = "generation_engine"
    harness_class = GenerationHarness
