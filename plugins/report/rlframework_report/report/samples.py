"""The samples of a run for the report page, with their turns and images, thinned to what a page can hold.

Samples are kept or dropped as complete steps.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlframework.observers.jsonl import FOLDER
from rlframework.observers.runs import Run, Sample, Turn

LONGEST = 4000
"""Maximum number of characters in one prompt or completion."""

_NAME = re.compile(r"[0-9a-f]{32}\.jpg")
_JPEG = b"\xff\xd8\xff"
_MOST_BYTES = 65_536
"""No copy of an image that a run stores has as many, so a larger file is none."""


def samples_of(run: Run, budget: int, images: int) -> dict[str, Any]:
    """The samples as `rows` of step, kind, index of the prompt, completion, reward, other fields, and any turns.

    If any prompts or turns have images, `prompt_images` has the names of those of each prompt, and `images` those by
    name that fit the page, from the last step on.
    """
    short = [
        row.model_copy(update={"prompt": _truncate(row.prompt), "completion": _truncate(row.completion)})
        for row in run.samples
    ]
    kept = thin_samples(short, budget)
    prompts = {key: number for number, key in enumerate(dict.fromkeys((row.prompt, row.images) for row in kept))}
    rows = []
    for row in kept:
        reward = None if row.reward is None or not math.isfinite(row.reward) else round(row.reward, 4)
        extra = {name: str(value)[:500] for name, value in (row.model_extra or {}).items() if value is not None}
        extra |= {name: f"{value:.4g}" for name, value in row.metrics.items()}
        turns = [[_turn(turn) for turn in _with_input(row)]] if row.turns else []
        rows.append([row.step, row.kind, prompts[row.prompt, row.images], row.completion, reward, extra, *turns])
    found = {"total": len(run.samples), "prompts": [prompt for prompt, _ in prompts], "rows": rows}
    if not any(row.images or any(map(_turn_images, row.turns)) for row in kept):
        return found
    return {**found, "prompt_images": [names for _, names in prompts], "images": _images(run.path, kept, images)}


def _images(output_dir: Path, rows: Sequence[Sample], budget: int) -> dict[str, str]:
    """The images of `rows` as data URIs of at most `budget` characters, those of the last rows first."""
    found: dict[str, str] = {}
    shown = (name for row in reversed(rows) for names in (row.images, *map(_turn_images, row.turns)) for name in names)
    for name in dict.fromkeys(shown):
        uri = image_uri(output_dir, name)
        if uri is not None and len(uri) <= budget:
            found[name], budget = uri, budget - len(uri)
    return found


def image_uri(output_dir: Path, name: str) -> str | None:
    """Return the stored image `name` as a data URI; None if there is none.

    A run's files may be others' work, so nothing else is read, whatever is named.
    """
    path = output_dir / FOLDER / name
    if not _NAME.fullmatch(name) or not path.is_file() or path.stat().st_size > _MOST_BYTES:
        return None
    content = path.read_bytes()
    return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}" if content.startswith(_JPEG) else None


def thin_samples(rows: Sequence[Sample], budget: int) -> list[Sample]:
    """Select rows of about `budget` characters: complete steps, evenly spaced per kind, always with the last step."""
    kinds = {row.kind for row in rows}
    kept = set()
    for kind in kinds:
        sizes: Counter[int] = Counter()
        for row in rows:
            if row.kind == kind:
                sizes[row.step] += len(row.completion) + len(row.prompt) + 40 + sum(map(_turn_size, _with_input(row)))
        steps = sorted(sizes, reverse=True)
        thinned = (steps[::stride] for stride in range(1, len(steps)))
        fitting = (some for some in thinned if sum(sizes[step] for step in some) <= budget // len(kinds))
        kept |= {(kind, step) for step in next(fitting, steps[:1])}
    return [row for row in rows if (row.kind, row.step) in kept]


def _with_input(row: Sample) -> list[Turn]:
    """The messages of an episode, and before them the text that its first turn continues, if it is known."""
    first = [Turn(role="model input", content=row.model_input)] if row.turns and row.model_input else []
    return [*first, *row.turns]


def _turn(turn: Turn) -> dict[str, Any]:
    """A message for the page: its role and text, whether it is sampled and trained on, its reward and tool calls."""
    content = turn.content
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    shown: dict[str, Any] = {"role": turn.role, "text": _truncate(str(content or "")), "trained": turn.trained}
    if turn.row is not None:
        shown["row"] = turn.row
    if turn.sampled:
        shown["sampled"] = True
    if turn.reasoning_content:
        shown["reasoning"] = _truncate(turn.reasoning_content)
    if calls := [call.get("function") or {} for call in turn.tool_calls]:
        shown["calls"] = [_truncate(f"{call.get('name', '')}({call.get('arguments', '')})") for call in calls]
    if images := _turn_images(turn):
        shown["images"] = images
    if turn.reward is not None and math.isfinite(turn.reward):
        shown["reward"] = round(turn.reward, 4)
    return shown


def _turn_images(turn: Turn) -> list[str]:
    """The names of the images of a message."""
    parts = turn.content if isinstance(turn.content, list) else []
    return [str(part["image"]) for part in parts if isinstance(part, dict) and part.get("image")]


def _turn_size(turn: Turn) -> int:
    """About the number of characters of a message on the page."""
    return len(json.dumps(_turn(turn), ensure_ascii=False))


def _truncate(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}\n… {len(text) - LONGEST:,} more characters"
