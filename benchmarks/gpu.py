"""Figures of one GPU: head, attention shapes, training step, decoding, offloading, refit, and where a step's time goes.

    python benchmarks/gpu.py [--json FILE] [--page FILE] [--only head training]
    python benchmarks/gpu.py --device cpu --size tiny        # that everything runs, in a minute

The model has the shape of Qwen3-0.6B (28 layers x 1,024, 16 heads of 128 over 8 of keys and values, vocabulary 151,936)
with random weights, in bfloat16 with fp32 main weights. Times are wall-clock times between synchronizations: the median
of `--rounds` after a warm-up, except where a part says that it times the first call. Peak memory is that of torch's
allocator. Model FLOPs utilisation (MFU) counts 6 FLOPs per weight and token, the head where it runs and the causal half
of attention, relative to the rate of a matrix product of 8,192 x 8,192 in bfloat16 on the same device.

| part | question | seconds on an H100 (estimated) |
| --- | --- | --- |
| head | time, memory and error of log-probabilities and their backward by chunk size | 20 |
| attention | what a new shape costs in the first and the second call, with cuDNN's kernels and without | 60 |
| training | tokens/s, MFU and memory of a step by batching mode, with recomputation and compiled | 150 |
| decoding | tokens/s of 64 answers of 256 tokens | 90 |
| offload | time and bytes of moving optimizer and model to the host and back | 20 |
| refit | time and rate of sending the weights to an engine in another process on the same device | 60 |
| profile | a training step's time by kind of kernel | 40 |

A part that fails reports its error, the others run, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from interleave import machine, table, write_json
from plain import Rows
from torch.autograd import DeviceType
from work import as_batch, make_policy, matrix_product_flops

from rlframework import create_manager
from rlframework.algorithms.losses import NLLLoss
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.generation.driver import Generation
from rlframework.generation.remote import RemoteGeneration
from rlframework.huggingface.model_directories import quiet_transformers
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.policy.client import Policy
from rlframework.policy.head import logprobs
from rlframework.policy.head import vocabulary as vocabulary_shard
from rlframework_conformance.layouts import Layout
from rlframework_conformance.policies import run_config

Row = list[str]


@dataclass(frozen=True)
class Size:
    """The sizes of the work. `lengths`: tokens of each row of the training step."""

    model: Mapping[str, int]
    lengths: tuple[int, ...]
    head_tokens: int
    hidden: tuple[int, ...]
    chunks: tuple[int, ...]
    prompts: int
    answer: int


SIZES = {
    "qwen3-0.6b": Size(
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
        },
        (4096, 3071, 2903, 2048, 1500, 1200, 800, 766),
        16_384,
        (1024, 4096),
        (1 << 23, 1 << 26, 1 << 28),
        64,
        256,
    ),
    "tiny": Size(
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": 512,
        },
        (40, 31, 20, 9),
        64,
        (32,),
        (1 << 10, 1 << 14),
        4,
        8,
    ),
}


@dataclass
class Bench:
    """The device, the model and how to time, shared by the parts."""

    size: Size
    device: torch.device
    precision: str
    rounds: int
    model: Path
    tokenizer: Any
    peak_flops: float

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def once(self, run: Callable[[], Any]) -> float:
        """Seconds of one call."""
        self.synchronize()
        started = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - started

    def seconds(self, run: Callable[[], Any]) -> float:
        """Median seconds of a call after a warm-up."""
        run()
        return statistics.median(self.once(run) for _ in range(self.rounds))

    def peak(self, run: Callable[[], Any]) -> int:
        """Most bytes allocated during a call beside those before it; 0 on a CPU, where torch does not count."""
        if self.device.type != "cuda":
            return 0
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        self.synchronize()
        return torch.cuda.max_memory_allocated() - before


def head(bench: Bench) -> list[Row]:
    """Log-probabilities with entropies and their backward, by hidden size and elements of a chunk."""
    rows = [["hidden", "chunk elements", "tokens x ids of a chunk", "ms", "peak MiB", "largest error"]]
    vocabulary, count = bench.size.model["vocab_size"], bench.size.head_tokens
    dtype = torch.bfloat16 if bench.device.type == "cuda" else torch.float32
    for hidden_size in bench.size.hidden:
        generator = torch.Generator(bench.device).manual_seed(0)
        hidden, weight = (
            torch.randn(n, hidden_size, device=bench.device, generator=generator).mul_(hidden_size**-0.25).to(dtype)
            for n in (count, vocabulary)
        )
        hidden.requires_grad_(), weight.requires_grad_()
        targets = torch.randint(vocabulary, (count,), device=bench.device, generator=generator)
        some = slice(0, count, max(1, count // 64))
        exact = (hidden[some].double() @ weight.double().T).log_softmax(-1).gather(1, targets[some, None])[:, 0]
        default = vocabulary_shard.CHUNK_ELEMENTS[bench.device.type]
        for elements in bench.size.chunks:
            vocabulary_shard.CHUNK_ELEMENTS[bench.device.type] = elements

            def run(hidden: Any = hidden, weight: Any = weight, targets: Any = targets) -> torch.Tensor:
                hidden.grad = weight.grad = None
                values, _ = logprobs.chunked_logprobs(hidden, weight, None, targets, wants_entropy=True)
                values.sum().backward()
                return values.detach()

            error = float((run()[some] - exact.detach()).abs().max())
            shape = "{} x {}".format(*vocabulary_shard.chunk_shape(count, vocabulary, bench.device))
            measured = [f"{1e3 * bench.seconds(run):.1f}", f"{bench.peak(run) / 2**20:,.0f}", f"{error:.1e}"]
            rows.append([str(hidden_size), f"{elements:,}", shape, *measured])
        vocabulary_shard.CHUNK_ELEMENTS[bench.device.type] = default
    return rows


def attention(bench: Bench) -> list[Row]:
    """Milliseconds of the first and the second call with each of 20 shapes, in training and in decoding."""
    rows = [["work", "cuDNN", "first call, ms", "second call, ms"]]
    sizes = bench.size.model
    heads, kv_heads, width = (sizes[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    dtype = torch.bfloat16 if bench.device.type == "cuda" else torch.float32
    longest = max(bench.size.lengths)
    rng = random.Random(1)
    for cudnn in (False, True):
        lengths = rng.sample(range(longest // 2, longest), 20)  # shapes that the other setting has not seen
        for work in ("training", "decoding"):
            first, second = [], []
            for length in lengths:
                queries = length if work == "training" else 1
                query = torch.randn(1, heads, queries, width, device=bench.device, dtype=dtype, requires_grad=True)
                key, value = (
                    torch.randn(1, kv_heads, length, width, device=bench.device, dtype=dtype, requires_grad=True)
                    for _ in range(2)
                )

                def run(q: Any = query, k: Any = key, v: Any = value, causal: bool = queries > 1) -> None:
                    attend = torch.nn.functional.scaled_dot_product_attention
                    if causal:
                        attend(q, k, v, is_causal=True, enable_gqa=True).sum().backward()
                    else:
                        with torch.no_grad():
                            attend(q, k, v, enable_gqa=True)

                torch.backends.cuda.enable_cudnn_sdp(cudnn)
                first.append(bench.once(run))
                second.append(bench.once(run))
            medians = [f"{1e3 * statistics.median(times):.2f}" for times in (first, second)]
            rows.append([work, "on" if cudnn else "off", *medians])
    torch.backends.cuda.enable_cudnn_sdp(False)
    return rows


def training_rows(bench: Bench) -> Rows:
    """The rows of a training step; the loss is on all tokens."""
    lengths = torch.tensor(bench.size.lengths)
    inside = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.randint(2, 500, inside.shape, generator=torch.Generator().manual_seed(0))
    return Rows(torch.where(inside, ids, 0), lengths, inside.float())


def training(bench: Bench) -> list[Row]:
    """One optimizer step on the rows by batching mode, then with activation checkpointing, then compiled.

    Peak memory is all that the step needs, with weights and optimizer.
    """
    rows = [["mode", "checkpointing", "compiled", "first step, s", "ms", "tokens/s", "MFU", "peak MiB"]]
    data, loss = training_rows(bench), NLLLoss()
    batch, tokens = as_batch(data), int(data.lengths.sum())
    variants: list[tuple[str, Any, bool]] = [("dynamic", False, False), ("packed", False, False)]
    variants += [("packed", "selective", False), ("packed", "full", False)]
    if bench.device.type == "cuda":  # a CPU compiles for a minute
        variants.append(("packed", False, True))
    for mode, checkpointing, compiled in variants:
        keys = {"activation_checkpointing": checkpointing, "dtensor": {"compile": compiled}}
        with policy_of(bench, mode, **keys) as policy:

            def run(policy: Any = policy) -> None:
                policy.train(batch, loss)

            first, seconds = bench.once(run), bench.seconds(run)
            policy.reset_peak_memory_stats()  # the policy counts by phases, and so restarts what torch counts
            work = policy.train(batch, loss)["flops"]
            peak = policy.get_gpu_info()[0]["peak_memory_allocated_mb"]
        share = f"{work / seconds / bench.peak_flops:.1%}"
        measured = [f"{first:.1f}", f"{1e3 * seconds:.0f}", f"{tokens / seconds:,.0f}", share, f"{peak:,.0f}"]
        rows.append([mode, str(checkpointing), str(compiled), *measured])
    return rows


def decoding(bench: Bench) -> list[Row]:
    """Answers of fixed length to prompts of 16 to 32 tokens."""
    rng = random.Random(1)
    lengths = torch.tensor([rng.randint(16, 32) for _ in range(bench.size.prompts)])
    inside = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.where(inside, torch.randint(2, 500, inside.shape, generator=torch.Generator().manual_seed(1)), 0)
    data = BatchedDataDict({"input_ids": ids, "input_lengths": lengths, "seeds": torch.arange(len(ids))})
    settings = {"max_new_tokens": bench.size.answer, "temperature": 1.0, "stop_token_ids": []}
    with policy_of(bench, "packed", generation=settings) as policy:
        generation = Generation(policy, bench.tokenizer)
        generated = int(generation.generate(data)["generation_lengths"].sum())
        seconds = bench.seconds(lambda: generation.generate(data))
    rows = [["rows", "tokens each", "s", "tokens/s"]]
    return [*rows, [str(len(ids)), str(bench.size.answer), f"{seconds:.2f}", f"{generated / seconds:,.0f}"]]


def offload(bench: Bench) -> list[Row]:
    """The optimizer's state, then all, to the host and back."""
    rows = [["moved", "direction", "MiB", "ms", "GiB/s"]]
    with policy_of(bench, "packed") as policy:
        policy.train(as_batch(training_rows(bench)), NLLLoss())
        for what, leave in (
            ("optimizer", policy.offload_before_refit),
            ("model and optimizer", policy.offload_after_refit),
        ):
            for direction, run in (("to host", leave), ("to device", policy.prepare_for_training)):
                moved: list[int] = []
                seconds = bench.once(lambda run=run, moved=moved: moved.extend(run().values()))
                size = sum(moved)
                speed = size / seconds / 2**30
                rows.append([what, direction, f"{size / 2**20:,.1f}", f"{1e3 * seconds:.0f}", f"{speed:.1f}"])
    return rows


