"""Tensor and sequence parallelism: a model's weights split over the ranks that compute it together.

The blocks are split as a plan says (`plans`), embedding and head over the vocabulary, tied heads included. It is done
before FSDP, on weights that may be on the meta device.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

from rlframework.errors import ConfigError
from rlframework.models.adapters import layers_of
from rlframework.plugins.model_checks import DIVIDED, indivisible
from rlframework.policy.head.vocab_parallel import VocabularyShard
from rlframework_dtensor.lora import with_adapters
from rlframework_dtensor.plans import make_plan
from rlframework_dtensor.styles import Embedding, cut, vocabulary_rows


def require_divisible(config: Any, tensor: int) -> None:
    """A `ConfigError` where `tensor` ranks cannot share a model of `config`. Before any weight is loaded."""
    text = config.get_text_config()
    # GPT-2 has other names for some, which the configuration answers to
    sizes = {name: getattr(text, name, None) for name in DIVIDED}
    found = indivisible(sizes, tensor) if tensor > 1 else None
    if found:
        raise ConfigError(f"{found}; choose a divisor")


def split(model: Any, mesh: DeviceMesh, *, sequence: bool, custom_plan: str | None) -> VocabularyShard | None:
    """Split `model` in place over the 1-D `mesh`; which rows of the head are here, for `HeadPatch` (None: all)."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    plan = make_plan(model, sequence=sequence, custom=custom_plan)
    parallelize_module(model, mesh, with_adapters(model, plan) if layers_of(model) else plan, src_data_rank=None)
    Embedding()._apply(embedding, mesh)
    if head is None:  # of a reward model: one row
        return None
    _split_head(head, embedding if tied else None, mesh)
    return VocabularyShard(mesh.get_group(), *vocabulary_rows(head.weight.shape[0], mesh))


def _split_head(head: nn.Module, tied_to: nn.Module | None, mesh: DeviceMesh) -> None:
    if tied_to is None:
        cut(head, "weight", mesh, Shard(0))
    else:
        head.weight = tied_to.weight
    if getattr(head, "bias", None) is not None:
        cut(head, "bias", mesh, Shard(0))
