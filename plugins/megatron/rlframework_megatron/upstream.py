"""All imports from megatron-core, in one place and without its warnings.

It warns about each optional package that is missing (Transformer Engine, Apex) and about its own imports. On import it
passes small functions to `torch.compile`; without a GPU they stay uncompiled, so no compiler is loaded or needed.
"""

# ruff: noqa: F401 - the names are exported
# mypy: implicit-reexport
from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from rlframework.engine import replacing


def _uncompiled() -> AbstractContextManager[None]:
    if torch.cuda.is_available():
        return nullcontext()
    return replacing(torch, compile=lambda function, **_: function)


with warnings.catch_warnings(), _uncompiled():
    warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.strategies.torch import (
        MCoreSavePlanner,
        TorchDistSaveShardedStrategy,
        mcore_to_pyt_state_dict,
    )
    from megatron.core.dist_checkpointing.strategies.torch import (
        _replace_state_dict_keys_with_sharded_keys as replace_state_dict_keys_with_sharded_keys,
    )
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer
    from megatron.core.optimizer.optimizer_config import ParamPredicate
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import (
        CheckpointWithoutOutput,
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        reduce_from_tensor_model_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )
    from megatron.core.tensor_parallel import random as random_states
    from megatron.core.tensor_parallel.layers import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        set_tensor_model_parallel_attributes,
    )
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

if not hasattr(
    moe_utils, "te_general_gemm"
):  # 0.16.1 compares it with None but defines it only with Transformer Engine
    moe_utils.te_general_gemm = None


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings from megatron-core, which concern its own code and cannot be fixed by the caller."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        # from its calls: gradients of views of its buffers, and collectives under their names before torch 2.13
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        warnings.filterwarnings("ignore", message="Please use DTensor instead")  # its checkpoints use ShardedTensor
        yield
