"""The receiving side of a refit: weights arrive completely or not at all, and errors name the damaged weight.

The sender is the core's own, running in this process, in another thread for the process group.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.generation.harness import PROMPTS, GenerationHarness, rows_of
from rlframework.conformance.suites.plain_decoding import PlainDecoder
from rlframework.errors import RLFrameworkError, UserError
from rlframework.plugins.types import Capability
from rlframework.weight_sync import collective
from rlframework.weight_sync.collective import RefitGroup
from rlframework.weight_sync.ipc import IpcSender, device_id
from rlframework.workers.machine import bind_free_port

_MOST = 4
_PROMPTS = PROMPTS[:3]
_DEADLINE = 20.0
_NAME = "model.layers.1.mlp.up_proj.weight"


class Refits(Suite):
    """`prepare_refit_info` and the update calls after it."""

    @holds(6, Capability.IPC_REFIT)
    def test_weights_come_through_handles(self, harness: GenerationHarness) -> None:
        """Each refit through IPC handles must deliver new weights, one group per weight."""
        engine, sender = _prepared(harness)
        for number, seed in enumerate((0, 1, 0)):
            _require_no_error(harness, sender.send(harness, engine, seed), f"refit {number + 1}")
            _samples_with(harness, f"refit {number + 1} through handles", engine, harness.plain(harness.path(seed)))

    @holds(6, Capability.IPC_REFIT)
    def test_weights_come_into_memory_that_the_engine_offers(self, harness: GenerationHarness) -> None:
        """A refit must work through memory that the engine offers, if it offers any.

        After offering memory the engine must not generate until all weights have arrived.
        """
        engine, sender = _prepared(harness)
        for number, seed in enumerate((0, 1, 0)):
            sent = sender.send(harness, engine, seed, offered=True)
            _require_no_error(harness, sent, f"refit {number + 1} into offered memory")
            _samples_with(harness, f"refit {number + 1} into offered memory", engine, harness.plain(harness.path(seed)))
        raised = list(sender.send(harness, engine, 1, damage=_NAME, offered=True))
        harness.require(
            raised and _NAME in raised[0], "a flipped bit in offered memory must be reported by name", got=raised
        )
        _require_no_error(harness, sender.send(harness, engine, 1, offered=True), "a sound refit into offered memory")
        engine.offer_refit_memory()
        harness.raises(UserError, lambda: engine.generate(rows_of(_PROMPTS)), "generate after memory was offered")

    @holds(6, Capability.COLLECTIVE_REFIT)
    def test_weights_come_over_a_process_group(self, harness: GenerationHarness) -> None:
        """Refits over a process group must deliver the weights, also the second one through the same group."""
        engine = harness.bare_engine(max_new_tokens=_MOST)
        info = _info(harness)
        engine.prepare_refit_info(info)
        kept = bind_free_port("127.0.0.1")
        port, device = kept.getsockname()[1], torch.device(harness.device)
        with ThreadPoolExecutor(1) as trainer:
            joining = trainer.submit(RefitGroup, "127.0.0.1", port, 0, 2, device, _DEADLINE, kept)
            engine.init_collective("127.0.0.1", port, 2)
            group = joining.result(_DEADLINE)
            harness.resources.callback(group.close)
            for number, seed in enumerate((0, 1)):
                weights = iter(harness.weights(seed).items())
                sending = trainer.submit(collective.send, group, info, weights, 8192.0)
                harness.require(engine.update_weights_from_collective() is True, f"refit {number + 1} must return True")
                sending.result(_DEADLINE)
                _samples_with(
                    harness, f"refit {number + 1} over a process group", engine, harness.plain(harness.path(seed))
                )

    @holds(6, Capability.IPC_REFIT)
    def test_half_of_a_refit_does_not_generate(self, harness: GenerationHarness) -> None:
        """An incomplete refit must make `generate` raise, instead of using old or mixed weights."""
        engine, sender = _prepared(harness)
        _require_no_error(harness, sender.send(harness, engine, 0), "a whole refit")
        _require_no_error(harness, sender.send(harness, engine, 1, leave_out=_NAME), "all weights but one")
        harness.raises(
            UserError, lambda: engine.generate(rows_of(_PROMPTS)), "generate in the middle of a refit", _NAME
        )

    @holds(6, Capability.IPC_REFIT)
    def test_damage_on_the_way_is_told_by_name(self, harness: GenerationHarness) -> None:
        """A damaged weight must raise an error that names it, and `generate` must fail until a complete refit."""
        engine, sender = _prepared(harness)
        raised = list(sender.send(harness, engine, 1, damage=_NAME))
        harness.require(
            raised and _NAME in raised[0], "a weight with a flipped bit must be rejected by name", got=raised
        )
        harness.raises(UserError, lambda: engine.generate(rows_of(_PROMPTS)), "generate after a refit that failed")
        _require_no_error(harness, sender.send(harness, engine, 1), "a sound refit after it")
        _samples_with(harness, "a sound refit after damage", engine, harness.plain(harness.path(1)))


class _Sender:
    """Sends weights through IPC, one per group."""

    def __init__(self, harness: GenerationHarness) -> None:
        self._device = torch.device(harness.device)
        self._ipc_sender = IpcSender(self._device)
        harness.resources.callback(self._ipc_sender.close)

    def send(
        self,
        harness: GenerationHarness,
        engine: Any,
        seed: int,
        *,
        leave_out: str = "",
        damage: str = "",
        offered: bool = False,
    ) -> Iterator[str]:
        """Yield the error that the engine raises, if any; nothing is sent after an error."""
        memory = engine.offer_refit_memory() if offered else {}
        self._ipc_sender.begin(_info(harness), memory.get(device_id(self._device)))
        for name, weight in harness.weights(seed).items():
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


def _prepared(harness: GenerationHarness) -> tuple[Any, _Sender]:
    engine = harness.bare_engine(max_new_tokens=_MOST)
    engine.prepare_refit_info(_info(harness))
    return engine, _Sender(harness)


def _info(harness: GenerationHarness) -> dict[str, Any]:
    return {name: (tuple(weight.shape), weight.dtype) for name, weight in harness.weights().items()}


def _require_no_error(harness: GenerationHarness, raised: Iterator[str], what: str) -> None:
    harness.equal(f"errors of {what}", list(raised), [])


def _samples_with(harness: GenerationHarness, what: str, engine: Any, decoder: PlainDecoder) -> None:
    harness.require_logprobs(what, engine.generate(rows_of(_PROMPTS), greedy=True), decoder, 1.0)
