"""A plugin that is not installed: vLLM's engine that is told to be faulty, between two updates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from faulty_engines import FAULTS, injectable
from refit_faults import stale_cache
from torch import Tensor

from rlframework.interfaces.generation import WeightReport
from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import GenerationEngineRecord
from rlframework.weight_sync.buffers import WeightInfo
from rlframework.weight_sync.receiver import WeightSink
from rlframework.weight_sync.staged import Source
from rlframework_vllm import plugin, weight_loading
from rlframework_vllm.engine import VllmEngine
from rlframework_vllm.runtime import Runtime


def _kept(worker: Any) -> None:
    """Keep the packed copies of the heads."""
    worker.kept = [(head, head.cpu_linear) for head, _ in weight_loading._tied_heads(worker.get_model())]


def _put_back(worker: Any) -> None:
    """Compute with the copies that were kept."""
    for head, packed in worker.kept:
        head.cpu_linear = packed


def _tied_again(worker: Any) -> None:
    for head, embedding in weight_loading._tied_heads(worker.get_model()):
        head.cpu_linear = embedding.cpu_linear


def head_kept(part: Any) -> type:
    """The head computes with the packed weight of the earlier version, which vLLM's loader leaves behind."""

    class Broken(part):  # type: ignore[misc]
        def begin_weight_update(self, version: int, specs: WeightInfo) -> None:
            super().begin_weight_update(version, specs)
            self._vllm.call(_kept)

        def finish_weight_update(self) -> WeightReport:
            report: WeightReport = super().finish_weight_update()
            self._vllm.call(_put_back)
            return report

        def repaired(self) -> None:
            self._vllm.call(_tied_again)

    return Broken


def head_left_behind(part: Any) -> type:
    """As `head_kept`, but before the engine compares its head with the embedding."""

    def load(worker: Any, source: Source) -> dict[str, Tensor]:
        _kept(worker)
        worker.reload_weights(weights_iterator=source.weights())
        _put_back(worker)
        for head, _ in worker.kept:
            weight_loading.require_packed("the head", head, head.weight)
        return {}

    class Broken(part):  # type: ignore[misc]
        def refit_sink(self, info: WeightInfo) -> WeightSink:
            sink: Any = super().refit_sink(info)
            self.loads, sink._load = sink, lambda source: self._vllm.call(load, source)[0]
            return sink  # type: ignore[no-any-return]

        def repaired(self) -> None:
            self.loads._load = self._load

    return Broken


def prefixes_kept(part: Any) -> type:
    """Caches are neither dropped nor told apart by their version."""

    class Broken(stale_cache(part)):  # type: ignore[misc]
        def begin_weight_update(self, version: int, specs: WeightInfo) -> None:
            super().begin_weight_update(version, specs)
            runtime, first = self._vllm, self.first
            runtime.add = lambda request, tokens, top_k, _, places: Runtime.add(
                runtime, request, tokens, top_k, first, places
            )

        def repaired(self) -> None:
            del self._vllm.add

    return Broken


def _buffers(worker: Any) -> Iterable[Tensor]:
    """The tables of the rotary embeddings, each once."""
    found = {id(one): one for name, one in worker.get_model().named_buffers() if name.endswith("cos_sin_cache")}
    assert found
    return found.values()


def _zero(worker: Any) -> None:
    worker.tables = [(one, one.clone()) for one in _buffers(worker)]
    for one, _ in worker.tables:
        one.zero_()


def _restore(worker: Any) -> None:
    with torch.inference_mode():
        for one, kept in worker.tables:
            one.copy_(kept)


def buffer_lost(part: Any) -> type:
    """The tables of the rotary embeddings, which are not saved, are zero after an update."""

    class Broken(part):  # type: ignore[misc]
        def finish_weight_update(self) -> WeightReport:
            report: WeightReport = super().finish_weight_update()
            self._vllm.call(_zero)
            return report

        def repaired(self) -> None:
            self._vllm.call(_restore)

    return Broken


OWN = {
    "tied tensor": head_left_behind,
    "tied tensor, after the checks": head_kept,
    "stale prefix cache": prefixes_kept,
    "lost buffer": buffer_lost,
}

VLLM_FAULTS = {**FAULTS, **OWN}
FaultyVllm = injectable(VllmEngine, VLLM_FAULTS)


@hookimpl
def rlframework_generation_engines() -> list[GenerationEngineRecord]:
    (sound,) = plugin.rlframework_generation_engines()
    return [replace(sound, name="faulty_vllm", target="faulty_vllm:FaultyVllm")]
