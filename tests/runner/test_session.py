"""Sessions, and configurations of a loop that uses neither algorithm nor environment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlframework import Session, loop_config, run
from rlframework.algorithms.losses import NLLLoss
from rlframework.base.errors import BatchTypeError, ConfigError, WorkerError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.huggingface.model_directories import make_llama
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.rollout.seeds import row_seeds
from rlframework.rollout.single_turn import complete
from rlframework.runner.launch import dry_run


@pytest.fixture
def source(tmp_path: Path) -> dict[str, object]:
    make_llama(str(tmp_path / "tiny"), character_tokenizer("ab="), hidden=16, layers=1, heads=2)
    return {"policy": {"model_name": str(tmp_path / "tiny")}, "output_dir": str(tmp_path / "run")}


def test_a_loop_may_leave_out_algorithm_and_environment(source) -> None:
    assert loop_config(source).policy.model_name == source["policy"]["model_name"]
    named = loop_config(source, ["algorithm={name: grpo, num_steps: 7}", "environment={name: dataset, check: exact}"])
    assert (named.algorithm.name, named.algorithm.num_steps, named.environment.name) == ("grpo", 7, "dataset")
    assert loop_config(source, ["algorithm.num_steps=7"]).algorithm.num_steps == 7
    with pytest.raises(ConfigError, match=r"Did you mean `policy\.optimizer"):
        loop_config(source, ["policy.optimiser.lr=1"])


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_a_schedule_that_decays_needs_its_end_without_an_algorithm(source, name: str) -> None:
    decays = [f"policy.scheduler.name={name}"]
    with pytest.raises(ConfigError, match=rf"`policy\.scheduler\.total_steps`: required .* {name} schedule"):
        Session(source, decays)
    assert loop_config(source, [*decays, "policy.scheduler.total_steps=7"]).policy.scheduler.total_steps == 7
    assert loop_config(source, [*decays, "algorithm.num_steps=7"]).algorithm.num_steps == 7
    assert loop_config(source, [*decays, "algorithm={name: grpo}"]).policy.scheduler.name == name


@pytest.mark.parametrize("function", [run, dry_run])
def test_a_run_takes_what_a_session_takes(source, function) -> None:
    with pytest.raises(ConfigError, match=r"`algorithm\.name`: required key is missing"):
        function(source)


@pytest.mark.slow
def test_a_session_is_open_until_it_is_closed(source, tmp_path: Path) -> None:
    session = Session(source)
    assert session.policy.get_info()
    name = source["policy"]["model_name"]
    assert repr(session) == f"<Session of {name}: dtensor, 1 x inline, open>"
    session.close()
    session.close()
    assert repr(session) == f"<Session of {name}: dtensor, 1 x inline, closed>"
    with pytest.raises(WorkerError, match="shut down"):
        session.policy.get_info()
    with pytest.raises(ZeroDivisionError), Session(source) as session:
        1 / 0  # noqa: B018 - an error of the loop
    assert repr(session).endswith("closed>")
    assert not (tmp_path / "run").exists()


class Counting(NLLLoss):
    def __init__(self) -> None:
        self.calls, self.weight = 0, 1.0

    def __call__(self, *args):
        self.calls += 1
        self.cache = args[0].shape  # new once: no state
        return super().__call__(*args)


def rows(count: int = 4) -> BatchedDataDict:
    ids = torch.tensor([[1, 2, 3]]).repeat(count, 1)
    masks = {"token_mask": torch.ones(count, 3), "sample_mask": torch.ones(count)}
    return BatchedDataDict(input_ids=ids, input_lengths=torch.full((count,), 3), **masks)


@pytest.mark.slow
def test_a_loss_that_keeps_state_is_warned_about_once(source, caplog) -> None:
    with Session(source, ["policy.train_global_batch_size=4"]) as session:
        session.policy.train(rows(), NLLLoss())
        assert "a loss must keep no state" not in caplog.text
        for _ in range(2):
            session.policy.train(rows(), Counting())
    [told] = [record.message for record in caplog.records if "a loss must keep no state" in record.message]
    assert told.startswith("Counting changes its attribute 'calls'")


class Overflowing(NLLLoss):
    def __call__(self, *args):
        loss, metrics = super().__call__(*args)
        return loss * float("nan"), metrics


@pytest.mark.slow
def test_a_skipped_step_of_a_loop_is_warned_about_once(source, caplog) -> None:
    with Session(source, ["policy.train_global_batch_size=4"]) as session:
        assert [session.policy.train(rows(8), Overflowing())["skipped"] for _ in range(2)] == [2, 2]
    [told] = [record.message for record in caplog.records if "was not finite" in record.message]
    assert told.startswith("the gradient of 2 of 2 optimizer steps was not finite (loss nan)")


@pytest.mark.slow
def test_prompts_that_are_no_lists_of_ids_are_told_what_they_are(source) -> None:
    with Session(source) as session:
        for prompts, told in [
            ("ab=", "got a str"),
            (["ab=", "b="], "got a list with 'ab='"),
            ([3, 4], "got a list with 3"),
            (torch.tensor([[3, 4]]), "got a Tensor"),
            ([[3, 4], [3.7, 4]], r"got 3\.7 as a token id"),
            ([[3, True]], "got True as a token id"),
            ([list(torch.tensor([3.5]))], r"got tensor\(3\.5000\) as a token id"),
            ([["3"]], "got '3' as a token id"),
        ]:
            with pytest.raises(BatchTypeError, match=rf"^prompts must be a list .*; {told}$"):
                complete(session.tokenizer, session.generation, prompts, row_seeds(0, 1, 2))
        prompts = [[3, 4], (np.int64(3), torch.tensor(4))]
        output, _ = complete(session.tokenizer, session.generation, prompts, row_seeds(0, 1, 2), temperature=0)
    assert output["output_ids"][0, :2].tolist() == [3, 4]


@pytest.mark.slow
def test_a_session_whose_workers_have_ended_says_so(source, monkeypatch) -> None:
    """After an interrupt while a call waits for a worker."""
    with Session(source, ["worker_group={name: processes, num_workers: 1}"]) as session:

        def interrupted(*args: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(session.policy.worker_group, "_collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.policy.get_info()
        assert repr(session).endswith("1 x processes, failed: open a new Session>")
        told = r"no longer usable: get_info ended with KeyboardInterrupt; create a new one, or a new Session$"
        with pytest.raises(WorkerError, match=told):
            session.policy.get_info()
    assert repr(session).endswith("closed>")
