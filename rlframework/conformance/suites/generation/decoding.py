"""Decoding and sampling: greedy completions and log-probabilities of plain decoding, and the frequencies of samples."""

from __future__ import annotations

from rlframework.conformance import cases
from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.generation.harness import (
    END,
    PROMPTS,
    SPREAD,
    GenerationHarness,
    completions,
    rows_of,
)


class Decoding(Suite):
    """`generate` computes what the model computes."""

    @holds(3)
    def test_greedy_answers_are_those_of_plain_decoding(self, harness: GenerationHarness) -> None:
        """Greedy completions must match plain decoding token by token, for ragged prompts and any sampling settings."""
        output = harness.engine(max_new_tokens=16, temperature=0.7, top_k=2).generate(rows_of(PROMPTS), greedy=True)
        expected = [harness.plain().greedy(prompt, {END}, 16) for prompt in PROMPTS]
        harness.require_completions("greedy", output, PROMPTS, expected)

    @holds(3)
    def test_a_temperature_of_zero_is_greedy(self, harness: GenerationHarness) -> None:
        """A temperature of 0 must decode greedily, with log-probabilities at temperature 1."""
        output = harness.engine(max_new_tokens=12, temperature=0.0).generate(rows_of(PROMPTS))
        expected = [harness.plain().greedy(prompt, {END}, 12) for prompt in PROMPTS]
        harness.require_completions("temperature 0", output, PROMPTS, expected)
        harness.require_logprobs("temperature 0", output, harness.plain(), 1.0)

    @holds(3)
    def test_positions_are_told_from_the_prompts_own_start(self, harness: GenerationHarness) -> None:
        """Positions must count from the prompt's first token, not from padding.

        Tested with learned positions, because rotary positions are relative and hide the error.
        """
        path = cases.model("learned_positions", harness.models)
        engine = harness.engine(path=path, tokenizer=cases.tokenizer(), max_new_tokens=10)
        output = engine.generate(rows_of(PROMPTS), greedy=True)
        expected = [harness.plain(path).greedy(prompt, {END}, 10) for prompt in PROMPTS]
        harness.require_completions("learned positions", output, PROMPTS, expected)
        harness.require_logprobs("learned positions", output, harness.plain(path), 1.0)

    @holds(3)
    def test_dropout_is_off_while_generating(self, harness: GenerationHarness) -> None:
        """Generation must disable dropout, even if the trainer passes a module in training mode."""
        path = cases.model("untied", harness.models)
        engine = harness.engine(path=path, tokenizer=cases.tokenizer(), max_new_tokens=10)
        output = engine.generate(rows_of(PROMPTS), greedy=True)
        harness.require_logprobs("dropout 0.5, training mode", output, harness.plain(path), 1.0)

    @holds(3)
    def test_logprobs_of_samples_are_at_the_sampling_temperature(self, harness: GenerationHarness) -> None:
        """Log-probabilities must be of the distribution that was sampled from, and 0 on prompts and padding."""
        for temperature in (0.6, 1.0, 1.7):
            output = harness.engine(max_new_tokens=12, temperature=temperature).generate(rows_of(PROMPTS))
            harness.require_logprobs(f"temperature {temperature}", output, harness.plain(), temperature)

    @holds(3)
    def test_greedy_logprobs_are_at_temperature_one(self, harness: GenerationHarness) -> None:
        """Greedy log-probabilities must be at temperature 1, so that validation is comparable across runs."""
        output = harness.engine(max_new_tokens=12, temperature=0.5).generate(rows_of(PROMPTS), greedy=True)
        harness.require_logprobs("greedy, sampling temperature 0.5", output, harness.plain(), 1.0)

    @holds(3)
    def test_logprobs_are_those_before_top_k_and_top_p(self, harness: GenerationHarness) -> None:
        """Log-probabilities must be those before top-k and top-p truncation.

        The trainer computes them from the full vocabulary; anything else would look like drift.
        """
        for settings in ({"top_k": 3}, {"top_p": 0.8}):
            output = harness.engine(max_new_tokens=12, temperature=0.9, **settings).generate(rows_of(PROMPTS))
            harness.require_logprobs(f"temperature 0.9, {settings}", output, harness.plain(), 0.9)


_SEEDS = (11, 2**62, 5, -3, 0, 7, 5, 2**33 + 7, 4)


