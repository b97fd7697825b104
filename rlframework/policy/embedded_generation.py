"""The generation engine inside a policy worker: uses the live module, or a copy updated from the weights."""

from __future__ import annotations

from typing import Any

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.sections import GenerationConfig
from rlframework.errors import NotSupported
from rlframework.interfaces.generation import GenerationEngine
from rlframework.plugins.loading import load_target
from rlframework.policy.engine import Engine
from rlframework.policy.profiling import GENERATE, trace_span
from rlframework.policy.progress import TrainingProgress
from rlframework.policy.residency import Residency

Rows = BatchedDataDict[Any]


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
        """`target`: class of the generation engine (`module:Class`); None if the worker will not be asked to generate.

        The engine is created at once, which is cheap, so that bad settings are reported before the model is built.
        """
        self._engine, self._residency, self._progress = engine, residency, progress
        self._weights_version = -1
        self._generator: GenerationEngine | None = None
        if target is not None:
            self._generator = load_target(target)(
                config,
                engine.tokenizer,
                model_name=engine.config.model_name,
                device=str(engine.device),
                precision=engine.config.precision,
            )

    def generate(self, data: Rows, greedy: bool) -> Rows:
        """See `PolicyWorker.generate`."""
        self._residency.onload("model")
        generator = self._updated()
        with self._engine.generating(), trace_span(GENERATE):
            return generator.generate(data, greedy=greedy)

    def _updated(self) -> GenerationEngine:
        """The generation engine with current weights: the live module if this rank has it whole, otherwise a copy."""
        if self._generator is None:
            raise NotSupported("this worker was built without a generation engine; set generation_target")
        if self._weights_version != self._progress.weights_version:
            module = self._engine.whole_model()
            if module is not None:
                self._generator.attach(module)
            else:
                self._generator.load_weights(self._engine.gather_weights(self._engine.weight_specs()))
            self._weights_version = self._progress.weights_version
        return self._generator

    def finish(self) -> bool:
        """See `PolicyWorker.finish_generation`."""
        return self._generator is None or bool(self._generator.finish_generation())

    def close(self) -> None:
        """Drop the generation engine."""
        self._generator = None
