"""The generation interface: prompts in, completions with their log-probabilities out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rlframework.errors import NotSupported

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from rlframework.batch.batched_data_dict import BatchedDataDict
    from rlframework.config.sections import GenerationConfig


class GenerationEngine(ABC):
    """Samples completions with the weights that it was given last.

    The embedded engine lives in the trainer's process: `attach` hands it the live module (no copy), or, where the
    trainer's module is sharded, `load_weights` fills a module of its own. The module that is attached is left as it
    was, weights and modes; generating without any weights is a `UserError`. An engine in a process of its own gets
    weights by refits, see the end of this class.
    """

    @abstractmethod
    def __init__(
        self,
        config: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        model_name: str,
        device: str,
        precision: str,
    ) -> None:
        """Light: nothing is loaded before `attach` or `load_weights`. Bad stop strings are a `ConfigError`."""

    @abstractmethod
    def attach(self, model: torch.nn.Module) -> None:
        """Use `model` itself, a transformers causal LM whose parameters are whole, from now on."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take weights by the names that `save_pretrained` writes; all of them, or a `UserError` naming the missing.

        Each is copied before the next is asked for: the sender may use its memory again.
        """

    @abstractmethod
    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """Complete each row.

        In: `input_ids [B, S]` int64, right-padded prompts; `input_lengths [B]`; `seeds [B]` int64, all 64 bits of which
        count. The sample of a row depends on its prompt, its seed and the weights only: never on the rows beside it or
        how they are spread over workers (up to the rounding of the forward). A row ends with one of the model's end
        tokens or of the configuration's. Missing seeds or an empty prompt are a `BatchError`.

        Out, on the CPU, in the order of the rows: `output_ids [B, T]` prompt and completion, right-padded with the
        tokenizer's pad id; `generation_lengths [B]` tokens of the completion, the stop token included;
        `unpadded_sequence_lengths [B]`; `logprobs [B, T]` fp32, of each sampled token at the sampling temperature and
        before top-k and top-p, 0 elsewhere (`greedy`: at temperature 1); `truncated [B]` bool, stopped by
        `max_new_tokens`. Ends are told by position, never by the pad id, which may be the end token.
        """

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Called once before a series of `generate` calls; True when ready."""
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Called once after it: free caches."""
        return True

    # The receiving side of a refit, for an engine outside the trainer's processes: `policy.refit.receiving` has it for
    # any engine. Weights are checked: other names, shapes or dtypes than were told of, and bytes that are not those
    # that were sent (each weight has a checksum), are a `RefitError` or `UserError` that names the weight. From the
    # first weight of a refit to the last, and after one that failed, `generate` is a `UserError`.

    def init_collective(self, ip: str, port: int, world_size: int, rank: int = 1) -> None:
        """Join the process group of collective refits: the trainer is its rank 0, at `ip` and `port`, engines follow.

        A `RefitError` where the others do not come within `generation.refit.deadline` seconds.
        """
        raise NotSupported(f"{type(self).__name__} does not receive weights over a process group")

    def prepare_refit_info(self, state_dict_info: Mapping[str, Any]) -> None:
        """Name to (shape, dtype) of all weights that will come, in their order; once, before any transport."""
        raise NotSupported(f"{type(self).__name__} does not receive weights from another process")

    def offer_refit_memory(self) -> dict[str, Any]:
        """Begin a refit through handles: device id to memory of this engine that its weights go to, for
        `prepare_weights_for_ipc`. Empty where the engine has none that other processes can write to.
        """
        return {}

    def update_weights_from_ipc_handles(self, ipc_handles: Mapping[str, Any]) -> bool:
        """Take the group of weights at `ipc_handles` (device id to what `get_weights_ipc_handles` gave for it).

        The memory is read before this returns. When the last weight of the refit has come, they are all in use. True.
        """
        raise NotSupported(f"{type(self).__name__} does not receive weights through IPC handles")

    def update_weights_from_collective(self) -> bool:
        """Take all weights, which the trainer broadcasts at the same time. True.

        A `RefitError` where it is gone, or nothing comes for `generation.refit.deadline` seconds.
        """
        raise NotSupported(f"{type(self).__name__} does not receive weights over a process group")
