"""Broadcasts: ranks in threads of this process, each with a process group of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from rlframework.base.errors import RefitError, RefitNotPrepared
from rlframework.weight_sync import collective
from rlframework.weight_sync.buffers import as_bytes, checksum
from rlframework.weight_sync.collective import RefitGroup
from rlframework.weight_sync.receiver import CollectingSink
from rlframework.workers.machine import bind_free_port

CPU, DEADLINE = torch.device("cpu"), 60.0


def ready_engine(sent):
    """An engine that has its module: transformers cannot build two models in two threads at the same time."""
    engine = sent.engine()
    engine.load_weights([(name, torch.zeros_like(weight)) for name, weight in sent.weights.items()])
    engine.finish_weight_update()
    return engine


def connect(engines) -> RefitGroup:
    """The sender's group, with `engines` as its other ranks."""
    kept = bind_free_port("127.0.0.1")
    port, size = kept.getsockname()[1], 1 + len(engines)
    with ThreadPoolExecutor(size) as pool:
        joining = [
            pool.submit(engine.init_collective, "127.0.0.1", port, size, rank) for rank, engine in enumerate(engines, 1)
        ]
        group = RefitGroup("127.0.0.1", port, 0, size, CPU, DEADLINE, kept)
        for joined in joining:
            joined.result()
    return group


def exchange(group, sent, engines, budget: float = 4096.0, weights=None, info=None):
    """Refit; return the exception that the sender and each engine raised, or None. `info`: that of the engines."""

    def raised(call):
        try:
            call()
        except Exception as error:  # noqa: BLE001 - asserted by the test
            return error
        return None

    for engine in engines:
        engine.begin_weight_update(1, info or sent.info)
    given = iter((sent.weights if weights is None else weights).items())
    with ThreadPoolExecutor(1 + len(engines)) as pool:
        receiving = [pool.submit(raised, engine.update_weights_from_collective) for engine in engines]
        sending = pool.submit(raised, lambda: collective.send(group, sent.info, given, budget))
        return [sending.result(), *[result.result() for result in receiving]]


@pytest.mark.slow
def test_several_engines_get_all_weights_in_small_groups_and_again(sent, serve):
    engines = [ready_engine(sent), ready_engine(sent)]
    group = connect(engines)
    for budget in (4096.0, 1e9):
        assert exchange(group, sent, engines, budget) == [None, None, None]
        for engine in engines:
            assert engine.finish_weight_update().checksums.keys() == sent.weights.keys()
            assert sent.loaded_by(engine)
            assert serve(engine) == 1
        for weight in sent.weights.values():
            weight.add_(1)


@pytest.mark.slow
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "packed"])
def test_damage_is_reported_on_both_sides_and_the_group_stays_usable(sent, monkeypatch, alone):
    engine = ready_engine(sent)
    group = connect([engine])
    groups = collective._message_slots(sent.info, 4096.0)
    bad = next(number for number, slots in enumerate(groups) if (len(slots) == 1) == alone)
    sound, numbers = collective._Message.start, count()

    def damaging(self, raw):
        if self._group.rank == 0 and next(numbers) == bad:
            raw = raw.clone()
            raw[0] ^= 1
        sound(self, raw)

    monkeypatch.setattr(collective._Message, "start", damaging)
    sender, receiver = exchange(group, sent, [engine])
    assert f"'{groups[bad][0].name}' differs from what the trainer sent" in str(receiver)
    assert "1 of 1 receivers rejected the weights of this refit" in str(sender)
    monkeypatch.undo()
    assert exchange(group, sent, [engine]) == [None, None]
    engine.finish_weight_update()
    assert sent.loaded_by(engine)


def test_weights_of_any_size_layout_and_dtype_arrive(sent):
    """Weights sent without a copy, packed weights, and weights that must be cast or made contiguous first."""
    random = torch.Generator().manual_seed(0)
    given = {
        "large": torch.randn(1024, 300, generator=random),
        "small": torch.randn(7, generator=random),
        "number": torch.tensor(3.0),
        "turned": torch.randn(600, 500, generator=random).t(),
        "rounded": torch.randn(1024, 600, generator=random),
        "none": torch.empty(0, 4),
    }
    info = {name: (tuple(weight.shape), weight.dtype) for name, weight in given.items()}
    info["rounded"] = ((1024, 600), torch.bfloat16)
    engine = sent.engine()
    arrived: dict[str, torch.Tensor] = {}
    engine.refit_sink = lambda info: CollectingSink(info, CPU, lambda weights: arrived.update(weights))
    engine.begin_weight_update(0, info)
    group = connect([engine])
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(engine.update_weights_from_collective)
        sums = collective.send(group, info, iter(given.items()), 4096.0)
        assert receiving.result() is True
    engine.finish_weight_update()
    assert arrived.keys() == given.keys()
    for name, weight in given.items():
        assert torch.equal(arrived[name], weight.to(info[name][1])), name
        assert arrived[name].dtype == info[name][1]
    assert sums == [checksum(as_bytes(arrived[name])) for name in info]


