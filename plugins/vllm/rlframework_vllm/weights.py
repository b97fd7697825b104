"""Weights on their way into vLLM: received in memory of the engine, from which vLLM's loader copies them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlframework.errors import UserError
from rlframework.models.file_weights import FileLayout
from rlframework.weight_sync.buffers import Slot, WeightInfo, assign_slots
from rlframework.weight_sync.ipc import MemoryHandle, SharedMemory, open_memory
from rlframework.weight_sync.receiver import Held, WeightSink, listed


class Source(NamedTuple):
    """Where vLLM's workers find all weights: in this process (`raw`, 1-D uint8), or in shared memory."""

    slots: Sequence[Slot]
    memory: Tensor | MemoryHandle


class StagedWeights(WeightSink):
    """Memory for the weights of an update. vLLM gets them all at once.

    vLLM keeps references to weights until it has all those of a layer, so buffers that are used in turn would give it
    wrong ones. On a CPU, and for several GPUs, the memory is shared; on one GPU it is there, and freed at the end.
    """

    def __init__(
        self, info: WeightInfo, device: torch.device, load: Callable[[Source], Held], *, several: bool = False
    ) -> None:
        """`several`: vLLM's workers are other processes."""
        self.info, self._load = info, load
        self._slots = {slot.name: slot for slot in assign_slots(info, info)}
        size = max((slot.offset + slot.size for slot in self._slots.values()), default=1)
        self._shared = SharedMemory(size) if several or device.type == "cpu" else None
        self._raw = self._shared.raw if self._shared else torch.empty(size, dtype=torch.uint8, device=device)
        self._memory = self._shared.handle if self._shared and several else self._raw

    def target(self, name: str) -> Tensor:
        """See `WeightSink.target`."""
        return view(self._slots[name], self._raw)

    def memory(self) -> SharedMemory | None:
        """See `WeightSink.memory`."""
        return self._shared

    def finish(self) -> Held:
        """See `WeightSink.finish`."""
        return self._load(Source(tuple(self._slots.values()), self._memory))


def view(slot: Slot, raw: Tensor) -> Tensor:
    """Return the weight of `slot` in the bytes `raw`, sharing memory."""
    return slot.of(raw).view(slot.dtype).view(slot.shape)


def require_fit(info: WeightInfo, config: Any) -> None:
    """Raise `UserError` unless `info` has the names and shapes of a model of `config`: vLLM skips what is missing."""
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    expected = {name: weight.shape for name, weight in FileLayout.of(model).weights.items()}
    mistakes: Mapping[str, list[str]] = {
        "missing": sorted(expected.keys() - info.keys()),
        "unknown": sorted(info.keys() - expected.keys()),
        "with another shape": [name for name in info if tuple(info[name][0]) != expected.get(name, info[name][0])],
        "not floating-point": [name for name, (_, dtype) in info.items() if not dtype.is_floating_point],
    }
    if any(mistakes.values()):
        described = "; ".join(f"{what}: {listed(names)}" for what, names in mistakes.items() if names)
        raise UserError(f"the weights do not fit the model ({described}); send those that save_pretrained writes")


def load(worker: Any, source: Source) -> dict[str, Tensor]:
    """Load weights into the model of `worker` of vLLM; return what it holds as it was sent, by name."""
    raw = source.memory if isinstance(source.memory, Tensor) else open_memory(source.memory)
    worker.reload_weights(weights_iterator=((slot.name, view(slot, raw)) for slot in source.slots))
    model = worker.get_model()
    for head, embedding in _tied_heads(model):
        if hasattr(embedding, "cpu_linear"):  # the packed copy of the weight, with which a CPU computes
            head.cpu_linear = embedding.cpu_linear
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {slot.name: held for slot in source.slots if (held := _held(slot, parameters.get(slot.name))) is not None}


def load_shard(worker: Any, source: Source) -> None:
    """`load` into one of several workers, in a process of its own, which holds no weight as it was sent."""
    load(worker, source)


def _tied_heads(model: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each head that has the weight of an embedding, and the embedding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    modules = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    owners = {id(module.weight): module for module in modules if not isinstance(module, ParallelLMHead)}
    for module in modules:
        if isinstance(module, ParallelLMHead) and id(module.weight) in owners:
            yield module, owners[id(module.weight)]


def _held(slot: Slot, parameter: Tensor | None) -> Tensor | None:
    """Return `parameter` without the rows that pad a vocabulary, if it is the weight of `slot` as it was sent."""
    if parameter is None or parameter.dtype != slot.dtype or parameter.ndim != len(slot.shape):
        return None
    padded = parameter.ndim == 2 and len(parameter) > slot.shape[0]
    own = parameter[: slot.shape[0]] if padded else parameter
    return own if tuple(own.shape) == slot.shape else None
