"""The transports of weights: they arrive completely or not at all, and errors name the damaged weight.

The sender is the core's own, running in this process, in another thread for the process group.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from rlframework.base.errors import EngineNotReady, RefitError, RLFrameworkError
from rlframework.interfaces.generation import WeightReport
from rlframework.plugins.types import Capability
from rlframework.weight_sync import collective
from rlframework.weight_sync.buffers import as_bytes, checksum
from rlframework.weight_sync.collective import RefitGroup
from rlframework.weight_sync.ipc import IpcSender, device_id
from rlframework.workers.machine import bind_free_port
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.generation.engine_harness import GenerationHarness, requests_of, specs_of
from rlframework_conformance.suites.generation.weights import samples_with

_DEADLINE = 20.0
_NAME = "model.layers.1.mlp.up_proj.weight"


class Refits(Suite):
    """Transports between `begin_weight_update` and `finish_weight_update`."""

    @holds(6, Capability.IPC_REFIT)
    def test_weights_come_through_handles(self, harness: GenerationHarness) -> None:
        """Each update through IPC handles must deliver new weights, one group per weight.

        They are in memory of the sender, or in what the engine offers, if it offers any.
        """
        for offered in (False, True):
            engine, sender, place = harness.bare_engine(), _Sender(harness), "offered" if offered else "own"
            for version, seed in enumerate((0, 1, 0)):
                what = f"update {version} through handles of {place} memory"
                _require_no_error(harness, sender.send(engine, seed, version, offered=offered), what)
                _require_report(harness, engine.finish_weight_update(), seed, version)
                samples_with(harness, what, engine, harness.plain(harness.path(seed)))

    @holds(6, Capability.COLLECTIVE_REFIT)
    def test_weights_come_over_a_process_group(self, harness: GenerationHarness) -> None:
        """Updates over a process group must deliver the weights, also the second one through the same group."""
        engine, info = harness.bare_engine(), specs_of(harness.weights())
        kept = bind_free_port("127.0.0.1")
        port, device = kept.getsockname()[1], torch.device(harness.device)
        with ThreadPoolExecutor(1) as trainer:
            joining = trainer.submit(RefitGroup, "127.0.0.1", port, 0, 2, device, _DEADLINE, kept)
            engine.init_collective("127.0.0.1", port, 2)
            group = joining.result(_DEADLINE)
            harness.resources.callback(group.close)
            for version, seed in enumerate((0, 1)):
                engine.begin_weight_update(version, info)
                weights = iter(harness.weights(harness.path(seed)).items())
                sending = trainer.submit(collective.send, group, info, weights, 8192.0)
                harness.require(engine.update_weights_from_collective() is True, f"update {version} must return True")
                sending.result(_DEADLINE)
                _require_report(harness, engine.finish_weight_update(), seed, version)
                plain = harness.plain(harness.path(seed))
                samples_with(harness, f"update {version} over a process group", engine, plain)

    @holds(10, Capability.IPC_REFIT)
    def test_half_of_a_transfer_is_not_used(self, harness: GenerationHarness) -> None:
        """An incomplete transfer must be a `RefitError` that names what is missing; then nothing is served."""
        engine, sender = harness.engine(), _Sender(harness)
        _require_no_error(harness, sender.send(engine, 1, 2, leave_out=_NAME), "all weights but one")
        harness.raises(RefitError, engine.finish_weight_update, "a transfer that is not complete", _NAME)
        _require_not_ready(harness, engine)

    @holds(10, Capability.IPC_REFIT)
    def test_damage_on_the_way_is_reported_by_name(self, harness: GenerationHarness) -> None:
        """A damaged weight must raise an error that names it, and nothing is served until a complete update."""
        engine, sender = harness.engine(), _Sender(harness)
        for version, offered in ((2, False), (4, True)):
            raised = list(sender.send(engine, 1, version, damage=_NAME, offered=offered))
            harness.require(
                raised and _NAME in raised[0], "a weight with a flipped bit must be rejected by name", got=raised
            )
            _require_not_ready(harness, engine)
            engine.abort(["0"])
            engine.poll(0.0)
            _require_no_error(harness, sender.send(engine, 1, version + 1), "a sound transfer after it")
            engine.finish_weight_update()
            samples_with(harness, "a sound transfer after damage", engine, harness.plain(harness.path(1)))


class _Sender:
    """Sends weights through IPC, one per group."""

    def __init__(self, harness: GenerationHarness) -> None:
        self._harness = harness
        self._device = torch.device(harness.device)
        self._ipc_sender = IpcSender(self._device)
        harness.resources.callback(self._ipc_sender.close)

    def send(
        self,
        engine: Any,
        seed: int,
        version: int,
        *,
        leave_out: str = "",
        damage: str = "",
        offered: bool = False,
    ) -> Iterator[str]:
        """Begin an update and send its weights; yield the error that the engine raises, after which nothing is sent."""
        weights = self._harness.weights(self._harness.path(seed))
        info = specs_of(weights)
        engine.begin_weight_update(version, info)
        memory = engine.offer_refit_memory() if offered else {}
        self._ipc_sender.begin(info, memory.get(device_id(self._device)))
        for name, weight in weights.items():
            if name == leave_out:
                continue
            group = self._ipc_sender.pack([name], iter([(name, weight)]))
            if name == damage:
                group.slots[0].of(self._ipc_sender.written())[7] ^= 1
            try:
                taken = engine.update_weights_from_ipc_handles({device_id(self._device): group})
            except RLFrameworkError as error:
                yield str(error)
                return
            if taken is not True:
                yield f"{name} was not taken"


def _require_report(harness: GenerationHarness, report: WeightReport, seed: int, version: int) -> None:
    """Require the version, and checksums that are those of the weights that were sent."""
    harness.equal("version of the report", report.version, version)
    sent = harness.weights(harness.path(seed))
    expected = {name: checksum(as_bytes(sent[name])) for name in report.checksums if name in sent}
    harness.equal("checksums of the report", dict(report.checksums), expected)


def _require_no_error(harness: GenerationHarness, raised: Iterator[str], what: str) -> None:
    harness.equal(f"errors of {what}", list(raised), [])


def _require_not_ready(harness: GenerationHarness, engine: Any) -> None:
    engine.submit(requests_of([[5]]))
    harness.raises(EngineNotReady, partial(engine.poll, 60.0), "poll after an update that failed")
