"""Weights as files name them, where a model holds them otherwise: experts, each by itself outside, together inside.

A mixture of experts of transformers 5 holds `experts.gate_up_proj [E, 2 I, H]` and `experts.down_proj [E, H, I]`; files
have `experts.3.gate_proj.weight [I, H]`, `up_proj` and `down_proj [H, I]` of each expert. Everything that leaves a
worker or comes in goes by the names of files. Left out: kinds of models besides `KINDS`; they keep the names in memory,
which transformers reads too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("qwen2_moe", "qwen3_moe")
"""The `model_type`s whose files name experts so."""

_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True)
class FileWeight:
    """A weight of the files, and where it lies in the tensor `source` of the model: all of it, or rows of an expert."""

    name: str
    source: str
    shape: tuple[int, ...]
    expert: int | None = None
    start: int = 0

    def of(self, whole: Tensor) -> Tensor:
        """It, out of the whole tensor `source`; shares its memory."""
        return whole if self.expert is None else whole[self.expert, self.start : self.start + self.shape[0]]


def file_weights(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, FileWeight]:
    """What files call the `tensors` of `model`, those of one tensor one after the other."""
    per_expert = model.config.get_text_config().model_type in KINDS
    found = (part for name, tensor in tensors.items() for part in _parts(name, tuple(tensor.shape), per_expert))
    return {part.name: part for part in found}


def file_tensors(model: Any) -> dict[str, Tensor]:
    """The tensors of `model`, a whole module of transformers, by the names of files; they share its memory."""
    tensors = model.state_dict()
    return {name: weight.of(tensors[weight.source]) for name, weight in file_weights(model, tensors).items()}


def _parts(name: str, shape: tuple[int, ...], per_expert: bool) -> Iterator[FileWeight]:
    match = _EXPERTS.fullmatch(name) if per_expert and len(shape) == 3 else None
    if match is None:
        yield FileWeight(name, name, shape)
        return
    experts, rows, columns = shape
    kinds = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
    size = rows // len(kinds)
    for expert in range(experts):
        for number, kind in enumerate(kinds):
            yield FileWeight(f"{match[1]}.{expert}.{kind}.weight", name, (size, columns), expert, number * size)


def by_source(weights: Mapping[str, FileWeight]) -> dict[str, list[FileWeight]]:
    """The weights of the files that lie in each tensor of the model."""
    found: dict[str, list[FileWeight]] = {}
    for weight in weights.values():
        found.setdefault(weight.source, []).append(weight)
    return found


def gathered(
    names: Iterable[str], weights: Mapping[str, FileWeight], gather: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The weights `names` of the files; `gather` gives a whole tensor of the model, once for names that follow."""
    source, held = "", None
    for name in names:
        weight = weights[name]
        if weight.source != source or held is None:
            held = None  # before the next one comes
            held = gather(weight.source)
        source = weight.source
        if weight.expert is None:
            found, held = held, None
        else:
            found = weight.of(held).clone()  # a view would keep all experts
        yield name, found
        del found
