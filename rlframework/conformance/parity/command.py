"""What `rlframework parity` does: who is compared, in what, and with which exit code it ends."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rlframework.config.policy import PolicyConfig
from rlframework.conformance import cases
from rlframework.conformance.layouts import Layout, quick_layouts
from rlframework.conformance.parity import report
from rlframework.conformance.parity.compare import examine
from rlframework.conformance.parity.outcome import Outcome, Subject
from rlframework.conformance.parity.recorded_step import RecordedStep, read_step
from rlframework.conformance.parity.reference import LOSSES, Exam, made_exam
from rlframework.conformance.parity.replay import against_run, exam_of, run_outcome, run_subject
from rlframework.conformance.sections import parse_section, section_of
from rlframework.errors import ConfigError
from rlframework.files import check_writable
from rlframework.huggingface.model_directories import model_sizes
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.plugins.manager import create_manager

if TYPE_CHECKING:
    from rlframework.plugins.manager import PluginManager

KIND = "policy_worker"
MODES = ("padded", "dynamic", "packed")
KEYS = re.compile(r"/(?=[\w.]+=)")
"""What stands before each key of a word; a slash within a value is none."""
PRECISIONS: tuple[str, ...] = get_args(PolicyConfig.model_fields["precision"].annotation)


def parity(
    words: Sequence[str] = (),
    *,
    model: str | None = None,
    steps: int = 20,
    rows: int = 8,
    precisions: Sequence[str] = (),
    modes: Sequence[str] = (),
    checkpointing: bool = False,
    device: str = "cpu",
    json_file: str | None = None,
    manager: PluginManager | None = None,
) -> int:
    """Compare the backends that `words` name, `BACKEND[:LAYOUT][/KEY=VALUE]...`, with the oracle; the exit code.

    No words: every policy worker that is installed. What cannot be made is told, and the others go on; it makes the
    command fail where it was named. `model`: a directory; none: a tiny model made here. `modes`: of `policy.batching`;
    none: padded. `checkpointing`: each once more, with activation checkpointing.
    """
    _check(device, json_file, steps=steps, rows=rows)
    variants = list(_variants(modes, checkpointing))
    manager = manager or create_manager()
    subjects = _subjects(words, _known(precisions or ("float32", "bfloat16")), device, manager, quick=True)
    with _folder() as folder:
        path: Path | str = model or cases.model("untied", folder)
        vocabulary = _vocabulary(path) if model else None
        exams = [made_exam(kind, path, steps=steps, rows=rows, vocabulary=vocabulary) for kind in LOSSES]
        exams = [exam.varied(variant, keys) for variant, keys in variants for exam in exams]
        outcomes = list(_examined(exams, subjects, manager, folder))
        title = (
            f"beside the oracle: {model or 'a tiny model'}, {_count(steps, 'step')} of {_count(rows, 'row')}, {device}"
        )
        settings = {"model": model, "steps": steps, "rows": rows, "lr": exams[0].lr}
        return _end(outcomes, title, json_file, settings, exams[0].slack)


def _examined(
    exams: Sequence[Exam], subjects: Sequence[tuple[Subject, bool]], manager: PluginManager, folder: Path
) -> Iterator[Outcome]:
    """Each subject in each exam; a backend that cannot be made in fp32 is told once a layout."""
    absent: set[tuple[str, str, str]] = set()
    for subject, named in subjects:
        unmade: set[str] = set()
        for exam in exams:
            if exam.variant in unmade or (subject.backend, subject.how, exam.variant) in absent:
                continue
            outcome = _told(examine(exam, subject, manager=manager, folder=folder, named=named))
            yield outcome
            if not outcome.made:
                unmade.add(exam.variant)
                if subject.precision == "float32":
                    absent.add((subject.backend, subject.how, exam.variant))


def replay(
    run: str,
    step: int,
    words: Sequence[str] = (),
    *,
    precisions: Sequence[str] = (),
    device: str = "cpu",
    json_file: str | None = None,
    manager: PluginManager | None = None,
) -> int:
    """Compute step `step` of the run in the folder `run` again; print how far all are apart; the exit code.

    No words: the run's own backend, and each other that can be made, with one worker. No precisions: the run's, and
    float32.
    """
    _check(device, json_file, step=step)
    recorded = read_step(Path(run), step)
    manager = manager or create_manager(recorded.config["plugins"])
    own = run_subject(recorded)
    chosen = _known(precisions or ("float32", own.precision))
    subjects = _subjects(words, chosen, device, manager, quick=False)
    if not words:  # the run's own first, and what it could do before is no surprise
        subjects = sorted(
            ((subject, subject.backend == own.backend) for subject, _ in subjects), key=lambda entry: not entry[1]
        )
    with _folder() as folder:
        exam = exam_of(recorded)
        outcomes = [run_outcome(recorded, exam)]
        for outcome in _examined([exam], subjects, manager, folder):
            if outcome.seen is not None and outcome.subject.precision == own.precision:
                outcome = replace(outcome, against_run=against_run(recorded, exam, outcome.seen))
            outcomes.append(outcome)
        settings = {"run": run, "step": step, "lr": exam.lr, "recorded_with": dict(recorded.versions)}
        return _end(outcomes, _title(recorded, exam), json_file, settings, exam.slack)


def _title(recorded: RecordedStep, exam: Exam) -> str:
    rows, steps = _count(recorded.data.size, "row"), _count(len(exam.batches), "optimizer step")
    return (
        f"beside the oracle: step {recorded.step} of {recorded.path.parents[1]}, {rows} in {steps}, "
        "with a fresh optimizer (its moments are not recorded)"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _check(device: str, json_file: str | None, **counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"--{name} is {count}; it must be at least 1")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device is {device!r}; it must be cpu or cuda")
    if json_file is not None:
        check_writable(Path(json_file).absolute().parent)


def _known(precisions: Sequence[str]) -> list[str]:
    for precision in precisions:
        if precision not in PRECISIONS:
            raise ConfigError(f"--precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}")
    return list(dict.fromkeys(precisions))


def _subjects(
    words: Sequence[str], precisions: Sequence[str], device: str, manager: PluginManager, *, quick: bool
) -> list[tuple[Subject, bool]]:
    """Who is compared, and whether somebody named it. `quick`: a layout of two too, where none is named."""
    found: list[tuple[str, Layout, tuple[str, ...], bool]] = []
    for word in words or manager.registered(KIND):
        place, *keys = KEYS.split(word)
        name, colon, text = place.partition(":")
        record = manager.select(KIND, name).record
        if colon and not text:
            raise ConfigError(f"{word!r} names no layout after the colon: write dtensor, or dtensor:data=2")
        if keys:
            section_of(record, parse_section(keys))
        layouts = [Layout.parse(text)] if colon else (quick_layouts(record) if quick else [Layout()])
        found += [(name, layout, tuple(keys), bool(words)) for layout in layouts]
    return [
        (Subject(name, layout, precision, device, keys=keys), named)
        for name, layout, keys, named in dict.fromkeys(found)
        for precision in precisions
    ]


def _variants(modes: Sequence[str], checkpointing: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each way to make microbatches, in words and as keys of `policy`; of few tokens, so that there are several."""
    for mode in modes:
        if mode not in MODES:
            raise ConfigError(f"--batching is {mode!r}; it must be one of {', '.join(MODES)}")
    tokens = 3 * cases.WIDTH - 2
    for again in (False, True)[: 1 + checkpointing]:
        for mode in dict.fromkeys(modes) or ("padded",):
            words = [mode] * bool(modes) + ["checkpointed"] * again
            yield " ".join(words), {"batching": {"mode": mode, "tokens": tokens}, "activation_checkpointing": again}


def _vocabulary(model: Path | str) -> int:
    """Ids below this are of tokens that both the tokenizer and the model have."""
    tokens = len(load_tokenizer(str(model)))
    size = model_sizes(str(model))[1]
    return tokens if size is None else min(tokens, size)


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rlframework-parity-") as folder:
        yield Path(folder)


def _told(outcome: Outcome) -> Outcome:
    """Say on stderr who is done, where that is a terminal: a comparison may take minutes."""
    if sys.stderr.isatty():
        print(f"{outcome.subject}, {outcome.exam}: {outcome.verdict}", file=sys.stderr, flush=True)
    return outcome


def _end(
    outcomes: Sequence[Outcome], title: str, json_file: str | None, settings: Mapping[str, Any], slack: float
) -> int:
    report.print_outcomes(outcomes, title)
    if json_file is not None:
        report.write_json(json_file, report.as_json(outcomes, settings, slack))
        print(f"written to {json_file}")
    if not any(outcome.measurements for outcome in outcomes if not outcome.is_run):
        print("nothing was compared: no backend gave any figures")
        return 1
    return int(any(outcome.fails for outcome in outcomes))
