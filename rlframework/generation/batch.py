"""A batch in NeMo-RL's shape as generation requests, and their results as a batch."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlframework.base.errors import BatchError, BatchTypeError, RLFrameworkError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.batch.packed_tensor import PackedTensor
from rlframework.interfaces.generation import GenerationEngine, GenerationRequest, GenerationResult, SamplingParams

if TYPE_CHECKING:
    from rlframework.config.sections import GenerationConfig


def generate(
    engine: GenerationEngine,
    data: BatchedDataDict[Any],
    config: GenerationConfig,
    stop_tokens: frozenset[int],
    pad_id: int,
    *,
    greedy: bool = False,
) -> BatchedDataDict[Any]:
    """Complete each row of `data` on an `engine` without other requests. Input: `requests_of`, output: `batch_of`."""
    requests = requests_of(data, config, stop_tokens, temperature=0.0 if greedy else None)
    names = [request.request_id for request in requests]
    results: dict[str, GenerationResult] = {}
    engine.submit(requests)
    try:
        while not results.keys() >= set(names):
            results |= {result.request_id: result for result in engine.poll(None)}
    except BaseException:
        engine.abort(names)
        raise
    return batch_of([results[name] for name in names], [request.prompt_ids for request in requests], pad_id)


def requests_of(
    data: BatchedDataDict[Any],
    config: GenerationConfig,
    stop_tokens: frozenset[int],
    *,
    temperature: float | None = None,
) -> list[GenerationRequest]:
    """Return a request for each row, with ids that are unique in all processes.

    `data`: `input_ids [B, S]` of any integer dtype, right-padded prompts; `input_lengths [B]`; `seeds [B]` int64, all
    64 bits significant; and `PackedTensor`s, the media of each row. `stop_tokens`: all tokens that end a completion.
    `temperature`: None for that of `config`. Raises `BatchError` for missing seeds and an empty prompt.
    """
    prompts, seeds = _unpadded_prompts(data)
    packed = {name: value.tensors for name, value in data.items() if isinstance(value, PackedTensor)}
    media = [{name: rows[row] for name, rows in packed.items() if rows[row] is not None} for row in range(len(seeds))]
    used = config.temperature if temperature is None else temperature
    if not isinstance(used, Real):
        raise BatchTypeError(f"temperature is {used!r}; it must be a number, 0 for the most likely tokens")
    sampling = SamplingParams(used, config.top_k, config.top_p, stop_tokens)
    batch = uuid.uuid4().hex
    return [
        GenerationRequest(f"{batch}:{row}", prompt, seed, config.max_new_tokens, sampling, media=media[row])
        for row, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]


def batch_of(results: Sequence[GenerationResult], prompts: Sequence[Tensor], pad_id: int) -> BatchedDataDict[Any]:
    """Return the rows in the order of `results`, whose `prompts` are 1-D int64, on the CPU.

    - `output_ids [B, T]`: prompt and completion, right-padded with `pad_id`;
    - `generation_lengths [B]`: tokens in the completion, including the stop token;
    - `unpadded_sequence_lengths [B]`: tokens in prompt and completion;
    - `logprobs [B, T]` fp32: of each sampled token as in `GenerationResult`; 0 elsewhere;
    - `truncated [B]` bool: ended without a stop token.

    Find the end of a row from the lengths, never from the pad id, which may equal an end-of-sequence token. Raises
    `RLFrameworkError` for log-probabilities that are not finite.
    """
    starts = torch.tensor([len(prompt) for prompt in prompts])
    lengths = torch.tensor([len(row.token_ids) for row in results])
    ends = starts + lengths
    # all rows at once: with a `cat` for each row, 768 short rows take three times as long
    places = torch.arange(int(ends.max()))
    real, sampled = places < ends[:, None], places >= starts[:, None]
    ids = torch.full(real.shape, pad_id, dtype=torch.int64)
    ids[real] = torch.cat(
        [part for prompt, row in zip(prompts, results, strict=True) for part in (prompt, row.token_ids)]
    )
    logprobs = torch.zeros(real.shape)
    logprobs[real & sampled] = torch.cat([row.logprobs for row in results])
    if not bool(torch.isfinite(logprobs).all()):
        raise RLFrameworkError("the model's probabilities are not finite: its weights contain NaN or infinity")
    return BatchedDataDict(
        {
            "output_ids": ids,
            "generation_lengths": lengths,
            "unpadded_sequence_lengths": ends,
            "logprobs": logprobs,
            "truncated": torch.tensor([row.finish_reason != "stop" for row in results]),
        }
    )


def _unpadded_prompts(data: BatchedDataDict[Any]) -> tuple[list[Tensor], list[int]]:
    """Return the prompts of `data` without padding, and the seeds."""
    names = "input_ids", "input_lengths", "seeds"
    missing = [name for name in names if name not in data]
    if missing:
        raise BatchError(f"generate needs input_ids, input_lengths and seeds; {missing} are not in {sorted(data)}")
    ids, lengths, seeds = (data[name].cpu() for name in names)
    if ids.ndim != 2 or not len(ids) == len(lengths) == len(seeds) > 0:
        shapes = {name: tuple(data[name].shape) for name in names}
        raise BatchError(
            f"generate needs input_ids [B, S], input_lengths [B] and seeds [B] with B at least 1, got {shapes}"
        )
    wrong = ((lengths < 1) | (lengths > ids.shape[1])).nonzero().flatten().tolist()
    if wrong:
        raise BatchError(
            f"input_lengths of row {wrong[0]} is {int(lengths[wrong[0]])}; it must be between 1 and {ids.shape[1]}"
        )
    ids = ids if ids.is_floating_point() else ids.long()  # a request rejects fractions
    return [row[:length] for row, length in zip(ids, lengths.tolist(), strict=True)], seeds.tolist()
