"""IPC: the errors that the receiver detects, and that it never generates from half of the new weights."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from rlframework.base.errors import EngineNotReady, RefitError, RefitNotPrepared, UserError
from rlframework.weight_sync import buffers, receiver
from rlframework.weight_sync.buffers import layout_checksum
from rlframework.weight_sync.ipc import (
    IpcSender,
    MemoryHandle,
    ReceiveBuffer,
    device_id,
    move_to_shared_memory,
    open_memory,
)

CPU = torch.device("cpu")


def open_inodes() -> set[int]:
    found = set()
    for file in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.add(os.stat(f"/proc/self/fd/{file}").st_ino)
    return found


HERE = device_id(CPU)


def handles_of(sender: IpcSender, sent, names: Iterable[str] | None = None):
    chosen = list(sent.weights if names is None else names)
    return {HERE: sender.pack(chosen, iter([(name, sent.weights[name]) for name in chosen]))}


@pytest.fixture
def sender(sent):
    made = IpcSender(CPU)
    made.begin(sent.info)
    yield made
    made.close()


def test_weights_arrive_group_by_group_and_again_in_place(sent, sender, serve, monkeypatch):
    """Checksums are reported of what is held; they are computed again only of weights that were not sent in place."""
    engine = sent.engine()
    monkeypatch.setattr(receiver, "checksum", again := Mock(wraps=buffers.checksum))
    for version in (0, 1):
        engine.begin_weight_update(version, sent.info)
        sender.begin(sent.info)
        for name in sent.weights:
            assert engine.update_weights_from_ipc_handles(handles_of(sender, sent, [name])) is True
        report = engine.finish_weight_update()
        assert report.version == version
        assert report.checksums == {
            name: buffers.checksum(buffers.as_bytes(weight)) for name, weight in sent.weights.items()
        }
        assert again.call_count == len(sent.weights)
        assert sent.loaded_by(engine)
        assert serve(engine) == version
        for weight in sent.weights.values():
            weight.mul_(-1)


def test_damaged_bytes_are_reported_by_weight(sent, sender, serve):
    engine, name = sent.engine(), "model.layers.0.mlp.up_proj.weight"
    handles = handles_of(sender, sent)
    next(slot for slot in handles[HERE].slots if slot.name == name).of(sender.written())[100] ^= 1
    with pytest.raises(RefitError, match=f"received weight '{name}' differs from what the trainer sent: its checksum"):
        engine.update_weights_from_ipc_handles(handles)
    with pytest.raises(EngineNotReady, match=f"last update, to version ., failed .*{name}"):
        serve(engine)


def test_an_engine_does_not_serve_before_all_weights_arrived_and_an_interrupted_update_is_begun_again(
    sent, sender, serve
):
    engine, (first, *_, last) = sent.engine(), sent.weights
    engine.update_weights_from_ipc_handles(handles_of(sender, sent, [first]))
    with pytest.raises(EngineNotReady, match="its update to version 0 is not finished"):
        serve(engine)
    sender.begin(sent.info)
    with pytest.raises(RefitError, match="two transfers in one update"):
        engine.update_weights_from_ipc_handles(handles_of(sender, sent, [last]))
    engine.begin_weight_update(0, sent.info)
    engine.update_weights_from_ipc_handles(handles_of(sender, sent, [name for name in sent.weights if name != last]))
    with pytest.raises(RefitError, match=rf"1 of the \d+ weights of version 0 have not arrived \({last}\)"):
        engine.finish_weight_update()
    with pytest.raises(EngineNotReady, match=f"last update, to version 0, failed .*{last}"):
        serve(engine)
    with pytest.raises(RefitNotPrepared, match="begin_weight_update must be called before"):
        engine.finish_weight_update()


def test_names_shapes_and_dtypes_that_were_not_announced_are_rejected(sent, sender):
    name = "model.norm.weight"
    group = handles_of(sender, sent, [name])[HERE]

    def with_slot(**changes):
        return {HERE: replace(group, slots=(replace(group.slots[0], **changes),))}

    twice = {HERE: replace(group, slots=group.slots * 2, checksums=group.checksums * 2)}
    for message, handles in {
        r"'no\.such\.weight', which was not announced by begin_weight_update \(announced: ": with_slot(
            name="no.such.weight"
        ),
        rf"'{name}' with shape \(16, 2\) .* announced \(32,\)": with_slot(shape=(16, 2)),
        f"'{name}' .* in torch.int32; .* in torch.float32": with_slot(dtype=torch.int32),
        f"'{name}' twice": twice,
    }.items():
        with pytest.raises(RefitError, match=message):
            sent.engine().update_weights_from_ipc_handles(handles)


def test_weights_that_do_not_fit_the_model_are_rejected(sent, sender):
    sent.weights["lm_tail.weight"] = torch.ones(3)
    sender.begin(sent.info)
    engine = sent.engine()
    engine.update_weights_from_ipc_handles(handles_of(sender, sent))
    with pytest.raises(RefitError, match=r"unknown: lm_tail\.weight"):
        engine.finish_weight_update()


def test_weights_that_an_engine_cannot_receive_are_reported(sent, sender):
    """They were not announced, are on another machine, or the trainer closed the memory."""
    engine, handles = sent.engine(), handles_of(sender, sent)
    with pytest.raises(RefitError, match="no weights"):
        engine.begin_weight_update(0, {})
    with pytest.raises(UserError, match=r"another machine.*set generation.refit.transport to collective"):
        engine.update_weights_from_ipc_handles({"another machine": handles[HERE]})
    sender.close()
    with pytest.raises(RefitError, match=r"cannot open the shared memory|is no longer the memory"):
        engine.update_weights_from_ipc_handles(handles)
    with pytest.raises(RefitNotPrepared, match="begin_weight_update must be called before"):
        engine.update_weights_from_ipc_handles(handles)


def test_a_trainer_that_gathers_other_weights_than_announced_is_detected(sent, sender):
    names = list(sent.weights)
    with pytest.raises(RefitError, match=f"gathered {names[1]} .* instead of {names[0]}"):
        sender.pack(names, iter([(name, sent.weights[name]) for name in reversed(names[:2])]))
    with pytest.raises(RefitError, match=f"gathered nothing instead of {names[0]}"):
        sender.pack(names, iter([]))


def test_buffers_are_reused_and_grow_for_a_larger_weight(sent, sender):
    small, large = "model.norm.weight", "model.embed_tokens.weight"
    first = [handles_of(sender, sent, [small])[HERE].memory for _ in range(6)]
    assert first[:3] == first[3:]
    assert len(set(first)) == 3
    assert handles_of(sender, sent, [large])[HERE].memory.size > first[0].size


def offered(sent, sender):
    """An engine with weights, and the buffer it offers for the next update, which has begun."""
    engine = sent.engine()
    assert engine.offer_refit_memory() == {}  # no module yet
    engine.update_weights_from_ipc_handles(handles_of(sender, sent))
    engine.finish_weight_update()
    engine.begin_weight_update(1, sent.info)
    (buffer,) = engine.offer_refit_memory().values()
    sender.begin(sent.info, buffer)
    return engine, buffer


@pytest.mark.slow
def test_offered_memory_is_written_once_and_not_copied(sent, sender, serve, monkeypatch):
    engine, buffer = offered(sent, sender)
    kept = engine._engine_model._module
    before = {name: weight.data_ptr() for name, weight in kept.state_dict().items()}
    monkeypatch.setattr(buffers, "copy_bytes", counted := Mock(wraps=buffers.copy_bytes))
    for _ in range(2):
        for weight in sent.weights.values():
            weight.mul_(-1)
        for name in sent.weights:
            engine.update_weights_from_ipc_handles(handles_of(sender, sent, [name]))
        report = engine.finish_weight_update()
        assert report.checksums.keys() == sent.weights.keys()
        assert sent.loaded_by(engine)
        assert serve(engine) == 1
        engine.begin_weight_update(1, sent.info)
        assert list(engine.offer_refit_memory().values()) == [buffer]
        sender.begin(sent.info, buffer)
    assert counted.call_count == 2 * len(sent.weights)
    assert engine._engine_model._module is kept
    assert {name: weight.data_ptr() for name, weight in kept.state_dict().items()} == before


@pytest.mark.slow
def test_other_engines_copy_from_the_memory_of_the_one_that_offered_it(sent, sender):
    engine, _ = offered(sent, sender)
    other, new = sent.engine(), sent.engine()
    other.load_weights([(name, torch.zeros_like(weight)) for name, weight in sent.weights.items()])
    other.finish_weight_update()
    other.begin_weight_update(1, sent.info)
    other.offer_refit_memory()
    for weight in sent.weights.values():
        weight.add_(1)
    handles = handles_of(sender, sent)
    for taker in (engine, other, new):
        taker.update_weights_from_ipc_handles(handles)
        taker.finish_weight_update()
        assert sent.loaded_by(taker)
    for weight in engine._model.state_dict().values():
        weight.zero_()
    assert sent.loaded_by(other)
    assert sent.loaded_by(new)


@pytest.mark.parametrize("bad", ["changed", "not written"])
def test_damaged_bytes_in_offered_memory_are_reported_by_weight(sent, sender, serve, bad):
    engine, buffer = offered(sent, sender)
    name = "model.layers.0.mlp.up_proj.weight"
    sent.weights[name].add_(1)
    raw = open_memory(buffer.memory)
    before = raw.clone()
    handles = handles_of(sender, sent)
    slot = next(slot for slot in handles[HERE].slots if slot.name == name)
    if bad == "changed":
        slot.of(raw)[100] ^= 1
    else:
        slot.of(raw).copy_(slot.of(before))
    with pytest.raises(RefitError, match=f"received weight '{name}' differs from what the trainer sent: its checksum"):
        engine.update_weights_from_ipc_handles(handles)
    with pytest.raises(EngineNotReady, match=f"last update, to version ., failed .*{name}"):
        serve(engine)
    engine.begin_weight_update(1, sent.info)
    (buffer,) = engine.offer_refit_memory().values()
    sender.begin(sent.info, buffer)
    engine.update_weights_from_ipc_handles(handles_of(sender, sent))
    engine.finish_weight_update()
    assert sent.loaded_by(engine)


@pytest.mark.slow
def test_a_receive_buffer_for_other_weights_is_rejected_and_weights_sent_outside_it_are_received(sent, sender):
    engine, buffer = offered(sent, sender)
    name = next(iter(sent.weights))
    with pytest.raises(RefitError, match="receive buffer for weights other than"):
        sender.begin({**sent.info, name: (sent.info[name][0], torch.bfloat16)}, buffer)
    sent.weights[name].add_(1)
    sender.begin(sent.info)
    engine.update_weights_from_ipc_handles(handles_of(sender, sent))
    engine.finish_weight_update()
    assert sent.loaded_by(engine)


@pytest.mark.slow
def test_weights_unlike_the_modules_own_are_sent_through_the_trainers_memory(sent, sender):
    """They are announced in another dtype: the engine offers nothing and releases the memory of its module."""
    engine, _ = offered(sent, sender)
    info = {name: (shape, torch.bfloat16) for name, (shape, _) in sent.info.items()}
    engine.begin_weight_update(2, info)
    assert engine.offer_refit_memory() == {}
    assert engine._refit_offered is None
    sender.begin(info)
    engine.update_weights_from_ipc_handles(handles_of(sender, sent))
    assert engine.finish_weight_update().checksums == {}  # of weights in another dtype
    held = engine._model.state_dict()
    assert all(torch.equal(held[name], weight.bfloat16().float()) for name, weight in sent.weights.items())


@pytest.mark.slow
def test_memory_of_a_dead_engine_is_reported_and_released(sent, sender):
    code = (
        "import dataclasses, sys, torch; from rlframework.weight_sync.ipc import move_to_shared_memory; "
        "memory = move_to_shared_memory([torch.ones(5)]); "
        "print(*dataclasses.astuple(memory.handle), flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as other:
        memory = MemoryHandle(*map(int, other.stdout.readline().split()))
        buffer = ReceiveBuffer(memory, layout_checksum({"a": ((5,), torch.float32)}), {"a": 0})
        sender.begin({"a": ((5,), torch.float32)}, buffer)
        sender.pack(["a"], iter([("a", torch.zeros(5))]))
        other.kill()
    sender.begin({"a": ((5,), torch.float32)}, buffer)
    sender.pack(["a"], iter([("a", torch.zeros(5))]))  # the memory is still open; the driver reports the dead engine
    sender.begin(sent.info)
    sender.begin({"a": ((5,), torch.float32)}, buffer)
    with pytest.raises(RefitError, match="cannot open the shared memory"):
        sender.pack(["a"], iter([("a", torch.zeros(5))]))


def test_tensors_that_move_to_shared_memory_stay_the_same_objects():
    """Tied tensors stay tied, gradients and optimizers still work, and the memory is freed with the last tensor."""
    layer = torch.nn.Linear(3, 2)
    layer.twin = layer.weight
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    kept, values = layer.weight, layer.weight.detach().clone()
    memory = move_to_shared_memory(layer.parameters())
    assert layer.weight is kept is layer.twin
    assert torch.equal(kept, values)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    moved = memory.raw[memory.offset(kept) :][: kept.nbytes].view(torch.float32).view(2, 3)
    assert torch.equal(moved, values - 1)
    inode = memory.handle.inode
    del memory
    assert torch.equal(moved, values - 1)
    assert inode in open_inodes()
    del layer, optimizer, kept, moved
    gc.collect()
    assert inode not in open_inodes()


@pytest.mark.slow
def test_nothing_is_left_behind_when_a_trainer_is_killed():
    """Its memory has no name, so there is nothing to clean up."""
    before = set(os.listdir("/dev/shm"))
    code = (
        "import torch, os, signal; from rlframework.weight_sync.ipc import IpcSender\n"
        "box = IpcSender(torch.device('cpu')); box.begin({'a': ((4,), torch.float32)})\n"
        "box.pack(['a'], iter([('a', torch.ones(4))])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert set(os.listdir("/dev/shm")) <= before
