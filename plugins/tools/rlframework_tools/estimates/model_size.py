"""Sizes of a model, counted on the meta device without loading weights, and what a layer saves for the backward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlframework.config.policy import LoraConfig, ParallelismConfig, PolicyConfig
from rlframework.huggingface.hub import quiet_hub
from rlframework.huggingface.model_directories import first_size, quiet_transformers

if TYPE_CHECKING:
    from torch import nn

INDEX = 8
"""Bytes of an int64."""


@dataclass(frozen=True)
class BlockSize:
    """Parameters of a block: matrices and experts, which parallelism shards, and vectors, which are replicated."""

    matrices: int
    vectors: int = 0
    experts: int = 0

    @property
    def parameters(self) -> int:
        """All parameters of the block."""
        return self.matrices + self.vectors + self.experts


@dataclass(frozen=True)
class LayerShape:
    """Widths of a layer. `query`, `key_value`: of all heads; `experts`: 0 if dense, and else `top_k` per token.

    `intermediate`: of the MLP, or of an expert. `head_norms`: query and key are normalized.
    """

    hidden: int
    query: int
    key_value: int
    heads: int
    intermediate: int
    experts: int = 0
    top_k: int = 0
    head_norms: bool = False

    def saved(self, width: int, *, tensor: int = 1, sequence: bool = False) -> float:
        """Bytes that a layer saves for the backward of one token, with `width` bytes per number.

        A norm saves its input in fp32 and its result before the weight. Products save their input; attention saves
        query, output, key, value and an fp32 number per head; the MLP four widths; experts each row that is routed to
        them, in and out. `tensor` workers share attention and MLP, and the norms too if `sequence` is sharded.
        """
        between = tensor if sequence else 1
        norms = 2 * (self._norm(self.hidden, width) / between + width * self.hidden)
        heads = self._norm(self.query + self.key_value, width) if self.head_norms else 0
        attention = width * (2 * self.query + 2 * self.key_value) + 4 * self.heads
        return norms + (heads + attention + self._mlp(width)) / tensor

    def saved_products(self, width: int, *, tensor: int = 1, sequence: bool = False) -> float:
        """Bytes of the results of products and attention, and of the layer's input: selective checkpointing."""
        between = tensor if sequence else 1
        rows = self.top_k or 1
        attention = width * (2 * self.query + 2 * self.key_value) + 4 * self.heads
        mlp = width * rows * (2 * self.intermediate + (self.hidden if self.experts else 0))
        return 3 * width * self.hidden / between + (attention + mlp) / tensor

    def backward(self, width: int, *, tensor: int = 1, checkpointed: bool = False) -> float:
        """Bytes per token of the gradients that exist at once, besides what is saved.

        The larger of the MLP's, and of a norm's in fp32; without checkpointing the final norm's, while all is saved.
        """
        routed = self.top_k * (self.intermediate + self.hidden) if self.experts else self.intermediate
        norm = (14 if checkpointed else 28) * self.hidden
        return max(2 * width * (routed / tensor + self.hidden), norm)

    def _norm(self, features: int, width: int) -> int:
        return (4 + width) * features

    def _mlp(self, width: int) -> int:
        if not self.experts:
            return 4 * self.intermediate * width
        row = (2 * self.hidden + 4 * self.intermediate + 1) * width + 3 * INDEX
        return self.top_k * (row + INDEX) + 4 * self.experts


