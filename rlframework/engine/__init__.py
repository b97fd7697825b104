"""The SDK of training backends: everything that a backend imports of core besides its configuration and its record.

A backend is an `Engine` (what differs between training engines), a `PolicyWorkerBase` around it, and a record
(`rlframework.plugins.types`). The rest of this page are parts that engines share: Hugging Face models and their
attention of packed rows, the output head, checkpoints by tensor, process groups. The names are versioned with the
plugin API: one that is removed or changes its meaning raises `PolicyWorkerRecord.supported_api`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlframework.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from rlframework.huggingface.vision_models import packs_images
    from rlframework.interfaces.data_processor import Microbatch, MicrobatchRule
    from rlframework.interfaces.named_sharding import data_parallel_size
    from rlframework.interfaces.policy_worker import WorkerInfo
    from rlframework.interfaces.worker_group import WorkerContext
    from rlframework.models import adapters
    from rlframework.models.activation_checkpointing import checkpoint_activations
    from rlframework.models.adapters import layers_of
    from rlframework.models.attention import ATTENTION, PaddedRows, RowLayout, Segments, row_attention
    from rlframework.models.described_weights import ModelFiles, new_head_hint, new_weights, weights_folder
    from rlframework.models.file_weights import ADAPTER, FileLayout, FileWeight, external_name, gathered, named_tensors
    from rlframework.models.forward import Attend, ContextParallel, attending, forward
    from rlframework.models.load_balancing import LoadBalancingLoss
    from rlframework.models.loading import (
        auto_class,
        decoder_layers,
        empty_model,
        freeze_part,
        is_multimodal,
        load_config,
        load_model,
        pretrained_weights,
        replacing,
        require_vocabulary,
        trains_images_only,
    )
    from rlframework.models.probing import probe_packing, require_splittable
    from rlframework.models.rotary import length_dependent, positions_without_padding, rotate_by_sequence
    from rlframework.models.scores import Scores
    from rlframework.models.varlen import kernel_for_packed_rows
    from rlframework.policy.all_ranks import run_on_all_ranks
    from rlframework.policy.checkpoint.pickles import without_code
    from rlframework.policy.checkpoint.saved import FIRST, INDEX, SECOND, moments_slice, slice_of
    from rlframework.policy.checkpoint.sharded import read_index
    from rlframework.policy.engine import (
        Engine,
        Moments,
        ShardedState,
        Step,
        StepResult,
        TensorShard,
        WeightSpec,
        no_adapters,
    )
    from rlframework.policy.head.patch import HeadOutput, HeadPatch, HeadRequest, output_head, read_head_output
    from rlframework.policy.head.vocabulary_shard import VocabularyShard
    from rlframework.policy.host_buffers import HostBuffers
    from rlframework.policy.lora_math import A, B, initial_a, is_adapter, merge
    from rlframework.policy.microbatches.aligned_media import align_media
    from rlframework.policy.microbatches.on_demand import on_device, on_host
    from rlframework.policy.optimization import layer_matrices, parameter_groups
    from rlframework.policy.profiling import BACKWARD, FORWARD, GATHER, DeviceWait, trace_span
    from rlframework.policy.shared_state import TrainingProgress
    from rlframework.policy.worker import PolicyWorkerBase
    from rlframework.workers import process_groups

__all__ = [
    "ADAPTER",
    "ATTENTION",
    "BACKWARD",
    "FIRST",
    "FORWARD",
    "GATHER",
    "INDEX",
    "SECOND",
    "A",
    "Attend",
    "B",
    "ContextParallel",
    "DeviceWait",
    "Engine",
    "FileLayout",
    "FileWeight",
    "HeadOutput",
    "HeadPatch",
    "HeadRequest",
    "HostBuffers",
    "LoadBalancingLoss",
    "Microbatch",
    "MicrobatchRule",
    "ModelFiles",
    "Moments",
    "PaddedRows",
    "PolicyWorkerBase",
    "RowLayout",
    "Scores",
    "Segments",
    "ShardedState",
    "Step",
    "StepResult",
    "TensorShard",
    "TrainingProgress",
    "VocabularyShard",
    "WeightSpec",
    "WorkerContext",
    "WorkerInfo",
    "adapters",
    "align_media",
    "attending",
    "auto_class",
    "checkpoint_activations",
    "data_parallel_size",
    "decoder_layers",
    "empty_model",
    "external_name",
    "forward",
    "freeze_part",
    "gathered",
    "initial_a",
    "is_adapter",
    "is_multimodal",
    "kernel_for_packed_rows",
    "layer_matrices",
    "layers_of",
    "length_dependent",
    "load_config",
    "load_model",
    "merge",
    "moments_slice",
    "named_tensors",
    "new_head_hint",
    "new_weights",
    "no_adapters",
    "on_device",
    "on_host",
    "output_head",
    "packs_images",
    "parameter_groups",
    "positions_without_padding",
    "pretrained_weights",
    "probe_packing",
    "process_groups",
    "read_head_output",
    "read_index",
    "replacing",
    "require_splittable",
    "require_vocabulary",
    "rotate_by_sequence",
    "row_attention",
    "run_on_all_ranks",
    "slice_of",
    "trace_span",
    "trains_images_only",
    "weights_folder",
    "without_code",
]

_MODULES = {
    "ADAPTER": "rlframework.models.file_weights",
    "ATTENTION": "rlframework.models.attention",
    "BACKWARD": "rlframework.policy.profiling",
    "FIRST": "rlframework.policy.checkpoint.saved",
    "FORWARD": "rlframework.policy.profiling",
    "GATHER": "rlframework.policy.profiling",
    "INDEX": "rlframework.policy.checkpoint.saved",
    "SECOND": "rlframework.policy.checkpoint.saved",
    "A": "rlframework.policy.lora_math",
    "Attend": "rlframework.models.forward",
    "B": "rlframework.policy.lora_math",
    "ContextParallel": "rlframework.models.forward",
    "DeviceWait": "rlframework.policy.profiling",
    "Engine": "rlframework.policy.engine",
    "FileLayout": "rlframework.models.file_weights",
    "FileWeight": "rlframework.models.file_weights",
    "HeadOutput": "rlframework.policy.head.patch",
    "HeadPatch": "rlframework.policy.head.patch",
    "HeadRequest": "rlframework.policy.head.patch",
    "HostBuffers": "rlframework.policy.host_buffers",
    "LoadBalancingLoss": "rlframework.models.load_balancing",
    "Microbatch": "rlframework.interfaces.data_processor",
    "MicrobatchRule": "rlframework.interfaces.data_processor",
    "ModelFiles": "rlframework.models.described_weights",
    "Moments": "rlframework.policy.engine",
    "PaddedRows": "rlframework.models.attention",
    "PolicyWorkerBase": "rlframework.policy.worker",
    "RowLayout": "rlframework.models.attention",
    "Scores": "rlframework.models.scores",
    "Segments": "rlframework.models.attention",
    "ShardedState": "rlframework.policy.engine",
    "Step": "rlframework.policy.engine",
    "StepResult": "rlframework.policy.engine",
    "TensorShard": "rlframework.policy.engine",
    "TrainingProgress": "rlframework.policy.shared_state",
    "VocabularyShard": "rlframework.policy.head.vocabulary_shard",
    "WeightSpec": "rlframework.policy.engine",
    "WorkerContext": "rlframework.interfaces.worker_group",
    "WorkerInfo": "rlframework.interfaces.policy_worker",
    "adapters": "rlframework.models.adapters",
    "align_media": "rlframework.policy.microbatches.aligned_media",
    "attending": "rlframework.models.forward",
    "auto_class": "rlframework.models.loading",
    "checkpoint_activations": "rlframework.models.activation_checkpointing",
    "data_parallel_size": "rlframework.interfaces.named_sharding",
    "decoder_layers": "rlframework.models.loading",
    "empty_model": "rlframework.models.loading",
    "external_name": "rlframework.models.file_weights",
    "forward": "rlframework.models.forward",
    "freeze_part": "rlframework.models.loading",
    "gathered": "rlframework.models.file_weights",
    "initial_a": "rlframework.policy.lora_math",
    "is_adapter": "rlframework.policy.lora_math",
    "is_multimodal": "rlframework.models.loading",
    "kernel_for_packed_rows": "rlframework.models.varlen",
    "layer_matrices": "rlframework.policy.optimization",
    "layers_of": "rlframework.models.adapters",
    "length_dependent": "rlframework.models.rotary",
    "load_config": "rlframework.models.loading",
    "load_model": "rlframework.models.loading",
    "merge": "rlframework.policy.lora_math",
    "moments_slice": "rlframework.policy.checkpoint.saved",
    "named_tensors": "rlframework.models.file_weights",
    "new_head_hint": "rlframework.models.described_weights",
    "new_weights": "rlframework.models.described_weights",
    "no_adapters": "rlframework.policy.engine",
    "on_device": "rlframework.policy.microbatches.on_demand",
    "on_host": "rlframework.policy.microbatches.on_demand",
    "output_head": "rlframework.policy.head.patch",
    "packs_images": "rlframework.huggingface.vision_models",
    "parameter_groups": "rlframework.policy.optimization",
    "positions_without_padding": "rlframework.models.rotary",
    "pretrained_weights": "rlframework.models.loading",
    "probe_packing": "rlframework.models.probing",
    "process_groups": "rlframework.workers.process_groups",
    "read_head_output": "rlframework.policy.head.patch",
    "read_index": "rlframework.policy.checkpoint.sharded",
    "replacing": "rlframework.models.loading",
    "require_splittable": "rlframework.models.probing",
    "require_vocabulary": "rlframework.models.loading",
    "rotate_by_sequence": "rlframework.models.rotary",
    "row_attention": "rlframework.models.attention",
    "run_on_all_ranks": "rlframework.policy.all_ranks",
    "slice_of": "rlframework.policy.checkpoint.saved",
    "trace_span": "rlframework.policy.profiling",
    "trains_images_only": "rlframework.models.loading",
    "weights_folder": "rlframework.models.described_weights",
    "without_code": "rlframework.policy.checkpoint.pickles",
}

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