def refit(bench: Bench) -> list[Row]:
    """The weights, in bfloat16 on a GPU, to an engine in another process on the same device."""
    manager, precision = create_manager(), bench.precision
    generation = {"workers": {}, "refit": {"transport": "ipc", "dtype": precision}, "max_new_tokens": 8}
    batching = {"mode": "packed", "tokens": sum(bench.size.lengths)}
    config = run_config(
        "dtensor",
        bench.model,
        Layout(),
        manager=manager,
        device=bench.device.type,
        generation=generation,
        apart=True,
        precision=precision,
        batching=batching,
    )
    rows = [["transport", "MiB", "ms", "GiB/s"]]
    with Policy(config, bench.tokenizer, manager, device=bench.device.type) as policy:
        engines = RemoteGeneration(config, policy, bench.tokenizer, manager, device=bench.device.type)
        try:
            reports = [engines.refitter.refit() for _ in range(bench.rounds + 1)][1:]
        finally:
            engines.shutdown()
    seconds = statistics.median(report.seconds for report in reports)
    size, transport = reports[0].size, reports[0].transport
    return [*rows, [transport, f"{size / 2**20:,.1f}", f"{1e3 * seconds:.0f}", f"{size / seconds / 2**30:.1f}"]]


KINDS = {
    "attention": ("flash", "fmha", "attention", "sdpa", "cudnn_generated"),
    "matrix products": ("gemm", "cutlass", "nvjet", "wgmma", "sgemm", "mm_"),
    "communication": ("nccl",),
    "optimizer": ("adam", "multi_tensor"),
    "copies": ("memcpy", "memset", "copy_"),
}
"""Kinds of kernels, by parts of their names; all others are elementwise."""


