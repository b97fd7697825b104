"""The embedded generation engine: a transformers causal language model with our own decoding loop.

Hugging Face `generate` supports neither per-row seeds, nor log-probabilities of the distribution before truncation, nor
prefilling a prompt once for a whole group. Not supported: continuous batching, paged caches, beam search. The cache
takes the memory of `batch_size` rows, on a GPU of as many as fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.sections import GenerationConfig
from rlframework.errors import BatchError, ConfigError, RLFrameworkError, UserError
from rlframework.generation.batch_memory import free_bytes, rows_that_fit
from rlframework.generation.decode import Completion, SamplingRule, complete, row_uniforms
from rlframework.generation.engine_model import EngineModel
from rlframework.generation.probing import row_forward
from rlframework.generation.row_forward import PaddedRows, RowForward, WholeRows
from rlframework.generation.row_limits import RowLimits
from rlframework.weight_sync.buffers import WeightInfo
from rlframework.weight_sync.receiver import ReceivesWeights, WeightSink


class TransformersEngine(ReceivesWeights):
    """See `GenerationEngine`. An attached model keeps its dtype and device."""

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
        self._configured_stop_tokens = _configured_stop_tokens(config, tokenizer)
        self._pad_id = int(tokenizer.pad_token_id)
        self._engine_model = EngineModel(model_name, device, precision)
        self.refit_device, self.refit_deadline = torch.device(device), config.refit.deadline
        self._model: Any = None
        self._forwards: type[RowForward] = PaddedRows
        self._probed_config: Any = None

    def attach(self, model: nn.Module) -> None:
        """See `GenerationEngine.attach`. Keeps the mode (training or evaluation) of each module.

        The first time, finds out on a tiny model how rows can be decoded together; raises `NotSupported` if in no way.
        """
        if model.config is not self._probed_config:
            self._forwards, self._probed_config = row_forward(model), model.config
        self._model = model

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `GenerationEngine.load_weights`. The first call builds the engine's own module, in its precision."""
        self._model = None
        self.attach(self._engine_model.load(weights))

    def refit_sink(self, info: WeightInfo) -> WeightSink:
        """See `ReceivesWeights.refit_sink`. Writes into the engine's own module, in place if it has one."""
        self._model = None
        return self._engine_model.sink(info, self.attach)

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """See `GenerationEngine.generate`.

        If a prompt leaves fewer than `max_new_tokens` of the model's positions, its row gets the remaining ones and
        counts as truncated; a prompt that leaves none raises `BatchError`.
        """
        self.require_weights()
        model, config = self._model, self._config
        if model is None:
            raise UserError("the generation engine has no weights yet: call attach or load_weights before generate")
        prompts, seeds = _unpadded_prompts(data)
        limits = RowLimits.of(model.config)
        room = [limits.room(row, len(prompt)) for row, prompt in enumerate(prompts)]
        budgets = torch.tensor([int(min(config.max_new_tokens, positions)) for positions in room])
        rule = SamplingRule(0.0 if greedy else config.temperature, config.top_k, config.top_p)
        uniforms = row_uniforms(seeds, 0 if rule.greedy else config.max_new_tokens)
        of_model = _eos_tokens(getattr(model, "generation_config", None))
        ends = self._configured_stop_tokens | of_model | self._saved_stop_tokens
        stop_tokens = torch.tensor(list(ends), dtype=torch.int64)
        done: dict[int, Completion] = {}
        with _evaluating(model):
            size = self._batch_size(model, prompts, budgets, rule)
            for rows in self._batches(prompts, limits, size):
                chosen = [prompts[row] for row in rows]
                completions = complete(
                    model, chosen, uniforms[rows], budgets[rows], stop_tokens, rule, self._pad_id, self._forwards
                )
                done |= zip(rows, completions, strict=True)
        return _output(prompts, [done[row] for row in range(len(prompts))], self._pad_id)

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """See `GenerationEngine.finish_generation`. Returns the cache's memory to the GPU, for other processes."""
        if self.refit_device.type == "cuda":
            torch.cuda.empty_cache()
        return True

    def _batch_size(self, model: nn.Module, prompts: list[Tensor], budgets: Tensor, rule: SamplingRule) -> int:
        """Return the rows to decode together: `batch_size`, or on a GPU fewer, in batches of equal size that fit."""
        most, weight = self._config.batch_size, next(model.parameters())
        if (free := free_bytes(weight.device)) is None:
            return most
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        total = int((lengths + budgets).max())
        prompt = total if self._forwards is WholeRows else int(lengths.max())  # the tokens of the largest forward
        sizes = {"prompt": prompt, "total": total, "width": weight.element_size()}
        truncated = rule.top_k is not None or rule.top_p < 1.0
        most = min(most, rows_that_fit(free, model.config, truncated=truncated, **sizes))
        return -(-len(prompts) // -(-len(prompts) // most))

    @cached_property
    def _saved_stop_tokens(self) -> set[int]:
        """The end-of-sequence tokens in the model's `generation_config.json`; none without that file."""
        try:
            return _eos_tokens(transformers.GenerationConfig.from_pretrained(self._model_name))
        except OSError:  # most small models have none
            return set()

    def _batches(self, prompts: list[Tensor], limits: RowLimits, size: int) -> Iterator[list[int]]:
        """Return batches of up to `size` rows that can be decoded together, of similar length, equal ones adjacent."""

        def alike(row: int) -> int:
            length = len(prompts[row])
            return length if self._forwards.equal_lengths else limits.regime(length)

        order = sorted(range(len(prompts)), key=lambda row: (len(prompts[row]), prompts[row].tolist()))
        for _, group in groupby(order, alike):
            rows = list(group)
            yield from (rows[start : start + size] for start in range(0, len(rows), size))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put `model` into evaluation mode, and restore the mode of each module afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _unpadded_prompts(data: BatchedDataDict[Any]) -> tuple[list[Tensor], Tensor]:
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
    return [row[:length] for row, length in zip(ids, lengths.tolist(), strict=True)], seeds


def _output(prompts: list[Tensor], done: list[Completion], pad_id: int) -> BatchedDataDict[Any]:
    """Return the rows in order; each is prompt and completion, right-padded."""
    ids = [torch.cat((prompt, row.tokens)) for prompt, row in zip(prompts, done, strict=True)]
    logprobs = [torch.cat((torch.zeros(len(prompt)), row.logprobs)) for prompt, row in zip(prompts, done, strict=True)]
    padded_logprobs = pad_sequence(logprobs, batch_first=True)
    if not bool(torch.isfinite(padded_logprobs).all()):
        raise RLFrameworkError("the model's probabilities are not finite: its weights contain NaN or infinity")
    return BatchedDataDict(
        {
            "output_ids": pad_sequence(ids, batch_first=True, padding_value=pad_id),
            "generation_lengths": torch.tensor([len(row.tokens) for row in done]),
            "unpadded_sequence_lengths": torch.tensor([len(row) for row in ids]),
            "logprobs": padded_logprobs,
            "truncated": torch.tensor([row.truncated for row in done]),
        }
    )


# -- the tokens that end a completion ----------------------------------------------------------------------------------


def _configured_stop_tokens(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the end-of-sequence token of `tokenizer` and the stop tokens and stop strings of `config`.

    Raises `ConfigError` for a stop string that is not a single token and a stop token outside the vocabulary.
    """
    size = len(tokenizer)
    for token in config.stop_token_ids:
        if not 0 <= token < size:
            raise ConfigError(
                f"generation.stop_token_ids: {token} is not a token of the tokenizer; its tokens are 0 to {size - 1}"
            )
    strings = {_single_token(tokenizer, text) for text in config.stop_strings}
    return _eos_tokens(tokenizer) | set(config.stop_token_ids) | strings


def _eos_tokens(owner: Any) -> set[int]:
    """Return the end-of-sequence tokens of a tokenizer or a transformers `GenerationConfig`; none if it is None."""
    found = getattr(owner, "eos_token_id", None)
    return set() if found is None else {found} if isinstance(found, int) else set(found)


def _single_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    known = tokenizer.get_vocab()
    if text in known:
        return int(known[text])
    ids: list[int] = []
    try:
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:  # the tokenizers library raises bare Exception
        if "Missing [UNK] token" not in str(error):
            raise
    if len(ids) != 1 or tokenizer.decode(ids) != text:
        raise ConfigError(
            f"generation.stop_strings: {text!r} is not a single token of the tokenizer "
            + (f"but {len(ids)} ({tokenizer.convert_ids_to_tokens(ids)})" if ids else "(it has no token for it)")
            + "; give strings of one token, or use generation.stop_token_ids"
        )
    return ids[0]
