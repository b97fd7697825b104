"""Build the model of a worker: construct it, shard it over the mesh, load its weights.

A single process in fp32 keeps the plain module: there is nothing to shard or cast, and generation can share it.
Unsupported combinations are rejected before any weight is loaded.

Otherwise the model is constructed with parameters on the meta device and real buffers, sharded, and then loaded
(`load_pretrained_weights`): each rank reads its shard of each weight from memory-mapped safetensors files and casts it
to fp32, so no process holds a whole model. Checkpoints whose weight names differ from the model's, quantized
checkpoints, and formats other than safetensors require a whole copy in every process, which is logged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from rlframework.base.errors import NotSupported
from rlframework.config.policy import PolicyConfig
from rlframework.engine import (
    ATTENTION,
    FileLayout,
    HeadPatch,
    HostBuffers,
    WorkerContext,
    adapters,
    checkpoint_activations,
    decoder_layers,
    empty_model,
    fill_weights,
    freeze_part,
    is_multimodal,
    load_config,
    load_model,
    named_tensors,
    pretrained_weights,
    probe_packing,
    process_groups,
    require_splittable,
    require_vocabulary,
    row_attention,
    trains_images_only,
)
from rlframework_dtensor.config import DTensorConfig
from rlframework_dtensor.mesh import Mesh, Sizes
from rlframework_dtensor.offload import move_model
from rlframework_dtensor.shards import copy_into_shard, tensor_shards

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class BuiltModel:
    """A model on its device, with the patched head and the mesh (None: a plain module in a single process)."""

    model: Any
    head: HeadPatch
    mesh: Mesh | None
    packs: bool
    layout: FileLayout


def build_model(
    config: PolicyConfig,
    section: DTensorConfig,
    context: WorkerContext,
    sizes: Sizes,
    tokenizer: Any,
    device: torch.device,
) -> BuiltModel:
    """Build, shard and load the model that `config` names. Collective with more than one worker."""
    model_config = load_config(config)
    _require_shardable(model_config, config, sizes)
    can_pack = probe_packing(config, model_config, device, section.attention)
    choice = None if section.attention == "auto" else section.attention
    if context.world_size == 1 and config.precision == "float32" and not config.offload.parameters:
        model = load_model(config, choice)
        _prepare(model, config, section, tokenizer, sizes)
        if config.lora is not None:
            adapters.initialize(model, config.lora, copy_into_shard)
        layout = FileLayout.of(model)
        model = model.to(device)
        return BuiltModel(model, HeadPatch(model), None, can_pack, layout)
    model = empty_model(config, model_config, choice)
    _prepare(model, config, section, tokenizer, sizes)
    layout = FileLayout.of(model)
    process_groups.join(context, device)
    mesh = Mesh(sizes, device.type)
    head_rows = None
    if sizes.tensor > 1:
        from rlframework_dtensor.tensor_parallel import apply_tensor_parallel

        head_rows = apply_tensor_parallel(
            model, mesh.tensor, sequence=config.parallelism.sequence, custom_plan=section.custom_parallel_plan
        )
    if sizes.expert > 1:
        from rlframework_dtensor.experts import shard_experts

        shard_experts(model, mesh.expert)
    if config.lora is not None:
        adapters.freeze(model)
    if config.freeze is not None:
        freeze_part(model, config.freeze)
    head = HeadPatch(model, head_rows)
    apply_fsdp(model, mesh, config, section.reshard_after_forward)
    load_pretrained_weights(model, layout, config, choice, device)
    if config.lora is not None:
        adapters.initialize(model, config.lora, copy_into_shard)
    return BuiltModel(model, head, mesh, can_pack, layout)


def _require_shardable(model_config: Any, config: PolicyConfig, sizes: Sizes) -> None:
    """Raise a `ConfigError` if a model of `model_config` cannot be shared by as many workers as `sizes` says."""
    if sizes.context > 1:
        require_splittable(model_config)
    if sizes.tensor > 1:
        from rlframework_dtensor.tensor_parallel import require_divisible

        require_divisible(model_config, sizes.tensor)
    if sizes.expert > 1 or config.router_aux_loss_coef > 0:
        from rlframework_dtensor.experts import require_experts

        require_experts(model_config, sizes.expert, config.router_aux_loss_coef > 0)


def _prepare(model: Any, config: PolicyConfig, section: DTensorConfig, tokenizer: Any, sizes: Sizes) -> None:
    """Check the model and apply everything that has to happen before it is sharded."""
    require_vocabulary(model, tokenizer)
    if trains_images_only(config) and section.replicate > 1:
        raise NotSupported(
            "a frozen language model is not supported with replicas of the weights; set policy.dtensor.replicate to 1"
        )
    if config.lora is not None:
        adapters.inject(model, config.lora)
    if config.freeze is not None:
        freeze_part(model, config.freeze)
    if config.activation_checkpointing:
        checkpoint_activations(model, config.activation_checkpointing)
    if section.compile:
        compile_blocks(model)


def compile_blocks(model: Any, compiler: str = "inductor") -> None:
    """Compile each decoder block of `model` separately, on its first forward; call this before `fully_shard`.

    `compiler` is the backend of `torch.compile`. Shapes are dynamic, so one compilation serves any number of rows and
    tokens. The framework's attention is excluded, because it loops over a varying number of sequences of
    varying lengths. The embedding and the head are not compiled, and CUDA graphs are not used.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, torch.compiler.disable(row_attention))
    for layer in decoder_layers(model):
        layer.compile(dynamic=True, backend=compiler)


