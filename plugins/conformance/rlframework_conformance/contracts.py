"""The contracts that every implementation must keep, and the numerical tolerances.

Each suite test names its contract; this is the table of contents.
"""

from __future__ import annotations

from collections.abc import Mapping

CONTRACTS: Mapping[int, str] = {
    1: "conventions: right padding, logprobs[:, i] = log p(token i | tokens before i), results in row order",
    2: "losses divide by global counts: grouping, order, padding and sharding of rows change no number",
    3: "every backend computes what a plain single-process torch and transformers program computes",
    4: "the policy's weights always return after using the reference, and evaluating changes nothing",
    5: "training resumed from saved state continues with the same numbers",
    6: "the generation engine uses the trainer's weights",
    7: "one failing rank fails the call with that rank's traceback; nothing hangs, and no process outlives the run",
    8: "invalid input, an invalid configuration or an undeclared capability is one clear error before any work",
    9: "each request comes back once; its result depends on its prompt, seed, sampling and the weights, nothing else",
    10: "weights are used as a whole or not at all, nothing of older ones after an update, and tokens have versions",
    11: "a trajectory's sampled tokens and log-probabilities are the engine's, and its row re-scored gives them again",
    13: "rows of a group share a microbatch, in their order, in every batching mode and layout",
}

FP32 = 1e-5
"""fp32, relative: log-probabilities, loss, gradient norm, and each tensor's gradient in the first step."""

WEIGHTS_AFTER_20_STEPS = 1e-5
"""fp32: relative L2 distance of all weights together at learning rate 1e-4."""

TENSOR_AFTER_20_STEPS = 2e-4
"""fp32: the same for each tensor. A mere change of microbatch grouping causes up to 7e-5 over 20 steps."""

BF16 = 3e-2
"""bfloat16 has 8 bits of mantissa (4e-3). After a few layers norms and means stay within this, single values do not."""
