"""The CPU adapter, the process groups, and models that the backend cannot compute as transformers does."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rlframework.base.errors import ConfigError, DataError, NotSupported
from rlframework.config.policy import ParallelismConfig, PolicyConfig
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.workers import process_groups
from rlframework_megatron import cpu, layers
from rlframework_megatron.architectures import ARCHITECTURES
from rlframework_megatron.config import MegatronConfig
from rlframework_megatron.coordinates import Coordinates
from rlframework_megatron.names import local_shards, weight_shapes
from rlframework_megatron.parallel import Groups, Sizes
from rlframework_megatron.settings import (
    as_reward_model,
    require_axes,
    require_experts,
    require_same_function,
    transformer_config,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_the_adapter_redirects_cuda_to_the_cpu():
    with cpu.on(CPU):
        assert torch.zeros(2, device="cuda").device == CPU
        assert torch.ones(1, device=torch.device("cuda", 0)).device == CPU
        assert torch.zeros(2).to("cuda").device == CPU
        assert torch.zeros(2).cuda().device == CPU
        assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
        assert torch.cuda.current_device() == CPU


def test_the_adapter_is_removed_after_an_error_in_a_nested_one():
    before = torch.cuda.current_device, torch.cuda.Stream, torch.distributed.all_to_all_single
    with pytest.raises(RuntimeError, match="inside"), cpu.on(CPU), cpu.on(CPU):
        raise RuntimeError("inside")
    assert before == (torch.cuda.current_device, torch.cuda.Stream, torch.distributed.all_to_all_single)
    assert torch.zeros(2).type() == "torch.FloatTensor"


def test_on_a_gpu_there_is_no_adapter():
    before = torch.cuda.current_device
    with cpu.on(CUDA):
        assert torch.cuda.current_device is before
        assert torch.zeros(2).type() == "torch.FloatTensor"


@pytest.mark.parametrize(
    ("workers", "axes", "says"),
    [
        (3, {"tensor": 2}, "3 workers cannot hold whole replicas"),
        (2, {"expert": 4}, "does not divide 2, the number of data-parallel workers"),
    ],
)
def test_worker_counts_that_do_not_factor_are_rejected(workers, axes, says):
    with pytest.raises(ConfigError, match=says):
        Sizes.of(workers, ParallelismConfig(**axes))


def test_one_process_has_one_layout_at_a_time():
    first = Groups(WorkerContext(), CPU, Sizes())
    second = Groups(WorkerContext(), CPU, Sizes())
    with pytest.raises(ConfigError, match="cannot have another"):
        Groups(WorkerContext(), CPU, Sizes(virtual=2, pipeline=2))
    for groups in (first, second):
        assert groups.data is None
        groups.leave()
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_the_last_policy_ends_the_threads_of_its_groups():
    """Gloo runs threads for each group."""
    process_groups.join(WorkerContext(), CPU)
    try:
        Groups(WorkerContext(), CPU, Sizes()).leave()  # libraries start threads on first use
        before = settled_threads()
        groups = Groups(WorkerContext(), CPU, Sizes())
        assert threads() > before
        groups.leave()
        until = time.monotonic() + 60
        while threads() > before and time.monotonic() < until:
            time.sleep(0.01)
        assert threads() == before
    finally:
        process_groups.leave()


def settled_threads() -> int:
    """The number of gloo's threads once it stays the same: a joined one is in /proc until the kernel has removed it."""
    counts = [threads()]
    while len(counts) < 20 or len(set(counts[-20:])) > 1:
        time.sleep(0.01)
        counts.append(threads())
    return counts[-1]


