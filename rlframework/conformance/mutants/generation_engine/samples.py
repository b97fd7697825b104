"""Mutants that sample the wrong tokens, or make samples depend on unrelated state."""

from __future__ import annotations

from typing import Any

import torch

from rlframework.conformance.mutants.generation_engine.base import (
    broken_forward,
    broken_generate,
    broken_input,
    broken_settings,
    in_mode,
)
from rlframework.conformance.mutants.mutant import mutant

_GREEDY = "test_greedy_answers_are_those_of_plain_decoding"
_BESIDE = "test_a_row_does_not_depend_on_the_rows_beside_it"


@mutant("greedy_ignored", "Greedy completions are sampled.", _GREEDY)
@broken_generate
def _greedy_ignored(engine: Any, sound: Any, data: Any, greedy: bool) -> Any:
    return sound(data, greedy=False)


@mutant(
    "samples_are_greedy",
    "Sampling always picks the most likely token.",
    "test_samples_are_as_frequent_as_the_model_says",
    "test_the_seed_decides",
)
@broken_generate
def _always_greedy(engine: Any, sound: Any, data: Any, greedy: bool) -> Any:
    return sound(data, greedy=True)


@mutant(
    "one_draw_a_row",
    "All tokens of a row are drawn with the same random number.",
    "test_samples_are_as_frequent_as_the_model_says",
)
@broken_generate
def _same_draw(engine: Any, sound: Any, data: Any, greedy: bool) -> Any:
    """Generate two tokens, and draw the second with the random number of the first."""
    whole = sound(data, greedy=greedy)
    if greedy or engine.settings.max_new_tokens != 2:
        return whole
    ends, lengths = whole["unpadded_sequence_lengths"], data["input_lengths"]
    first = type(data)(
        {**data, "input_ids": whole["output_ids"][:, : int(lengths.max()) + 1], "input_lengths": lengths + 1}
    )
    again = sound(first, greedy=False)
    unfinished = ends == lengths + 2
    whole["output_ids"][unfinished, lengths[unfinished] + 1] = again["output_ids"][unfinished, lengths[unfinished] + 1]
    return whole


_top_k_one_too_many = mutant(
    "top_k_one_too_many", "Top-k sampling keeps one token too many.", "test_top_k_leaves_the_k_most_likely_tokens"
)(broken_settings(lambda config: {"top_k": config.top_k and config.top_k + 1}))


_top_p_ignored = mutant("top_p_ignored", "`top_p` has no effect.", "test_top_p_leaves_the_nucleus")(
    broken_settings(lambda config: {"top_p": 1.0})
)


_seed_by_row_number = mutant(
    "seed_by_row_number", "A row is seeded by its index in the batch.", _BESIDE, "test_the_seed_decides"
)(broken_input(lambda data: {"seeds": torch.arange(len(data["seeds"]))}))


_seeds_of_32_bits = mutant("seeds_of_32_bits", "Only the low 32 bits of a seed are used.", "test_the_seed_decides")(
    broken_input(lambda data: {"seeds": data["seeds"] & 0xFFFFFFFF})
)


@mutant("always_new", "The same seeds give different samples on each call.", "test_the_seed_decides")
@broken_generate
def _reseeded_each_call(engine: Any, sound: Any, data: Any, greedy: bool) -> Any:
    engine.calls = getattr(engine, "calls", 0) + 1
    return sound(type(data)({**data, "seeds": data["seeds"] + 1000 * engine.calls}), greedy=greedy)


@mutant(
    "seed_by_place_in_the_split",
    "Samples depend on how rows are split into decoding batches.",
    "test_a_row_does_not_depend_on_how_rows_are_split",
    _BESIDE,
)
@broken_generate
def _seeded_by_batch(engine: Any, sound: Any, data: Any, greedy: bool) -> Any:
    """Make seeds depend on how rows are split, as with one generator per decoding batch."""
    rows = torch.arange(len(data["seeds"])) % engine.settings.batch_size
    return sound(type(data)({**data, "seeds": data["seeds"] + rows}), greedy=greedy)


@mutant("padding_attended_to", "Tokens attend to the padding of shorter prompts.", _GREEDY, _BESIDE)
@broken_forward
def _without_mask(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"attention_mask": None}


@mutant(
    "padding_has_positions",
    "The positions of a prompt start at its padding.",
    "test_positions_are_told_from_the_prompts_own_start",
)
@broken_forward
def _positions_with_padding(kwargs: dict[str, Any]) -> dict[str, Any]:
    mask, ids = kwargs["attention_mask"], kwargs["input_ids"]
    if mask is None:
        return {}
    positions = torch.arange(mask.shape[1] - ids.shape[1], mask.shape[1], device=ids.device)
    return {"position_ids": positions.expand(ids.shape)}


@mutant(
    "dropout_left_on", "The module stays in training mode while generating.", "test_dropout_is_off_while_generating"
)
@broken_generate
def _in_training_mode(engine: Any, sound: Any, data: Any, greedy: bool) -> Any:
    def keep_training(module: Any, args: Any) -> None:
        module.train()

    with in_mode(engine.module, training=engine.module.training):
        handle = engine.module.register_forward_pre_hook(keep_training)
        try:
            return sound(data, greedy=greedy)
        finally:
            handle.remove()