@dataclass(frozen=True)
class Part:
    """Parameters of a worker's part of the model: experts, and everything else; `unit`: the largest unit computed.

    `matrices`: those of `others` in matrices of blocks. `tied_end`: the embedding, if it is the head too.
    """

    others: int
    matrices: int
    experts: int
    unit: int
    tied_end: int


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model: its parameters by where they are, those that are trained, and the shape of its layers.

    `head` is 0 if it is tied to the embedding; `rest`: parameters outside blocks, embedding and head.
    """

    blocks: tuple[BlockSize, ...]
    embedding: int
    head: int
    rest: int
    trained: int
    layer: LayerShape
    vocabulary: int

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.embedding + self.head + self.rest + sum(block.parameters for block in self.blocks)

    def part(self, parallelism: ParallelismConfig, stage: int, *, splits_ends: bool) -> Part:
        """The largest part of a worker of the pipeline stage `stage`, before its backend shards it."""
        tensor, per_stage = parallelism.tensor, -(-len(self.blocks) // parallelism.pipeline)
        blocks = self.blocks[stage * per_stage : (stage + 1) * per_stage]
        first, last = stage == 0, stage == parallelism.pipeline - 1
        head = self.head or (0 if first else self.embedding)  # a tied head away from the embedding is a copy
        ends = [size for size, here in ((self.embedding, first), (head, last)) if here]
        ends = [-(-size // tensor) for size in ends] if splits_ends else ends
        experts = [block.experts // parallelism.expert // tensor for block in blocks]
        matrices = [-(-block.matrices // tensor) for block in blocks]
        others = [size + block.vectors for size, block in zip(matrices, blocks, strict=True)]
        units = [a + b for a, b in zip(experts, others, strict=True)]
        return Part(
            others=sum(others) + sum(ends) + (self.rest if last else 0),
            matrices=sum(matrices),
            experts=sum(experts),
            unit=max([*units, *ends], default=0) if self.blocks else self.parameters,
            tied_end=0 if self.head or not first or not last else sum(ends),
        )


def model_size(config: PolicyConfig) -> ModelSize:
    """Return the sizes of the model `policy.model_name`. Leaves the process's random states unchanged.

    Raises `ConfigError` or `NotSupported` if `policy.lora` selects what the model does not have.
    """
    import torch

    from rlframework.models.loading import auto_class, decoder_layers, load_config

    with quiet_hub():
        found = load_config(config)
    with torch.random.fork_rng(devices=[]), torch.device("meta"), quiet_transformers():
        model = auto_class(found, config.head).from_config(
            found, dtype=torch.float32, trust_remote_code=config.trust_remote_code
        )
    layers = decoder_layers(model)
    blocks = tuple(_block_size(layer) for layer in layers)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is None or head.weight is embedding.weight
    ends = embedding.weight.numel(), 0 if tied else head.weight.numel()
    parameters = _count(model.parameters())
    return ModelSize(
        blocks=blocks,
        embedding=ends[0],
        head=ends[1],
        rest=parameters - sum(ends) - sum(block.parameters for block in blocks),
        trained=parameters if config.lora is None else _adapter_parameters(model, config.lora),
        layer=_layer_shape(found.get_text_config(), layers),
        vocabulary=first_size(found.get_text_config(), "vocab_size") or 0,
    )


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _block_size(layer: nn.Module) -> BlockSize:
    named = dict(layer.named_parameters())
    experts = [parameter for name, parameter in named.items() if ".experts." in name]
    vectors = [parameter for parameter in named.values() if parameter.ndim < 2]
    return BlockSize(
        matrices=_count(named.values()) - _count(experts) - _count(vectors),
        vectors=_count(vectors),
        experts=_count(experts),
    )


def _adapter_parameters(model: Any, lora: LoraConfig) -> int:
    from rlframework.models.adapters import adapted_layers

    layers = [model.get_submodule(name) for name in adapted_layers(model, lora)]
    return sum(lora.rank * (layer.in_features + layer.out_features) for layer in layers)


def _layer_shape(text: Any, layers: list[nn.Module]) -> LayerShape:
    def size(*names: str) -> int:
        return first_size(text, *names) or 0

    hidden, heads = size("hidden_size", "n_embd"), size("num_attention_heads", "n_head")
    head = size("head_dim") or hidden // max(heads, 1)
    top_k = size("num_experts_per_tok")
    dense = size("intermediate_size", "n_inner") or 4 * hidden
    return LayerShape(
        hidden=hidden,
        query=head * heads,
        key_value=head * (size("num_key_value_heads") or heads),
        heads=heads,
        intermediate=(top_k and size("moe_intermediate_size")) or dense,
        experts=size("num_experts", "num_local_experts") if top_k else 0,
        top_k=top_k,
        head_norms=any(name.endswith("q_norm") for layer in layers[:1] for name, _ in layer.named_modules()),
    )
