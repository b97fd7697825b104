"""The weights of a model as `save_pretrained` of transformers writes them: their names, and where they are in memory.

transformers 5 keeps some weights in another form than files do: the experts of a mixture share one tensor in memory,
`experts.gate_up_proj [E, 2 I, H]`, and have tensors of their own in files, such as `experts.3.gate_proj.weight [I, H]`
or `block_sparse_moe.experts.3.w1.weight`. All weights that enter or leave a worker have the names of files.
transformers' own conversion, run once on tensors without memory, says which part of which tensor each of them is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.core_model_loading import revert_weight_conversion

from rlframework.policy.lora_math import is_adapter

ADAPTER = "default"
"""The name of the only adapter in peft."""


def external_name(name: str) -> str:
    """Return the external name of a parameter or buffer of a model that may have adapters."""
    return re.sub(rf"\.(lora_[AB])\.{ADAPTER}\.", r".\1.", name).replace(".base_layer.", ".")


def named_tensors(model: Any) -> dict[str, Tensor]:
    """Return parameters, adapters included, and saved buffers by external name; a tied head only as the embedding.

    `model` has all parameters, sharded or not. The tensors are the live ones, detached: writing to one changes the
    model.
    """
    saved = model.state_dict().keys()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {external_name(name): tensor.detach() for name, tensor in named if name in saved}


@dataclass(frozen=True)
class FileWeight:
    """A weight in files and its location in the model's tensor `source`: all of it, or rows, possibly of one expert.

    `whole`: the shape of `source`. `expert`: index in its first dimension; None: the weight has this dimension too.
    `start`: the first row.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    expert: int | None = None
    start: int = 0

    @classmethod
    def entire(cls, name: str, shape: tuple[int, ...]) -> FileWeight:
        """Return the weight that is a tensor of the model itself."""
        return cls(name, name, tuple(shape), tuple(shape))

    @property
    def is_part(self) -> bool:
        """Whether the weight is less than its source."""
        return self.shape != self.whole

    @property
    def flat_start(self) -> int:
        """The position of the weight's first element in its source."""
        row = 0 if self.expert is None else self.expert * self.whole[1]
        return (row + self.start) * math.prod(self.shape[1:])

    def of(self, whole: Tensor) -> Tensor:
        """Return the weight as a view of the full tensor `source`."""
        if not self.is_part:
            return whole
        inside = whole if self.expert is None else whole[self.expert]
        return inside[self.start : self.start + self.shape[0]]


@dataclass(frozen=True)
class FileLayout:
    """The weights of a model in files.

    `weights`: by name; those of one source are adjacent. `by_source`: the same, by the model's tensor that has them,
    adapters included. `other_names`: further names of tied weights, by the name that `weights` has.
    """

    weights: dict[str, FileWeight]
    by_source: dict[str, list[FileWeight]]
    other_names: dict[str, list[str]]

    @classmethod
    def of(cls, model: Any) -> FileLayout:
        """Return the layout of `model` as transformers built it, with adapters or without, before it is sharded."""
        tensors = named_tensors(model)
        adapters = [FileWeight.entire(name, tuple(one.shape)) for name, one in tensors.items() if is_adapter(name)]
        found = file_weights(model, {name: one for name, one in tensors.items() if not is_adapter(name)})
        tied = _tied_names(model)
        weights = {tied.get(name, [name])[0]: weight for name, weight in found.items()}
        weights = {name: replace(weight, name=name) for name, weight in weights.items()}
        other_names = {first: others for first, *others in tied.values()}
        by_source: dict[str, list[FileWeight]] = {}
        for weight in (*weights.values(), *adapters):
            by_source.setdefault(weight.source, []).append(weight)
        return cls(weights, by_source, other_names)


def by_file_names(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return full `tensors` of `model` under their names in files, sharing memory. Most names do not change."""
    return {name: weight.of(tensors[weight.source]) for name, weight in file_weights(model, tensors).items()}


def file_weights(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, FileWeight]:
    """Return the file weights of `tensors` of `model`, by name; those with the same source are adjacent.

    `model`: as transformers built it, because sharding changes its classes. A weight that is joined from several
    tensors in memory, or has its rows in another order there, keeps its name in memory, which transformers reads too.
    """
    bare = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    sources = {id(tensor): name for name, tensor in bare.items()}
    with _WithoutCopies():  # type: ignore[no-untyped-call]
        saved = revert_weight_conversion(model, dict(bare))
    found: dict[str, list[FileWeight | None]] = {name: [] for name in bare}
    for name, view in saved.items():
        source = sources.get(id(view if view._base is None else view._base))
        if source is not None:
            found[source].append(_located(name, source, view, bare[source]))
    complete = (_complete(parts, name, bare[name]) for name, parts in found.items())
    return {weight.name: weight for parts in complete for weight in parts}


class _WithoutCopies(TorchDispatchMode):
    """Make `contiguous` return the view that it is called on, so that what only selects elements shows where."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0]
        if func is torch.ops.aten._unsafe_view.default:  # reshaping what is not contiguous takes a copy
            return torch.empty(args[1], device="meta")
        return func(*args, **(kwargs or {}))


def _located(name: str, source: str, view: Tensor, whole: Tensor) -> FileWeight | None:
    """Return the weight `view` of the tensor `whole`; None if it is not all of it or rows of it."""
    shape = tuple(view.shape)
    if view is whole:
        return FileWeight(name, source, shape, shape)
    stacked = whole.dim() - view.dim()
    rows_only = shape and stacked in (0, 1) and shape[1:] == tuple(whole.shape[stacked + 1 :])
    if not rows_only or not view.is_contiguous():
        return None
    row, inside = divmod(int(view.storage_offset()), math.prod(shape[1:]))
    expert, start = divmod(row, whole.shape[stacked])
    if inside or start + shape[0] > whole.shape[stacked]:
        return None
    return FileWeight(name, source, shape, tuple(whole.shape), expert if stacked else None, start)


def _complete(parts: list[FileWeight | None], name: str, whole: Tensor) -> list[FileWeight]:
    """Return `parts` of the tensor `whole`, or the tensor itself, called `name`, if they are not all of it."""
    found = [part for part in parts if part is not None]
    complete = sum(math.prod(part.shape) for part in found) == whole.numel()
    return found if complete else [FileWeight.entire(name, whole.shape)]


def _tied_names(model: Any) -> dict[str, list[str]]:
    """Return the names of each tied weight in files, the one that `save_pretrained` keeps first, by that in memory."""
    groups: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(parameter, []).append(external_name(name))
    tied = {name: parameter for parameter, names in groups.items() if len(names) > 1 for name in names}
    renamed = {weight.source: weight.name for weight in file_weights(model, tied).values()}
    left_out = getattr(model, "all_tied_weights_keys", {})
    return {
        renamed[names[0]]: [renamed[name] for name in sorted(names, key=lambda name: name in left_out)]
        for names in groups.values()
        if len(names) > 1
    }


def gathered(
    names: Iterable[str], weights: Mapping[str, FileWeight], gather: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the file weights `names`; calls `gather` for a full tensor of the model once per run of its weights."""
    source, tensor = "", None
    for name in names:
        weight = weights[name]
        if weight.source != source or tensor is None:
            tensor = None  # free it before gathering the next one
            tensor = gather(weight.source)
        source = weight.source
        if weight.is_part:
            found = weight.of(tensor).clone()  # a view would keep all experts alive
        else:
            found, tensor = tensor, None
        yield name, found
        del found
