"""Greedy answers and log-probabilities, against whole forwards of one row at a time."""

from __future__ import annotations

from rlframework.conformance import cases
from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.generation.workbench import END, PROMPTS, GenerationBench, rows_of


class Decoding(Suite):
    """`generate` computes what the model computes."""

    @holds(3)
    def test_greedy_answers_are_those_of_plain_decoding(self, bench: GenerationBench) -> None:
        """Token by token, for prompts of different length side by side, whatever the sampling settings are."""
        output = bench.engine(max_new_tokens=16, temperature=0.7, top_k=2).generate(rows_of(PROMPTS), greedy=True)
        expected = [bench.plain().greedy(prompt, {END}, 16) for prompt in PROMPTS]
        bench.require_completions("greedy", output, PROMPTS, expected)

    @holds(3)
    def test_a_temperature_of_zero_is_greedy(self, bench: GenerationBench) -> None:
        """The configuration says so; its log-probabilities are at temperature 1, as all greedy ones are."""
        output = bench.engine(max_new_tokens=12, temperature=0.0).generate(rows_of(PROMPTS))
        expected = [bench.plain().greedy(prompt, {END}, 12) for prompt in PROMPTS]
        bench.require_completions("temperature 0", output, PROMPTS, expected)
        bench.require_logprobs("temperature 0", output, bench.plain(), 1.0)

    @holds(3)
    def test_positions_are_told_from_the_prompts_own_start(self, bench: GenerationBench) -> None:
        """A model with learned positions shows what rotary ones, being relative, hide: padding has no position."""
        path = cases.model("learned_positions", bench.models)
        engine = bench.engine(path=path, tokenizer=cases.tokenizer(), max_new_tokens=10)
        output = engine.generate(rows_of(PROMPTS), greedy=True)
        expected = [bench.plain(path).greedy(prompt, {END}, 10) for prompt in PROMPTS]
        bench.require_completions("learned positions", output, PROMPTS, expected)
        bench.require_logprobs("learned positions", output, bench.plain(path), 1.0)

    @holds(3)
    def test_dropout_is_off_while_generating(self, bench: GenerationBench) -> None:
        """The trainer hands over a module in training mode; samples with dropout are of another model each time."""
        path = cases.model("dropout", bench.models)
        engine = bench.engine(path=path, tokenizer=cases.tokenizer(), max_new_tokens=10)
        output = engine.generate(rows_of(PROMPTS), greedy=True)
        bench.require_logprobs("dropout 0.5, training mode", output, bench.plain(path), 1.0)

    @holds(3)
    def test_logprobs_of_samples_are_at_the_sampling_temperature(self, bench: GenerationBench) -> None:
        """log p of the distribution that was sampled from; 0 on prompts and padding."""
        for temperature in (0.6, 1.0, 1.7):
            output = bench.engine(max_new_tokens=12, temperature=temperature).generate(rows_of(PROMPTS))
            bench.require_logprobs(f"temperature {temperature}", output, bench.plain(), temperature)

    @holds(3)
    def test_greedy_logprobs_are_at_temperature_one(self, bench: GenerationBench) -> None:
        """Validation compares them between runs that sample at different temperatures."""
        output = bench.engine(max_new_tokens=12, temperature=0.5).generate(rows_of(PROMPTS), greedy=True)
        bench.require_logprobs("greedy, sampling temperature 0.5", output, bench.plain(), 1.0)

    @holds(3)
    def test_logprobs_are_those_before_top_k_and_top_p(self, bench: GenerationBench) -> None:
        """The trainer computes them from the whole vocabulary: anything else would look like drift."""
        for settings in ({"top_k": 3}, {"top_p": 0.8}):
            output = bench.engine(max_new_tokens=12, temperature=0.9, **settings).generate(rows_of(PROMPTS))
            bench.require_logprobs(f"temperature 0.9, {settings}", output, bench.plain(), 0.9)
