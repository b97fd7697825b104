"""Tensor-parallel plans: by model family, the model's own, or one that the configuration names.

A plan covers the blocks and the final norm. The embedding and the head are always sharded over the vocabulary (see
`tensor_parallel`). Not supported: mixtures of experts, and models whose attention has q, k and v in one weight, unless
their own plan covers it.
"""

from __future__ import annotations

import importlib
from fnmatch import fnmatch
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from rlframework.base.errors import ConfigError, NotSupported
from rlframework.engine import is_multimodal
from rlframework_dtensor.styles import (
    REPLICATED,
    SEQUENCE,
    Chained,
    ConvColumns,
    ConvRows,
    HeadNorm,
    Hidden,
    Norm,
    Output,
    Plan,
)

KEY = "policy.dtensor.custom_parallel_plan"
TWO_NORMS = ("input_layernorm", "post_attention_layernorm")
FOUR_NORMS = (*TWO_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
NORMS = {
    "llama": TWO_NORMS,
    "mistral": TWO_NORMS,
    "qwen2": TWO_NORMS,
    "qwen3": TWO_NORMS,
    "gemma": TWO_NORMS,
    "gemma2": FOUR_NORMS,
    "gemma3_text": FOUR_NORMS,
}
"""The norms of a block by `model_type`, for the families whose blocks have q, k, v, o and gate, up, down."""
HEAD_NORMS = frozenset({"qwen3", "gemma3_text"})
"""The families that normalize each head of q and k."""


def make_plan(model: Any, *, sequence: bool, custom: str | None) -> Plan:
    """Return the plan for `model`; raise `NotSupported` or `ConfigError` if none exists.

    `sequence`: hidden states are sharded along the sequence between the sharded modules. `custom`: an import path.
    """
    kind, base = model.config.get_text_config().model_type, _base(model)
    if custom is not None:
        plan = _custom(custom)
    elif sequence and is_multimodal(model):
        raise NotSupported(
            f"there is no sequence-parallel plan for {type(model).__name__}, which is multimodal; set "
            "policy.parallelism.sequence to false"
        )
    elif kind in NORMS:
        plan = _family(base, kind, sequence)
    elif kind == "gpt2":
        plan = _gpt2(base, sequence)
    elif sequence:
        raise NotSupported(
            f"there is no sequence-parallel plan for {kind!r} (there is one for "
            f"{', '.join([*NORMS, 'gpt2'])}); set policy.parallelism.sequence to false, or {KEY}"
        )
    else:
        plan = _own(model, base)
    _require_modules(model, plan)
    return plan


def _base(model: Any) -> str:
    """The path of the module with the blocks: of a multimodal model that of its language model, the rest is whole."""
    if not is_multimodal(model):
        return str(model.base_model_prefix)
    return str(next(name for name, module in model.named_modules() if module is model.get_decoder()))


def _family(base: str, kind: str, sequence: bool) -> Plan:
    between = SEQUENCE if sequence else REPLICATED
    block = f"{base}.layers.*"
    # redistribute the input once for the modules that share it, and sum their shares of its gradient once
    plan: Plan = {f"{block}.{part}": Hidden(between, REPLICATED) for part in ("self_attn", "mlp")}
    split = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan |= {f"{block}.{part}": ColwiseParallel() for part in split}
    plan |= {
        f"{block}.{part}": RowwiseParallel(output_layouts=between) for part in ("self_attn.o_proj", "mlp.down_proj")
    }
    if kind in HEAD_NORMS:
        plan |= {f"{block}.self_attn.{part}": HeadNorm() for part in ("q_norm", "k_norm")}
    if sequence:
        plan |= _along_the_sequence(f"{base}.layers.0", f"{base}.norm", [f"{block}.{norm}" for norm in NORMS[kind]])
    return plan


def _gpt2(base: str, sequence: bool) -> Plan:
    """Shard embedding, head and MLP; attention, with q, k and v in one weight, is computed by every rank."""
    between = SEQUENCE if sequence else REPLICATED
    block = f"{base}.h.*"
    plan: Plan = {
        f"{block}.mlp": Hidden(between, REPLICATED),
        f"{block}.mlp.c_fc": ConvColumns(),
        f"{block}.mlp.c_proj": ConvRows(output_layouts=between),
    }
    if sequence:
        plan[f"{block}.attn"] = Chained(Hidden(SEQUENCE, REPLICATED, local=True), Output(REPLICATED, SEQUENCE))
        plan |= _along_the_sequence(f"{base}.h.0", f"{base}.ln_f", [f"{block}.ln_1", f"{block}.ln_2"])
    return plan


def _along_the_sequence(first_block: str, last_norm: str, norms: list[str]) -> Plan:
    plan: Plan = {norm: Norm() for norm in norms}
    plan[first_block] = Hidden(REPLICATED, SEQUENCE, local=True)
    plan[last_norm] = Chained(Norm(), Output(SEQUENCE, REPLICATED))
    return plan


def _own(model: Any, base: str) -> Plan:
    """The plan in the model's own configuration, without the embedding, which is always sharded over the vocabulary."""
    blocks, config = model.get_submodule(base), model.config.get_text_config()
    embedding = [name for name, module in blocks.named_modules() if module is model.get_input_embeddings()]
    own = getattr(config, "base_model_tp_plan", None) or {}
    plan = {path: word for path, word in own.items() if path not in embedding}
    if not plan:
        raise NotSupported(
            f"there is no tensor-parallel plan for {config.model_type!r}; set policy.parallelism.tensor to 1, or {KEY}"
        )
    styles = {f"{base}.{path}": _style(path, word) for path, word in plan.items()}
    _require_whole_gradients(model, styles)
    return styles


def _require_whole_gradients(model: Any, plan: Plan) -> None:
    """Raise `NotSupported` for an activation function with weights, as Apertus has, that `plan` leaves out.

    Each rank applies it to its share of the features, so it would keep its own share of the weights' gradient.
    """
    for path, module in model.named_modules():
        is_activation = type(module).__module__ == "transformers.activations"
        if is_activation and any(True for _ in module.parameters()) and not any(fnmatch(path, each) for each in plan):
            raise NotSupported(
                f"the tensor-parallel plan of {model.config.model_type!r} does not sum the gradients of {path} over "
                f"the workers; set policy.parallelism.tensor to 1, or {KEY}"
            )


def _style(path: str, word: str) -> ParallelStyle:
    """The style for transformers' name `word`."""
    styles: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
        "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
        "rowwise_rep": RowwiseParallel(input_layouts=Replicate()),
        "replicated_with_grad_allreduce": HeadNorm(),
    }
    if word not in styles:
        raise NotSupported(
            f"the model's own plan shards {path} as {word!r}, which this backend does not support (it supports "
            f"{', '.join(styles)}); set policy.parallelism.tensor to 1, or {KEY}"
        )
    return styles[word]


