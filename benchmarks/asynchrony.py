"""How much throughput does a hard bound on staleness cost, by the bound and by the rule that keeps it?

In virtual time, with the ledger itself: 1 to 256 engines, groups of 8 completions of log-normal length (sigma 1), a
trainer that needs as long for a step as the engines if none of them waits, and refits of 1% of that. Each rule sees the
same lengths. Throughput is relative to asynchrony without a bound, in which a step takes the groups that are complete
first, so that only the slower side limits it. Staleness is that of the first token of a group. Nothing is measured on
this machine: the results depend on the seeds alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from asynchrony_rules import CountsBySync, CountsByVersion, Drops, DueFirst, FirstDone, Rule, Tickets
from interleave import machine, table, write_json
from virtual_cluster import Cluster, Run

BOUNDS = (0, 1, 2, 4, 8)
ENGINES = (1, 4, 16, 64, 256)
EASY, HARD = Cluster(engines=16), Cluster(engines=16, rows_per_place=2.0, longest=8.0)
"""Steps whose K-fold duration is long, and short, compared with the longest completion."""
LOADS, LONGEST = (1.0, 2.0, 4.0, 8.0), (4.0, 8.0, 1e9)
GOAL, AT = 0.95, 2
"""Of the throughput without a bound, at the bound `AT`."""
OURS = "rlframework"
RULES: Mapping[str, type[Rule]] = {
    OURS: Tickets,
    "least wait": DueFirst,
    "AReaL": CountsByVersion,
    "verl": CountsBySync,
    "prime-rl": Drops,
}
PROMISED = {OURS, "least wait", "prime-rl"}
"""The rules that promise the bound for each token."""
Found = dict[str, Any]


def measure(cluster: Cluster, bound: int, name: str, seeds: int) -> Found:
    """Return means over the seeds. Raises `SystemExit` if a rule breaks what it promises."""
    rule = RULES[name]
    runs = [play(cluster, rule, bound, seed) for seed in range(seeds)]
    free = [_unbounded(cluster, seed) for seed in range(seeds)]
    found: Found = {
        "throughput": mean(other / run.step_time for run, other in zip(runs, free, strict=True)),
        "staleness_mean": mean(mean(run.staleness) for run in runs),
        "staleness_max": max(max(run.staleness) for run in runs),
        "trainer_idle": mean(run.trainer_idle for run in runs),
        "dropped": mean(run.dropped / (run.dropped + len(run.staleness)) for run in runs),
        "dropped_complete": sum(run.dropped_complete for run in runs),
    }
    if name in PROMISED and found["staleness_max"] > bound:
        raise SystemExit(f"{name}: a group was {found['staleness_max']} steps stale with the bound {bound}")
    if name == OURS and found["dropped"]:
        raise SystemExit(f"{name}: groups were dropped")
    settings = {"engines": cluster.engines, "rows_per_place": cluster.rows_per_place, "longest": cluster.longest}
    return {"rule": name, "bound": bound, **settings, "trainer": cluster.trainer, **found}


def play(cluster: Cluster, rule: type[Rule], bound: int, seed: int) -> Run:
    """Return a run."""
    return Run(cluster, rule(cluster.groups, bound, cluster.steps), seed).play()


_FREE: dict[tuple[Cluster, int], float] = {}


def _unbounded(cluster: Cluster, seed: int) -> float:
    if (cluster, seed) not in _FREE:
        _FREE[cluster, seed] = play(cluster, FirstDone, 0, seed).step_time
    return _FREE[cluster, seed]


def by_engines(engines: Sequence[int], steps: int, seeds: int) -> Iterator[Found]:
    """The ledger, by the number of engines and the bound."""
    for count in engines:
        for bound in BOUNDS:
            yield measure(replace(EASY, engines=count, steps=steps), bound, OURS, seeds)


def by_load(steps: int, seeds: int) -> Iterator[Found]:
    """The ledger and the least wait at the bound `AT`, by the rows of a step and the longest completion."""
    for load in LOADS:
        for longest in LONGEST:
            cluster = replace(EASY, rows_per_place=load, longest=longest, steps=steps)
            yield from (measure(cluster, AT, name, seeds) for name in (OURS, "least wait"))


def by_rule(steps: int, seeds: int) -> Iterator[Found]:
    """All rules, by the bound, in both settings."""
    for cluster in (EASY, HARD):
        for name in RULES:
            yield from (measure(replace(cluster, steps=steps), bound, name, seeds) for bound in BOUNDS)


def engines_table(found: Sequence[Found]) -> str:
    rows = [["engines", *(f"K = {bound}" for bound in BOUNDS)]]
    for engines in dict.fromkeys(one["engines"] for one in found):
        of = [one for one in found if one["engines"] == engines]
        rows.append([str(engines), *(f"{one['throughput']:.1%}, {one['staleness_mean']:.1f}" for one in of)])
    return table(rows)


def load_table(found: Sequence[Found]) -> str:
    rows = [["rows a place", *(f"longest {_longest(longest)}" for longest in LONGEST)]]
    for load in dict.fromkeys(one["rows_per_place"] for one in found):
        of = [one for one in found if one["rows_per_place"] == load]
        both = zip(of[::2], of[1::2], strict=True)
        rows.append([f"{load:g}", *(f"{one['throughput']:.1%} ({least['throughput']:.1%})" for one, least in both)])
    return table(rows)


def rules_table(found: Sequence[Found]) -> str:
    rows = [["rule", *(f"K = {bound}" for bound in BOUNDS)]]
    for name in RULES:
        of = [one for one in found if one["rule"] == name]
        rows.append([name, *(_of_rule(one) for one in of)])
    return table(rows)


def _of_rule(one: Found) -> str:
    dropped = f", {one['dropped']:.0%} dropped" if one["dropped"] else ""
    return f"{one['throughput']:.0%}, {one['staleness_mean']:.1f} to {one['staleness_max']}{dropped}"


def _longest(longest: float) -> str:
    return f"{longest:g} means" if longest < 1e6 else "unlimited"


def _setting(cluster: Cluster) -> str:
    return f"{cluster.rows_per_place:g} rows a place, longest {_longest(cluster.longest)}"


def of_setting(found: Sequence[Found], cluster: Cluster) -> list[Found]:
    """Return the results of a setting."""
    wanted = (cluster.rows_per_place, cluster.longest)
    return [one for one in found if (one["rows_per_place"], one["longest"]) == wanted]


def plot(path: Path, found: Sequence[Found]) -> None:
    """Plot throughput, largest staleness and dropped groups over K, a column for each setting, a line for each rule."""
    import matplotlib as mpl

    mpl.use("agg")

    from matplotlib import pyplot as plt

    shown = {"throughput": "throughput / unbounded", "staleness_max": "largest staleness", "dropped": "groups dropped"}
    figure, panels = plt.subplots(3, 2, figsize=(9, 8), layout="constrained", sharex=True, sharey="row")
    for column, cluster in enumerate((EASY, HARD)):
        for row, (quantity, label) in enumerate(shown.items()):
            panel = panels[row, column]
            for name, style in zip(RULES, ("o-", "x:", "s--", "+:", "d-."), strict=True):
                of = [one for one in of_setting(found, cluster) if one["rule"] == name]
                panel.plot([one["bound"] for one in of], [one[quantity] for one in of], style, label=name)
            if quantity == "staleness_max":
                panel.plot(BOUNDS, BOUNDS, color="gray", linewidth=0.7, label="the bound K")
            panel.grid(alpha=0.3)
            panel.set_ylabel(label if not column else "")
        panels[0, column].set_title(_setting(cluster))
        panels[-1, column].set_xlabel("K")
    panels[1, 0].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Simulate, check what is promised, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="of a run, 10 of which are a warm-up (default 40)")
    parser.add_argument("--seeds", type=int, default=2, help="runs of which means are reported (default 2)")
    parser.add_argument("--engines", type=int, nargs="+", default=ENGINES, help="of the first table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot the rules over K to FILE (png, svg, pdf)")
    arguments = parser.parse_args()
    if arguments.steps <= EASY.warmup or arguments.seeds < 1:
        parser.error(f"--steps must be above {EASY.warmup}, and --seeds 1 or more")
    given = (arguments.steps, arguments.seeds)
    engines = list(by_engines(arguments.engines, *given))
    print(f"The ledger, {_setting(EASY)}: throughput of that without a bound, mean staleness")
    print(engines_table(engines))
    load = list(by_load(*given))
    print(f"\nAt K = {AT}, {EASY.engines} engines: throughput of the ledger (of the least wait that keeps the bound)")
    print(load_table(load))
    rules = list(by_rule(*given))
    for cluster in (EASY, HARD):
        print(f"\n{cluster.engines} engines, {_setting(cluster)}: throughput, staleness from mean to largest")
        print(rules_table(of_setting(rules, cluster)))
    least = min(one["throughput"] for one in engines if one["bound"] == AT)
    reached = "yes" if least >= GOAL else "NO"
    print(f"\nAt least {GOAL:.0%} at K = {AT} with {_setting(EASY)}: {least:.1%}: {reached}")
    if arguments.json:
        found = {"engines": engines, "load": load, "rules": rules}
        write_json(arguments.json, {"machine": machine(), "steps": arguments.steps, "seeds": arguments.seeds, **found})
    if arguments.plot:
        plot(arguments.plot, rules)


if __name__ == "__main__":
    main()
