"""The SDK of training backends: everything that a backend imports of core besides its configuration and its record.

A backend is an `Engine` (what differs between training engines), a `PolicyWorkerBase` around it, and a record
(`rlframework.plugins.types`). The rest of this page are parts that engines share: Hugging Face models and their
attention of packed rows, the output head, checkpoints by tensor, process groups. The names are versioned with the
plugin API: one that is removed or changes its meaning raises `PolicyWorkerRecord.supported_api`.
"""

# ruff: noqa: F401 - the names are exported
# mypy: implicit-reexport
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
    from rlframework.models.adapters import ModelState, layers_of
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
    from rlframework.models.varlen import Scores, kernel_for_packed_rows
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
    from rlframework.policy.head.vocabulary import VocabularyShard
    from rlframework.policy.host_buffers import HostBuffers
    from rlframework.policy.lora_math import A, B, initial_a, is_adapter, merge
    from rlframework.policy.microbatches.aligned_media import align_media
    from rlframework.policy.microbatches.on_demand import on_device, on_host
    from rlframework.policy.optimization import layer_matrices, parameter_groups
    from rlframework.policy.profiling import BACKWARD, FORWARD, GATHER, DeviceWait, trace_span
    from rlframework.policy.shared_state import TrainingProgress
    from rlframework.policy.tensor_shards import Region, Slices, fill_moments, fill_weights, flat_shards, steps_of
    from rlframework.policy.worker import PolicyWorkerBase
    from rlframework.workers import process_groups
    from rlframework.workers.process_groups import run_on_all_ranks

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
