"""Samples: how frequent, and what they may depend on."""

from __future__ import annotations

from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.generation.workbench import (
    END,
    PROMPTS,
    SPREAD,
    GenerationBench,
    completions,
    rows_of,
)

_SEEDS = (11, 2**62, 5, -3, 0, 7, 5, 2**33 + 7, 4)


class Sampling(Suite):
    """`generate` samples."""

    @holds(3)
    def test_samples_are_as_frequent_as_the_model_says(self, bench: GenerationBench) -> None:
        """The first two tokens of 3000 rows, at a temperature: both at once, so that two draws must be independent."""
        engine = bench.engine(max_new_tokens=2, temperature=0.7, batch_size=1000)
        output = engine.generate(rows_of([SPREAD] * 3000))
        shares = bench.plain().two_tokens(SPREAD, END, 0.7)
        bench.require_frequencies("3000 pairs of tokens at temperature 0.7", output, shares)

    @holds(3)
    def test_top_k_leaves_the_k_most_likely_tokens(self, bench: GenerationBench) -> None:
        """In proportion to what they were before."""
        engine = bench.engine(max_new_tokens=1, temperature=2.0, top_k=3, batch_size=1000)
        shares = _shares_of_three(bench)
        bench.require_frequencies("1000 tokens with top_k=3", engine.generate(rows_of([SPREAD] * 1000)), shares)

    @holds(3)
    def test_top_p_leaves_the_nucleus(self, bench: GenerationBench) -> None:
        """The fewest most likely tokens whose mass reaches top_p, here three, in proportion to what they were."""
        best = bench.plain().next(SPREAD, 2.0).exp().topk(3).values
        top_p = float(best[0] + best[1] + best[2] / 2)
        engine = bench.engine(max_new_tokens=1, temperature=2.0, top_p=top_p, batch_size=1000)
        shares = _shares_of_three(bench)
        output = engine.generate(rows_of([SPREAD] * 1000))
        bench.require_frequencies(f"1000 tokens with top_p={top_p:.3f}", output, shares)

    @holds(1)
    def test_a_row_does_not_depend_on_the_rows_beside_it(self, bench: GenerationBench) -> None:
        """In another order, alone, and among others: the same sample, back at its own place."""
        engine = bench.engine(max_new_tokens=12)
        whole = engine.generate(rows_of(PROMPTS, _SEEDS))
        order = [4, 7, 0, 8, 2, 6, 1, 5, 3]
        turned = engine.generate(rows_of([PROMPTS[row] for row in order], [_SEEDS[row] for row in order]))
        bench.require_same_rows("in another order", turned, whole, order)
        for row in (0, 2, 7):
            alone = engine.generate(rows_of([PROMPTS[row]], [_SEEDS[row]]))
            bench.require_same_rows("alone", alone, whole, [row])

    @holds(1)
    def test_a_row_does_not_depend_on_how_rows_are_split(self, bench: GenerationBench) -> None:
        """Rows are decoded `batch_size` at a time; how many is a matter of memory, not of results."""
        whole = bench.engine(max_new_tokens=12, batch_size=256).generate(rows_of(PROMPTS, _SEEDS))
        for batch_size in (1, 2, 4):
            split = bench.engine(max_new_tokens=12, batch_size=batch_size).generate(rows_of(PROMPTS, _SEEDS))
            bench.require_same_rows(f"batch_size {batch_size}", split, whole, range(len(PROMPTS)))

    @holds(1)
    def test_the_seed_decides(self, bench: GenerationBench) -> None:
        """Equal seeds, equal samples, now and later; and every bit of a seed counts."""
        engine = bench.engine(max_new_tokens=12, temperature=1.5)
        small = list(range(8))

        def sample(seeds: list[int]) -> list[list[int]]:
            return completions(engine.generate(rows_of([SPREAD] * len(seeds), seeds)))

        first = sample(small)
        bench.equal("the same seeds again", sample(small), first)
        bench.equal("each seed twice in one batch", sample([0, 0, 1, 1]), [first[0], first[0], first[1], first[1]])
        other = {"8 more": 8, "2**32 more": 2**32, "2**62 more": 2**62, "8 less": -8}
        for what, more in other.items():
            got = sample([seed + more for seed in small])
            bench.require(got != first, f"other seeds ({what}) give other samples", got=got, expected="others")


def _shares_of_three(bench: GenerationBench) -> dict[tuple[int, ...], float]:
    """What the three most likely tokens after `SPREAD` share at temperature 2, as completions of one token."""
    best, tokens = bench.plain().next(SPREAD, 2.0).exp().topk(3)
    return {(token,): share for token, share in zip(tokens.tolist(), (best / best.sum()).tolist(), strict=True)}