def profile(bench: Bench) -> list[Row]:
    """Time of the kernels of one packed training step by kind, and how long the device was idle."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    if bench.device.type != "cuda":
        return [["kind", "ms", "share"], ["not measured on a CPU", "-", "-"]]
    batch, loss = as_batch(training_rows(bench)), NLLLoss()
    with policy_of(bench, "packed") as policy:
        policy.train(batch, loss)
        with torch_profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
            seconds = bench.once(lambda: policy.train(batch, loss))
    return kernel_rows(recorded.events(), seconds)


def kernel_rows(events: Iterable[Any], seconds: float) -> list[Row]:
    """Time of the kernels among a profiler's `events` by kind, their share of `seconds`, and the time without any.

    Ranges of annotations (`record_function`) are events of the device too, which span the kernels in them: they are
    left out. Kernels that run side by side are added up by kind, but count once against the idle time.
    """
    spent = dict.fromkeys([*KINDS, "elementwise"], 0.0)
    busy, end = 0.0, -math.inf
    kernels = [one for one in events if one.device_type == DeviceType.CUDA and not one.is_user_annotation]
    for event in sorted(kernels, key=lambda one: float(one.time_range.start)):
        name, start, stop = event.name.lower(), event.time_range.start, event.time_range.end
        kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "elementwise")
        spent[kind] += (stop - start) / 1e6
        busy += max(0.0, stop - max(start, end)) / 1e6
        end = max(end, stop)
    spent["idle"] = max(0.0, seconds - busy)
    return [["kind", "ms", "share"], *[[kind, f"{1e3 * s:.1f}", f"{s / seconds:.0%}"] for kind, s in spent.items()]]


PARTS: dict[str, Callable[[Bench], list[Row]]] = {
    part.__name__: part for part in (head, attention, training, decoding, offload, refit, profile)
}


def policy_of(bench: Bench, mode: str, **keys: Any) -> Any:
    """The framework's policy of the benchmark's model."""
    keys = {"device": bench.device.type, "precision": bench.precision, "rows": len(bench.size.lengths), **keys}
    batching = {"mode": mode, "tokens": sum(bench.size.lengths)}
    return make_policy(bench.model, bench.tokenizer, mode, batching=batching, **keys)


def make_model(path: Path, size: Size) -> Any:
    """Write a Qwen3 with random weights to `path`; return its tokenizer, without an end-of-sequence token."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = character_tokenizer([chr(0x4E00 + index) for index in range(500)])
    tokenizer.eos_token = None
    longest = 2 * max(size.lengths)
    config = Qwen3Config(
        **size.model, max_position_embeddings=longest, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id
    )
    with quiet_transformers():
        Qwen3ForCausalLM(config).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts (default all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=SIZES, default="qwen3-0.6b", help="of the model and the work")
    parser.add_argument("--rounds", type=int, default=5, help="timed calls (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE as JSON")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write them to FILE as a page of Markdown")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; use --device cpu --size tiny to try the script")
    device = torch.device(given.device)
    here = machine()
    if given.device == "cuda":
        here |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        here |= {"memory_bytes": torch.cuda.get_device_properties(device).total_memory}
    peak_flops = matrix_product_flops(given.device, 8192 if given.device == "cuda" else 512)
    print(f"{here.get('device', here['cpu'])}, torch {here['torch']}, {peak_flops / 1e12:,.2f} TFLOP/s in bfloat16")
    settings = {"size": given.size, "rounds": given.rounds, **asdict(SIZES[given.size])}
    data: dict[str, Any] = {"machine": here, "settings": settings, "matrix_product_flops": peak_flops}
    with tempfile.TemporaryDirectory() as directory:
        size = SIZES[given.size]
        model = Path(directory) / "model"
        precision = "bfloat16" if given.device == "cuda" else "float32"
        bench = Bench(size, device, precision, given.rounds, model, make_model(model, size), peak_flops)
        for name in given.only:
            run_part(bench, name, data)
            if given.json:  # after each part: what was measured before the machine failed is kept
                write_json(given.json, data)
    if given.page:
        given.page.write_text(page(data))
    if data.get("errors"):
        sys.exit(f"failed: {', '.join(data['errors'])}")


