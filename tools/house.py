"""Prints the sizes of the house: lines, rooms, arrows, modules of a step, imports, times, dependencies.

    python tools/house.py [--json FILE]

Rooms are the packages of `rlframework/`, arrows the imports between them (type-only imports count), by grimp. A step
enters a module when it calls one of its functions in the driver's process; the steps are second ones, with dtensor.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
DISABLED = (
    "conformance,ddp,deepspeed,distillation,environments,megatron,preferences,ray,report,serve,storage,tools,vllm"
)
"""The plugins of this repository that the extra `dtensor` does not need for a run (`report` draws after it)."""
BACKENDS = ("dtensor", "deepspeed", "megatron", "ddp")
RUN = """
import sys
import rlframework
if __name__ == "__main__":
    rlframework.run(rlframework.load_config(CONFIG, OVERRIDES))
    ours = [m for name, m in list(sys.modules.items()) if name.split(".")[0].startswith("rlframework") and m.__file__]
    print("MODULES", len(ours), sum(open(m.__file__).read().count("\\n") for m in ours))
"""
STEP = """
import sys, threading
import rlframework
from rlframework.algorithms.loop import StepLoop
ordinary, entered, tracing = StepLoop._timed_step, set(), False
def note(frame, event, argument):
    if tracing and event == "call" and frame.f_code.co_flags & 2:  # a function's, not a class's body
        entered.add(frame.f_code.co_filename)
def traced(self, step):
    global tracing
    tracing = step == 2
    sys.setprofile(note if tracing else None)
    try:
        return ordinary(self, step)
    finally:
        sys.setprofile(None)
        tracing = False
threading.setprofile(note)
StepLoop._timed_step = traced
if __name__ == "__main__":
    rlframework.run(rlframework.load_config(CONFIG, OVERRIDES))
    print("MODULES", len([name for name in entered if "/rlframework" in name.rpartition("/")[0]]), 0)
"""
WITH_AN_ENGINE = ["algorithm={name: grpo, num_steps: 2}", "generation.workers={group: processes, num_workers: 1}"]
STEPS = {
    "SFT": ["algorithm={name: sft, num_steps: 2}", "environment.name=addition", "policy.batching.mode=packed"],
    "synchronous GRPO": WITH_AN_ENGINE,
    "asynchronous GRPO": [*WITH_AN_ENGINE, "algorithm.async.max_staleness=1"],
}


def lines_in(*folders: Path) -> int:
    """Lines of the Python files in `folders`, without tests."""
    return sum(path.read_text().count("\n") for folder in folders for path in folder.rglob("*.py"))


def packages() -> list[Path]:
    """The packages of all distributions."""
    return [ROOT / "rlframework", *sorted(ROOT.glob("plugins/*/rlframework_*"))]


def rooms_and_arrows() -> tuple[set[str], set[tuple[str, str]]]:
    """The rooms of core, and pairs of rooms of which the first imports the second."""
    graph = grimp.build_graph("rlframework", exclude_type_checking_imports=False, cache_dir=None)
    arrows = {
        (importer.split(".")[1], imported.split(".")[1])
        for importer in graph.modules - {"rlframework"}
        for imported in graph.find_modules_directly_imported_by(importer) - {"rlframework"}
    }
    return {name.split(".")[1] for name in graph.modules - {"rlframework"}}, {(a, b) for a, b in arrows if a != b}


def modules_of_core(backend: str) -> int:
    """The modules of core that a backend imports."""
    package = f"rlframework_{backend}"
    graph = grimp.build_graph("rlframework", package, exclude_type_checking_imports=False, cache_dir=None)
    inside = {name for name in graph.modules if name.startswith(package)}
    imported = {name for module in inside for name in graph.find_modules_directly_imported_by(module)}
    return len({name for name in imported if name.startswith("rlframework.")})


def run_program(code: str, overrides: Sequence[str]) -> tuple[int, int]:
    """Run `code` with a configuration; return the modules and lines that it prints.

    The plugins `DISABLED` are not imported, as if they were not installed.
    """
    from rlframework.huggingface.model_directories import make_llama
    from rlframework.huggingface.tokenizer import character_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        sizes = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "max_positions": 128}
        model = make_llama(Path(folder) / "model", character_tokenizer("0123456789+= "), **sizes)
        config, program = Path(folder) / "run.yaml", Path(folder) / "program.py"
        config.write_text("environment: {name: addition}\n")
        overrides = [f"policy.model_name={model}", f"output_dir={folder}/run", *overrides]
        overrides += ["generation.max_new_tokens=4", "observers.console=false", "policy.backend=dtensor"]
        program.write_text(code.replace("CONFIG", repr(str(config))).replace("OVERRIDES", repr(overrides)))
        environment = {**os.environ, "RLFRAMEWORK_DISABLE_PLUGINS": DISABLED}
        done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True, env=environment)
    word, count, lines = done.stdout.split()[-3:]
    assert word == "MODULES"
    return int(count), int(lines)


def seconds_of(command: str, times: int = 5) -> float:
    """The least processor time of a command, of several runs."""
    timed = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1], shell=True, check=True, capture_output=True); "
    )
    timed += "used = resource.getrusage(resource.RUSAGE_CHILDREN)\nprint(used.ru_utime + used.ru_stime)"
    runs = [subprocess.check_output([sys.executable, "-c", timed, command], text=True) for _ in range(times)]
    return min(map(float, runs))


def table() -> dict[str, object]:
    """The rows of the table."""
    rooms, arrows = rooms_and_arrows()
    modules, lines = run_program(RUN, ["algorithm={name: grpo, num_steps: 1}"])
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    program = Path(sys.executable).with_name("rlframework")
    return {
        "lines of rlframework/": lines_in(ROOT / "rlframework"),
        "rooms": len(rooms),
        "arrows": len(arrows),
        "our modules in a GRPO run (dtensor and transformers alone)": modules,
        "their lines": lines,
        **{f"modules that a step of {name} enters": run_program(STEP, keys)[0] for name, keys in STEPS.items()},
        "seconds of `import rlframework` and `rlframework plugins`": round(
            seconds_of(f"{sys.executable} -c 'import rlframework'; {program} plugins"), 2
        ),
        **{f"modules of core that {name} imports": modules_of_core(name) for name in BACKENDS},
        "required dependencies of core": len(required),
        "lines of all distributions": lines_in(*packages()),
        "lines of tests": lines_in(ROOT / "tests", *ROOT.glob("plugins/*/tests")),
    }


def main() -> None:
    """Print the table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the table as JSON")
    options = parser.parse_args()
    rows = table()
    for name, value in rows.items():
        print(f"{name:60} {value:>10,}")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
