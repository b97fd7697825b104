"""The contracts that hold everywhere, and how far a number may be from the one that is right.

The suites' tests each name the contract that they are of; this is their table of contents.
"""

from __future__ import annotations

from collections.abc import Mapping

CONTRACTS: Mapping[int, str] = {
    1: "conventions: right padding, logprobs[:, i] = log p(token i | tokens before i), rows in the order they went in",
    2: "losses divide by global counts: how rows are grouped, ordered, padded or shared changes no number",
    3: "every backend computes what a plain single-process torch and transformers program computes",
    4: "the reference model gives way again whatever happens, and evaluating changes nothing",
    5: "what is saved and loaded again goes on with the same numbers",
    6: "the generation engine holds what the trainer holds",
    7: "one failing rank fails the call with that rank's traceback; nobody hangs, no process outlives the run",
    8: "bad input, a bad configuration or an undeclared capability is one clear error before any work",
}

FP32 = 1e-5
"""fp32, relative: log-probabilities, loss, gradient norm and the first step's gradient of each tensor."""

WEIGHTS_AFTER_20_STEPS = 1e-5
"""fp32: L2 distance of all weights together, relative, at learning rate 1e-4."""

TENSOR_AFTER_20_STEPS = 2e-4
"""fp32: the same for each tensor. 20 steps with only the grouping into microbatches changed part by up to 7e-5."""

BF16 = 3e-2
"""bfloat16 has 8 bits of mantissa (4e-3). After a few layers norms and means stay within this; single values do not."""

EXACT = 0.0
"""Bit for bit."""