def run_part(bench: Bench, name: str, data: dict[str, Any]) -> None:
    """Run a part, print its table, and enter its rows, its seconds and its error into `data`."""
    started = time.perf_counter()
    try:
        top, *body = PARTS[name](bench)
    except Exception as error:  # noqa: BLE001  # reported; the other parts run
        traceback.print_exc()
        data.setdefault("errors", {})[name] = f"{type(error).__name__}: {error}"
    else:
        data.setdefault("parts", {})[name] = [dict(zip(top, row, strict=True)) for row in body]
        print("", (PARTS[name].__doc__ or name).splitlines()[0], table([top, *body]), sep="\n", flush=True)
    data.setdefault("seconds", {})[name] = round(time.perf_counter() - started, 1)


def page(data: Mapping[str, Any]) -> str:
    """The figures as a page of Markdown: a table for each part."""
    here, flops_reached = data["machine"], data["matrix_product_flops"] / 1e12
    lines = [f"# {here.get('device', here['cpu'])}", ""]
    lines += [f"torch {here['torch']}; matrix products in bfloat16: {flops_reached:,.1f} TFLOP/s.", ""]
    for name, seconds in data["seconds"].items():
        lines += [f"## {name}", "", f"{(PARTS[name].__doc__ or name).splitlines()[0]} ({seconds:.0f} s)", ""]
        if name in data.get("errors", {}):
            lines += [f"Failed: `{data['errors'][name].splitlines()[0]}`", ""]
        elif rows := data["parts"][name]:
            cells = [list(rows[0]), ["---"] * len(rows[0]), *[list(row.values()) for row in rows]]
            lines += ["| " + " | ".join(row) + " |" for row in cells] + [""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