def threads() -> int:
    """The number of gloo's threads; others, such as those of pytest's workers, come and go."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            names.append((task / "comm").read_text())
    return sum("gloo" in name for name in names)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (LlamaConfig(hidden_act="unheard_of"), "activation 'unheard_of'"),
        (Gemma3TextConfig(use_bidirectional_attention=True), r"settings \{'use_bidirectional_attention': True\}"),
        (
            Qwen2Config(num_hidden_layers=2, layer_types=["full_attention", "chunked_attention"]),
            r"has \['chunked_attention', 'full_attention'\]",
        ),
    ],
)
def test_models_with_an_unsupported_function_are_rejected(config, says):
    with pytest.raises(NotSupported, match=says):
        require_same_function(config)


def test_a_setting_that_the_description_does_not_know_is_rejected(monkeypatch):
    """As one would be that a later release of transformers adds."""
    known = replace(ARCHITECTURES["granite"], residual_scale=None)
    monkeypatch.setitem(ARCHITECTURES, "granite", known)
    require_same_function(GraniteConfig())
    with pytest.raises(NotSupported, match=r"settings \{'residual_multiplier': 0.5\} of the granite model"):
        require_same_function(GraniteConfig(residual_multiplier=0.5))


@pytest.mark.parametrize("config", [LlamaConfig(), Qwen2Config(), Qwen3Config()], ids=lambda config: config.model_type)
def test_supported_models_are_configured_without_dropout(config):
    config.num_hidden_layers = 2
    made = transformer_config(config, PolicyConfig(model_name="m"), MegatronConfig(), Sizes(), CPU)
    assert made.hidden_dropout == made.attention_dropout == 0.0
    assert made.add_qkv_bias == (config.model_type == "qwen2")


@pytest.mark.parametrize(
    ("config", "sizes", "router_loss", "says"),
    [
        (LlamaConfig(), Sizes(data=2, expert=2), False, "no experts"),
        (LlamaConfig(), Sizes(), True, "no experts"),
        (Qwen3MoeConfig(num_hidden_layers=2), Sizes(tensor=2), False, "supports tensor parallelism only with"),
        (Qwen3MoeConfig(num_hidden_layers=2), Sizes(pipeline=2), True, "whole layers and sequences"),
    ],
)
def test_missing_experts_and_unsupported_axes_are_rejected(config, sizes, router_loss, says):
    with pytest.raises(NotSupported, match=says):
        require_experts(config, sizes, router_loss=router_loss)


@pytest.mark.parametrize(
    ("word", "config", "device", "there", "used"),
    [
        ("auto", LlamaConfig(), CUDA, True, True),
        ("auto", LlamaConfig(), CUDA, False, False),
        ("auto", LlamaConfig(), CPU, True, False),
        ("false", LlamaConfig(), CUDA, True, False),
        ("auto", Gemma3TextConfig(), CUDA, True, False),
        ("auto", LlamaConfig(attention_bias=True), CUDA, True, False),
    ],
)
def test_transformer_engine_is_used_on_a_gpu_where_it_computes_the_layers(
    monkeypatch, word, config, device, there, used
):
    monkeypatch.setattr(layers, "find_spec", lambda name: object() if there and name == "transformer_engine" else None)
    assert layers.uses_transformer_engine(MegatronConfig(transformer_engine=word), device, config) is used


@pytest.mark.parametrize(("device", "there"), [(CPU, True), (CUDA, False)])
def test_unavailable_transformer_engine_is_rejected(monkeypatch, device, there):
    monkeypatch.setattr(layers, "find_spec", lambda name: object() if there else None)
    with pytest.raises(ConfigError, match="requires a GPU and the package transformer_engine"):
        layers.uses_transformer_engine(MegatronConfig(transformer_engine=True), device, LlamaConfig())


def test_transformer_engine_is_rejected_for_layers_that_it_lacks(monkeypatch):
    monkeypatch.setattr(layers, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="does not support the parts of a gemma3_text layer"):
        layers.uses_transformer_engine(MegatronConfig(transformer_engine=True), CUDA, Gemma3TextConfig())


def test_the_score_row_of_a_reward_model_replaces_the_head():
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 11}
    several, one = (LlamaConfig(**sizes, num_labels=labels, tie_word_embeddings=True) for labels in (2, 1))
    with pytest.raises(DataError, match="has one label, and this one has 2"):
        as_reward_model(several, "score")
    as_reward_model(one, "score")
    shapes = weight_shapes(one)
    assert shapes["score.weight"] == (1, 8)
    assert "lm_head.weight" not in shapes
    last = local_shards(one, Coordinates(tensor_rank=1, tensor_size=2))[-1]
    assert (last.name, last.parameter, last.is_copy) == ("score.weight", "output_layer.weight", False)


@pytest.mark.parametrize(
    ("config", "sizes", "says"),
    [
        (GptOssConfig(), Sizes(tensor=2, sequence=True), "the experts of a gpt_oss model are not split"),
        (GptOssConfig(), Sizes(data=2, expert=2), "the experts of a gpt_oss model are not split"),
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            Sizes(context=2),
            r"rotary embeddings \['dynamic'\], whose frequencies depend on the length",
        ),
    ],
)
def test_axes_that_cannot_split_a_model_are_rejected(config, sizes, says):
    with pytest.raises(NotSupported, match=says):
        require_axes(config, sizes)
    require_axes(config, Sizes(pipeline=2))