@pytest.mark.slow
def test_a_trainer_that_fails_lets_the_engine_leave(sent):
    engine = ready_engine(sent)
    group = connect([engine])
    engine._refit_group.deadline = 2.0
    engine._refit_group._group._set_default_timeout(timedelta(seconds=2))
    some = dict(list(sent.weights.items())[:3])
    sender, receiver = exchange(group, sent, [engine], weights=some)
    assert "gathered nothing instead of" in str(sender)
    assert isinstance(receiver, RefitError)
    assert "the trainer is gone or took too long (generation.refit.deadline is 2 s)" in str(receiver)
    assert not engine.get_refit_state()["joined"]


@pytest.mark.slow
def test_weights_other_than_announced_are_rejected(sent):
    engine = ready_engine(sent)
    group = connect([engine])
    sender, receiver = exchange(group, sent, [engine], info=dict(reversed(sent.info.items())))
    assert "weights other than those announced by begin_weight_update" in str(receiver)
    assert isinstance(sender, RefitError)


@pytest.mark.slow
def test_a_missing_rank_is_named_at_the_deadline(sent):
    with pytest.raises(
        RefitError,
        match=r"rank 0 of 2 could not form the process group .* within 1 s .*ranks \[1\] have not answered",
    ):
        RefitGroup("127.0.0.1", 0, 0, 2, CPU, 1.0, bind_free_port("127.0.0.1"))
    with pytest.raises(RefitNotPrepared, match="init_collective must be called"):
        ready_engine(sent).update_weights_from_collective()


@pytest.mark.slow
def test_an_engine_joins_a_new_group_after_the_old_one_was_closed(sent):
    engine = ready_engine(sent)
    connect([engine]).close()
    assert exchange(connect([engine]), sent, [engine]) == [None, None]
    engine.finish_weight_update()
    assert sent.loaded_by(engine)


class LateGloo:
    """`ProcessGroupGloo`, whose rank 0 connects later than the others the first time, so that they wait for it."""

    def __init__(self, gloo: Any, seconds: float) -> None:
        self._gloo, self._seconds, self.attempts = gloo, seconds, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gloo, name)

    def __call__(self, store: Any, rank: int, size: int, options: Any) -> Any:
        if rank == 0:
            self.attempts += 1
            time.sleep(self._seconds if self.attempts == 1 else 0.0)
        return self._gloo(store, rank, size, options)


@contextmanager
def strangers(first_bytes: bytes) -> Iterator[None]:
    """Connect to each port at which this process begins to listen, at once, and send `first_bytes`."""
    ended, held, process = threading.Event(), dict[Any, socket.socket](), psutil.Process()

    def listening() -> set[Any]:
        return {each.laddr for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN}

    known = listening()

    def connect_to_all() -> None:
        while not ended.is_set():
            for address in listening() - known:
                known.add(address)
                with suppress(OSError):
                    held[address] = socket.create_connection(address, 1.0)
                    held[address].sendall(first_bytes)

    thread = threading.Thread(target=connect_to_all)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for each in held.values():
            each.close()


@pytest.mark.slow
def test_a_stranger_who_takes_the_place_of_a_rank_delays_the_group_and_does_not_prevent_it(monkeypatch):
    """gloo takes eight zero bytes for the trainer. Which rank listens for which depends on their ports: about half."""
    monkeypatch.setattr("rlframework.weight_sync.rendezvous._FIRST_ATTEMPT", 0.3)
    sound = dist.ProcessGroupGloo
    for _ in range(20):
        late = LateGloo(sound, 0.1)
        monkeypatch.setattr(dist, "ProcessGroupGloo", late)
        kept = bind_free_port("127.0.0.1")
        place = "127.0.0.1", kept.getsockname()[1]
        with strangers(bytes(8)), ThreadPoolExecutor(2) as pool:
            joining = pool.submit(RefitGroup, *place, 1, 2, CPU, DEADLINE)
            groups = [RefitGroup(*place, 0, 2, CPU, DEADLINE, kept), joining.result()]
            given = [torch.tensor([7]), torch.tensor([0])]
            for group, work in [(one, one.start_broadcast(tensor)) for one, tensor in zip(groups, given, strict=True)]:
                group.wait(work, "using the group")
        assert given[1] == 7
        if late.attempts > 1:
            break
    assert late.attempts > 1, "no stranger was fast enough"


@pytest.mark.slow
def test_a_group_waits_as_long_as_its_deadline_after_short_attempts_to_connect(monkeypatch):
    monkeypatch.setattr("rlframework.weight_sync.rendezvous._FIRST_ATTEMPT", 0.3)
    kept = bind_free_port("127.0.0.1")
    place = "127.0.0.1", kept.getsockname()[1]
    with ThreadPoolExecutor(2) as pool:
        joining = pool.submit(RefitGroup, *place, 1, 2, CPU, DEADLINE)
        sender, receiver = RefitGroup(*place, 0, 2, CPU, DEADLINE, kept), joining.result()
        received = torch.zeros(1)
        waiting = pool.submit(receiver.broadcast, received, "receiving")
        time.sleep(0.6)
        sender.broadcast(torch.ones(1), "sending")
        waiting.result()
    assert received == 1
