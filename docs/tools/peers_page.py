"""`peers.md`: rlframework beside TRL, verl and a plain transformers loop, from `results/peers.json`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from pieces import page as page_of
from pieces import table

RESULTS = Path(__file__).resolve().parents[1] / "results"
Found = Mapping[str, Any]

_INTRO = """# Beside other frameworks

The same work in rlframework, in TRL and verl, and in a hand-written loop with torch and transformers, on one thread
of a CPU. A ratio is the CPU time of rlframework divided by that of the other side: **below 1, rlframework is
faster**. Every ratio can be repeated:

```shell
benchmarks/peers/setup.sh
python benchmarks/peers/run.py --json docs/results/peers.json
```

The first makes the environments `.venv-trl` and `.venv-verl` with pinned versions. The second makes the rows
with `even` lengths; `--lengths tailed` gives the others, and `--works`, `--sides` and `--pairs` select."""

_HOW = """## How it is measured

- **First both sides must compute the same.** The log-probabilities of every token, or loss and gradient norm (before
  clipping) of *every* step, those that are timed included, are compared with rlframework's; a difference above 1e-4
  (log-probabilities, loss) or 1e-3 of the norm ends the program. The last column of the tables has the largest
  difference. Steps follow each other, so equal losses also say that the optimizers did the same. GRPO is the
  exception: the two sides sample different tokens, so only the update of the first step is compared.
- **Each side has its own process and environment**, with `OMP_NUM_THREADS=1`. The sides take their steps in turn,
  never at the same time, in an order that rotates; a ratio is taken within a round, and the table has the median over
  the rounds (3 to 9) with quartiles. The first step of each side is not timed.
