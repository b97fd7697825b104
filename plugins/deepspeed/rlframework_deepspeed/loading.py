"""Weights from safetensors files into what DeepSpeed has made of a model: no process needs a whole one.

The model goes to DeepSpeed with memory that has not been touched, which takes no room where the system gives it as it
is written to: DeepSpeed deals weights out one at a time and lets go of each. Then each rank reads what it has of each
weight, memory-mapped, as fp32; also of a model in half precision, so that its fp32 weights are those of the files.
Checkpoints whose names are not the model's, quantised ones and those not in safetensors take a whole copy on every
process, which is logged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.config.policy import PolicyConfig
from rlframework.models.adapters import outside
from rlframework.models.file_names import file_weights
from rlframework.models.files import named_weights, weights_folder
from rlframework.models.loading import load_whole


def give_memory(model: nn.Module, dtype: torch.dtype) -> None:
    """Put the parameters of `model`, on the meta device, into CPU memory as `dtype`, with any values; ties stay."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                if parameter not in made:
                    empty = torch.empty_like(parameter, device="cpu", dtype=dtype)
                    made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                setattr(module, name, made[parameter])


@contextmanager
def saved_weights(
    wanted: Mapping[str, Tensor], model: Any, config: PolicyConfig, attention: str | None
) -> Iterator[Mapping[str, Tensor]]:
    """The weights of `config.model_name` by the names of files; `wanted` has tensors of their shapes."""
    folder = weights_folder(config.model_name) if not getattr(model.config, "quantization_config", None) else None
    if folder is not None:
        with named_weights(wanted, folder, model) as found:
            if found is not None:
                yield found
                return
    yield _by_file_names(load_whole(config, attention))


def _by_file_names(whole: Any) -> Mapping[str, Tensor]:
    tensors = {outside(name): one.detach() for name, one in (*whole.named_parameters(), *whole.named_buffers())}
    return {name: part.of(tensors[part.source]) for name, part in file_weights(whole, tensors).items()}
