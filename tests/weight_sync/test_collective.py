"""Broadcasts: ranks in threads of this process, each with a process group of its own."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
import torch

from rlframework.errors import RefitError, RefitNotPrepared
from rlframework.weight_sync import collective
from rlframework.weight_sync.buffers import as_bytes, checksum
from rlframework.weight_sync.collective import RefitGroup
from rlframework.weight_sync.receiver import CollectingSink
from rlframework.workers.machine import bind_free_port

CPU, DEADLINE = torch.device("cpu"), 2.0


def ready_engine(sent):
    """An engine that has its module: transformers cannot build two models in two threads at the same time."""
    engine = sent.engine()
    engine.load_weights([(name, torch.zeros_like(weight)) for name, weight in sent.weights.items()])
    engine.finish_weight_update()
    return engine


def connect(engines, deadline: float = DEADLINE) -> RefitGroup:
    """The sender's group, with `engines` as its other ranks."""
    kept = bind_free_port("127.0.0.1")
    port, size = kept.getsockname()[1], 1 + len(engines)
    with ThreadPoolExecutor(size) as pool:
        joining = [
            pool.submit(engine.init_collective, "127.0.0.1", port, size, rank) for rank, engine in enumerate(engines, 1)
        ]
        group = RefitGroup("127.0.0.1", port, 0, size, CPU, deadline, kept)
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


def test_a_trainer_that_fails_lets_the_engine_leave(sent):
    engine = ready_engine(sent)
    group = connect([engine])
    some = dict(list(sent.weights.items())[:3])
    begun = time.monotonic()
    sender, receiver = exchange(group, sent, [engine], weights=some)
    assert "gathered nothing instead of" in str(sender)
    assert isinstance(receiver, RefitError)
    assert "the trainer is gone or took too long (generation.refit.deadline is 2 s)" in str(receiver)
    assert time.monotonic() - begun < 5 * DEADLINE
    assert not engine.get_refit_state()["joined"]


def test_weights_other_than_announced_are_rejected(sent):
    engine = ready_engine(sent)
    group = connect([engine])
    sender, receiver = exchange(group, sent, [engine], info=dict(reversed(sent.info.items())))
    assert "weights other than those announced by begin_weight_update" in str(receiver)
    assert isinstance(sender, RefitError)


def test_a_missing_rank_is_reported_within_the_deadline(sent):
    begun = time.monotonic()
    with pytest.raises(RefitError, match=r"rank 0 of 2 could not form the process group .* within 1 s"):
        RefitGroup("127.0.0.1", 0, 0, 2, CPU, 1.0, bind_free_port("127.0.0.1"))
    assert time.monotonic() - begun < 10
    with pytest.raises(RefitNotPrepared, match="init_collective must be called"):
        ready_engine(sent).update_weights_from_collective()


def test_an_engine_joins_a_new_group_after_the_old_one_was_closed(sent):
    engine = ready_engine(sent)
    connect([engine]).close()
    assert exchange(connect([engine]), sent, [engine]) == [None, None]
    engine.finish_weight_update()
    assert sent.loaded_by(engine)
