"""The embedded generation engine: a transformers causal language model, decoded by our own loop.

The loop is our own because Hugging Face `generate` knows neither a seed for each row, nor the log-probabilities of the
distribution before truncation, nor prompts that are prefilled once for a whole group. Left out: continuous batching,
paged caches, beam search. Memory for the cache is that of `batch_size` rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.errors import BatchError, RLFrameworkError, UserError
from rlframework.generation.decode import Completions, Work, complete
from rlframework.generation.engine_model import OwnModel
from rlframework.generation.sampling import SamplingRule, row_uniforms
from rlframework.generation.stop_tokens import configured_ends, model_ends, saved_ends
from rlframework.weight_sync.buffers import Info
from rlframework.weight_sync.receiver import ReceivesWeights, WeightSink

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.sections import GenerationConfig


class TransformersEngine(ReceivesWeights):
    """See `GenerationEngine`. A model that is attached is used as it is, in its own dtype and on its own device."""

    def __init__(
        self,
        config: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        model_name: str,
        device: str,
        precision: str,
    ) -> None:
        self._config, self._model_name = config, model_name
        self._ends = configured_ends(config, tokenizer)
        self._pad_id = int(tokenizer.pad_token_id)
        self._own = OwnModel(model_name, device, precision)
        self.refit_device, self.refit_deadline = torch.device(device), config.refit.deadline
        self._model: nn.Module | None = None
        self._all_ends: frozenset[int] | None = None

    def attach(self, model: nn.Module) -> None:
        """See `GenerationEngine.attach`. The modes (training or evaluation) of its modules are kept."""
        self._model, self._all_ends = model, None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `GenerationEngine.load_weights`. The first call makes a module of the engine's own, in its precision."""
        self._model = None
        self.attach(self._own.load(weights))

    def refit_sink(self, info: Info) -> WeightSink:
        """See `ReceivesWeights.refit_sink`: into the engine's own module, in place where there is one already."""
        self._model = None
        return self._own.sink(info, self.attach)

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """See `GenerationEngine.generate`.

        A row whose prompt leaves less room than `max_new_tokens` in the model's positions gets what there is, and
        counts as truncated; a prompt that leaves none is a `BatchError`.
        """
        self.require_weights()
        if self._model is None:
            raise UserError("the generation engine has no weights yet: call attach or load_weights before generate")
        prompts, seeds = _checked(data)
        budgets = self._budgets(prompts, self._model)
        rule = self._rule(greedy)
        uniforms = row_uniforms(seeds, 0 if rule.greedy else self._config.max_new_tokens)
        device = next(self._model.parameters()).device
        ends = torch.tensor(sorted(self._end_ids(self._model)), dtype=torch.int64, device=device)
        done: list[tuple[list[int], Completions]] = []
        with _evaluating(self._model):
            for rows in _batches(prompts, self._config.batch_size):
                work = _work(prompts, rows, uniforms, budgets)
                done.append((rows, complete(self._model, work, ends, rule, self._pad_id)))
        return _collect(prompts, done, self._pad_id)

    def _rule(self, greedy: bool) -> SamplingRule:
        if greedy:
            return SamplingRule(temperature=0.0)
        return SamplingRule(self._config.temperature, self._config.top_k, self._config.top_p)

    def _end_ids(self, model: nn.Module) -> frozenset[int]:
        if self._all_ends is None:
            own = model_ends(getattr(model, "generation_config", None))
            self._all_ends = self._ends | own | saved_ends(self._model_name)
        return self._all_ends

    def _budgets(self, prompts: list[Tensor], model: nn.Module) -> Tensor:
        """Tokens that each row may get: `max_new_tokens`, or what the model has positions for."""
        most = self._config.max_new_tokens
        config: Any = model.config
        limit = getattr(config.get_text_config(), "max_position_embeddings", None)
        if limit is None:
            return torch.full((len(prompts),), most)
        for row, prompt in enumerate(prompts):
            if len(prompt) >= limit:
                raise BatchError(
                    f"the prompt of row {row} has {len(prompt)} tokens, and the model takes {limit} in all: "
                    "shorten or leave out such prompts"
                )
        return torch.tensor([min(most, limit - len(prompt)) for prompt in prompts])


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """`model` in evaluation mode; afterwards each of its modules in the mode it had."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _checked(data: BatchedDataDict[Any]) -> tuple[list[Tensor], Tensor]:
    """The prompts of `data` without padding, and the seeds; a `BatchError` where they do not fit together."""
    missing = [name for name in ("input_ids", "input_lengths", "seeds") if name not in data]
    if missing:
        raise BatchError(f"generate needs input_ids, input_lengths and seeds; {missing} are not in {sorted(data)}")
    ids, lengths, seeds = data["input_ids"].cpu(), data["input_lengths"].cpu(), data["seeds"].cpu()
    if ids.ndim != 2 or len(ids) == 0 or lengths.shape != ids.shape[:1] or seeds.shape != ids.shape[:1]:
        shapes = {name: tuple(data[name].shape) for name in ("input_ids", "input_lengths", "seeds")}
        raise BatchError(
            f"generate needs input_ids [B, S], input_lengths [B] and seeds [B] with B at least 1, got {shapes}"
        )
    wrong = ((lengths < 1) | (lengths > ids.shape[1])).nonzero().flatten().tolist()
    if wrong:
        raise BatchError(
            f"input_lengths of row {wrong[0]} is {int(lengths[wrong[0]])}; prompts have 1 to {ids.shape[1]} tokens here"
        )
    return [row[:length] for row, length in zip(ids, lengths.tolist(), strict=True)], seeds


def _batches(prompts: list[Tensor], batch_size: int) -> Iterator[list[int]]:
    """Row numbers in batches of like prompt length, equal prompts side by side."""
    keys = [(len(prompt), prompt.tolist()) for prompt in prompts]
    order = sorted(range(len(prompts)), key=keys.__getitem__)
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def _work(prompts: list[Tensor], rows: list[int], uniforms: Tensor, budgets: Tensor) -> Work:
    different: dict[tuple[int, ...], int] = {}
    prompt_of = [different.setdefault(tuple(prompts[row].tolist()), len(different)) for row in rows]
    unique = [torch.tensor(prompt) for prompt in different]
    return Work(unique, torch.tensor(prompt_of), uniforms[rows], budgets[rows])


def _collect(prompts: list[Tensor], done: list[tuple[list[int], Completions]], pad_id: int) -> BatchedDataDict[Any]:
    """All batches as one, in the order of the rows: prompts and completions side by side, padded on the right."""
    count = len(prompts)
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
    lengths, truncated = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.bool)
    for rows, part in done:
        lengths[rows], truncated[rows] = part.lengths, part.truncated
    totals = prompt_lengths + lengths
    ids = torch.full((count, int(totals.max())), pad_id, dtype=torch.int64)
    logprobs = torch.zeros(ids.shape, dtype=torch.float32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    for rows, part in done:
        valid = torch.arange(part.tokens.shape[1]) < part.lengths[:, None]
        index = torch.tensor(rows)
        row_index, step = valid.nonzero(as_tuple=True)
        columns = prompt_lengths[index][row_index] + step
        ids[index[row_index], columns] = part.tokens[valid]
        logprobs[index[row_index], columns] = part.logprobs[valid]
    if not bool(torch.isfinite(logprobs).all()):
        raise RLFrameworkError("the model's probabilities are not finite: its weights hold NaN or infinity")
    return BatchedDataDict(
        {
            "output_ids": ids,
            "generation_lengths": lengths,
            "unpadded_sequence_lengths": totals,
            "logprobs": logprobs,
            "truncated": truncated,
        }
    )
