"""Generate `memory.md`: what the estimate of a run's memory counts, how it was checked, and the largest models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from model_shapes import DENSE, SPARSE, model_shapes
from pieces import page as page_of
from pieces import table

from rlframework import load_config
from rlframework.base.errors import ConfigError
from rlframework.config.sections import RunConfig
from rlframework.plugins.manager import create_manager
from rlframework_tools.estimates.disk import gib
from rlframework_tools.estimates.estimate import MARGIN, layout_of
from rlframework_tools.estimates.model_size import ModelSize, model_size
from rlframework_tools.estimates.plan import PlannedGpus
from rlframework_tools.estimates.row_sizes import Rows
from rlframework_tools.estimates.state_layout import PlannedWorker
from rlframework_tools.estimates.worker_memory import MemoryUse, peak, worker_memory

TOKENS, ANSWER, DECODED, GLOBAL = 16_384, 4_096, 32, 512


@dataclass(frozen=True)
class Layout:
    """A backend with its options: sections of `policy` for a number of GPUs."""

    name: str
    backend: str
    gpus: tuple[int, ...] = (1, 8, 64)
    policy: Mapping[str, Any] = field(default_factory=dict)


def _parallel(**axes: Any) -> dict[str, Any]:
    return {"parallelism": axes}


def _zero(stage: int) -> dict[str, Any]:
    return {"deepspeed": {"zero_optimization": {"stage": stage}}}


_SHARDED = {"megatron": {"distributed_optimizer": True}}
_SPLIT = {"tensor": 8, "sequence": True}
LAYOUTS = (
    Layout("`dtensor`", "dtensor"),
    Layout("`dtensor`, `offload.optimizer`", "dtensor", policy={"offload": {"optimizer": True}}),
    Layout("`dtensor`, `tensor: 8`, `sequence`", "dtensor", (8, 64), _parallel(**_SPLIT)),
    Layout("`dtensor`, `expert: 8`", "dtensor", (8, 64), _parallel(expert=8)),
    Layout("`deepspeed`, stage 2", "deepspeed", policy=_zero(2)),
    Layout("`deepspeed`, stage 3", "deepspeed", policy=_zero(3)),
    Layout("`megatron`, `distributed_optimizer`", "megatron", policy=_SHARDED),
    Layout("the same, `tensor: 8`, `sequence`", "megatron", (8, 64), {**_SHARDED, **_parallel(**_SPLIT)}),
    Layout("the same and `pipeline: 2`", "megatron", (64,), {**_SHARDED, **_parallel(**_SPLIT, pipeline=2)}),
    Layout(
        "`megatron`, `distributed_optimizer`, `expert: 8`", "megatron", (8, 64), {**_SHARDED, **_parallel(expert=8)}
    ),
)

_INTRO = f"""`rlframework train CONFIG --dry-run` estimates what a run needs, and a run prints the same at its start.
With `--on` it plans for GPUs that this machine does not have, so a laptop answers whether a run fits eight H100:

```shell
rlframework train run.yaml --dry-run --on 8xH100
rlframework train run.yaml --dry-run --on 2x24GiB policy.offload.optimizer=true
```

`--on` says which GPUs there are, and changes nothing that the configuration says. Without `worker_group.num_workers`
there is a worker on each GPU that the [generation workers](generation_workers.md) leave: engines of the group `ray`
have GPUs of their own, and are counted with their memory. `2x8xH100` are two machines with eight GPUs each; for several
machines, and for more than eight GPUs, `worker_group.name=ray` is planned. What cannot be checked on this machine, such
as the environment of vLLM, is a note. Models with a `config.json` and no tokenizer are estimated too, without reading
data. The exit code is 1 if the run does not fit, and 0 if it fits or may not fit. `rlframework/base/gpu_models.py`
lists the models of GPUs that are known by name; for others, and for other memories of these, add the memory:
`8xA100-40GB`, `2x24GiB`.

