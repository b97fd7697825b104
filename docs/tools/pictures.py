"""The pictures of the concepts page: one training step, how rows become microbatches, how layouts split a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from drawing import arrow, box, picture, rectangle, words

WIDTH = 560
GAP = 20
_DRIVER = (
    ("1  Prompts", "environment.samples: P prompts, G answers for each"),
    (
        "2  Rollout",
        "generation.generate: completions, and their log-probabilities",
        "one seed per row: output_ids [B, T], logprobs [B, T]",
    ),
    ("3  Rewards", "environment.step: scores the answers, rewards [B]"),
    (
        "4  Advantages",
        "reward minus the mean of its group, for every token of the answer",
        "if the loss needs them: previous and reference log-probabilities",
    ),
    (
        "5  Balancing",
        "Policy.train: assigns rows to data-parallel ranks and microbatches,",
        "so that all ranks have work of similar cost at the same time",
    ),
)
_WORKER = (
    ("6  Microbatches", "data processor: padded,", "dynamic or packed rows"),
    ("7  Model and head", "engine.forward_backward: head in", "chunks, at requested positions"),
    ("8  Loss and backward", "loss(logprobs, data, counts), divided", "by counts of the whole global batch"),
    ("9  Clip and step", "engine.clip_and_step: norm of the", "whole gradient, AdamW"),
)
_AFTER = (
    ("Metrics", "to the observers"),
    ("Refit", "weights to the engines"),
    ("Checkpoint", "to resume from"),
)


def step() -> str:
    """Draw one step of GRPO."""
    parts, y = (
        [words(20, 30, "One step of GRPO", "title"), words(WIDTH - 20, 30, "in the driver", "small", "end")],
        46.0,
    )
    for title, *lines in _DRIVER:
        drawn, end = box(20, y, WIDTH - 40, "driver", title, *lines)
        parts += [drawn, arrow((WIDTH / 2, end), (WIDTH / 2, end + GAP))]
        y = end + GAP
    top = y
    y += 34
    for number, (title, *lines) in enumerate(_WORKER):
        for x in (34.0, WIDTH / 2 + 8):
            drawn, end = box(x, y, WIDTH / 2 - 42, "worker", title, *lines)
            middle = x + (WIDTH / 2 - 42) / 2
            last = number == len(_WORKER) - 1
            parts += [drawn] if last else [drawn, arrow((middle, end), (middle, end + GAP))]
        if number == 2:
            parts += _loop(y + 20, top + 34 + 20)
        y = end + GAP
    parts += [
        rectangle(20, top, WIDTH - 40, y - top, "frame", 8),
        words(34, top + 21, "worker group: rank 0", "small"),
        words(WIDTH / 2 + 8, top + 21, "rank 1, ...", "small"),
    ]
    return picture(WIDTH, int(_after(parts, y)), "One training step", parts)


def _loop(below: float, above: float) -> Sequence[str]:
    """From the loss back to the next microbatch, on the outer sides of both ranks."""
    left, right = 27.0, WIDTH - 27.0
    inner_left, inner_right = 34.0, WIDTH - 34.0
    return [
        arrow((inner_left, below), (left, below), (left, above), (inner_left - 0.5, above)),
        arrow((inner_right, below), (right, below), (right, above), (inner_right + 0.5, above)),
    ]


def _after(parts: list[str], y: float) -> float:
    """Draw what follows a step; return the bottom of the picture."""
    parts.append(arrow((WIDTH / 2, y), (WIDTH / 2, y + GAP)))
    width = (WIDTH - 40 - 2 * 12) / 3
    for number, (title, line) in enumerate(_AFTER):
        drawn, end = box(20 + number * (width + 12), y + GAP, width, "driver", title, line)
        parts.append(drawn)
    parts.append(words(20, end + 24, "6 to 8 run once per microbatch, 9 once per global batch.", "small"))
    return end + 40


LENGTHS = (5, 9, 3, 6, 8)
UNIT, ROW = 24, 20


def batching() -> str:
    """How the same five rows become microbatches."""
    parts = [words(20, 30, "Five rows of 5, 9, 3, 6 and 8 tokens, as microbatches", "title")]
    y = 54.0
    padded = [[0, 1, 2], [3, 4]]
    by_length = sorted(range(len(LENGTHS)), key=LENGTHS.__getitem__)
    for name, text, groups in (
        ("padded", "a fixed number of rows, padded to the longest of them", padded),
        ("dynamic", "rows of similar length, so there is little padding", [by_length[:3], by_length[3:]]),
    ):
        parts += [words(20, y, name, "code"), words(100, y, text, "small")]
        y = _rows(parts, groups, y + 10) + 26
    parts += [
        words(20, y, "packed", "code"),
        words(100, y, "rows concatenated, attention only within each: no padding", "small"),
    ]
    y = _strips(parts, [[1, 4], [0, 3, 2]], y + 10)
    return picture(WIDTH, int(y + 12), "How rows become microbatches", parts)


def _rows(parts: list[str], groups: Sequence[Sequence[int]], y: float) -> float:
    x = 20.0
    for number, group in enumerate(groups):
        longest = max(LENGTHS[row] for row in group)
        for line, row in enumerate(group):
            top = y + line * (ROW + 3)
            parts.append(rectangle(x, top, LENGTHS[row] * UNIT, ROW, ("zero", "one")[number], 2))
            parts.append(words(x + 8, top + 14, f"row {row}", "small on"))
            if LENGTHS[row] < longest:
                start = x + LENGTHS[row] * UNIT + 1
                parts.append(rectangle(start, top, (longest - LENGTHS[row]) * UNIT - 1, ROW, "pad", 2))
        x += longest * UNIT + 40
    return y + max(map(len, groups)) * (ROW + 3)


def _strips(parts: list[str], groups: Sequence[Sequence[int]], y: float) -> float:
    for number, group in enumerate(groups):
        x = 20.0
        for row in group:
            parts.append(rectangle(x, y, LENGTHS[row] * UNIT, ROW, ("zero", "one")[number], 2))
            parts.append(words(x + 8, y + 14, f"row {row}", "small on"))
            x += LENGTHS[row] * UNIT
        y += ROW + 6
    return y


PANEL_W, PANEL_H = 262, 196
_PANELS = (
    ("data: 2", "rows", "cut", "each has its own rows; weights are", "replicated or sharded (FSDP2, ZeRO)"),
    ("tensor: 2", "both", "columns", "each has a shard of every weight;", "activations between them are reduced"),
    ("context: 2", "tokens", "cut", "each has a part of every sequence;", "keys and values are gathered"),
    ("pipeline: 2", "both", "stages", "each has some of the layers;", "microbatches pass through the stages"),
    ("expert: 2", "rows", "experts", "each has some of the experts;", "tokens are sent to them and back"),
    (
        "tensor: 2, sequence: true",
        "both",
        "sequence",
        "as tensor; between the weights each has",
        "the activations of some of the tokens",
    ),
)
"""Name, how the batch and the model are split, and two lines of text."""


def layouts() -> str:
    """Draw what each of two workers holds, axis by axis."""
    parts = [
        words(20, 30, "What two workers hold", "title"),
        rectangle(300, 19, 14, 14, "zero", 2),
        words(320, 30, "worker 0", "small"),
        rectangle(390, 19, 14, 14, "one", 2),
        words(410, 30, "worker 1", "small"),
        rectangle(480, 19, 14, 14, "both", 2),
        words(500, 30, "both", "small"),
    ]
    for number, (name, batch, model, *text) in enumerate(_PANELS):
        x, y = 12 + (number % 2) * (PANEL_W + 12), 46 + (number // 2) * (PANEL_H + 10)
        parts += [rectangle(x, y, PANEL_W, PANEL_H, "box", 6), words(x + 12, y + 20, name, "code")]
        parts += _batch(x + 12, y + 52, batch) + _model(x + 146, y + 52, model)
        parts += [words(x + 12, y + 44, "batch", "small"), words(x + 146, y + 44, "model", "small")]
        parts += [words(x + 12, y + 166 + 15 * line, said, "small") for line, said in enumerate(text)]
    return picture(WIDTH, 46 + 3 * (PANEL_H + 10) + 4, "How layouts split a model and its batches", parts)


def _batch(x: float, y: float, cut: str) -> list[str]:
    """Four rows of six tokens."""
    cells = []
    for row in range(4):
        for token in range(6):
            kind = {"rows": row >= 2, "tokens": token >= 3}.get(cut)
            cells.append(rectangle(x + token * 18, y + row * 24, 16, 22, "both" if kind is None else _of(kind), 2))
    return cells


def _model(x: float, y: float, cut: str) -> list[str]:
    """Four layers; for a mixture, with two experts each. Thin bars are activations between split weights."""
    parts = []
    for layer in range(4):
        top = y + layer * 24
        if cut == "stages":
            parts.append(rectangle(x, top, 100, 22, _of(layer >= 2), 2))
        elif cut == "experts":
            parts.append(rectangle(x, top, 30, 22, "both", 2))
            parts += [rectangle(x + 33 + 34 * number, top, 32, 22, _of(number == 1), 2) for number in range(2)]
        else:
            height = 22 if cut == "cut" else 14
            parts += [rectangle(x + 51 * number, top, 49, height, _of(number == 1), 2) for number in range(2)]
        if cut == "columns":
            parts.append(rectangle(x, top + 16, 100, 5, "both", 1))
        if cut == "sequence":
            parts += [rectangle(x + 51 * number, top + 16, 49, 5, _of(number == 1), 1) for number in range(2)]
    return parts


def _of(second: bool) -> str:
    return "one" if second else "zero"


PICTURES: Mapping[str, Callable[[], str]] = {"step": step, "batching": batching, "layouts": layouts}
"""File name below docs/pictures to the function that draws it."""
