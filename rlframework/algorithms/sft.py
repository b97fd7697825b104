"""Supervised fine-tuning on the completions of the environment's samples, or on token data made from them.

Validation uses the environment's scores if it can score answers, and otherwise the loss on the held-out samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from rlframework.algorithms.loop import StepLoop, StepResult, Timer, training_metrics
from rlframework.algorithms.losses import NLLLoss
from rlframework.base.errors import ConfigError
from rlframework.base.secrets import hide_secrets
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.algorithms import SFTConfig
from rlframework.config.sections import AlgorithmConfig, RunConfig
from rlframework.datasets.chat.rendering import render_samples
from rlframework.datasets.loader import PromptLoader
from rlframework.datasets.tokens import TokenData, TokenRows, pad_rendered
from rlframework.huggingface.tokenizer import tokenizer_fingerprint
from rlframework.interfaces.environment import Environment, Sample, Split
from rlframework.interfaces.loss import LossFunction
from rlframework.interfaces.messages import pictures_of
from rlframework.observers.run_environment import flatten
from rlframework.plugins.user_defined import load_loss
from rlframework.rollout.parts import Parts


class SFT(StepLoop):
    """Train on one global batch per step.

    The loss covers the turns or text that `algorithm.train_on` selects, including the tokens that end them.
    """

    config_model: ClassVar[type[AlgorithmConfig]] = SFTConfig
    config: SFTConfig

    @classmethod
    def training_samples(cls, config: RunConfig, environment: Environment) -> int:
        """Return the number of rows of the token data, if there is any, or else of the environment's samples."""
        assert isinstance(config.algorithm, SFTConfig)
        data = config.algorithm.token_data
        return super().training_samples(config, environment) if data is None else len(TokenData(data))

    loader: PromptLoader[Any]

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        batch_size, seed = parts.config.policy.train_global_batch_size, parts.config.seed
        self.tokens = None if self.config.token_data is None else open_token_data(self.config, parts)
        if self.tokens is None:
            self.inputs.rows("train", self.train_samples, self.render)
            self.loader = PromptLoader(self.train_samples, batch_size, seed)
        else:
            self.inputs.tokens(self.tokens.lengths, str(self.tokens.path))
            mixture = getattr(self.train_samples, "mixture", None)  # token data has the rows of the samples, in order
            self.loader = PromptLoader(range(len(self.tokens)), batch_size, seed, mixture)
        own = self.config.loss
        self.loss: LossFunction = NLLLoss() if own is None else load_loss(own.name, own.keys)

    def train_step(self, step: int, timer: Timer) -> StepResult:
        """See `StepLoop.train_step`."""
        with timer.phase("data"):
            if self.tokens is None:
                batch = self.encode(next(self.loader), "train")
            else:
                batch = _batch(self.tokens.rows(next(self.loader), self.parts.tokenizer.pad_token_id))
        with timer.phase("train"):
            self.parts.policy.prepare_for_training()
            result = self.train(step, batch, self.loss)
        metrics = training_metrics([result]) | {"train/tokens": float(batch["input_lengths"].sum())}
        shown = result["metrics"].keys() if self.config.loss is not None else {"router_aux_loss"}
        of_loss = {name: value for name, value in result["metrics"].items() if name in shown}
        return self.with_loss_metrics(metrics, of_loss), []

    def should_stop(self, metrics: dict[str, float]) -> bool:
        """Whether the validation accuracy has reached `stop_at_accuracy`."""
        goal = self.config.stop_at_accuracy
        return goal is not None and metrics.get("validation/accuracy", 0.0) >= goal

    def check_validation(self, samples: Sequence[Sample]) -> None:
        """See `StepLoop.check_validation`."""
        if self.parts.environment.scores:
            super().check_validation(samples)
        else:
            self.inputs.rows("validation", samples, self.render)

    def validate(self, step: int) -> StepResult:
        """Score greedy answers if the environment can, otherwise compute the loss on the held-out rows."""
        if self.parts.environment.scores:
            return super().validate(step)
        samples = self.parts.environment.samples("validation")[: self.config.validation.samples]
        batch = self.encode(samples, "validation")
        rows = torch.arange(len(samples) + -len(samples) % self.parts.policy.data_parallel_size)
        batch = batch.select_indices(rows % len(samples))  # repeat rows: every worker needs the same number
        batch["sample_mask"] = (rows < len(samples)).float()
        self.parts.policy.prepare_for_lp_inference()
        result = self.parts.policy.train(batch, self.loss, eval_mode=True, gbs=len(rows))
        return {"validation/loss": result["loss"], "validation/samples": float(len(samples))}, []

    def encode(self, samples: Sequence[Sample], split: Split) -> BatchedDataDict[Any]:
        """Return the batch of `samples` of `split`: one conversation per row, with a mask on the trained tokens."""
        rendered = self.render(samples)
        self.inputs.fits(split, [len(ids) for ids, _ in rendered], samples)
        batch = _batch(pad_rendered(rendered, self.parts.tokenizer.pad_token_id))
        if self.parts.images is not None:
            pictures = [pictures_of(sample.messages) for sample in samples]
            batch.update(self.parts.images.columns(pictures, batch["input_ids"]))
        return batch

    def render(self, samples: Sequence[Sample]) -> list[tuple[list[int], list[bool]]]:
        """Return the token ids and mask of each sample, as configured."""
        config, parts = self.config, self.parts
        return render_samples(parts.tokenizer, samples, config.train_on, config.max_tokens, parts.images)


def open_token_data(config: SFTConfig, parts: Parts) -> TokenData:
    """Open `algorithm.token_data` and verify its checksums, which takes 0.4 s per GB.

    Raises a `DataError` if it is damaged, and a `ConfigError` if it was made with another tokenizer or other settings.

    The section `environment` and the seed must match too, as the data may contain rows that this run holds out; except
    keys that do not affect training rows (`EnvironmentConfig.unseen_by_training`), and data that does not record its
    source (`write_token_data` without `source`).
    """
    assert config.token_data is not None
    tokens = TokenData(config.token_data)
    tokens.verify()
    where = f"algorithm.token_data={str(config.token_data)!r} was made with"
    again = "make the data again with `rlframework tokenize`"
    if tokens.meta["tokenizer"] != tokenizer_fingerprint(parts.tokenizer):
        policy = parts.config.policy
        raise ConfigError(
            f"{where} another tokenizer or chat template than that of "
            f"{policy.tokenizer_name or policy.model_name!r}; {again}"
        )
    for name in ("train_on", "max_tokens"):
        configured, recorded = getattr(config, name), tokens.meta[name]
        if configured != recorded:
            raise ConfigError(
                f"{where} algorithm.{name}={recorded}, but this run has {configured}; set it to {recorded}, or {again}"
            )
    environment = parts.config.environment
    given = {"environment": environment.model_dump(mode="json"), "seed": parts.config.seed}
    ours, theirs = (flatten(hide_secrets(source)) for source in (given, tokens.meta.get("source") or {}))
    for name in dict.fromkeys([*ours, *theirs]) if theirs else ():
        if ours.get(name) != theirs.get(name) and name not in environment.unseen_by_training:
            raise ConfigError(
                f"{where} {name}={theirs.get(name)!r}, but this run has {ours.get(name)!r}: rows that this run holds "
                f"out may be in it; restore the old value, or {again}"
            )
    return tokens


def _batch(rows: TokenRows) -> BatchedDataDict[Any]:
    return BatchedDataDict({**rows._asdict(), "sample_mask": torch.ones(len(rows.input_ids))})
