"""IPC: what the receiver finds wrong, and that it does not generate with half of the new weights."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from rlframework.errors import RefitError, RefitNotPrepared, UserError
from rlframework.weight_sync import buffers
from rlframework.weight_sync.buffers import layout_checksum
from rlframework.weight_sync.ipc import Outbox, Room, device_id
from rlframework.weight_sync.shared_memory import MemoryHandle, OpenedMemory, move_in

CPU = torch.device("cpu")


def open_inodes() -> set[int]:
    found = set()
    for file in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the folder itself
            found.add(os.stat(f"/proc/self/fd/{file}").st_ino)
    return found


class Counted:
    """A function and how often it was called."""

    def __init__(self, call):
        self.call, self.calls = call, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.call(*args, **kwargs)


HERE = device_id(CPU)


def handles_of(outbox: Outbox, sent, names: Iterable[str] | None = None):
    chosen = list(sent.weights if names is None else names)
    return {HERE: outbox.pack(chosen, iter([(name, sent.weights[name]) for name in chosen]))}


@pytest.fixture
def outbox(sent):
    made = Outbox(CPU)
    made.begin(sent.info)
    yield made
    made.close()


def test_weights_arrive_group_by_group_and_again_in_place(sent, outbox, prompts):
    engine = sent.engine()
    for _ in range(2):
        outbox.begin(sent.info)
        for name in sent.weights:
            assert engine.update_weights_from_ipc_handles(handles_of(outbox, sent, [name])) is True
        assert sent.held_by(engine)
        engine.generate(prompts())
        for weight in sent.weights.values():
            weight.mul_(-1)


@pytest.mark.parametrize("bad", ["changed", "shifted", "swapped"])
def test_bytes_that_are_not_those_that_were_sent_are_told_by_name(sent, outbox, prompts, bad):
    engine, name = sent.engine(), "model.layers.0.mlp.up_proj.weight"
    handles = handles_of(outbox, sent)
    raw = next(slot for slot in handles[HERE].slots if slot.name == name).of(outbox._buffers[outbox._turn].raw)
    if bad == "changed":
        raw[100] ^= 1
    elif bad == "shifted":
        raw.copy_(raw.roll(4))
    else:
        raw[:8], raw[8:16] = raw[8:16].clone(), raw[:8].clone()
    with pytest.raises(RefitError, match=f"{name} is not what the trainer sent: its checksum"):
        engine.update_weights_from_ipc_handles(handles)
    with pytest.raises(UserError, match=f"last refit of this engine failed .*{name}"):
        engine.generate(prompts())


def test_an_engine_does_not_generate_before_all_weights_are_there(sent, outbox, prompts):
    engine = sent.engine()
    engine.update_weights_from_ipc_handles(handles_of(outbox, sent))
    engine.generate(prompts())
    outbox.begin(sent.info)
    *most, last = sent.weights
    engine.update_weights_from_ipc_handles(handles_of(outbox, sent, most))
    with pytest.raises(UserError, match=f"1 are missing: {last}"):
        engine.generate(prompts())
    engine.update_weights_from_ipc_handles(handles_of(outbox, sent, [last]))
    engine.generate(prompts())


def test_a_refit_that_was_broken_off_is_begun_anew(sent, outbox):
    engine, (first, *_) = sent.engine(), sent.weights
    engine.update_weights_from_ipc_handles(handles_of(outbox, sent, [first]))
    outbox.begin(sent.info)
    engine.update_weights_from_ipc_handles(handles_of(outbox, sent))
    assert sent.held_by(engine)


def test_names_shapes_and_dtypes_that_were_not_told_of_are_refused(sent, outbox):
    engine, name = sent.engine(), "model.norm.weight"
    group = handles_of(outbox, sent, [name])[HERE]

    def with_slot(**changes):
        return {HERE: replace(group, slots=(replace(group.slots[0], **changes),))}

    with pytest.raises(UserError, match=r"no\.such\.weight came, which prepare_refit_info did not tell of"):
        engine.update_weights_from_ipc_handles(with_slot(name="no.such.weight"))
    with pytest.raises(RefitError, match=rf"{name} came with shape \(16, 2\) .* told of \(32,\)"):
        engine.update_weights_from_ipc_handles(with_slot(shape=(16, 2)))
    with pytest.raises(RefitError, match=f"{name} came .* in torch.int32; .* in torch.float32"):
        engine.update_weights_from_ipc_handles(with_slot(dtype=torch.int32))
    twice = {HERE: replace(group, slots=group.slots * 2, checksums=group.checksums * 2)}
    with pytest.raises(RefitError, match=f"{name} came twice"):
        engine.update_weights_from_ipc_handles(twice)


def test_weights_that_do_not_fit_the_model_are_refused(sent, outbox):
    sent.weights["lm_tail.weight"] = torch.ones(3)
    outbox.begin(sent.info)
    engine = sent.engine()
    with pytest.raises(UserError, match=r"unknown: lm_tail\.weight"):
        engine.update_weights_from_ipc_handles(handles_of(outbox, sent))


def test_an_engine_that_was_told_of_nothing_says_so(sent, outbox):
    engine = sent.engine()
    engine._refit_info = None
    with pytest.raises(RefitNotPrepared, match="prepare_refit_info must be called before"):
        engine.update_weights_from_ipc_handles(handles_of(outbox, sent))
    with pytest.raises(UserError, match="no weights"):
        engine.prepare_refit_info({})


def test_an_engine_elsewhere_is_told_to_take_the_other_transport(sent, outbox):
    handles = {"another machine": handles_of(outbox, sent)[HERE]}
    with pytest.raises(UserError, match=r"another machine.*set generation.refit.transport to collective"):
        sent.engine().update_weights_from_ipc_handles(handles)


def test_memory_that_the_trainer_let_go_of_is_told(sent, outbox):
    handles = handles_of(outbox, sent)
    outbox.close()
    with pytest.raises(RefitError, match=r"cannot be opened|is not the memory"):
        sent.engine().update_weights_from_ipc_handles(handles)


def test_a_trainer_that_gives_other_weights_than_it_told_of_is_found_out(sent, outbox):
    names = list(sent.weights)
    with pytest.raises(RefitError, match=f"gave {names[1]} .* where {names[0]}"):
        outbox.pack(names, iter([(name, sent.weights[name]) for name in reversed(names[:2])]))
    with pytest.raises(RefitError, match=f"gave nothing where {names[0]}"):
        outbox.pack(names, iter([]))


def test_buffers_are_used_again_and_grow_for_a_larger_weight(sent, outbox):
    small, large = "model.norm.weight", "model.embed_tokens.weight"
    first = [handles_of(outbox, sent, [small])[HERE].memory for _ in range(6)]
    assert first[:3] == first[3:]
    assert len(set(first)) == 3
    assert handles_of(outbox, sent, [large])[HERE].memory.size > first[0].size


def offered(sent, outbox):
    """An engine with weights, and what it offers for the next refit, which is begun."""
    engine = sent.engine()
    assert engine.offer_refit_memory() == {}  # it has no module yet
    engine.update_weights_from_ipc_handles(handles_of(outbox, sent))
    (room,) = engine.offer_refit_memory().values()
    outbox.begin(sent.info, room)
    return engine, room


def test_weights_are_written_where_the_engine_has_them_and_copied_no_more(sent, outbox, prompts, monkeypatch):
    engine, room = offered(sent, outbox)
    kept = engine._own._module
    before = {name: weight.data_ptr() for name, weight in kept.state_dict().items()}
    monkeypatch.setattr(buffers, "copy_bytes", counted := Counted(buffers.copy_bytes))
    for _ in range(2):
        for weight in sent.weights.values():
            weight.mul_(-1)
        for name in sent.weights:
            engine.update_weights_from_ipc_handles(handles_of(outbox, sent, [name]))
        assert sent.held_by(engine)
        engine.generate(prompts())
        assert list(engine.offer_refit_memory().values()) == [room]
        outbox.begin(sent.info, room)
    assert counted.calls == 2 * len(sent.weights)
    assert engine._own._module is kept
    assert {name: weight.data_ptr() for name, weight in kept.state_dict().items()} == before


def test_other_engines_copy_from_the_memory_of_the_one_that_offered_it(sent, outbox):
    engine, _ = offered(sent, outbox)
    other, new = sent.engine(), sent.engine()
    other.load_weights([(name, torch.zeros_like(weight)) for name, weight in sent.weights.items()])
    other.offer_refit_memory()
    for weight in sent.weights.values():
        weight.add_(1)
    handles = handles_of(outbox, sent)
    for taker in (engine, other, new):
        taker.update_weights_from_ipc_handles(handles)
        assert sent.held_by(taker)
    for weight in engine._model.state_dict().values():
        weight.zero_()
    assert sent.held_by(other)
    assert sent.held_by(new)


def test_an_engine_does_not_generate_while_the_trainer_may_write(sent, outbox, prompts):
    engine, _ = offered(sent, outbox)
    with pytest.raises(UserError, match=f"{len(sent.weights)} are missing"):
        engine.generate(prompts())


def test_weights_that_lie_elsewhere_than_they_were_to_be_are_taken_from_there(sent, outbox):
    """By an engine that was refused by the trainer's side, which then sent another way."""
    engine, _ = offered(sent, outbox)
    sent.weights["model.norm.weight"].add_(1)
    outbox.begin(sent.info)
    engine.update_weights_from_ipc_handles(handles_of(outbox, sent))
    assert sent.held_by(engine)


