"""Find out how the rows of an architecture can be decoded together, on a tiny random model of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.utils.hub import TRANSFORMERS_DYNAMIC_MODULE_NAME

from rlframework.base.errors import NotSupported
from rlframework.config.policy import PolicyConfig
from rlframework.generation.sdk import RowLimits, SamplingParams, length_dependent, tiny_model
from rlframework_transformers.decoding import Row, RowBatch
from rlframework_transformers.packed_rows import PackedRows
from rlframework_transformers.row_forward import EqualRows, PaddedRows, RowForward, WholeRows

SHOWN_BY_SHORT_ROWS = {
    *("full_attention", "sliding_attention", "chunked_attention", "indexed_attention"),
    *("linear_attention", "conv", "hybrid", "hybrid_sliding", "moe", "mlp"),
}
"""Layer types in which padding, if it has any effect, has it in short rows. Others may compress groups of tokens."""

PROMPTS, BUDGETS = (9, 4, 7, 2, 7, 4), (8, 8, 3, 8, 6, 3)
"""Tokens of the probed prompts, and how many follow each: rows leave the batch at different times."""

LONGEST = 17
TOLERANCE = 1e-3


def row_forward(model: Any) -> type[RowForward]:
    """Return the `RowForward` with the fewest batches that computes rows of models like `model` as one by one.

    Raises `NotSupported` if none does, and if no tiny model can be built.
    """
    attention = model.config._attn_implementation
    # a configuration can name code that was not allowed to run, beside a model that transformers has
    own_code = any(kind.__module__.startswith(TRANSFORMERS_DYNAMIC_MODULE_NAME) for kind in type(model).__mro__)
    config = PolicyConfig(model_name=model.config._name_or_path or "-", trust_remote_code=own_code)
    tiny = tiny_model(config, model.config, attention if attention in ("sdpa", "eager") else None)
    types = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    reason = ""
    for forwards in (PackedRows, PaddedRows, EqualRows, WholeRows):
        if forwards is PackedRows and not _packable(model):
            continue
        if not forwards.equal_lengths and types - SHOWN_BY_SHORT_ROWS:
            continue
        try:
            if _is_right(tiny, forwards):
                return forwards
            reason = "the probabilities of a token depend on the tokens after it"
        except Exception as error:  # noqa: BLE001 - models reject caches, masks and positions in any way
            reason = f"{type(error).__name__}: {error}"
    raise NotSupported(f"{type(model).__name__} is not supported by the generation engine: {reason}; use another model")


def _packable(model: Any) -> bool:
    """Return True on a CPU, if the attention can be replaced and no position depends on the length of its row."""
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    return on_cpu and model.config._attn_implementation == "sdpa" and not length_dependent(model.config)


@torch.no_grad()
def _is_right(model: Any, forwards: type[RowForward]) -> bool:
    """Return whether the log-probabilities of decoded rows are those of plain forwards of the finished rows."""
    longest = max(2, int(min(LONGEST, *RowLimits.of(model.config).bounds)))
    prompts, pad = _prompts(model, [max(1, length * longest // LONGEST) for length in PROMPTS])
    rows = [
        Row(str(seed), prompt, seed, min(new, longest - len(prompt)))
        for seed, (new, prompt) in enumerate(zip(BUDGETS, prompts, strict=True))
    ]
    lengths = [len(prompt) if forwards.equal_lengths else 0 for prompt in prompts]
    for length in set(lengths):
        _decode(model, forwards, pad, [row for row, own in zip(rows, lengths, strict=True) if own == length])
    for row in rows:
        expected = _plain_logprobs(model, row.prompt, row.tokens)
        if not torch.allclose(row.logprobs, expected, rtol=TOLERANCE, atol=TOLERANCE):
            return False
    return True


def _decode(model: Any, forwards: type[RowForward], pad: int, rows: list[Row]) -> None:
    """Complete `rows`, of which half join after some tokens of the others, if they can."""
    batch = _batch(model, forwards, pad)
    first, late = rows[: -(-len(rows) // 2)], rows[-(-len(rows) // 2) :]
    batch.add(first)
    for _ in range(2):
        batch.step()
    if late and not batch.rows:
        batch = _batch(model, forwards, pad)
    batches = [batch]
    if late and (forwards.equal_lengths or not batch.add(late)):
        batches.append(_batch(model, forwards, pad))
        batches[-1].add(late)
    for each in batches:
        while each.rows:
            each.step()


def _batch(model: Any, forwards: type[RowForward], pad: int) -> RowBatch:
    device = next(model.parameters()).device
    return RowBatch(forwards(model, pad, device), SamplingParams(), device)


def _prompts(model: Any, lengths: list[int]) -> tuple[list[Tensor], int]:
    """Random prompts of `lengths`, equal ones of equal lengths, with padding tokens in them; and the padding token."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (max(lengths),), generator=torch.Generator().manual_seed(0))
    pad = getattr(model.config.get_text_config(), "pad_token_id", None) or 0
    ids[1::4] = pad  # some models take them for padding wherever they are
    return [ids[-length:] for length in lengths], pad


def _plain_logprobs(model: Any, prompt: Tensor, completion: Tensor) -> Tensor:
    ids = torch.cat((prompt, completion))
    logprobs: Tensor = model(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
    return logprobs[len(prompt) - 1 : -1].gather(-1, completion[:, None])[:, 0]
