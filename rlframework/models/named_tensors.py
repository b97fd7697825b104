"""The named tensors of a transformers model, and their names in files.

All weights that enter or leave a worker have the names that `save_pretrained` writes. They differ for a mixture of
experts, which has `experts.gate_up_proj [E, 2 I, H]` and `experts.down_proj [E, H, I]` in transformers 5, and in files
`experts.3.gate_proj.weight [I, H]`, `up_proj` and `down_proj [H, I]` for each expert. Model types besides `KINDS` keep
their names in memory, which transformers reads too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER = "default"  # peft's name for the only adapter
KINDS = ("qwen2_moe", "qwen3_moe")  # the `model_type`s whose files have one tensor per expert
_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


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


def by_file_names(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return full `tensors` of `model` under their names in files, sharing memory. Most names do not change."""
    return {name: weight.of(tensors[weight.source]) for name, weight in file_weights(model, tensors).items()}


@dataclass(frozen=True)
class FileWeight:
    """A weight in files and its location in the model's tensor `source`: all of it, or some rows of one expert."""

    name: str
    source: str
    shape: tuple[int, ...]
    expert: int | None = None
    start: int = 0

    def of(self, whole: Tensor) -> Tensor:
        """Return the weight as a view of the full tensor `source`."""
        return whole if self.expert is None else whole[self.expert, self.start : self.start + self.shape[0]]


def file_weights(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, FileWeight]:
    """Return the file weights of `tensors` of `model`, by name; those with the same source are adjacent."""
    per_expert = model.config.get_text_config().model_type in KINDS
    found: dict[str, FileWeight] = {}
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        parts = list(split_experts(name, shape)) if per_expert else []
        found |= {weight.name: weight for weight in parts or [FileWeight(name, name, shape)]}
    return found


def split_experts(name: str, shape: tuple[int, ...]) -> Iterator[FileWeight]:
    """Yield the weights of each expert in the tensor `name`; nothing unless it is a stack of experts."""
    match = _EXPERTS.fullmatch(name)
    if match is None or len(shape) != 3:
        return
    experts, rows, columns = shape
    kinds = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
    size = rows // len(kinds)
    for expert in range(experts):
        for number, kind in enumerate(kinds):
            yield FileWeight(f"{match[1]}.{expert}.{kind}.weight", name, (size, columns), expert, number * size)


def by_source(weights: Mapping[str, FileWeight]) -> dict[str, list[FileWeight]]:
    """Group the file weights by the model's tensor that contains them."""
    found: dict[str, list[FileWeight]] = {}
    for weight in weights.values():
        found.setdefault(weight.source, []).append(weight)
    return found


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
        if weight.expert is None:
            found, tensor = tensor, None
        else:
            found = weight.of(tensor).clone()  # a view would keep all experts alive
        yield name, found
        del found