@pytest.mark.parametrize("bad", ["changed", "not written"])
def test_bytes_in_an_engines_own_memory_that_are_not_the_trainers_are_told_by_name(sent, outbox, prompts, bad):
    engine, room = offered(sent, outbox)
    name = "model.layers.0.mlp.up_proj.weight"
    sent.weights[name].add_(1)
    raw = OpenedMemory(1).open(room.memory)
    before = raw.clone()
    handles = handles_of(outbox, sent)
    slot = next(slot for slot in handles[HERE].slots if slot.name == name)
    if bad == "changed":
        slot.of(raw)[100] ^= 1
    else:
        slot.of(raw).copy_(slot.of(before))
    with pytest.raises(RefitError, match=f"{name} is not what the trainer sent: its checksum"):
        engine.update_weights_from_ipc_handles(handles)
    with pytest.raises(UserError, match=f"last refit of this engine failed .*{name}"):
        engine.generate(prompts())
    (room,) = engine.offer_refit_memory().values()
    outbox.begin(sent.info, room)
    engine.update_weights_from_ipc_handles(handles_of(outbox, sent))
    assert sent.held_by(engine)


def test_room_for_other_weights_is_refused(sent, outbox):
    _, room = offered(sent, outbox)
    name = next(iter(sent.weights))
    with pytest.raises(RefitError, match="made room for other weights"):
        outbox.begin({**sent.info, name: (sent.info[name][0], torch.bfloat16)}, room)


