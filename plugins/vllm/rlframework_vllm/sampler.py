"""vLLM's sampler with the log-probabilities that the loss needs. Runs in vLLM's workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.v1.sample.sampler import Sampler

GREEDY = 1e-5  # temperatures below are greedy in vLLM


class TemperatureSampler(Sampler):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Returns log-probabilities at each request's temperature (greedy: at 1), before top-k and top-p.

    vLLM's modes have either the model's own, at temperature 1, or those after the truncation. Tokens of `never`, which
    stand for features of images, are not sampled.
    """

    never: Sequence[int] = ()

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """Sample at temperature 1 from logits that are divided by the temperature."""
        given = sampling_metadata.temperature
        if given is not None and not sampling_metadata.all_greedy:
            greedy = given < GREEDY
            logits = logits.float() / torch.where(greedy, 1.0, given)[:, None]
            sampling_metadata = replace(sampling_metadata, temperature=torch.where(greedy, given, 1.0))
        return super().forward(logits, sampling_metadata, *args, **kwargs)

    def apply_logits_processors(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Also exclude the tokens of `never`."""
        for token in self.never:  # one at a time: a list of indices would be copied to the device each time
            logits[:, token] = -torch.inf
        return super().apply_logits_processors(logits, *args, **kwargs)


def install(worker: Any, never: Sequence[int]) -> None:
    """Give `worker` of vLLM this sampler."""
    worker.model_runner.sampler = TemperatureSampler("raw_logprobs")
    worker.model_runner.sampler.never = never
