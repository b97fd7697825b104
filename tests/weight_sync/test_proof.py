"""A version is committed only if the engines hold and use the trainer's weights."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from refit_faults import FAULTS, partial_commit
from tiny_refits import AdapterEngine, CollectingEngine, Run, TinyEngine, TinyModel

from rlframework.base.errors import (
    EngineLost,
    EngineNotReady,
    NotSupported,
    RefitError,
    RequestError,
    UserError,
    WorkerLost,
)
from rlframework.interfaces.generation import GenerationRequest, WeightReport
from rlframework.policy.lora_math import A, B, merge
from rlframework.weight_sync.proof import compare_reports, sent_by_all

BY_CHECKSUM = {"missing", "transposed", "wrong dtype", "reordered"}


def refit_twice(run: Run) -> None:
    for _ in range(2):
        run.refitter.refit()
        run.step()


def test_a_sound_engine_is_committed_and_serves_the_trainers_weights():
    run = Run([TinyEngine(), CollectingEngine()])
    with pytest.raises(EngineNotReady, match="have no weights yet"):
        run.refitter.require_committed()
    for version in (1, 2, 3):
        assert run.refitter.is_stale()
        report = run.refitter.refit()
        assert report.version == run.refitter.require_committed() == version
        assert report.probe_error < 1e-5
        assert not run.refitter.is_stale()
        for engine in run.engines:
            for name, weight in run.model.state_dict().items():
                assert torch.equal(engine.model.state_dict()[name], weight)
        run.step()
    assert report.metrics().keys() == {
        "time/refit", "refit/mb", "refit/version", "refit/dropped_tokens", "refit/probe_error"
    }  # fmt: skip
    # each engine keeps the prefix of every token of the second refit: 8 after 56, 256, 5 and 5 tokens, 2 after 5 of 12
    assert report.dropped_tokens == 2 * (8 * (56 + 256 + 5 + 5) + 4 * 28 + 12 * (5 + 6))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_detected_and_the_trainer_can_refit_again(fault):
    """Weights that did not reach their place in the model are never committed, with or without checksums."""
    run = Run([TinyEngine(), FAULTS[fault](TinyEngine)()])
    with pytest.raises(RefitError, match=r"^engine 1 .*version") as raised:
        refit_twice(run)
    assert ("checksum" in str(raised.value)) == (fault in BY_CHECKSUM)
    with pytest.raises(EngineNotReady, match="last refit failed"):
        run.refitter.require_committed()
    run.handles[1].group.worker.engine = TinyEngine()  # as a service does with an engine that is lost
    run.step()
    run.refitter.refit()
    assert run.refitter.require_committed() == run.worker.progress.weights_version


def test_an_update_that_lacks_weights_is_not_finished(monkeypatch):
    """Neither by the engine, nor by the driver if the engine does not count them."""
    for engine, message in ((TinyEngine(), "engine 0: 1 of the 4 weights of version 2 have not arrived"),
                            (partial_commit(TinyEngine)(), "the trainer did not send second")):  # fmt: skip
        run = Run([engine])
        run.refitter.refit()
        run.step()
        prepare = run.worker.prepare_weights_for_ipc
        run.worker.prepare_weights_for_ipc = lambda *given, _prepare=prepare, **named: (
            [size for size in _prepare(*given, **named)[0] if size[0] != "second"],
            1e9,
        )
        with pytest.raises(RefitError, match=message):
            run.refitter.refit()
        run.worker.prepare_weights_for_ipc = prepare
        run.refitter.refit()


def request(**given: Any) -> GenerationRequest:
    return GenerationRequest("one", torch.tensor([3, 4]), 0, 1, **given)


def test_an_engine_does_not_serve_during_an_update_nor_after_one_that_failed():
    run = Run()
    run.refitter.refit()
    engine = run.engines[0]
    engine.submit([request()])
    engine.begin_weight_update(2, run.worker.info())
    with pytest.raises(EngineNotReady, match="update to version 2 is not finished"):
        engine.poll()
    with pytest.raises(RefitError, match="weights of version 2 have not arrived"):
        engine.finish_weight_update()
    with pytest.raises(EngineNotReady, match=r"last update, to version 2, failed \(4 of the 4 weights"):
        engine.poll()
    with pytest.raises(RefitError, match="version 1 are older than those of version 2"):
        engine.begin_weight_update(1, run.worker.info())


@pytest.mark.parametrize("delivered", [True, False])
def test_adapters_alone_are_sent_under_the_name_of_their_version(delivered):
    """One that was loaded but is not used by requests is detected by the probes: its checksums are right."""
    base = TinyModel(seed=0)
    engine = AdapterEngine(base)
    run = Run([engine])
    random = torch.Generator().manual_seed(0)
    for version in (1, 2):
        adapters = {"first" + A: torch.randn(2, 8, generator=random), "first" + B: torch.randn(8, 2, generator=random)}
        run.worker.adapters = adapters
        run.model.first.data.copy_(merge(base.first.detach(), adapters["first" + A], adapters["first" + B], 1.0))
        if version == 2 and not delivered:
            engine.deliver = lambda _: None
            with pytest.raises(RefitError, match="engine 0 was refit to version 2, but gives token"):
                run.refitter.refit()
            return
        report = run.refitter.refit()
        assert report.size == 2 * 2 * 8 * 4
        assert f"policy-{version}" in engine.adapters
        run.worker.progress.weights_version += 1


def test_an_engine_that_is_gone_fails_the_refit_by_name_and_not_the_trainer():
    run = Run([TinyEngine(), TinyEngine()])
    run.refitter.refit()

    def lost(*_: Any, **__: Any) -> Any:
        raise WorkerLost("worker 0 died")

    start, run.handles[1].start = run.handles[1].start, lost
    with pytest.raises(EngineLost, match="engine 1: worker 0 died"):
        run.refitter.refit()
    assert run.refitter.version is None
    run.handles[1].start = start
    run.refitter.refit()


@pytest.mark.parametrize("error", [NotSupported, RequestError, UserError])
@pytest.mark.parametrize("call", ["begin_weight_update", "finish_weight_update", "submit"])
def test_an_engine_that_rejects_its_part_fails_the_refit_by_name_and_can_be_refit_again(error, call, monkeypatch):
    run = Run()

    def reject(*_: Any, **__: Any) -> Any:
        raise error("not by this engine")

    with monkeypatch.context() as patched:
        patched.setattr(run.engines[0], call, reject)
        with pytest.raises(RefitError, match="engine 0: not by this engine"):
            run.refitter.refit()
    assert run.refitter.version is None
    assert run.refitter.refit().version == 1


def test_the_weights_of_the_reference_are_never_sent():
    run = Run()
    run.refitter.refit()
    run.step()
    with run.worker.residency.holding_reference(nullcontext()):
        with pytest.raises(UserError, match=r"^rank 0 of the trainer: a refit needs the weights of the policy.*leave"):
            run.refitter.refit()
        with (
            pytest.raises(UserError, match="inside use_reference_model"),
            run.worker.sender._gathering_weights(["first"]),
        ):
            pass
    assert run.refitter.version is None
    assert run.refitter.refit().version == 2


def test_reports_are_compared_with_what_every_rank_sent():
    info = {"a": ((1,), torch.float32), "b": ((1,), torch.float32)}
    sent = sent_by_all([{"a": 1}, {"a": 1, "b": 2}, {}])
    compare_reports("engine 0", WeightReport(3, {"a": 1}), 3, info, sent)
    with pytest.raises(RefitError, match="rank 1 of the trainer sent other bytes of a than"):
        sent_by_all([{"a": 1}, {"a": 2}])
    with pytest.raises(RefitError, match="engine 0 finished its update with version 2; the trainer sent 3"):
        compare_reports("engine 0", WeightReport(2), 3, info, sent)
    with pytest.raises(RefitError, match=r"engine 0 reports a weight 'c' of version 3, which"):
        compare_reports("engine 0", WeightReport(3, {"c": 1}), 3, info, sent)
    with pytest.raises(RefitError, match=r"engine 0 holds 'b' of version 3 with checksum 0+5; the trainer sent 0+2"):
        compare_reports("engine 0", WeightReport(3, {"b": 5}), 3, info, sent)
