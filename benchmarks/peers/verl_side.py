"""verl: its FSDP2 engine for language models, packed (its default) or padded, on a gloo group of one process.

verl has no CPU among its platforms and registers this engine for CUDA and NPU devices only. So a platform of ours names
the CPU (`set_platform` is its interface for that), and the engine's class is used without the registry.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch
from plain_side import as_rows
from steps import serve
from tensordict import TensorDict
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA


class PlatformCPU(PlatformCUDA):
    """The CPU, as verl asks for devices."""

    device_name = "cpu"

    @property
    def device_module(self) -> ModuleType:
        """torch.cpu, with the functions that verl expects of a device's memory."""
        module = ModuleType("cpu")
        module.__dict__.update(vars(torch.cpu))
        for name, value in (("mem_get_info", (1, 1)), ("memory_allocated", 0), ("memory_reserved", 0)):
            setattr(module, name, lambda *_, value=value: value)
        module.empty_cache = lambda: None  # type: ignore[attr-defined]
        return module

    def current_device(self) -> Any:
        """The device, instead of an index."""
        return torch.device("cpu")


set_platform(PlatformCPU())  # before the modules that ask for the device where they are imported

from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402
from verl.utils.dataset.dataset_utils import DatasetPadMode  # noqa: E402
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions  # noqa: E402
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402
from verl.workers.utils.losses import sft_loss  # noqa: E402


def make_engine(task: Mapping[str, Any], packed: bool) -> FSDPEngineWithLMHead:
    """Return an engine in fp32 with the settings of the other sides, and torch's default AdamW, as verl's is."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    dtypes = {f"{name}_dtype": "fp32" for name in ("param", "reduce", "buffer")}
    engine = FSDPEngineWithLMHead(
        HFModelConfig(
            path=task["model"],
            override_config={"attn_implementation": "sdpa"},
            enable_gradient_checkpointing=False,
            use_remove_padding=packed,
        ),
        FSDPEngineConfig(strategy="fsdp2", mixed_precision=dtypes, use_torch_compile=False),
        FSDPOptimizerConfig(lr=task["lr"], weight_decay=task["weight_decay"], clip_grad=task["clip"]),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine


def make_batch(task: Mapping[str, Any], packed: bool) -> TensorDict:
    """Return the rows as jagged tensors."""
    rows = as_rows(task["rows"])
    lengths = rows.lengths.tolist()
    columns = {
        "input_ids": [ids[:size] for ids, size in zip(rows.input_ids, lengths, strict=True)],
        "position_ids": [torch.arange(size) for size in lengths],
        "loss_mask": [mask[:size] for mask, size in zip(rows.mask, lengths, strict=True)],
    }
    nested = {name: torch.nested.as_nested_tensor(parts, layout=torch.jagged) for name, parts in columns.items()}
    batch = TensorDict(nested, batch_size=[len(lengths)])
    tensordict_utils.assign_non_tensor(
        batch,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=task["micro_rows"],
        use_remove_padding=packed,
        use_fused_kernels=False,
        pad_mode=DatasetPadMode.NO_PADDING,
        temperature=1.0,
        calculate_entropy=False,
    )
    return batch


def logprobs(task: Mapping[str, Any], packed: bool) -> None:
    """Log-probabilities of the completions; verl's are shifted, each belongs to the next token."""
    engine, mask = make_engine(task, packed), as_rows(task["rows"]).mask > 0

    def values(result: Mapping[str, Any]) -> dict[str, Any]:
        scored = result["model_output"]["log_probs"].unbind()
        chosen = [row[of[1 : len(row) + 1].nonzero()[:, 0]] for row, of in zip(scored, mask, strict=True)]
        return {"logprobs": torch.cat(chosen).tolist()}

    batch = make_batch(task, packed)
    with engine.eval_mode():
        serve(lambda: engine.infer_batch(batch.clone(recurse=False)), values)


def train(task: Mapping[str, Any], packed: bool) -> None:
    """A step on the mean negative log-likelihood of the completions."""
    engine, batch = make_engine(task, packed), make_batch(task, packed)
    loss = partial(sft_loss, None)
    with engine.train_mode():
        serve(
            lambda: engine.train_batch(batch.clone(recurse=False), loss),
            lambda result: {"loss": sum(result["loss"]), "grad_norm": result["metrics"]["grad_norm"]},
        )


def partition(task: Mapping[str, Any]) -> None:
    """As many bins of rows as a dynamic batch takes, by their lengths alone; they may exceed the capacity."""
    lengths = task["documents"][: task["partitioned"]]
    count = -(-sum(lengths) // task["capacity"])

    def sizes(bins: list[list[int]]) -> dict[str, int]:
        sums = [sum(lengths[index] for index in bin_) for bin_ in bins]
        return {"tokens": sum(sums), "bins": len(bins), "largest": max(sums)}

    serve(lambda: get_seqlen_balanced_partitions(lengths, count, equal_size=False), sizes)


WORKS: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
    f"{work.__name__} {way}": partial(work, packed=way == "packed")
    for work in (logprobs, train)
    for way in ("packed", "padded")
} | {"partition": partition}
