"""`results/benchmarks.md`: the benchmarks of `results/*.json`, each with its machine and its command."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pieces import page as page_of
from pieces import table

RESULTS = Path(__file__).resolve().parents[1] / "results"
Report = Mapping[str, Any]

_TEXT = """Both sides of a comparison of speed compute the same results, which the scripts verify before measuring. A
ratio is the time of rlframework divided by that of the other side, as median (quartiles) of interleaved rounds: below
1, rlframework is faster. The docstring of each script states what it measures and how the two sides differ."""


def page() -> str:
    """Return the page."""
    parts = [part for name, (command, body) in SCRIPTS.items() for part in _benchmark(name, command, body)]
    return page_of("# Benchmarks", _TEXT, *parts)


def _benchmark(name: str, command: str, body: Callable[[Report], list[str]]) -> list[str]:
    report = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    script = (Path(__file__).resolve().parents[2] / "benchmarks" / f"{name}.py").read_text(encoding="utf-8")
    question = script.removeprefix('"""').partition("\n\n")[0].replace("\n", " ")
    more = f", [the printed output]({name}.txt)" if (RESULTS / f"{name}.txt").is_file() else ""
    return [
        f"## `benchmarks/{name}.py`",
        f"**{question}** [The script](../../benchmarks/{name}.py), [the JSON]({name}.json){more}.",
        f"{_machine(report['machine'])}\n\n```shell\n{command}\n```",
        *body(report),
    ]


