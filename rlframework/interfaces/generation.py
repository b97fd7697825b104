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
    """Samples completions from the most recent weights it was given.

    An embedded engine runs in the trainer's process: `attach` gives it the live module without a copy or, if the
    trainer's module is sharded, `load_weights` fills the engine's separate module. The engine must not change the
    weights or the train/eval mode of an attached module. Generating before any weights were given raises `UserError`.
    An engine in a separate process receives its weights through refits, the last methods of this class.
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
        """Construct cheaply: load nothing before `attach` or `load_weights`. Bad stop strings raise `ConfigError`."""

    @abstractmethod
    def attach(self, model: torch.nn.Module) -> None:
        """Use `model` itself from now on: a transformers causal LM with unsharded parameters."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load all weights, under the names `save_pretrained` writes; raise `UserError` naming any that are missing.

        Copy each weight before asking for the next: the sender may reuse its memory.
        """

    @abstractmethod
    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """Complete each row.

        Input: `input_ids [B, S]` int64, right-padded prompts; `input_lengths [B]`; `seeds [B]` int64, all 64 bits
        significant. The sample of a row depends only on its prompt, its seed and the weights: never on the other rows
        or on how rows are distributed over workers (up to rounding in the forward pass). A row ends with one of the
        end-of-sequence tokens of the model or of the configuration. Missing seeds or an empty prompt raise
        `BatchError`.

        Output, on the CPU, in the order of the rows:

        - `output_ids [B, T]`: prompt and completion, right-padded with the tokenizer's pad id;
        - `generation_lengths [B]`: tokens in the completion, including the stop token;
        - `unpadded_sequence_lengths [B]`: tokens in prompt and completion;
        - `logprobs [B, T]` fp32: of each sampled token at the sampling temperature (`greedy`: at temperature 1), before
          top-k and top-p; 0 elsewhere;
        - `truncated [B]` bool: stopped by `max_new_tokens`.

        Find the end of a row from the lengths, never from the pad id, which may equal an end-of-sequence token.
        """

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Prepare for a series of `generate` calls; called once before the series. Return True when ready."""
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Free caches; called once after a series of `generate` calls. Return True when done."""
        return True

    # The receiving side of a refit, for an engine outside the trainer's processes. `rlframework.weight_sync.receiver`
    # implements it for any engine. Received weights are checked: names, shapes or dtypes other than those announced,
    # and bytes that differ from those sent (each weight has a checksum), raise a `RefitError` or `UserError` that names
    # the weight. From the first weight of a refit to the last, and after a failed refit, `generate` raises `UserError`.

    def init_collective(self, ip: str, port: int, world_size: int, rank: int = 1) -> None:
        """Join the process group for collective refits: the trainer, at `ip` and `port`, is rank 0; engines follow.

        Raises `RefitError` if the others do not join within `generation.refit.deadline` seconds.
        """
        raise NotSupported(f"{type(self).__name__} does not receive weights over a process group")

    def prepare_refit_info(self, state_dict_info: Mapping[str, Any]) -> None:
        """Announce the weights of all refits, name to (shape, dtype), in order; called once, before any transport."""
        raise NotSupported(f"{type(self).__name__} does not receive weights from another process")

    def offer_refit_memory(self) -> dict[str, Any]:
        """Begin a refit through handles; return receive buffers for `prepare_weights_for_ipc`, by device id.

        Empty if this engine has no memory that other processes can write to.
        """
        return {}

    def update_weights_from_ipc_handles(self, ipc_handles: Mapping[str, Any]) -> bool:
        """Load one group of weights from `ipc_handles`, device id to the result of `get_weights_ipc_handles` there.

        Reads the memory before it returns. All weights take effect together, once the last one of the refit has
        arrived. Returns True.
        """
        raise NotSupported(f"{type(self).__name__} does not receive weights through IPC handles")

    def update_weights_from_collective(self) -> bool:
        """Receive all weights, which the trainer broadcasts at the same time; return True.

        Raises `RefitError` if the trainer is gone or sends nothing for `generation.refit.deadline` seconds.
        """
        raise NotSupported(f"{type(self).__name__} does not receive weights over a process group")