- **Process CPU time**, because the machine also does other work; it does not include waiting.
- **Work**: a random Llama of 4 layers x 256 with a vocabulary of 2,048, fp32; 32 rows, a quarter of each a prompt
  that the loss excludes. Lengths are `even` (12 to 175 tokens, about 3,100 in all) or `tailed` (most short, few long,
  like a policy's answers). One optimizer step per batch, AdamW without weight decay, gradients clipped at norm 1.
- **Settings are each framework's defaults**, except those that make the work equal: fp32, nothing recomputed in the
  backward (TRL and verl recompute by default), microbatches of 8 rows for padded sides, no checkpoints and no reports
  to services; of rlframework, TensorBoard, the curve and the process of the reward function are off as well.
  rlframework chooses its microbatches itself: packed, the default on a CPU. TRL has no public function for
  log-probabilities; its trainer's private one is called.
- **What a step includes.** Of rlframework and TRL it is a step of a whole run (`rlframework.run`, `trainer.train()`),
  from the end of one step to the end of the next, with data loading, collation, metrics and logs. The plain loop and
  verl's engine are given a batch of tensors that is ready, which is to their advantage."""

_READING = """## What is behind the ratios

- **Padding.** A padded side computes 1.6 times the tokens with `even` lengths and 2.2 times with `tailed` ones, a
  loop sorted by length 1.15 and 1.41 times. This is most of the difference, and it depends on the lengths: with rows
  of one length it vanishes, see GRPO.
- **The plain loop sorted by length is the strongest opponent**: no framework around it, little padding. TRL comes
  close to it with `train_sampling_strategy="batch_rebalance"`, which is not its default.
- **verl packs by default**, without padding, but on a CPU its attention goes over a whole packed microbatch: in a
  profile of its training step that is 24% of the time, against 8% in the sorted loop, and one `logsumexp` per token
  is another 8%. Both are FlashAttention and fused kernels on a GPU, about which this ratio says nothing. Its
  optimizer is torch's AdamW in its default implementation; the others use the fused one.
- **The output head** runs only at the positions of the loss in rlframework and in TRL's log-probabilities; in the
  plain loop and in verl it runs at all positions.
- **TRL's log-probabilities** pad all rows to the longest prompt and the longest completion of the batch, not of a
  microbatch, so they compute more than the padded loop; its head also computes the entropy, a metric (a quarter of
  the time is its head).
- **GRPO**: 4 prompts x 8 completions, nearly all of which reach the limit of 64 tokens, because a random model hardly
  stops; so nearly nothing is padded, which is the case that favours rlframework least. Half of rlframework's step is
  generation, where a profile has a third in matrix products, a seventh in attention, and the rest in Python and small
  operations on a model of this size; of the training half, 60% is torch's backward, which both sides share. TRL's
  generation is transformers' `generate`. The two sides sample different tokens, so the ratio is of the time per
  token, and what is checked is the update: rlframework computes, from TRL's first rollouts and rewards, the gradient
  norm that TRL reports.
- **Packing**: `pack` is the whole work, bins of tokens from rows of tokens. TRL's `bfd` goes through a `datasets`
  table; both fill the same number of bins. `partition` looks at lengths only: verl's takes 8 s for 4,096 of them, and
  its bins may exceed the capacity (there by 65 tokens), which rlframework's never do."""

_NOT = """## What is not compared

- **verl on a CPU.** verl 0.9.1 installs, but has no CPU among its platforms, and registers its FSDP engine for CUDA
  and NPU devices only. The comparison registers a platform of ours through verl's interface for that
  (`set_platform`), and uses the class `FSDPEngineWithLMHead` itself with gloo and FSDP2: `infer_batch` and
  `train_batch` with its `sft_loss`. Its registry of rollouts has vLLM, SGLang and TensorRT-LLM servers only (there is
  a file for transformers, which no name selects), so a whole GRPO step of verl was not run. It has no DPO trainer.
- **Refit.** TRL without vLLM and rlframework by default generate with the weights that are trained, so there is
  nothing to send. With engines in other processes both need vLLM or another server, which were not tried, and verl's
  transports (NCCL, NIXL, Mooncake, HCCL) need devices.
  [`benchmarks/refit.py`](results/benchmarks.md#benchmarksrefitpy) compares rlframework's refit with copies of as many
  bytes.
- **GPUs.** Nothing here was measured on one.
- Other models and lengths, several workers, LoRA."""


def page() -> str:
    """Return the page."""
    results = json.loads((RESULTS / "peers.json").read_text(encoding="utf-8"))["results"]
    return page_of(_INTRO, "## Ratios", *_tables(results), _HOW, _READING, _NOT, _versions(results))


_TITLES = {
    "logprobs": "Log-probabilities of a batch",
    "train": "A training step",
    "dpo": "A DPO step",
    "grpo": "A GRPO step with its rollouts",
    "pack": "Packing 4,096 rows of tokens",
    "partition": "Partitioning 512 lengths",
}
_HEAD = ("lengths", "other side", "its CPU seconds", "ours", "ours / its (quartiles)", "largest difference")


def _tables(results: Mapping[str, Found]) -> Iterator[str]:
    for work, title in _TITLES.items():
        rows = [row for key, found in results.items() if key.startswith(f"{work},") for row in _rows(found, key)]
        if rows:
            yield f"### {title}"
            yield table(_HEAD, rows)


def _rows(found: Found, key: str) -> Iterator[tuple[str, ...]]:
    ours = next(iter(found["seconds"]))
    for name, ratio in found["ratios"].items():
        yield (
            "lognormal" if key.startswith("pa") else key.partition(", ")[2].replace(" lengths", ""),
            name,
            f"{median(found['seconds'][name]):.3g}",
            f"{median(found['seconds'][ours]):.3g}",
            " ".join([_short(ratio["median"]), f"({_short(ratio['low'])} to {_short(ratio['high'])})"]),
            ", ".join(f"{key.replace('_', ' ')} {value:.0e}" for key, value in found["differences"][name].items()),
        )


def _short(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.1g}"


def _versions(results: Mapping[str, Found]) -> str:
    machines = {_machine(found["machine"]) for found in results.values()}
    loads = [found["machine"]["load_average"] for found in results.values()]
    sides: dict[str, str] = {}
    for found in results.values():
        for name, packages in found["versions"].items():
            text = ", ".join(f"{package} {version}" for package, version in packages.items())
            sides.setdefault(name.partition(",")[0], text)
    lines = [f"- {name}: {text}" for name, text in sides.items()]
    return "\n\n".join(
        [
            "## Machine and versions",
            f"{'; '.join(sorted(machines))}. One thread a side; load averages of {min(loads):g} to {max(loads):g}.",
            "[The JSON](results/peers.json) has every time.",
            "\n".join(lines),
        ]
    )


def _machine(machine: Mapping[str, Any]) -> str:
    return f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}"
