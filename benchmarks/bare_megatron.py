"""A hand-written megatron-core loop for one worker.

GPTModel of the local layer specification, `DistributedDataParallel`, `get_megatron_optimizer` and the schedule of
`get_forward_backward_func`; megatron-core's own attention, norm, rotary positions and cross entropy of all logits.

It runs next to a policy of the framework, which must have created the process groups (the default one and those of
megatron-core): a process has only one set. From the backend it uses only the adapter that
makes megatron-core run on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from plain import PlainLoop, Rows
from torch import Tensor

from rlframework_megatron import cpu
from rlframework_megatron.upstream import quiet


class MegatronLoop(PlainLoop):
    """The work of `PlainLoop` in megatron-core. `section`: of `policy.megatron`, only `distributed_optimizer`."""

    def __init__(self, *args: Any, section: Mapping[str, Any], lr: float, weight_decay: float, **kwargs: Any) -> None:
        super().__init__(*args, lr=lr, weight_decay=weight_decay, **kwargs)
        if unknown := set(section) - {"distributed_optimizer"}:
            raise ValueError(f"the plain loop of megatron-core does not support {', '.join(sorted(unknown))}")
        distributed = bool(section.get("distributed_optimizer", False))
        source, half = self.model, self.dtype == torch.bfloat16
        del self.model, self.optimizer
        with self._megatron():
            from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
            from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
            from megatron.core.transformer.module import Float16Module

            gpt = gpt_model(source.config, half=half, on_gpu=self.device != "cpu")
            lacks, strange = gpt.load_state_dict(converted(source.state_dict(), source.config), strict=False)
            if strange or any(not name.endswith("_extra_state") for name in lacks):  # of Transformer Engine
                raise ValueError(f"the weights do not fit the GPTModel: {lacks}, {strange}")
            self.config, gpt = gpt.config, gpt.to(self.device)
            self.model = DistributedDataParallel(
                config=self.config,
                ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=distributed),
                module=Float16Module(self.config, gpt) if half else gpt,
            )
            settings = OptimizerConfig(
                optimizer="adam",
                lr=lr,
                weight_decay=weight_decay,
                adam_beta2=0.999,
                clip_grad=self.clip,
                bf16=half,
                params_dtype=self.config.params_dtype,
                use_distributed_optimizer=distributed,
            )
            self.optimizer = get_megatron_optimizer(
                settings, [self.model], get_standard_config_overrides(settings), use_gloo_process_groups=False
            )
        for group in self.optimizer.param_groups:  # as a scheduler would in each step
            group["lr"], group["weight_decay"] = lr, weight_decay * group["wd_mult"]

    @contextmanager
    def _megatron(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(quiet())
            stack.enter_context(cpu.on(torch.device(self.device)))
            yield

    def train(self, batch: Rows) -> tuple[float, float]:
        """Do one optimizer step on `batch`; return the loss and the gradient norm before clipping."""
        with self._megatron():
            from megatron.core.pipeline_parallel import get_forward_backward_func

            self.model.train()
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            parts, valid = list(self._microbatches(batch.lengths)), batch.mask[:, 1:].sum()

            def loss(index: Tensor, logprobs: Tensor) -> tuple[Tensor, dict[str, float]]:
                mask = self._cut(batch.mask, batch, index)[:, 1:].to(self.device)
                found = -(logprobs * mask).sum() / valid
                return found * len(parts), {"loss": found.item()}  # the schedule averages over the microbatches

            def forward(indices: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
                index = next(indices)
                return self._logprobs(batch, index), partial(loss, index)

            told = get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(parts),
                model=self.model,
                num_microbatches=len(parts),
                seq_length=batch.input_ids.shape[1],
                micro_batch_size=self.rows,
                forward_only=False,
            )
            _, norm, _ = self.optimizer.step()
        return sum(one["loss"] for one in told), float(norm)

    def get_logprobs(self, batch: Rows) -> Tensor:
        """See `PlainLoop.get_logprobs`."""
        with self._megatron():
            found: Tensor = super().get_logprobs(batch)
        return found

    def _logprobs(self, batch: Rows, index: Tensor) -> Tensor:
        ids = self._cut(batch.input_ids, batch, index).to(self.device)
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        # no mask: attention is causal and padding is on the right. The last column has no target
        nll: Tensor = self.model(ids, positions, None, labels=ids.roll(-1, 1))
        return -nll[:, :-1].float()


def gpt_model(config: Any, *, half: bool, on_gpu: bool) -> Any:
    """The GPTModel of a Llama or Qwen2 with the transformers configuration `config`, without its weights."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    made = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        layernorm_epsilon=config.rms_norm_eps,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=half,
        params_dtype=torch.bfloat16 if half else torch.float32,
        use_cpu_initialization=not on_gpu,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    return GPTModel(
        config=made,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        share_embeddings_and_output_weights=bool(config.tie_word_embeddings),
        position_embedding_type="rope",
        rotary_base=config.rope_parameters["rope_theta"],
    )


def converted(weights: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Rename transformers `weights` for a GPTModel, and fuse queries, keys and values per group of heads."""
    groups = config.num_key_value_heads
    found = {
        "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        found["output_layer.weight"] = weights["lm_head.weight"]
    for number in range(config.num_hidden_layers):
        theirs, ours = f"model.layers.{number}.", f"decoder.layers.{number}."
        for what in ("weight", "bias"):
            if f"{theirs}self_attn.q_proj.{what}" in weights:
                parts = [weights[f"{theirs}self_attn.{name}_proj.{what}"] for name in "qkv"]
                grouped = torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1)
                found[f"{ours}self_attention.linear_qkv.{what}"] = grouped.flatten(0, 1)
        found[f"{ours}self_attention.linear_proj.weight"] = weights[f"{theirs}self_attn.o_proj.weight"]
        gated = [weights[f"{theirs}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        found[f"{ours}mlp.linear_fc1.weight"] = torch.cat(gated)
        found[f"{ours}mlp.linear_fc2.weight"] = weights[f"{theirs}mlp.down_proj.weight"]
        found[f"{ours}input_layernorm.weight"] = weights[f"{theirs}input_layernorm.weight"]
        found[f"{ours}pre_mlp_layernorm.weight"] = weights[f"{theirs}post_attention_layernorm.weight"]
    return found
