"""Starts generation engines in processes of their own."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from rlframework.base.errors import WorkerLost
from rlframework.base.logs import debug_span
from rlframework.config.policy import ParallelismConfig
from rlframework.config.sections import RunConfig, WorkerGroupConfig
from rlframework.generation.engine_handle import EngineHandle, RemoteEngine
from rlframework.interfaces.named_sharding import policy_sharding
from rlframework.interfaces.worker_group import WorkerGroup, WorkerSpec
from rlframework.plugins.types import GenerationEngineRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.plugins.manager import PluginManager

_LOG = logging.getLogger(__name__)


class EngineStarter:
    """Starts the engines of `generation.workers`, each in a worker group of its own."""

    def __init__(
        self,
        worker: str,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        manager: PluginManager,
        device: str,
    ) -> None:
        """`worker`: import path of the worker class."""
        workers, dtype = config.generation.workers, config.generation.refit.dtype
        assert workers is not None
        self._config, self._workers, self._manager, self._device = config, workers, manager, device
        self.dtype = config.policy.precision if dtype == "auto" else dtype
        """The dtype of the engines' weights."""
        engine = manager.select("generation_engine", config.generation.name).record
        assert isinstance(engine, GenerationEngineRecord)
        self._gpus = 1 if engine.gpus_per_engine is None else engine.gpus_per_engine(config.generation)
        self._python = workers.python or engine.py_executable
        self._target = worker
        self._kwargs = {
            "engine_target": engine.target,
            "generation": config.generation,
            "tokenizer": tokenizer,
            "model_name": config.policy.model_name,
            "precision": self.dtype,
            "tf32": config.policy.tf32,
            "cudnn_attention": config.policy.cudnn_attention,
        }

    def start_all(self) -> list[RemoteEngine]:
        """Start all engines; if one fails, the others are shut down.

        The first one starts alone, as it may start what they share, such as Ray; the others at the same time.
        """
        engines: list[RemoteEngine] = []
        try:
            engines.append(self._start_one(0))
            pending = [self.starting(index) for index in range(1, self._workers.num_workers)]
            engines += [each.result() for each in pending if each.exception() is None]
            for each in pending:
                each.result()
        except BaseException:
            for engine in engines:
                engine.shutdown()
            raise
        return engines

    def starting(self, index: int, lost: EngineHandle | None = None) -> Future[RemoteEngine]:
        """Start an engine in a thread that the program's end does not wait for, which kills what it has started.

        `lost`: the engine that it replaces, which is shut down before. Its name is in the error if the start fails.
        """
        started: Future[RemoteEngine] = Future()

        def start() -> None:
            try:
                if lost is not None:
                    lost.shutdown()
                started.set_result(self._start_one(index))
            except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
                if lost is not None:
                    reason = f"{lost.name} was lost, and the start of another in its place has failed: {error}"
                    error, error.__cause__ = WorkerLost(reason), error
                started.set_exception(error)

        threading.Thread(target=start, name=f"start-engine-{index}", daemon=True).start()
        return started

    def _start_one(self, index: int) -> RemoteEngine:
        config, workers = self._config, self._workers
        record = self._manager.select("worker_group", workers.group).record
        group_class: Any = self._manager.load(record)
        section: dict[str, Any] = {}
        if config.worker_group.name == workers.group:  # the trainer's, without what describes its own workers
            section = config.worker_group.model_dump(exclude_unset=True, exclude={"workers_per_node", "python"})
        section |= {"name": workers.group, "num_workers": 1, "deadlines": workers.deadlines}
        spec = WorkerSpec(
            target=self._target,
            kwargs={**self._kwargs, "index": index},
            plugins=tuple(config.plugins),
            # another environment need not have the backends installed
            fingerprint=None if self._python else self._manager.fingerprint(),
            py_executable=self._python,
            replica=index,
            replicas=workers.num_workers,
            gpus=self._gpus,
            notified=True,
        )
        model = record.config_model or WorkerGroupConfig
        sharding = policy_sharding(1, ParallelismConfig())
        with debug_span(_LOG, "generation engine %d: starting in worker group %s", index, workers.group):
            group: WorkerGroup = group_class(spec, model(**section), sharding=sharding, device=self._device)
        return RemoteEngine(group, f"generation engine {index}")
