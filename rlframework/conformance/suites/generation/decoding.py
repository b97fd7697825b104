"""Greedy completions and log-probabilities, compared with whole forwards of one row at a time."""

from __future__ import annotations

from rlframework.conformance import cases
from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.generation.harness import END, PROMPTS, GenerationHarness, rows_of


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
        path = cases.model("dropout", harness.models)
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
