"""Generate `recipes.md`: the recipes in examples/recipes, and what each is estimated to need on its hardware."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml
from model_shapes import model_shapes
from pieces import page as page_of
from pieces import table

from rlframework import load_config
from rlframework.config.load import compose
from rlframework.config.sections import RunConfig
from rlframework_tools.estimates.disk import gib
from rlframework_tools.estimates.estimate import Estimate
from rlframework_tools.estimates.plan import PlannedGpus, plan_run
from rlframework_tools.estimates.printing import estimate_run

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))

_INTRO = """Configurations of each kind of training, with the hardware that they are written for:

```
rlframework train examples/recipes/grpo_8b_8gpus.yaml --dry-run --on 8xH100    # on any machine: does it fit?
rlframework train examples/recipes/grpo_8b_8gpus.yaml                          # on eight GPUs
```

A recipe joins three files and adds what belongs to the combination, such as backend and parallelism:

```yaml
defaults: [models/qwen3_8b.yaml, algorithms/sft.yaml, hardware/8xH100.yaml]
output_dir: runs/sft_8b
policy:
  backend: deepspeed
  deepspeed: {zero_optimization: {stage: 3}}
```

To make your own, write such a file beside them, with another model, algorithm or hardware, and plan it with
`--dry-run`. Any key is changed on the command line too: `policy.model_name=...`, `environment.path=...`.

**No recipe has run on the hardware that it names.** `make recipes` runs each on a CPU, with a model of the same kind
and random weights. GiB are [estimated](memory.md), as by the command above: on each GPU that trains, with rows as long
as a microbatch (`policy.batching.tokens`) or as an answer (`generation.max_new_tokens`), and the least on each that
only generates, with one such row; an H100 has 79. Learning rates and batch sizes are usual values, which have not been
tuned."""

_NOTES = """- **Data**: `gsm8k`, `tools` and `agent` read `openai/gsm8k` from the hub, or files with
  `environment.train_path=train.jsonl` and `environment.path=...`. Preferences are `pairs.jsonl`, images `rows.jsonl`
  ([formats](data.md)).
- **Code**: `tools` and `agent` use `gsm8k_tasks.py`, so start them with `PYTHONPATH=examples/recipes`; both need
  `pip install openai`, and `agent` the extra `serve`. `vision` needs the extra `vision`.
- **Several machines**: 16 and 32 GPUs are two and four machines of a [Ray cluster](cluster.md), with `RAY_ADDRESS`.
- **GPUs that generate** have an engine each, or one for two with models of 30 billion parameters. vLLM runs in
  [an environment of its own](vllm.md), `.venv-vllm`."""


def page() -> str:
    """Return the text of the page."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))  # of the functions that recipes name
    with model_shapes() as shapes:
        rows = [row(path, planned(path, shapes)) for path in RECIPES]
    names = ("recipe", "model", "GPUs that train", "that generate", "backend", "GiB on each", "on each that generates")
    return page_of("# Recipes", _INTRO, table(names, rows), _NOTES)


def hardware(path: Path) -> PlannedGpus:
    """The GPUs that the recipe is written for: those after which its file of hardware is named."""
    defaults = yaml.safe_load(path.read_text(encoding="utf-8"))["defaults"]
    (name,) = (Path(each).stem for each in defaults if each.startswith("hardware/"))
    return PlannedGpus.parse(name)


def planned(path: Path, shapes: Mapping[str, Path]) -> Estimate:
    """The plan of `rlframework train RECIPE --dry-run --on HARDWARE`, with the shapes of the recipe's models."""
    plan = plan_run(path, list(_models(path, shapes)), hardware(path))
    return estimate_run(plan.config, planned=plan.gpus)


def local_config(path: Path, shapes: Mapping[str, Path]) -> RunConfig:
    """The recipe with the `shapes` of its models, and core's engine in place of vLLM, which another environment has."""
    overrides, generation = list(_models(path, shapes)), compose(path).values.get("generation", {})
    if generation.get("name") == "vllm":
        overrides += ["generation.name=transformers", "~generation.workers.python"]
        overrides += ["~generation.vllm"] * ("vllm" in generation)
    return load_config(path, overrides)


def engines(found: Estimate) -> int:
    """The number of GPUs that only generate."""
    return 0 if found.engines is None else found.engines.count * found.engines.gpus


def _models(path: Path, shapes: Mapping[str, Path]) -> Iterator[str]:
    values = compose(path).values
    for section in ("policy", "teacher"):
        if section in values:
            name = values[section]["model_name"].rpartition("/")[2]
            yield f"{section}.model_name={shapes[name]}"


def row(path: Path, found: Estimate) -> tuple[str, ...]:
    """The cells of the recipe in the table."""
    generating, model = engines(found), Path(found.config.policy.model_name).name
    return (
        f"[`{path.stem}`](../examples/recipes/{path.name})",
        model,
        str(found.config.worker_group.num_workers),
        str(generating) if generating else "-",
        f"`{found.config.policy.backend}`",
        gib(found.device_bytes),
        gib(found.engine_bytes) if generating else "-",
    )
