"""rlframework: whole runs, and the calls of its policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from plain_side import as_rows
from steps import serve, steps
from work import as_batch

from rlframework import build_parts, load_config, run
from rlframework.algorithms.advantages import add_advantages
from rlframework.algorithms.grpo import policy_loss
from rlframework.batch.packing import get_packer
from rlframework.config.algorithms import GRPOConfig
from rlframework.rollout.result import Rollout

ENDLESS = 1_000_000


def configure(task: Mapping[str, Any], algorithm: Mapping[str, Any], environment: Mapping[str, Any]) -> Any:
    """Return a configuration with the batching, observers and other settings that a run has by default.

    Off is what the other sides do not do at all: validation and pictures of curves.
    """
    return load_config(
        {
            "output_dir": f"{task['folder']}/ours-{os.getpid()}",
            "device": "cpu",
            "algorithm": {"num_steps": ENDLESS, "validation": {"at_start": False, "at_end": False}, **algorithm},
            "environment": environment,
            "policy": {
                "model_name": task["model"],
                "train_global_batch_size": len(task["rows"]),
                "train_micro_batch_size": task["micro_rows"],
                "logprob_batch_size": task["micro_rows"],
                "optimizer": {"lr": task["lr"], "weight_decay": task["weight_decay"]},
                "max_grad_norm": task["clip"],
            },
            "generation": {"max_new_tokens": task["new_tokens"], "temperature": 1.0},
            "observers": {"console": False, "tensorboard": False, "curve": False},
            "worker_group": {"name": "inline"},
            "plugins": ["step_end"],
        }
    )


def logprobs(task: Mapping[str, Any]) -> None:
    """Log-probabilities of the completions."""
    rows = as_rows(task["rows"])
    batch, mask = as_batch(rows), rows.mask > 0
    with build_parts(configure(task, {"name": "sft"}, {"name": "addition"})) as parts:
        torch.set_num_threads(1)
        serve(
            lambda: parts.policy.get_logprobs(batch, positions="token_mask")["logprobs"],
            lambda result: {"logprobs": result[mask].tolist()},
        )


def train(task: Mapping[str, Any]) -> None:
    """A run of supervised training on the completions, whose rows are one batch."""
    texts = [{name: row[f"{name}_text"] for name in ("prompt", "completion")} for row in task["rows"]]
    _run(configure(task, {"name": "sft"}, {"name": "dataset"}), texts)


def dpo(task: Mapping[str, Any]) -> None:
    """A run of direct preference optimization, whose pairs are one batch."""
    texts = [{name: pair[f"{name}_text"] for name in ("prompt", "chosen", "rejected")} for pair in task["pairs"]]
    algorithm = {"name": "dpo", "beta": task["beta"]}
    _run(configure(task, algorithm, {"name": "preferences"}), texts)


def grpo(task: Mapping[str, Any]) -> None:
    """A run of GRPO with its rollouts."""
    prompts = [{"prompt": text} for text in task["prompts"]]
    _run(_grpo(task), prompts)


def grpo_update(task: Mapping[str, Any]) -> None:
    """The update of GRPO on given rollouts."""
    rollouts, config = task["rollouts"], _grpo(task)
    assert isinstance(config.algorithm, GRPOConfig)
    batch = as_batch(as_rows(rollouts))
    lengths = torch.tensor([len(each["completion"]) for each in rollouts])
    nothing = torch.zeros(len(rollouts), dtype=torch.bool)
    result = Rollout(
        samples=(),
        completions=[],
        data=batch,
        rewards=torch.tensor([each["reward"] for each in rollouts]),
        accuracies=torch.zeros(len(rollouts)),
        completion_lengths=lengths,
        truncated=nothing,
        metrics={},
        episode_of=torch.arange(len(rollouts)),
        failed=nothing,
    )
    add_advantages(result, config.algorithm, task["new_tokens"])
    with build_parts(config, data=[{"prompt": text} for text in task["prompts"]]) as parts:
        torch.set_num_threads(1)
        loss = policy_loss(config.algorithm, task["new_tokens"])
        serve(
            lambda: parts.policy.train(batch, loss),
            lambda trained: {"grad_norm": float(trained["grad_norm"][0])},  # the loss is 0 where lengths are equal
        )


def pack(task: Mapping[str, Any]) -> None:
    """Rows as dense bins of tokens."""
    rows = [np.full(length, index) for index, length in enumerate(task["documents"])]
    packer = get_packer("balanced", task["capacity"])

    def packed() -> list[np.ndarray[Any, Any]]:
        bins = packer.pack(task["documents"])
        return [np.concatenate([rows[index] for index in bin_]) for bin_ in bins]

    serve(packed, lambda bins: {"tokens": sum(map(len, bins)), "bins": len(bins), "largest": max(map(len, bins))})


def partition(task: Mapping[str, Any]) -> None:
    """Bins of rows by their lengths alone."""
    lengths, packer = task["documents"][: task["partitioned"]], get_packer("balanced", task["capacity"])

    def sizes(bins: list[list[int]]) -> dict[str, int]:
        sums = [sum(lengths[index] for index in bin_) for bin_ in bins]
        return {"tokens": sum(sums), "bins": len(bins), "largest": max(sums)}

    serve(lambda: packer.pack(lengths), sizes)


def _grpo(task: Mapping[str, Any]) -> Any:
    algorithm = {
        "name": "grpo",
        "prompts_per_step": len(task["rows"]) // task["samples"],
        "samples_per_prompt": task["samples"],
        "std_epsilon": 1e-4,
        "skip_zero_variance": False,
    }
    environment = {"name": "dataset", "reward": "rewards:odd_share", "reward_timeout": None}
    return configure(task, algorithm, environment)


def _run(config: Any, rows: Sequence[Mapping[str, str]]) -> None:
    held_out = {**rows[0], "prompt": 2 * rows[0]["prompt"]}  # must be given, and is never used
    steps().ready()
    run(config, data={"train": rows, "validation": [held_out]})


WORKS: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
    work.__name__: work for work in (logprobs, train, dpo, grpo, grpo_update, pack, partition)
}
