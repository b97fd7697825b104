"""Mutants of the output layout: padding, lengths, stop conditions and the order of rows."""

from __future__ import annotations

from typing import Any

import torch

from rlframework.conformance.mutants.generation_engine.base import (
    broken_generate,
    broken_input,
    broken_output,
    broken_settings,
)
from rlframework.conformance.mutants.mutant import mutant

_GREEDY = "test_greedy_answers_are_those_of_plain_decoding"
_LAYOUT = "test_rows_are_prompt_and_completion_padded_on_the_right"
_LENGTHS = "test_lengths_count_the_stop_token_and_add_up"
_BESIDE = "test_a_row_does_not_depend_on_the_rows_beside_it"
_PAD_IS_EOS = "test_ends_are_told_by_position_where_pad_is_the_end_token"


def _rows(output: Any) -> list[list[int]]:
    ends = output["unpadded_sequence_lengths"].tolist()
    return [ids[:end] for ids, end in zip(output["output_ids"].tolist(), ends, strict=True)]


@mutant(
    "sorted_by_length", "Results come back in decoding order, not in the order of the rows.", _BESIDE, _LAYOUT, _GREEDY
)
@broken_generate
def _sorted_by_length(engine: Any, sound: Any, data: Any, greedy: bool) -> Any:
    return sound(data.select_indices(data["input_lengths"].argsort(stable=True)), greedy=greedy)


@mutant("padded_with_0", "Outputs are padded with id 0.", _LAYOUT)
@broken_output
def _padded_with_0(engine: Any, output: Any, greedy: bool) -> dict[str, Any]:
    padding = torch.arange(output["output_ids"].shape[1]) >= output["unpadded_sequence_lengths"][:, None]
    return {"output_ids": output["output_ids"].masked_fill(padding, 0)}


@mutant("padded_on_the_left", "Outputs are padded on the left.", _LAYOUT)
@broken_output
def _padded_on_the_left(engine: Any, output: Any, greedy: bool) -> dict[str, Any]:
    width = output["output_ids"].shape[1]
    return {"output_ids": torch.tensor([[engine.pad_id] * (width - len(ids)) + ids for ids in _rows(output)])}


@mutant("stop_not_counted", "The stop token is not counted as part of the completion.", _LENGTHS)
@broken_output
def _stop_not_counted(engine: Any, output: Any, greedy: bool) -> dict[str, Any]:
    fewer = (~output["truncated"]).long()
    return {name: output[name] - fewer for name in ("generation_lengths", "unpadded_sequence_lengths")}


@mutant("seeds_moved_on", "The caller's seeds are incremented in place.", "test_the_batch_itself_is_not_changed")
@broken_generate
def _seeds_incremented(engine: Any, sound: Any, data: Any, greedy: bool) -> Any:
    output = sound(data, greedy=greedy)
    data["seeds"] += 1
    return output


@mutant("width_as_length", "The reported length of a row is the width of the output.", _LENGTHS)
@broken_output
def _width_as_length(engine: Any, output: Any, greedy: bool) -> dict[str, Any]:
    width = output["output_ids"].shape[1]
    return {"unpadded_sequence_lengths": torch.full_like(output["unpadded_sequence_lengths"], width)}


@mutant(
    "pad_taken_for_stop",
    "Lengths exclude every pad id in a row, although the pad id may be the end-of-sequence token.",
    _PAD_IS_EOS,
)
@broken_output
def _lengths_by_pad(engine: Any, output: Any, greedy: bool) -> dict[str, Any]:
    pad_ids = torch.tensor([sum(token == engine.pad_id for token in ids) for ids in _rows(output)])
    return {name: output[name] - pad_ids for name in ("generation_lengths", "unpadded_sequence_lengths")}


@mutant(
    "prompts_cut_at_pad",
    "Prompts are truncated at their first pad id, which may be the end-of-sequence token.",
    _PAD_IS_EOS,
)
@broken_generate
def _truncated_at_pad(engine: Any, sound: Any, data: Any, greedy: bool) -> Any:
    """Truncate each prompt at its first pad id, which may be the end-of-sequence token."""
    is_pad = data["input_ids"] == engine.pad_id
    ends = torch.where(is_pad.any(1), is_pad.int().argmax(1), data["input_lengths"])
    lengths = torch.minimum(ends, data["input_lengths"]).clamp(min=1)
    return sound(type(data)({**data, "input_lengths": lengths}), greedy=greedy)


_stop_tokens_ignored = mutant(
    "stop_tokens_ignored",
    "`stop_token_ids` has no effect.",
    "test_stop_tokens_and_stop_strings_end_a_row",
    "test_stops_that_are_no_token_are_refused_at_once",
)(broken_settings(lambda config: {"stop_token_ids": ()}))


_stop_strings_ignored = mutant(
    "stop_strings_ignored",
    "`stop_strings` has no effect.",
    "test_stop_tokens_and_stop_strings_end_a_row",
    "test_stops_that_are_no_token_are_refused_at_once",
)(broken_settings(lambda config: {"stop_strings": ()}))


@mutant(
    "ends_of_the_model_ignored",
    "The model's own end-of-sequence tokens have no effect.",
    "test_end_tokens_of_the_model_end_a_row",
)
def _model_eos_ignored(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def attach(self, model: Any) -> None:
            model.generation_config.eos_token_id = None
            super().attach(model)

    return Broken


@mutant("never_truncated", "No row is ever reported as truncated.", "test_truncated_are_the_rows_that_found_no_end")
@broken_output
def _never_truncated(engine: Any, output: Any, greedy: bool) -> dict[str, Any]:
    return {"truncated": torch.zeros_like(output["truncated"])}


@mutant(
    "truncated_by_length",
    "A row that stops at its last allowed token is reported as truncated.",
    "test_truncated_are_the_rows_that_found_no_end",
)
@broken_output
def _truncated_by_length(engine: Any, output: Any, greedy: bool) -> dict[str, Any]:
    return {"truncated": output["generation_lengths"] >= engine.settings.max_new_tokens}


_one_token_too_many = mutant(
    "one_token_too_many", "Rows get one token more than `max_new_tokens`.", "test_no_row_gets_more_than_max_new_tokens"
)(broken_settings(lambda config: {"max_new_tokens": config.max_new_tokens + 1}))


@mutant("seeds_made_up", "Rows without seeds get default seeds.", "test_bad_batches_are_refused")
@broken_input
def _default_seeds(data: Any) -> dict[str, Any]:
    return {"seeds": data.get("seeds", torch.arange(len(data["input_ids"])))}
