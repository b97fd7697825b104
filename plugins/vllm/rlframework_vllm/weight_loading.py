"""Weights on their way into vLLM: its loader copies them from memory of the engine. Runs in vLLM's workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from rlframework.base.errors import RefitError
from rlframework.generation.sdk import Slot, Source, shows_columns

_ENCODER = "visual."  # the image encoder in files and in vLLM, in all of `KINDS`; probes have no images


def load(worker: Any, source: Source) -> dict[str, Tensor]:
    """Load weights into the model of `worker` of vLLM; return what it holds as it was sent, by name.

    Raises `RefitError` if a packed layer of the image encoder computes with other weights.
    """
    load_shard(worker, source)
    model = worker.get_model()
    packed = {
        f"{name}.weight": layer
        for name, layer in model.named_modules()
        if name.startswith(_ENCODER) and hasattr(layer, "cpu_linear")
    }
    for name, weight in source.weights() if packed else ():
        if name in packed:
            require_packed(name, packed[name], weight)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {slot.name: held for slot in source.slots if (held := _held(slot, parameters.get(slot.name))) is not None}


def load_shard(worker: Any, source: Source) -> None:
    """`load` into one of several workers, in a process of its own, which holds no weight as it was sent."""
    worker.reload_weights(weights_iterator=source.weights())
    for head, embedding in _tied_heads(worker.get_model()):
        if hasattr(embedding, "cpu_linear"):  # the packed copy of the weight, with which a CPU computes
            head.cpu_linear = embedding.cpu_linear
            require_packed("the head", head, head.weight)


def require_packed(name: str, layer: Any, weight: Tensor) -> None:
    """Raise `RefitError` if the packed copy of the weight of a layer has other values than `weight`.

    Probes do not detect a head of an earlier version if the learning rate is small, and they have no images.
    """
    sent = weight.to(layer.weight.dtype)
    if not shows_columns(lambda rows: layer.cpu_linear(rows, layer.weight, None), sent):
        raise RefitError(f"vLLM computes {name} with other weights than it was sent or is tied to: report a bug")


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
