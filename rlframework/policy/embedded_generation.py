"""The generation engine inside a policy worker: uses the live module, or a copy updated from the weights."""

from __future__ import annotations

from rlframework.config.sections import GenerationConfig
from rlframework.errors import NotSupported
from rlframework.interfaces.generation import GenerationEngine
from rlframework.interfaces.policy_worker import Rows
from rlframework.plugins.loading import load_target
from rlframework.policy.engine import Engine, require_head
from rlframework.policy.profiling import GENERATE, trace_span
from rlframework.policy.shared_state import Residency, TrainingProgress


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
        self._generator: GenerationEngine | None = None
        if target is not None:
            self._generator = load_target(target)(
                config,
                engine.tokenizer,
                model_name=engine.config.model_name,
                device=str(engine.device),
                precision=engine.config.precision,
            )

    def generate(self, data: Rows, greedy: bool = False) -> Rows:
        """See `PolicyWorker.generate`."""
        require_head(self._engine.config, "language", "generate")
        self._residency.onload("model")
        generator = self._updated()
        with self._engine.generating(), trace_span(GENERATE):
            return generator.generate(data, greedy=greedy)

    def _updated(self) -> GenerationEngine:
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