**It is an estimate.** The parts are counted as described below, and [compared with one GPU](#how-it-was-checked) in
three cases. Not counted: fragmentation of the allocator, workspaces of cuBLAS and buffers of NCCL, compiled code. So
warnings start at {MARGIN} times the estimate."""

_STATE = """Each backend declares how many bytes per parameter it keeps and over how many workers they are sharded, by
the hook `rlframework_state_layout` ([write a backend](write_a_backend.md)); for one that does not, the estimate assumes
FSDP and says so. In bfloat16, with d workers that are data- or context-parallel to each other, after tensor,
pipeline and expert parallelism divided the parameters:"""

_STATE_ROWS = (
    ("`dtensor`", "4/d fp32", "4/d fp32", "8/d", "none: the weights are fp32"),
    ("`dtensor`, `replicate: r`", "4r/d", "4r/d", "8r/d", "none"),
    ("`dtensor`, `reduce_gradients: step`", "4/d", "4/d, and 4 whole until the last microbatch", "8/d", "none"),
    ("`deepspeed`, stage 0", "2", "2, and 4 in the optimizer's step", "8", "4"),
    ("`deepspeed`, stage 1", "2", "2, and 4/d in the step", "8/d", "4/d"),
    ("`deepspeed`, stage 2", "2", "2/d, and 4/d in the step", "8/d", "4/d"),
    ("`deepspeed`, stage 3", "2/d", "2/d always, and 4/d in the step", "8/d", "4/d"),
    ("`megatron`", "2", "4 fp32, always", "8", "4"),
    ("`megatron`, `distributed_optimizer`", "2", "4 fp32, always", "8/d", "4/d"),
)

_REST = """Besides the state:

- **A unit that is computed** (the larger of a block and the head): `dtensor` holds 3 x 2 + 4 bytes per parameter:
  its weights, the next block's, its gradients and their fp32 copy for the reduction. Stage 3 of ZeRO gathers at most
  `stage3_max_live_parameters` (10^9 by default, 2 bytes each). Buckets of ZeRO have `reduce_bucket_size` elements.
- **Activations** of a layer and token, w bytes per number (2 or 4), H hidden, Q and K the widths of all query and of
  all key heads, I the MLP: two norms 2 ((4 + w) H + w H); norms of heads (4 + w) (Q + K), where there are any;
  attention w (2 Q + 2 K) and 4 per head; MLP 4 w I. A mixture: w (2 H + 4 I) for each of the k experts of a token.
  `activation_checkpointing: full` keeps w H per layer and recomputes one layer; `selective` keeps the results of
  products and attention: w (3 H + 2 Q + 2 K + 2 I). Gradients in the backward of a layer: 2 w (I + H), or 14 H for a
  norm in fp32.
- **Logits**: on a GPU chunks of at most 2^28 fp32 numbers, and of 1/64 of its memory, with their gradients.
- **Generation** in the workers: keys and values of `generation.batch_size` rows, and a whole copy of the model
  unless the engine generates with its own weights (one worker, ZeRO 0 to 2). On a GPU as many rows are decoded as fit:
  whether a run fits is decided with one.
- **Engines in processes of their own** (`generation.workers`): the whole model in `generation.refit.dtype`, of which
  each GPU of an engine has its share (`generation.vllm.tensor_parallel_size`), keys and values of one row, and with
  vLLM on one GPU a second copy while weights are updated. How many rows fit in 90% of the rest is a line of its own.
  Not counted: vLLM's activations, CUDA graphs, and what it reserves beyond that (`gpu_memory_utilization`). Ray
  reserves GPUs for workers and engines; those of other groups begin at the first GPU, so one may have both.
- **A reference policy** is in host memory."""

_CHECKS = """On a CPU, torch 2.13, transformers 5.23, deepspeed 0.19, megatron-core 0.16.1:

- **Parameters** are those of the model on the meta device.
- **Activations** were counted on fake tensors, which have sizes and no memory: bytes that exist after each layer,
  and the peak of forward and backward, for shapes of Qwen3 and Llama in fp32 and bfloat16, with and without full
  checkpointing. A layer is within 1%, the peak within 5%. Those of Qwen3-MoE were counted on real tensors: 1%, and
  15% for the peak. Not counted: `selective`, and kernels of a GPU (packed rows, Transformer Engine), which may save
  other tensors.
- **State** was counted while each engine trained a Llama of a million parameters as rank 0 of 4, in a process group
  that exchanges nothing: bytes of all storages between two steps, and their peak in the second. The tests
  (`test_state_layout.py` of each plugin) allow 0.5% for the first, and 2% too low to 35% too high for the second.
- **Sums for 8B, 32B and 30B-A3B** are written out by hand in `plugins/tools/tests/estimates/test_worker_memory.py`.
- **Measured** on a CPU is the resident memory of three runs ([observers](observers.md#before-a-run-starts)), and on a
  GPU the peak of one training step, last table.
- **Not checked**: offloading, pipelines, expert parallelism, the number of units alive at once on a GPU."""

_COUNTED = (
    ("`dtensor`, fp32", 3.00, 3.00, 10.03, 11.61),
    ("`dtensor`", 3.00, 3.00, 7.61, 8.52),
    ("`dtensor`, `reduce_gradients: step`", 3.00, 3.00, 10.08, 12.52),
    ("`dtensor`, `reshard_after_forward: false`", 3.00, 3.00, 8.44, 10.52),
    ("`dtensor`, `replicate: 2`", 6.00, 6.00, 11.61, 12.52),
    ("`dtensor`, `tensor: 2`", 3.01, 3.00, 6.09, 6.64),
    ("`dtensor`, `context: 2`", 3.00, 3.00, 7.08, 7.49),
    ("`dtensor`, full checkpointing", 3.00, 3.00, 6.77, 7.18),
    ("`dtensor`, `lora: {rank: 4}`", 1.05, 1.03, 3.59, 4.08),
    ("`megatron`, fp32", 16.00, 16.00, 20.59, 21.64),
    ("`megatron`", 18.00, 18.00, 20.43, 21.53),
    ("`megatron`, `distributed_optimizer`", 9.00, 9.00, 11.43, 12.53),
    ("`megatron`, `tensor: 2`", 9.01, 9.01, 10.62, 11.15),
    ("`megatron`, `tensor: 2`, `sequence`", 9.03, 9.01, 10.33, 10.96),
    ("`megatron`, full checkpointing", 18.00, 18.00, 18.86, 20.19),
    ("`deepspeed`, fp32, stage 2", 7.00, 7.00, 16.02, 17.63),
    ("`deepspeed`, stage 0", 14.00, 14.00, 20.01, 20.00),
    ("`deepspeed`, stage 1", 5.00, 5.00, 11.01, 12.53),
    ("`deepspeed`, stage 2", 5.00, 5.00, 9.52, 11.03),
    ("`deepspeed`, stage 3", 6.00, 6.00, 11.93, 12.05),
)
"""Layout, then bytes per parameter: counted and estimated between steps, counted and estimated at the peak."""


_MEASURED = f"""The peak that torch allocated in one step of `dtensor` with Qwen3-0.6B on [one H200](gpu.md#measured),
in bfloat16 on a packed microbatch of {TOKENS:,} tokens. The estimate is without the CUDA context, which torch does not
count:"""

_GPU_RESULTS = Path(__file__).resolve().parents[1] / "results" / "gpu_h200.json"


def page() -> str:
    """Return the text of the page."""
    names = ("weights", "gradients", "moments", "fp32 main weights")
    counted = [(name, *(f"{value:.2f}" for value in values)) for name, *values in _COUNTED]
    with model_shapes() as shapes:
        return page_of(
            "# Memory: what fits",
            _INTRO,
            "## What is counted",
            _STATE,
            table(("backend", *names), _STATE_ROWS),
            _REST,
            "## The largest models",
            _largest_text(),
            table(("backend", "GPUs", "SFT, dense", "SFT, mixture", "GRPO, dense"), _largest(shapes)),
            "## Three models on eight H100",
            "`dtensor`, SFT as above. 1 GiB is 2^30 bytes.",
            _three(shapes),
            "## How it was checked",
            _CHECKS,
            "Bytes per parameter of that model on rank 0 of 4, bfloat16 unless it says fp32:",
            table(("layout", "between steps, counted", "estimated", "peak, counted", "estimated"), counted),
            _MEASURED,
            table(("activation checkpointing", "estimate, GiB", "measured, GiB", "estimate is"), _measured(shapes)),
        )


def _largest_text() -> str:
    return (
        f"The largest model of the Qwen3 family of which {MARGIN} times the estimate fits an H100 of 80 GB (79 GiB "
        "that torch can allocate from), with the GiB of the estimate on each GPU. bfloat16, full checkpointing, "
        f"microbatches of {TOKENS:,} tokens. GRPO generates in the workers, {DECODED} rows of {ANSWER:,} tokens "
        "together; with `generation.workers` on other GPUs, it trains what SFT does. Models whose number of layers or "
        "heads does not divide are skipped."
    )


def _largest(shapes: Mapping[str, Path]) -> Iterator[tuple[str, ...]]:
    for layout in LAYOUTS:
        for gpus in layout.gpus:
            cells = (
                _largest_of(shapes, DENSE, layout, gpus, "sft"),
                _largest_of(shapes, SPARSE, layout, gpus, "sft"),
                _largest_of(shapes, DENSE, layout, gpus, "grpo"),
            )
            if any(cell != "none" for cell in cells):
                yield layout.name, str(gpus), *cells


def _largest_of(
    shapes: Mapping[str, Path], family: Mapping[str, Any], layout: Layout, gpus: int, algorithm: str
) -> str:
    for name in reversed(family):
        uses = _memory(shapes[name], layout, gpus, algorithm)
        needed = 0 if uses is None else peak(uses, "device")
        if needed and MARGIN * needed <= PlannedGpus.parse(f"{gpus}xH100").memory_bytes:
            return f"{name.removeprefix('Qwen3-')}: {gib(needed)}"
    return "none"


def _measured(shapes: Mapping[str, Path]) -> Iterator[tuple[str, ...]]:
    """The packed steps of `gpu_h200.json` that were not compiled, beside the estimate of each."""
    for row in json.loads(_GPU_RESULTS.read_text(encoding="utf-8"))["parts"]["training"]:
        if row["mode"] == "packed" and row["compiled"] == "False":
            kind = "false" if row["checkpointing"] == "False" else row["checkpointing"]
            layout = Layout(kind, "dtensor", policy={"activation_checkpointing": kind if kind != "false" else False})
            uses = _memory(shapes["Qwen3-0.6B"], layout, 1, "sft") or []
            estimate = peak([use for use in uses if use.name != "CUDA context"], "device") / 2**30
            found = float(row["peak MiB"].replace(",", "")) / 2**10
            yield f"`{kind}`", f"{estimate:.1f}", f"{found:.1f}", f"{estimate / found - 1:.0%} too high"


def _memory(model: Path, layout: Layout, gpus: int, algorithm: str) -> list[MemoryUse] | None:
    """The memory of a worker; None if the backend rejects the layout for this model."""
    try:
        config = _config(model, layout, gpus, algorithm)
    except ConfigError:
        return None
    size, memory = _size(str(model)), PlannedGpus.parse(f"{gpus}xH100").memory_bytes
    worker = PlannedWorker("cuda", size.trained, memory)
    generated = GLOBAL * ANSWER if algorithm == "grpo" else 0
    longest = ANSWER if generated else TOKENS
    state = layout_of(config, _manager(), worker)
    return worker_memory(config, state, size, Rows(GLOBAL, longest, longest, generated), worker, reference=False)


def _config(model: Path, layout: Layout, gpus: int, algorithm: str) -> RunConfig:
    grpo = {"prompts_per_step": GLOBAL // 8, "samples_per_prompt": 8} if algorithm == "grpo" else {}
    values = {
        "output_dir": "unused",
        "device": "cuda",
        "algorithm": {"name": algorithm, "num_steps": 1, **grpo},
        "environment": {"name": "addition"},
        "policy": {
            "model_name": str(model),
            "backend": layout.backend,
            "activation_checkpointing": "full",
            "train_global_batch_size": GLOBAL,
            "batching": {"mode": "packed", "tokens": TOKENS},
            **layout.policy,
        },
        "generation": {"max_new_tokens": ANSWER // 2, "batch_size": DECODED},
        "worker_group": {"name": "processes", "num_workers": gpus},
    }
    return load_config(values, manager=_manager())


@cache
def _manager() -> Any:
    return create_manager(())


@cache
def _size(model: str) -> ModelSize:
    config = _config(Path(model), LAYOUTS[0], 1, "sft")
    return model_size(config.policy)


def _three(shapes: Mapping[str, Path]) -> str:
    names = ("Qwen3-8B", "Qwen3-32B", "Qwen3-30B-A3B")
    found = {name: _memory(shapes[name], LAYOUTS[0], 8, "sft") or [] for name in names}
    parts = list(dict.fromkeys(use.name for uses in found.values() for use in uses if use.place == "device"))
    rows = [("parameters", *(f"{_size(str(shapes[name])).parameters:,}" for name in names))]
    for part in parts:
        sizes = [sum(use.bytes for use in found[name] if use.name == part) for name in names]
        rows.append((part, *map(gib, sizes)))
    rows.append(("at the peak", *(gib(peak(found[name], "device")) for name in names)))
    return table(("GiB on each GPU", *names), rows)
