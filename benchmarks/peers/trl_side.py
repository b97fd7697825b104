"""TRL: its trainers with their defaults, except for what `arguments` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from datasets import Dataset
from rewards import odd_share
from steps import serve, steps
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer, pack_dataset

ENDLESS, COPIES = 1_000_000, 200


class StepEnd(TrainerCallback):
    """Ends a step when the trainer has logged it, the last thing that its loop does."""

    def __init__(self, values: Callable[[], Mapping[str, Any]] = dict) -> None:
        self.values = values

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **_: Any) -> None:
        """Answer with what was logged, and wait for the next step."""
        if logs and "loss" in logs:
            steps().done(lambda: {name: logs[name] for name in ("loss", "grad_norm")} | dict(self.values()))


def arguments(kind: type[Any], task: Mapping[str, Any], micro: int, **options: Any) -> Any:
    """Return a configuration: fp32, nothing recomputed in backward, four microbatches of `micro` examples a step."""
    return kind(
        output_dir=f"{task['folder']}/trl",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        max_steps=ENDLESS,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=len(task["rows"]) // task["micro_rows"],
        learning_rate=task["lr"],
        weight_decay=task["weight_decay"],
        max_grad_norm=task["clip"],
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )


def batches(rows: list[dict[str, str]], copies: int = COPIES) -> Dataset:
    """Return a dataset in which each step's batch, taken in order, has the same `rows`."""
    return Dataset.from_list(rows * copies)


def grpo_trainer(task: Mapping[str, Any], reward: Callable[..., list[float]], **options: Any) -> GRPOTrainer:
    """Return a trainer whose loss, advantages and sampling are TRL's defaults."""
    config = arguments(
        GRPOConfig,
        task,
        task["micro_rows"],
        num_generations=task["samples"],
        max_completion_length=task["new_tokens"],
        **options,
    )
    data = Dataset.from_list([{"prompt": text} for text in task["prompts"]])
    return GRPOTrainer(task["model"], reward, config, data)


def logprobs(task: Mapping[str, Any]) -> None:
    """Log-probabilities of the completions, by the method that its trainers use, which has no public name."""
    trainer, rows = grpo_trainer(task, odd_share), task["rows"]
    trainer.model.eval()
    sides = {name: [torch.tensor(row[name]) for row in rows] for name in ("prompt", "completion")}
    ids = {
        name: pad_sequence(parts, batch_first=True, padding_side="left" if name == "prompt" else "right")
        for name, parts in sides.items()
    }
    masks = {
        name: pad_sequence(
            [torch.ones_like(part) for part in parts],
            batch_first=True,
            padding_side="left" if name == "prompt" else "right",
        )
        for name, parts in sides.items()
    }
    whole, attention = (torch.cat([each["prompt"], each["completion"]], 1) for each in (ids, masks))

    @torch.no_grad()
    def score() -> torch.Tensor:
        scored = trainer._get_per_token_logps_and_entropies(
            trainer.model, whole, attention, ids["completion"].shape[1], batch_size=task["micro_rows"]
        )
        result: torch.Tensor = scored[0]
        return result

    serve(score, lambda result: {"logprobs": result[masks["completion"] > 0].tolist()})


def train(task: Mapping[str, Any]) -> None:
    """`SFTTrainer` on the completions, in the order given."""
    _sft(task, COPIES, "sequential")


def train_rebalanced(task: Mapping[str, Any]) -> None:
    """The same with rows of about the same length in a microbatch. Each step is an epoch, so that it has all rows."""
    _sft(task, 1, "batch_rebalance")


def _sft(task: Mapping[str, Any], copies: int, sampling: str) -> None:
    config = arguments(SFTConfig, task, task["micro_rows"], train_sampling_strategy=sampling)
    texts = [{name: row[f"{name}_text"] for name in ("prompt", "completion")} for row in task["rows"]]
    _train(SFTTrainer(task["model"], config, train_dataset=batches(texts, copies), callbacks=[StepEnd()]))


def dpo(task: Mapping[str, Any]) -> None:
    """`DPOTrainer` on the pairs."""
    config = arguments(
        DPOConfig, task, task["micro_rows"] // 2, train_sampling_strategy="sequential", beta=task["beta"]
    )
    texts = [{name: pair[f"{name}_text"] for name in ("prompt", "chosen", "rejected")} for pair in task["pairs"]]
    _train(DPOTrainer(task["model"], args=config, train_dataset=batches(texts), callbacks=[StepEnd()]))


def grpo(task: Mapping[str, Any]) -> None:
    """`GRPOTrainer` with `model.generate`; answers with the rollouts of each step."""
    rollouts: list[dict[str, Any]] = []

    def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        rewards = odd_share(completions)
        rollouts[:] = [
            {"prompt_text": prompt, "completion": ids, "reward": value}
            for prompt, ids, value in zip(prompts, completion_ids, rewards, strict=True)
        ]
        return rewards

    trainer = grpo_trainer(task, reward)
    tokenizer = trainer.processing_class

    def values() -> dict[str, Any]:
        for each in rollouts:
            each["prompt"] = tokenizer(each["prompt_text"], add_special_tokens=False)["input_ids"]
        tokens = sum(len(each["prompt"]) + len(each["completion"]) for each in rollouts)
        return {"tokens": tokens, "rollouts": rollouts}

    trainer.add_callback(StepEnd(values))
    _train(trainer)


def pack(task: Mapping[str, Any]) -> None:
    """Best-fit decreasing bins of a dataset in memory, all rows in one call as on the other side."""
    data = Dataset.from_dict({"input_ids": [[index] * length for index, length in enumerate(task["documents"])]})
    options = {"batch_size": len(data), "load_from_cache_file": False}

    def sizes(packed: Dataset) -> dict[str, int]:
        lengths = [sum(each) for each in packed["seq_lengths"]]
        return {"tokens": sum(lengths), "bins": len(lengths), "largest": max(lengths)}

    serve(lambda: pack_dataset(data, task["capacity"], map_kwargs=options), sizes)


def _train(trainer: Any) -> None:
    steps().ready()
    trainer.train()


WORKS: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
    work.__name__: work for work in (logprobs, train, train_rebalanced, dpo, grpo, pack)
}
