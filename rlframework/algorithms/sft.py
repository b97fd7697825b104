"""Supervised training on the completions of the environment's samples, or on token data that was made of them.

What is held out is judged by the environment where it can, else by the loss on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from rlframework.algorithm import Parts
from rlframework.algorithms.losses import NLLLoss
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.algorithms import SFTConfig
from rlframework.datasets.collate import TokenRows, pad_rendered
from rlframework.datasets.loader import PromptLoader
from rlframework.datasets.rendering import render_samples
from rlframework.datasets.tokens.reading import TokenData
from rlframework.errors import ConfigError
from rlframework.huggingface.tokenizer import tokenizer_fingerprint
from rlframework.plugins.own_parts import load_loss
from rlframework.training.loop import StepLoop, Timer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlframework.interfaces.environment import Sample, Split
    from rlframework.interfaces.loss import LossFunction
    from rlframework.plugins.hookspec import SampleRecord


class SFT(StepLoop):
    """One global batch a step; the loss is on what `algorithm.train_on` names, with the tokens that end it."""

    config: SFTConfig

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        batch_size, seed = parts.config.policy.train_global_batch_size, parts.config.seed
        self.tokens = None if self.config.token_data is None else open_token_data(self.config, parts)
        if self.tokens is None:
            self.inputs.rows("train", self.train_samples, self.render)
            self.loader = PromptLoader(self.train_samples, batch_size, seed)
        else:
            self.inputs.tokens(self.tokens.lengths, str(self.tokens.path))
            self.loader = PromptLoader(self.tokens, batch_size, seed)
        own = self.config.loss
        self.loss: LossFunction = NLLLoss() if own is None else load_loss(own.name, own.keys)

    def train_step(self, step: int, timer: Timer) -> tuple[dict[str, float], list[SampleRecord]]:
        """See `StepLoop.train_step`."""
        with timer.phase("data"):
            batch = self.next_batch()
        with timer.phase("train"):
            self.parts.policy.prepare_for_training()
            result = self.train(step, batch, self.loss)
        metrics = {
            "train/loss": result["loss"],
            "train/grad_norm": float(result["grad_norm"].mean()),
            "train/lr": result["lr"],
            "train/skipped_steps": float(result["skipped"]),
            "train/tokens": float(batch["input_lengths"].sum()),
            "train/global_valid_toks": result["global_valid_toks"],
        } | {f"train/{name}": value for name, value in result["metrics"].items() if name == "router_aux_loss"}
        return metrics, []

    def should_stop(self, metrics: dict[str, float]) -> bool:
        """Whether a validation reached `stop_at_accuracy`."""
        goal = self.config.stop_at_accuracy
        return goal is not None and metrics.get("validation/accuracy", 0.0) >= goal

    def check_validation(self, samples: Sequence[Sample]) -> None:
        """See `StepLoop.check_validation`."""
        if self.parts.environment.scores:
            super().check_validation(samples)
        else:
            self.inputs.rows("validation", samples, self.render)

    def validate(self, step: int) -> tuple[dict[str, float], list[SampleRecord]]:
        """Greedy answers where the environment can judge them, else the loss on the held-out rows."""
        if self.parts.environment.scores:
            return super().validate(step)
        samples = self.parts.environment.samples("validation")[: self.config.validation.samples]
        batch = self.encode(samples, "validation")
        rows = torch.arange(len(samples) + -len(samples) % self.parts.policy.data_parallel_size)
        batch = batch.select_indices(rows % len(samples))  # every worker must have as many
        batch["sample_mask"] = (rows < len(samples)).float()
        self.parts.policy.prepare_for_lp_inference()
        result = self.parts.policy.train(batch, self.loss, eval_mode=True, gbs=len(rows))
        return {"validation/loss": result["loss"], "validation/samples": float(len(samples))}, []

    def next_batch(self) -> BatchedDataDict[Any]:
        """The next global batch: from token data by their numbers, else samples, rendered."""
        if self.tokens is None:
            return self.encode(next(self.loader), "train")
        return _batch(self.tokens.rows(self.loader.indices(), self.parts.tokenizer.pad_token_id))

    def encode(self, samples: Sequence[Sample], split: Split) -> BatchedDataDict[Any]:
        """The batch of `samples`, which are of `split`: a conversation a row, the mask on what is trained on."""
        rendered = self.render(samples)
        self.inputs.fits(split, [len(ids) for ids, _ in rendered], [sample.id for sample in samples])
        return _batch(pad_rendered(rendered, self.parts.tokenizer.pad_token_id))

    def render(self, samples: Sequence[Sample]) -> list[tuple[list[int], list[bool]]]:
        """Ids and mask of each sample, as the configuration says."""
        return render_samples(self.parts.tokenizer, samples, self.config.train_on, self.config.max_tokens)


def open_token_data(config: SFTConfig, parts: Parts) -> TokenData:
    """`algorithm.token_data`; a `ConfigError` where it was not made with this tokenizer and these settings.

    The section `environment` and the seed count too: with others, rows that are held out here may be in it. All their
    keys must be equal but those that training rows do not depend on (`EnvironmentConfig.unseen_by_training`). Data that
    does not say what it was made of (`write_token_data` without `source`) is taken on trust.
    """
    assert config.token_data is not None
    tokens = TokenData(config.token_data)
    where = f"algorithm.token_data={str(config.token_data)!r}"
    if tokens.meta["tokenizer"] != tokenizer_fingerprint(parts.tokenizer):
        policy = parts.config.policy
        raise ConfigError(
            f"{where} was made with another tokenizer or chat template than that of "
            f"{policy.tokenizer_name or policy.model_name!r}; make it again with `rlframework tokenize`"
        )
    for name in ("train_on", "max_tokens"):
        wanted, there = getattr(config, name), tokens.meta[name]
        if wanted != there:
            raise ConfigError(
                f"{where} was made with algorithm.{name}={there}, and here it is {wanted}; set it to {there}, or make "
                "the data again with `rlframework tokenize`"
            )
    _check_source(tokens.meta.get("source") or {}, parts, where)
    return tokens


def _check_source(source: Mapping[str, Any], parts: Parts, where: str) -> None:
    if not source:
        return
    environment = parts.config.environment
    here = _flat({"environment": environment.model_dump(mode="json"), "seed": parts.config.seed})
    there = _flat(source)
    for name in dict.fromkeys([*here, *there]):
        if here.get(name) != there.get(name) and name not in environment.unseen_by_training:
            raise ConfigError(
                f"{where} was made with {name}={there.get(name)!r}, and here it is {here.get(name)!r}: rows that are "
                "held out here may be in it. Set it to what it was, or make the data again with `rlframework tokenize`"
            )


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """The values by dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return flat


def _batch(rows: TokenRows) -> BatchedDataDict[Any]:
    return BatchedDataDict({**rows._asdict(), "sample_mask": torch.ones(len(rows.input_ids))})