def _custom(path: str) -> Plan:
    """Import the plan `module:name` or `module.name`: a dictionary, or a function that returns one."""
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        target: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{KEY}={path!r} cannot be imported: {error}; write module:name") from error
    plan = target() if callable(target) else target
    if not isinstance(plan, dict) or not all(isinstance(style, ParallelStyle) for style in plan.values()):
        raise ConfigError(
            f"{KEY}={path!r} is not a plan: expected a dictionary of torch.distributed.tensor.parallel styles by "
            f"module path, or a function that returns one, not {plan!r}"
        )
    return dict(plan)


def _require_modules(model: nn.Module, plan: Plan) -> None:
    """Check that each path of `plan` matches a module, and none the embedding or the head."""
    names = [name for name, _ in model.named_modules()]
    vocabulary = {name for name, module in model.named_modules() if module in _ends(model)}
    for path in plan:
        matches = {name for name in names if name.count(".") == path.count(".") and fnmatch(name, path)}
        if not matches:
            raise ConfigError(f"the tensor-parallel plan names {path}, which {type(model).__name__} does not have")
        if matches & vocabulary:
            raise ConfigError(
                f"the tensor-parallel plan names {path}, but the backend shards the embedding and the head "
                f"over the vocabulary; remove it from {KEY}"
            )


def _ends(model: Any) -> tuple[nn.Module, nn.Module]:
    return model.get_input_embeddings(), model.get_output_embeddings()