class Sampling(Suite):
    """`generate` samples from the model's distribution."""

    @holds(3)
    def test_samples_are_as_frequent_as_the_model_says(self, harness: GenerationHarness) -> None:
        """The frequencies of 3000 sampled token pairs must fit the model.

        Pairs show whether the two draws are independent.
        """
        engine = harness.engine(max_new_tokens=2, temperature=0.7, batch_size=1000)
        output = engine.generate(rows_of([SPREAD] * 3000))
        shares = harness.plain().two_tokens(SPREAD, END, 0.7)
        harness.require_frequencies("3000 pairs of tokens at temperature 0.7", output, shares)

    @holds(3)
    def test_top_k_leaves_the_k_most_likely_tokens(self, harness: GenerationHarness) -> None:
        """Top-k must sample from the k most likely tokens in proportion to their probabilities."""
        engine = harness.engine(max_new_tokens=1, temperature=2.0, top_k=3, batch_size=1000)
        shares = _shares_of_three(harness)
        harness.require_frequencies("1000 tokens with top_k=3", engine.generate(rows_of([SPREAD] * 1000)), shares)

    @holds(3)
    def test_top_p_leaves_the_nucleus(self, harness: GenerationHarness) -> None:
        """Top-p must sample from the fewest most likely tokens whose mass reaches top_p, here three, in proportion."""
        best = harness.plain().next(SPREAD, 2.0).exp().topk(3).values
        top_p = float(best[0] + best[1] + best[2] / 2)
        engine = harness.engine(max_new_tokens=1, temperature=2.0, top_p=top_p, batch_size=1000)
        shares = _shares_of_three(harness)
        output = engine.generate(rows_of([SPREAD] * 1000))
        harness.require_frequencies(f"1000 tokens with top_p={top_p:.3f}", output, shares)

    @holds(1)
    def test_a_row_does_not_depend_on_the_rows_beside_it(self, harness: GenerationHarness) -> None:
        """A sample must not depend on the other rows of the batch or on the order of rows."""
        engine = harness.engine(max_new_tokens=12)
        whole = engine.generate(rows_of(PROMPTS, _SEEDS))
        order = [4, 7, 0, 8, 2, 6, 1, 5, 3]
        turned = engine.generate(rows_of([PROMPTS[row] for row in order], [_SEEDS[row] for row in order]))
        harness.require_same_rows("in another order", turned, whole, order)
        for row in (0, 2, 7):
            alone = engine.generate(rows_of([PROMPTS[row]], [_SEEDS[row]]))
            harness.require_same_rows("alone", alone, whole, [row])

    @holds(1)
    def test_a_row_does_not_depend_on_how_rows_are_split(self, harness: GenerationHarness) -> None:
        """A sample must not depend on `batch_size`, the number of rows decoded at a time."""
        whole = harness.engine(max_new_tokens=12, batch_size=256).generate(rows_of(PROMPTS, _SEEDS))
        for batch_size in (1, 2, 4):
            split = harness.engine(max_new_tokens=12, batch_size=batch_size).generate(rows_of(PROMPTS, _SEEDS))
            harness.require_same_rows(f"batch_size {batch_size}", split, whole, range(len(PROMPTS)))

    @holds(1)
    def test_the_seed_decides(self, harness: GenerationHarness) -> None:
        """Equal seeds must give equal samples in every call, and every bit of a seed must matter."""
        engine = harness.engine(max_new_tokens=12, temperature=1.5)
        small = list(range(8))

        def sample(seeds: list[int]) -> list[list[int]]:
            return completions(engine.generate(rows_of([SPREAD] * len(seeds), seeds)))

        first = sample(small)
        harness.equal("the same seeds again", sample(small), first)
        harness.equal("each seed twice in one batch", sample([0, 0, 1, 1]), [first[0], first[0], first[1], first[1]])
        other = {"8 more": 8, "2**32 more": 2**32, "2**62 more": 2**62, "8 less": -8}
        for what, more in other.items():
            got = sample([seed + more for seed in small])
            harness.require(got != first, f"other seeds ({what}) give other samples", got=got, expected="others")


def _shares_of_three(harness: GenerationHarness) -> dict[tuple[int, ...], float]:
    """Return the renormalized probabilities of the three most likely tokens after `SPREAD` at temperature 2."""
    best, tokens = harness.plain().next(SPREAD, 2.0).exp().topk(3)
    return {(token,): share for token, share in zip(tokens.tolist(), (best / best.sum()).tolist(), strict=True)}