def _logits_alone(model: Any, args: Any, output: Any) -> Any:
    """Return `output` without what is never read, such as the hidden states of an image encoder."""
    return type(output)(logits=output.logits)


def apply_fsdp(model: Any, mesh: Mesh, config: PolicyConfig, reshard_after_forward: bool) -> Any:
    """Apply `fully_shard` to each decoder block, to embedding and head unless tied, and to the root.

    Weights are in CPU memory with `policy.offload.parameters`. On a GPU each block gathers the next one's weights.

    The forward runs in `policy.precision`; gradients are reduced in fp32. With expert parallelism, experts are sharded
    as units of their own, over the ranks that hold the same experts.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    layer_policy = MixedPrecisionPolicy(param_dtype=DTYPES[config.precision], reduce_dtype=torch.float32)
    on_cpu: dict[str, Any] = {}
    if config.offload.parameters:
        on_cpu["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.fsdp.device_type == "cuda")
    settings = {"mp_policy": layer_policy, "reshard_after_forward": reshard_after_forward, **on_cpu}
    if mesh.sizes.expert > 1:
        from rlframework_dtensor.experts import experts_of

        for module in experts_of(model):
            fully_shard(module, mesh=mesh.expert_fsdp, **settings)
    layers: list[Any] = list(decoder_layers(model))
    for layer in layers:
        fully_shard(layer, mesh=mesh.fsdp, **settings)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and not is_multimodal(model) and embedding.weight is not head.weight:
        fully_shard(embedding, mesh=mesh.fsdp, **settings)
        # gathered while the last blocks compute; the backward needs its weight again at once
        fully_shard(head, mesh=mesh.fsdp, mp_policy=layer_policy, reshard_after_forward=False, **on_cpu)
    model.register_forward_hook(_logits_alone)  # before the hook of FSDP, which casts and follows all that it is given
    root_policy = replace(layer_policy, output_dtype=torch.float32)
    # a tied head is part of the root, and its weight must stay unsharded until the backward
    fully_shard(model, mesh=mesh.fsdp, mp_policy=root_policy, reshard_after_forward=False, **on_cpu)
    if mesh.fsdp.device_type == "cuda":
        for layer, following in pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])
    return model


@torch.no_grad()
def load_pretrained_weights(
    model: Any, layout: FileLayout, config: PolicyConfig, attention: str | None, device: torch.device
) -> None:
    """Materialize `model`, sharded and on the meta device, on `device` and load the weights of `config.model_name`.

    With `policy.offload.parameters` the weights are allocated in CPU memory, and only the buffers on `device`.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device="cpu" if config.offload.parameters else device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    move_model(model, device, HostBuffers(), buffers_only=True)
    weights, tensors = pretrained_weights(layout, model, config, attention), named_tensors(model)
    for part in layout.weights.values():
        fill_weights(tensor_shards(part, tensors[part.source]), weights)