def test_weights_that_are_not_the_modules_own_are_sent_by_the_trainers_memory(sent, outbox):
    """Here in another dtype than the engine's: it offers nothing, and gives up the memory of its module."""
    engine, _ = offered(sent, outbox)
    info = {name: (shape, torch.bfloat16) for name, (shape, _) in sent.info.items()}
    engine.prepare_refit_info(info)
    assert engine.offer_refit_memory() == {}
    assert engine._refit_inbox.own is None
    outbox.begin(info)
    engine.update_weights_from_ipc_handles(handles_of(outbox, sent))
    held = engine._model.state_dict()
    assert all(torch.equal(held[name], weight.bfloat16().float()) for name, weight in sent.weights.items())


def test_memory_of_an_engine_that_is_gone_is_told_and_let_go_of(sent, outbox):
    code = (
        "import dataclasses, sys, torch; from rlframework.weight_sync.shared_memory import move_in; "
        "memory = move_in([torch.ones(5)]); print(*dataclasses.astuple(memory.handle), flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as other:
        memory = MemoryHandle(*map(int, other.stdout.readline().split()))
        room = Room(memory, layout_checksum({"a": ((5,), torch.float32)}), {"a": 0})
        outbox.begin({"a": ((5,), torch.float32)}, room)
        outbox.pack(["a"], iter([("a", torch.zeros(5))]))
        other.kill()
    outbox.begin({"a": ((5,), torch.float32)}, room)
    outbox.pack(["a"], iter([("a", torch.zeros(5))]))  # it has that memory open, and the driver notices who is gone
    outbox.begin(sent.info)
    outbox.begin({"a": ((5,), torch.float32)}, room)
    with pytest.raises(RefitError, match="cannot be opened"):
        outbox.pack(["a"], iter([("a", torch.zeros(5))]))


def test_tensors_that_move_to_shared_memory_stay_who_they_are():
    """Tied ones are one, gradients and optimizers go on, and the memory is given back with the last of them."""
    layer = torch.nn.Linear(3, 2)
    layer.twin = layer.weight
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    kept, values = layer.weight, layer.weight.detach().clone()
    memory = move_in(layer.parameters())
    assert layer.weight is kept is layer.twin
    assert torch.equal(kept, values)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    there = memory.raw[memory.offset(kept) :][: kept.nbytes].view(torch.float32).view(2, 3)
    assert torch.equal(there, values - 1)
    inode = memory.handle.inode
    del memory
    assert torch.equal(there, values - 1)
    assert inode in open_inodes()
    del layer, optimizer, kept, there
    gc.collect()
    assert inode not in open_inodes()


def test_nothing_is_left_behind_when_a_trainer_is_killed():
    """Its memory has no name, so there is nothing to clean up."""
    before = set(os.listdir("/dev/shm"))
    code = (
        "import torch, os, signal; from rlframework.weight_sync.ipc import Outbox\n"
        "box = Outbox(torch.device('cpu')); box.begin({'a': ((4,), torch.float32)})\n"
        "box.pack(['a'], iter([('a', torch.ones(4))])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert set(os.listdir("/dev/shm")) <= before
