"""Load safetensors files into a model sharded by DeepSpeed, without a whole copy in any process.

DeepSpeed receives the model in uninitialised memory, which the operating system commits only when written: it shards
weights one at a time and frees each. Then each rank reads its shards, memory-mapped, as fp32, also for half-precision
models, so that their fp32 weights equal the files. Checkpoints with other weight names, quantised ones and other
formats require a whole copy in every process, which is logged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.config.policy import PolicyConfig
from rlframework.models.adapters import external_name
from rlframework.models.file_names import file_weights
from rlframework.models.files import named_weights, weights_folder
from rlframework.models.loading import load_whole


def give_memory(model: nn.Module, dtype: torch.dtype) -> None:
    """Move the meta parameters of `model` to uninitialised CPU memory as `dtype`, keeping ties."""
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
    """The weights of `config.model_name` by their names in files; `wanted`: tensors of their shapes."""
    folder = weights_folder(config.model_name) if not getattr(model.config, "quantization_config", None) else None
    if folder is not None:
        with named_weights(wanted, folder, model) as found:
            if found is not None:
                yield found
                return
    yield _by_file_names(load_whole(config, attention))


def _by_file_names(whole: Any) -> Mapping[str, Tensor]:
    tensors = {external_name(name): one.detach() for name, one in (*whole.named_parameters(), *whole.named_buffers())}
    return {name: part.of(tensors[part.source]) for name, part in file_weights(whole, tensors).items()}
