"""The generation engine inside a policy worker: uses the live module, or a copy updated from the weights."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from rlframework.base.errors import NotSupported
from rlframework.config.sections import GenerationConfig
from rlframework.interfaces.generation import (
    GenerationEngine,
    GenerationRequest,
    GenerationResult,
    Incoming,
    Tag,
    submit_each,
)
from rlframework.plugins.discovery import load_target
from rlframework.policy.engine import Engine, require_head
from rlframework.policy.profiling import GENERATE, trace_span
from rlframework.policy.shared_state import Residency, TrainingProgress
from rlframework.weight_sync.proof import require_version

_CACHE: tuple[Tag, ...] = ("kv_cache",)


class EmbeddedGeneration:
    """Generates with the current weights of a training engine."""

    def __init__(
        self,
        engine: Engine,
        residency: Residency,
        progress: TrainingProgress,
        config: GenerationConfig,
        target: str | None,
    ) -> None:
        """Create the engine `target` (`module:Class`), which is cheap, so that bad settings are reported early."""
        self._engine, self._residency, self._progress = engine, residency, progress
        self._weights_version = -1
        self._unfinished: set[str] = set()
        self._released = False
        self._generator: GenerationEngine | None = None
        if target is not None:
            self._generator = load_target(target)(
                config,
                engine.tokenizer,
                model_name=engine.config.model_name,
                device=str(engine.device),
                precision=engine.config.precision,
            )

    def exchange(
        self, requests: Sequence[GenerationRequest], abort_ids: Collection[str], timeout: float | None
    ) -> Incoming:
        """See `PolicyWorker.exchange`."""
        require_head(self._engine.config, "language", "generate")
        self._residency.require_policy("generate")
        with self._residency.memory.during("generation"):
            self._residency.onload("model")
            generator = self.updated()
            with self._engine.generating(), trace_span(GENERATE):
                rejected = submit_each(generator, requests, abort_ids)
                self._unfinished |= {request.request_id for request in requests} - rejected.keys()
                return Incoming(self._served(generator, timeout), rejected)

    def _served(self, generator: GenerationEngine, timeout: float | None) -> list[GenerationResult]:
        """Serve until `timeout`; a single rank returns the first results, others would have to wait for each other."""
        until = None if timeout is None else time.monotonic() + timeout
        results: list[GenerationResult] = []
        unfinished, self._unfinished = self._unfinished, set()  # empty after an exception
        alone = timeout is not None and self._engine.context.world_size == 1
        while unfinished and not (alone and results):
            left = None if until is None else max(0.0, until - time.monotonic())
            finished = generator.poll(left)
            results += finished
            unfinished -= {result.request_id for result in finished}
            if left == 0.0:
                break
        self._unfinished = unfinished
        return results

    def updated(self) -> GenerationEngine:
        """Return the engine, with the current weights of the model. Collective, if the model is sharded."""
        if self._generator is None:
            raise NotSupported("this worker was built without a generation engine; set generation_target")
        if self._released:
            self._generator.restore(_CACHE)
            self._released = False
        version = self._progress.weights_version
        if self._weights_version != version:
            module = self._engine.whole_model()
            if module is not None:
                self._generator.attach(module, version)
            else:
                specs = self._engine.weight_specs()
                announced = {name: (spec.shape, spec.dtype) for name, spec in specs.items()}
                self._generator.begin_weight_update(version, announced)
                self._generator.load_weights(self._engine.gather_weights(specs))
                report = self._generator.finish_weight_update()
                require_version(f"the embedded {type(self._generator).__name__}", report, version)
            self._weights_version = version
        return self._generator

    def finish(self) -> bool:
        """See `PolicyWorker.finish_generation`."""
        if self._generator is not None:
            self._generator.release(_CACHE)
            self._released = True
        return True

    def close(self) -> None:
        """Close the generation engine."""
        generator, self._generator = self._generator, None
        if generator is not None:
            generator.close()