def _machine(machine: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {machine[name]}" for name in ("torch", "transformers", "ray") if name in machine)
    return (
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads used, load "
        f"{machine['load_average']:g} at the start; Python {machine['python']}, {packages}."
    )


def _ratio(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def _policy(report: Report) -> list[str]:
    settings = report["settings"]
    rows, peaks = [], []
    for lengths, found in report["lengths"].items():
        for work, result in found["results"].items():
            for mode, ratios in result["time_ratio"].items():
                speed = f"{result['tokens_per_second'][mode]:,.0f}"
                rows.append((lengths, work, mode, speed, *(_ratio(ratios[loop]) for loop in _LOOPS)))
        peaks += [(lengths, who, f"{size / 2**20:,.0f}") for who, size in found["peak_bytes"].items()]
    heads = [(how, f"{size / 2**20:,.0f}") for how, size in report["head_bytes"].items()]
    said = (
        f"{settings['shape']}, {settings['rows']} rows of at most {settings['longest']} tokens, "
        f"{settings['precision']}, {settings['pairs']} pairs, backend `{settings['backend']}`."
    )
    return [
        said,
        table(("lengths", "work", "mode", "tokens/s", *(f"against the {loop}" for loop in _LOOPS)), rows),
        table(("lengths", "a training step of", "peak MiB"), peaks),
        table(("log-probabilities of 1,024 tokens and their backward, vocabulary 150,000", "peak MiB"), heads),
    ]


_LOOPS = ("padded loop", "sorted loop")


def _packing(report: Report) -> list[str]:
    parts = ["Bins of 8,192 tokens, 8 ranks. The spread refers to the ranks' costs."]
    head = (
        "packer",
        "assignment",
        "bins",
        "least possible",
        "full",
        "ms",
        "time / FFD's",
        "spread",
        "slowest / mean",
    )
    for lengths, found in report["sets"].items():
        rows = [
            (
                f"`{one['algorithm']}`",
                one["deal"],
                f"{one['bins']:,}",
                f"{one['bound']:,}",
                f"{one['utilisation']:.1%}",
                f"{one['pack_ms']:.2f}",
                _ratio(one["time_ratio"]),
                f"{one['spread']:.2%}",
                f"{one['slowest']:.4f}",
            )
            for one in found["packing"]
        ]
        parts += [f"### {lengths}", table(head, rows)]
    return [*parts, "![bin utilization and load balance across ranks](packing.png)"]


def _data(report: Report) -> list[str]:
    rows = [(one["size"], one["case"], *_milliseconds(one), _ratio(one["ratio"])) for one in report["cases"]]
    return [table(("batch", "case", "ms", "floor's ms", "ratio"), rows)]


def _milliseconds(case: Mapping[str, Any], floor: str = "floor") -> tuple[str, str]:
    return tuple(f"{case['seconds'][side] * 1000:,.3g}" for side in ("ours", floor))  # type: ignore[return-value]


def _groups(report: Report) -> list[str]:
    rows = [
        (one["case"], one["floor"], *_milliseconds(one, one["floor"]), _ratio(one["ratio"])) for one in report["cases"]
    ]
    said = f"Worker group `ray`, {report['workers']} workers on one machine, {report['rounds']} rounds."
    return [said, table(("case", "floor", "ms", "floor's ms", "ratio"), rows)]


def _refit(report: Report) -> list[str]:
    rows = [
        (
            one["ours"],
            one["floor"],
            *(f"{one['bytes_per_second'][one[side]] / 2**30:.2f}" for side in ("ours", "floor")),
            _ratio(one["ratio"]),
            f"{one['share']:.0%}",
        )
        for one in report["cases"]
    ]
    head: Sequence[str] = ("ours", "floor", "GiB/s", "floor's GiB/s", "time ratio", "share of the floor's speed")
    return [f"{report['bytes'] / 2**20:.0f} MiB of weights in fp32, {report['rounds']} rounds.", table(head, rows)]


def _mismatch(report: Report) -> list[str]:
    columns = {
        "generation_logprob_difference": "mean difference",
        "generation_logprob_difference_max": "largest",
        "generation_logprob_beyond_fraction": "beyond 0.1",
        "generation_kl": "KL",
        "importance_weight": "mean weight",
        "importance_truncated_fraction": "weights at the cap",
    }
    rows = [
        (dtype, f"{found['tokens']:,.0f}", *(f"{found[name]:.4g}" for name in columns))
        for dtype, found in report["dtypes"].items()
    ]
    said = f"Engine `{report['settings']['engine']}` in a worker of its own, trainer `dtensor` in float32."
    return [said, table(("engine's dtype", "tokens", *columns.values()), rows)]


def _asynchrony(report: Report) -> list[str]:
    bounds = sorted({one["bound"] for one in report["rules"]})
    head = ("engines", *(f"K = {bound}" for bound in bounds))
    rows = [
        (str(engines), *(f"{one['throughput']:.1%}" for one in report["engines"] if one["engines"] == engines))
        for engines in sorted({one["engines"] for one in report["engines"]})
    ]
    parts = ["Throughput of the ledger, relative to asynchrony without a bound:", table(head, rows)]
    for load, longest in dict.fromkeys((one["rows_per_place"], one["longest"]) for one in report["rules"]):
        found: dict[str, list[str]] = {}
        for one in report["rules"]:
            if (one["rows_per_place"], one["longest"]) == (load, longest):
                dropped = f", {one['dropped']:.0%} dropped" if one["dropped"] else ""
                text = f"{one['throughput']:.0%}, {one['staleness_max']} stale{dropped}"
                found.setdefault(one["rule"], []).append(text)
        engines = report["rules"][0]["engines"]
        parts += [
            f"{engines} engines, {load:g} rows of a step for each place, the longest {longest:g} times the mean:",
            table(("rule", *head[1:]), [(name, *cells) for name, cells in found.items()]),
        ]
    parts.append("By rule: throughput, largest staleness, and groups that were dropped.")
    return [*parts, "![throughput, staleness and dropped groups by bound and rule](asynchrony.png)"]


SCRIPTS: Mapping[str, tuple[str, Callable[[Report], list[str]]]] = {
    "policy": ("python benchmarks/policy.py --pairs 9 --lengths even tailed --json docs/results/policy.json", _policy),
    "packing": (
        """python benchmarks/packing.py --gsm8k train.jsonl --tokenizer DIR \\
    --json docs/results/packing.json --plot docs/results/packing.png""",
        _packing,
    ),
    "refit": ("python benchmarks/refit.py --json docs/results/refit.json", _refit),
    "worker_groups": (
        """python benchmarks/worker_groups.py --rounds 7 --only call answer replicated \\
    --json docs/results/worker_groups.json""",
        _groups,
    ),
    "data": ("python benchmarks/data.py --json docs/results/data.json", _data),
    "mismatch": (
        """python benchmarks/mismatch.py examples/grpo_smollm2_addition.yaml algorithm.num_steps=4 \\
    --json docs/results/mismatch.json""",
        _mismatch,
    ),
    "asynchrony": (
        """python benchmarks/asynchrony.py \\
    --json docs/results/asynchrony.json --plot docs/results/asynchrony.png""",
        _asynchrony,
    ),
}
"""Script name to the command that wrote its JSON and the function that renders its tables."""
