"""Mutants that draw the wrong tokens, or let them depend on what they must not."""

from __future__ import annotations

from typing import Any

import torch

from rlframework.conformance.mutants.generation_engine.base import (
    broken_forward,
    broken_generate,
    broken_input,
    broken_settings,
    in_mode,
    mutant,
)
from rlframework.conformance.mutants.mutant import Mutant

_GREEDY = "test_greedy_answers_are_those_of_plain_decoding"
_BESIDE = "test_a_row_does_not_depend_on_the_rows_beside_it"


def _same_draw(engine: Any, sound: Any, data: Any, greedy: bool) -> Any:
    """Two tokens, the second of which uses the random number of the first."""
    whole = sound(data, greedy=greedy)
    if greedy or engine.settings.max_new_tokens != 2:
        return whole
    ends, lengths = whole["unpadded_sequence_lengths"], data["input_lengths"]
    first = type(data)(
        {**data, "input_ids": whole["output_ids"][:, : int(lengths.max()) + 1], "input_lengths": lengths + 1}
    )
    again = sound(first, greedy=False)
    going_on = ends == lengths + 2
    whole["output_ids"][going_on, lengths[going_on] + 1] = again["output_ids"][going_on, lengths[going_on] + 1]
    return whole


def _always_new(engine: Any, sound: Any, data: Any, greedy: bool) -> Any:
    engine.calls = getattr(engine, "calls", 0) + 1
    return sound(type(data)({**data, "seeds": data["seeds"] + 1000 * engine.calls}), greedy=greedy)


def _one_batch_one_seed(engine: Any, sound: Any, data: Any, greedy: bool) -> Any:
    """Seeds of rows depend on how rows are split, as with one generator for each batch of rows."""
    rows = torch.arange(len(data["seeds"])) % engine.settings.batch_size
    return sound(type(data)({**data, "seeds": data["seeds"] + rows}), greedy=greedy)


def _greedily(engine: Any, sound: Any, data: Any, greedy: bool) -> Any:
    return sound(data, greedy=True)


def _greedy_ignored(engine: Any, sound: Any, data: Any, greedy: bool) -> Any:
    return sound(data, greedy=False)


def _no_mask(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"attention_mask": None}


def _positions_with_padding(kwargs: dict[str, Any]) -> dict[str, Any]:
    mask, ids = kwargs["attention_mask"], kwargs["input_ids"]
    if mask is None:
        return {}
    places = torch.arange(mask.shape[1] - ids.shape[1], mask.shape[1], device=ids.device)
    return {"position_ids": places.expand(ids.shape)}


def _in_training_mode(engine: Any, sound: Any, data: Any, greedy: bool) -> Any:
    def keep_training(module: Any, args: Any) -> None:
        module.train()

    with in_mode(engine.module, training=engine.module.training):
        handle = engine.module.register_forward_pre_hook(keep_training)
        try:
            return sound(data, greedy=greedy)
        finally:
            handle.remove()


MUTANTS: tuple[Mutant, ...] = (
    mutant(
        "greedy_ignored",
        "greedy answers are sampled",
        broken_generate(_greedy_ignored),
        _GREEDY,
    ),
    mutant(
        "samples_are_greedy",
        "samples are the most likely tokens",
        broken_generate(_greedily),
        "test_samples_are_as_frequent_as_the_model_says",
        "test_the_seed_decides",
    ),
    mutant(
        "one_draw_a_row",
        "all tokens of a row are drawn with one random number",
        broken_generate(_same_draw),
        "test_samples_are_as_frequent_as_the_model_says",
    ),
    mutant(
        "top_k_one_too_many",
        "one token more than top_k is left",
        broken_settings(lambda config: {"top_k": config.top_k and config.top_k + 1}),
        "test_top_k_leaves_the_k_most_likely_tokens",
    ),
    mutant(
        "top_p_ignored",
        "top_p does nothing",
        broken_settings(lambda config: {"top_p": 1.0}),
        "test_top_p_leaves_the_nucleus",
    ),
    mutant(
        "seed_by_row_number",
        "a row is seeded by its number in the batch",
        broken_input(lambda data: {"seeds": torch.arange(len(data["seeds"]))}),
        _BESIDE,
        "test_the_seed_decides",
    ),
    mutant(
        "seeds_of_32_bits",
        "only 32 bits of a seed count",
        broken_input(lambda data: {"seeds": data["seeds"] & 0xFFFFFFFF}),
        "test_the_seed_decides",
    ),
    mutant(
        "always_new",
        "the same seeds give other samples the next time",
        broken_generate(_always_new),
        "test_the_seed_decides",
    ),
    mutant(
        "seed_by_place_in_the_split",
        "samples depend on how rows are split for decoding",
        broken_generate(_one_batch_one_seed),
        "test_a_row_does_not_depend_on_how_rows_are_split",
        _BESIDE,
    ),
    mutant(
        "padding_attended_to",
        "tokens see the padding of shorter prompts",
        broken_forward(_no_mask),
        _GREEDY,
        _BESIDE,
    ),
    mutant(
        "padding_has_positions",
        "the positions of a prompt begin with its padding",
        broken_forward(_positions_with_padding),
        "test_positions_are_told_from_the_prompts_own_start",
    ),
    mutant(
        "dropout_left_on",
        "the module stays in training mode while generating",
        broken_generate(_in_training_mode),
        "test_dropout_is_off_while_generating",
    ),
)
