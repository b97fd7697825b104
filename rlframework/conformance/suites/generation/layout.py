"""What comes back: where rows end, how long they are, and how they stand in the output."""

from __future__ import annotations

import torch

from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.generation.workbench import (
    END,
    EQUALS,
    PLUS,
    PROMPTS,
    GenerationBench,
    completions,
    rows_of,
)


class OutputLayout(Suite):
    """The output of `generate`."""

    @holds(1)
    def test_rows_are_prompt_and_completion_padded_on_the_right(self, bench: GenerationBench) -> None:
        """With the tokenizer's pad id, here `=`; and each prompt comes back as it went in."""
        engine = bench.engine(tokenizer=bench.tokenizer(pad="="), max_new_tokens=16)
        output = engine.generate(rows_of(PROMPTS), greedy=True)
        whole = [prompt + bench.plain().greedy(prompt, {END}, 16) for prompt in PROMPTS]
        width = max(map(len, whole))
        expected = torch.tensor([row + [EQUALS] * (width - len(row)) for row in whole])
        bench.exact("output_ids", output["output_ids"], expected)

    @holds(1)
    def test_results_have_their_types_and_are_on_the_cpu(self, bench: GenerationBench) -> None:
        """Whatever the engine computes on and in."""
        output = bench.engine(max_new_tokens=4).generate(rows_of(PROMPTS))
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
            bench.equal(f"dtype, shape, device and gradient of {name}", got, (dtype, shape, "cpu", False))

    @holds(1)
    def test_the_batch_itself_is_not_changed(self, bench: GenerationBench) -> None:
        """The same prompts are answered again, and trained on."""
        data, untouched = rows_of(PROMPTS), rows_of(PROMPTS)
        bench.engine(max_new_tokens=4).generate(data)
        bench.equal("the keys of the batch", sorted(data), sorted(untouched))
        for key, value in untouched.items():
            bench.exact(f"{key} of the batch after generating", data[key], value)

    @holds(1)
    def test_lengths_count_the_stop_token_and_add_up(self, bench: GenerationBench) -> None:
        """generation_lengths includes the token that ended the row; the other length is of prompt and completion."""
        output = bench.engine(max_new_tokens=16).generate(rows_of(PROMPTS), greedy=True)
        lengths = [len(bench.plain().greedy(prompt, {END}, 16)) for prompt in PROMPTS]
        bench.equal("generation_lengths", output["generation_lengths"].tolist(), lengths)
        totals = [len(prompt) + length for prompt, length in zip(PROMPTS, lengths, strict=True)]
        bench.equal("unpadded_sequence_lengths", output["unpadded_sequence_lengths"].tolist(), totals)

    @holds(1)
    def test_stop_tokens_and_stop_strings_end_a_row(self, bench: GenerationBench) -> None:
        """Besides the end token, by id and by text; in the completion only, not in the prompt."""
        expected = [bench.plain().greedy(prompt, {END, PLUS}, 16) for prompt in PROMPTS]
        for settings in ({"stop_token_ids": (PLUS,)}, {"stop_strings": ("+",)}):
            output = bench.engine(max_new_tokens=16, **settings).generate(rows_of(PROMPTS), greedy=True)
            bench.require_completions(f"{settings}", output, PROMPTS, expected)

    @holds(1)
    def test_end_tokens_of_the_model_end_a_row(self, bench: GenerationBench) -> None:
        """A model may have several (an end of text and an end of turn), of which the tokenizer knows one."""
        module = bench.module()
        module.generation_config.eos_token_id = [END, PLUS]
        output = bench.engine(module=module, max_new_tokens=16).generate(rows_of(PROMPTS), greedy=True)
        expected = [bench.plain().greedy(prompt, {END, PLUS}, 16) for prompt in PROMPTS]
        bench.require_completions("end tokens of the model", output, PROMPTS, expected)

    @holds(1)
    def test_ends_are_told_by_position_where_pad_is_the_end_token(self, bench: GenerationBench) -> None:
        """Many tokenizers have no pad token of their own. Prompts hold the end token and are padded with it."""
        engine = bench.engine(tokenizer=bench.tokenizer(pad="<eos>"), max_new_tokens=16)
        output = engine.generate(rows_of(PROMPTS, padding=END), greedy=True)
        expected = [bench.plain().greedy(prompt, {END}, 16) for prompt in PROMPTS]
        bench.require_completions("pad is the end token", output, PROMPTS, expected)

    @holds(1)
    def test_truncated_are_the_rows_that_found_no_end(self, bench: GenerationBench) -> None:
        """A row whose last allowed token is the end token did find it."""
        output = bench.engine(max_new_tokens=8).generate(rows_of(PROMPTS), greedy=True)
        expected = [bench.plain().greedy(prompt, {END}, 8)[-1] != END for prompt in PROMPTS]
        bench.equal("truncated", output["truncated"].tolist(), expected)

    @holds(1)
    def test_no_row_gets_more_than_max_new_tokens(self, bench: GenerationBench) -> None:
        """And none fewer, unless it ended."""
        for most in (1, 5):
            output = bench.engine(max_new_tokens=most, temperature=1.3).generate(rows_of(PROMPTS))
            for row, completion in enumerate(completions(output)):
                ended = END in completion
                expected = completion.index(END) + 1 if ended else most
                what = f"the length of row {row} with max_new_tokens={most}"
                bench.equal(what, (len(completion), len(completion) <= most), (expected, True))
