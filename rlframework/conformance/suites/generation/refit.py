"""The receiving side of a refit: weights come whole or not at all, and damage is told by the weight's name.

The sender is core's own, in this process: `Outbox` for IPC, `collective.send` in another thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.generation.workbench import PROMPTS, GenerationBench, rows_of
from rlframework.conformance.suites.plain_decoding import PlainDecoder
from rlframework.errors import RLFrameworkError, UserError
from rlframework.plugins.types import Capability
from rlframework.weight_sync import collective
from rlframework.weight_sync.ipc import Outbox, device_id
from rlframework.weight_sync.process_group import RefitGroup
from rlframework.workers.ports import bind_free_port

_MOST = 4
_PROMPTS = PROMPTS[:3]
_DEADLINE = 20.0
_NAME = "model.layers.1.mlp.up_proj.weight"


class Refits(Suite):
    """`prepare_refit_info` and what follows it."""

    @holds(6, Capability.IPC_REFIT)
    def test_weights_come_through_handles(self, bench: GenerationBench) -> None:
        """One group for each weight; every refit brings new ones."""
        engine, sender = _prepared(bench)
        for number, seed in enumerate((0, 1, 0)):
            _told(bench, sender.send(bench, engine, seed), f"refit {number + 1}")
            _samples_with(bench, f"refit {number + 1} through handles", engine, bench.plain(bench.path(seed)))

    @holds(6, Capability.IPC_REFIT)
    def test_weights_come_into_memory_that_the_engine_offers(self, bench: GenerationBench) -> None:
        """Where it offers any; once it is offered, it does not generate before all weights are there."""
        engine, sender = _prepared(bench)
        for number, seed in enumerate((0, 1, 0)):
            sent = sender.send(bench, engine, seed, offered=True)
            _told(bench, sent, f"refit {number + 1} into offered memory")
            _samples_with(bench, f"refit {number + 1} into offered memory", engine, bench.plain(bench.path(seed)))
        raised = list(sender.send(bench, engine, 1, damage=_NAME, offered=True))
        bench.require(raised and _NAME in raised[0], "a wrong bit in offered memory is told by name", got=raised)
        _told(bench, sender.send(bench, engine, 1, offered=True), "a sound refit into offered memory")
        engine.offer_refit_memory()
        bench.refuses(UserError, lambda: engine.generate(rows_of(_PROMPTS)), "generate after memory was offered")

    @holds(6, Capability.COLLECTIVE_REFIT)
    def test_weights_come_over_a_process_group(self, bench: GenerationBench) -> None:
        """In groups of some weights; the second refit through the same process group."""
        engine = bench.bare_engine(max_new_tokens=_MOST)
        info = _info(bench)
        engine.prepare_refit_info(info)
        kept = bind_free_port("127.0.0.1")
        port, device = kept.getsockname()[1], torch.device(bench.device)
        with ThreadPoolExecutor(1) as trainer:
            meeting = trainer.submit(RefitGroup, "127.0.0.1", port, 0, 2, device, _DEADLINE, kept)
            engine.init_collective("127.0.0.1", port, 2)
            group = meeting.result(_DEADLINE)
            bench.resources.callback(group.close)
            for number, seed in enumerate((0, 1)):
                weights = iter(bench.weights(seed).items())
                sending = trainer.submit(collective.send, group, info, weights, 8192.0)
                bench.require(engine.update_weights_from_collective() is True, f"refit {number + 1} is taken")
                sending.result(_DEADLINE)
                _samples_with(bench, f"refit {number + 1} over a process group", engine, bench.plain(bench.path(seed)))

    @holds(6, Capability.IPC_REFIT)
    def test_half_of_a_refit_does_not_generate(self, bench: GenerationBench) -> None:
        """Neither with the old weights nor with a mixture, until the last one is there."""
        engine, sender = _prepared(bench)
        _told(bench, sender.send(bench, engine, 0), "a whole refit")
        _told(bench, sender.send(bench, engine, 1, leave_out=_NAME), "all weights but one")
        bench.refuses(UserError, lambda: engine.generate(rows_of(_PROMPTS)), "generate in the middle of a refit", _NAME)

    @holds(6, Capability.IPC_REFIT)
    def test_damage_on_the_way_is_told_by_name(self, bench: GenerationBench) -> None:
        """And what was refitted in part does not generate before a sound refit."""
        engine, sender = _prepared(bench)
        raised = list(sender.send(bench, engine, 1, damage=_NAME))
        bench.require(raised and _NAME in raised[0], "a weight with a wrong bit is refused by name", got=raised)
        bench.refuses(UserError, lambda: engine.generate(rows_of(_PROMPTS)), "generate after a refit that failed")
        _told(bench, sender.send(bench, engine, 1), "a sound refit after it")
        _samples_with(bench, "a sound refit after damage", engine, bench.plain(bench.path(1)))


class _Sender:
    """Sends weights, one a group."""

    def __init__(self, bench: GenerationBench) -> None:
        self._device = torch.device(bench.device)
        self._outbox = Outbox(self._device)
        bench.resources.callback(self._outbox.close)

    def send(
        self,
        bench: GenerationBench,
        engine: Any,
        seed: int,
        *,
        leave_out: str = "",
        damage: str = "",
        offered: bool = False,
    ) -> Iterator[str]:
        """What the engine raised, if it did: nothing is sent after that."""
        rooms = engine.offer_refit_memory() if offered else {}
        self._outbox.begin(_info(bench), rooms.get(device_id(self._device)))
        for name, weight in bench.weights(seed).items():
            if name == leave_out:
                continue
            group = self._outbox.pack([name], iter([(name, weight)]))
            if name == damage:
                group.slots[0].of(self._outbox.written(group))[7] ^= 1
            try:
                taken = engine.update_weights_from_ipc_handles({device_id(self._device): group})
            except RLFrameworkError as error:
                yield str(error)
                return
            if taken is not True:
                yield f"{name} was not taken"


def _prepared(bench: GenerationBench) -> tuple[Any, _Sender]:
    engine = bench.bare_engine(max_new_tokens=_MOST)
    engine.prepare_refit_info(_info(bench))
    return engine, _Sender(bench)


def _info(bench: GenerationBench) -> dict[str, Any]:
    return {name: (tuple(weight.shape), weight.dtype) for name, weight in bench.weights().items()}


def _told(bench: GenerationBench, raised: Iterator[str], what: str) -> None:
    bench.equal(f"what is wrong with {what}", list(raised), [])


def _samples_with(bench: GenerationBench, what: str, engine: Any, decoder: PlainDecoder) -> None:
    bench.require_logprobs(what, engine.generate(rows_of(_PROMPTS), greedy=True), decoder, 1.0)
