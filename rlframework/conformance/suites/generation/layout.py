"""The layout of the output: where rows end, how long they are, and how they are padded."""

from __future__ import annotations

import torch

from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.generation.harness import (
    END,
    EQUALS,
    PLUS,
    PROMPTS,
    GenerationHarness,
    completions,
    rows_of,
)


class OutputLayout(Suite):
    """The output of `generate`."""

    @holds(1)
    def test_rows_are_prompt_and_completion_padded_on_the_right(self, harness: GenerationHarness) -> None:
        """Rows must be the unchanged prompt and its completion, right-padded with the tokenizer's pad id."""
        engine = harness.engine(tokenizer=harness.tokenizer(pad="="), max_new_tokens=16)
        output = engine.generate(rows_of(PROMPTS), greedy=True)
        whole = [prompt + harness.plain().greedy(prompt, {END}, 16) for prompt in PROMPTS]
        width = max(map(len, whole))
        expected = torch.tensor([row + [EQUALS] * (width - len(row)) for row in whole])
        harness.exact("output_ids", output["output_ids"], expected)

    @holds(1)
    def test_results_have_their_types_and_are_on_the_cpu(self, harness: GenerationHarness) -> None:
        """Results must have the specified dtypes and shapes and be on the CPU, whatever the engine computes on."""
        output = harness.engine(max_new_tokens=4).generate(rows_of(PROMPTS))
        count, width = len(PROMPTS), output["output_ids"].shape[1]
        kinds = {
            "output_ids": (torch.int64, (count, width)),
            "logprobs": (torch.float32, (count, width)),
            "generation_lengths": (torch.int64, (count,)),
            "unpadded_sequence_lengths": (torch.int64, (count,)),
            "truncated": (torch.bool, (count,)),
        }
        for name, (dtype, shape) in kinds.items():
            value = output[name]
            got = (value.dtype, tuple(value.shape), value.device.type, value.requires_grad)
            harness.equal(f"dtype, shape, device and gradient of {name}", got, (dtype, shape, "cpu", False))

    @holds(1)
    def test_the_batch_itself_is_not_changed(self, harness: GenerationHarness) -> None:
        """`generate` must not modify the input batch, whose prompts are reused."""
        data, untouched = rows_of(PROMPTS), rows_of(PROMPTS)
        harness.engine(max_new_tokens=4).generate(data)
        harness.equal("the keys of the batch", sorted(data), sorted(untouched))
        for key, value in untouched.items():
            harness.exact(f"{key} of the batch after generating", data[key], value)

    @holds(1)
    def test_lengths_count_the_stop_token_and_add_up(self, harness: GenerationHarness) -> None:
        """`generation_lengths` must include the stop token; `unpadded_sequence_lengths` is prompt plus completion."""
        output = harness.engine(max_new_tokens=16).generate(rows_of(PROMPTS), greedy=True)
        lengths = [len(harness.plain().greedy(prompt, {END}, 16)) for prompt in PROMPTS]
        harness.equal("generation_lengths", output["generation_lengths"].tolist(), lengths)
        totals = [len(prompt) + length for prompt, length in zip(PROMPTS, lengths, strict=True)]
        harness.equal("unpadded_sequence_lengths", output["unpadded_sequence_lengths"].tolist(), totals)

    @holds(1)
    def test_stop_tokens_and_stop_strings_end_a_row(self, harness: GenerationHarness) -> None:
        """Stop token ids and stop strings must end a row, in the completion only and in addition to the end token."""
        expected = [harness.plain().greedy(prompt, {END, PLUS}, 16) for prompt in PROMPTS]
        for settings in ({"stop_token_ids": (PLUS,)}, {"stop_strings": ("+",)}):
            output = harness.engine(max_new_tokens=16, **settings).generate(rows_of(PROMPTS), greedy=True)
            harness.require_completions(f"{settings}", output, PROMPTS, expected)

    @holds(1)
    def test_end_tokens_of_the_model_end_a_row(self, harness: GenerationHarness) -> None:
        """Every end token of the model's generation config must end a row, not only the tokenizer's."""
        module = harness.module()
        module.generation_config.eos_token_id = [END, PLUS]
        output = harness.engine(module=module, max_new_tokens=16).generate(rows_of(PROMPTS), greedy=True)
        expected = [harness.plain().greedy(prompt, {END, PLUS}, 16) for prompt in PROMPTS]
        harness.require_completions("end tokens of the model", output, PROMPTS, expected)

    @holds(1)
    def test_ends_are_told_by_position_where_pad_is_the_end_token(self, harness: GenerationHarness) -> None:
        """If the pad token is the end token, rows must end by position; prompts may contain it."""
        engine = harness.engine(tokenizer=harness.tokenizer(pad="<eos>"), max_new_tokens=16)
        output = engine.generate(rows_of(PROMPTS, padding=END), greedy=True)
        expected = [harness.plain().greedy(prompt, {END}, 16) for prompt in PROMPTS]
        harness.require_completions("pad is the end token", output, PROMPTS, expected)

    @holds(1)
    def test_truncated_are_the_rows_that_found_no_end(self, harness: GenerationHarness) -> None:
        """`truncated` must mark the rows without an end token; ending exactly at the limit is not truncated."""
        output = harness.engine(max_new_tokens=8).generate(rows_of(PROMPTS), greedy=True)
        expected = [harness.plain().greedy(prompt, {END}, 8)[-1] != END for prompt in PROMPTS]
        harness.equal("truncated", output["truncated"].tolist(), expected)

    @holds(1)
    def test_no_row_gets_more_than_max_new_tokens(self, harness: GenerationHarness) -> None:
        """Each row must get exactly `max_new_tokens` tokens unless it ends earlier."""
        for most in (1, 5):
            output = harness.engine(max_new_tokens=most, temperature=1.3).generate(rows_of(PROMPTS))
            for row, completion in enumerate(completions(output)):
                ended = END in completion
                expected = completion.index(END) + 1 if ended else most
                what = f"the length of row {row} with max_new_tokens={most}"
                harness.equal(what, (len(completion), len(completion) <= most), (expected, True))
