"""IPC: what the receiver finds wrong, and that it does not generate with half of the new weights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from rlframework.errors import RefitError, RefitNotPrepared, UserError
from rlframework.policy.refit.sharing import Outbox, device_id

CPU = torch.device("cpu")
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


def test_nothing_is_left_behind_when_a_trainer_is_killed():
    """Its memory has no name, so there is nothing to clean up."""
    before = set(os.listdir("/dev/shm"))
    code = (
        "import torch, os, signal; from rlframework.policy.refit.sharing import Outbox\n"
        "box = Outbox(torch.device('cpu')); box.begin({'a': ((4,), torch.float32)})\n"
        "box.pack(['a'], iter([('a', torch.ones(4))])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert set(os.listdir("/dev/shm")) <= before
