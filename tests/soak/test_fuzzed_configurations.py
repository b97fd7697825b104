"""Damaged configurations: each is accepted and repeatable, or one clear error in bounded time."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from generated_configurations import Generator, Keys, Values, contradicted, damaged, damaged_text, overrides_of, written

from rlframework.base.errors import UserError
from rlframework.config.load import escape_interpolation
from rlframework.config.sections import RunConfig
from rlframework.config.yaml_text import to_yaml
from rlframework.plugins.configure import config_schema, config_yaml, dump_selected, load_config
from rlframework.plugins.manager import PluginManager, create_manager
from rlframework.runner.launch import dry_run

pytestmark = pytest.mark.slow

SECONDS = 1.0
"""Of a core, in which a configuration must be accepted or rejected."""
LONGEST, MEGABYTES = 50_000, 300
"""Characters of an error, and what all inputs of a test may add to the memory of the process."""


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    """All installed plugins."""
    return create_manager()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with some rows of data."""
    rows = [
        f'{{"prompt": "{n}+1=", "completion": "{n + 1}", "question": "{n}+1?", "answer": "#### {n + 1}"}}'
        for n in range(40)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def generator(soak: Any, manager: PluginManager, tiny_llama: Path) -> Generator:
    """Draws configurations whose model and data are there."""
    rows = ["rows.jsonl"]
    known = {
        "model_name": [str(tiny_llama)],
        "path": rows,
        "train_path": rows,
        "num_workers": [1, 1, 2],
        "plugins": [[]],
    }
    return Generator(config_schema(manager), soak.random(), known)


class Attack:
    """Loads configurations, checks each outcome, and counts. `slowest`: seconds of a core."""

    def __init__(self, folder: Path, manager: PluginManager) -> None:
        self.folder, self.manager = folder, manager
        self.accepted = self.rejected = 0
        self.slowest = 0.0

    def load(
        self, text: str | None, overrides: list[str] | None = None, mentions: Keys | None = None
    ) -> RunConfig | None:
        """The configuration in `text` with `overrides`, or None; the error then names `mentions` or a key beside it."""
        path = self.folder / "run.yaml"
        if text is not None:
            path.write_bytes(text.encode("utf-8", "surrogateescape" if "\udcff" in text else "surrogatepass"))
        start = time.process_time()
        try:
            config = load_config(path, overrides or (), manager=self.manager)
        except UserError as error:
            self.rejected += 1
            self._check(str(error), mentions)
            return None
        finally:
            took = time.process_time() - start
            self.slowest = max(self.slowest, took)
            assert took < SECONDS, f"{took:.1f} s"
        self.accepted += 1
        return config

    def _check(self, message: str, mentions: Keys | None) -> None:
        assert len(message) <= LONGEST, message[:200]
        assert "Traceback" not in message
        assert "run.yaml" in message or "`" in message, message
        if mentions is not None and not message.startswith(str(self.folder)):  # a line of the file
            # in other letters: an interpolation of `seed` fails if that is now spelled `SEED`
            assert any(key.lower() in message.lower() for key in named(mentions)), (mentions, message)

    def check_repeatable(self, config: RunConfig) -> None:
        """An accepted configuration, written and printed, gives the same one again."""
        assert self.load(config_yaml(config)) == config
        printed = self.load(to_yaml(escape_interpolation(dump_selected(config))))
        assert printed is not None
        assert dump_selected(printed) == dump_selected(config)


def named(place: Keys) -> set[str]:
    """The dotted keys at, above and beside `place`. An error names at least one of them."""
    keys = [str(key)[:70] for key in place]
    return {f"`{keys[0]}", f"{keys[0]}.", *keys[1:]}


@pytest.fixture
def attack(soak: Any, folder: Path, manager: PluginManager) -> Iterator[Attack]:
    """Counts the outcomes of a test for the log of the attack; memory must not grow much either."""
    begin, attack = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, Attack(folder, manager)
    yield attack
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin) // 1024
    assert grown < MEGABYTES
    inputs, slowest = attack.accepted + attack.rejected, round(attack.slowest, 2)
    soak.figures |= {"inputs": inputs, "accepted": attack.accepted, "slowest_seconds": slowest, "grown_mb": grown}


@pytest.fixture
def sound(soak: Any, attack: Attack, generator: Generator) -> list[Values]:
    """Configurations that are accepted, whose written form gives them again."""
    found: list[Values] = []
    while len(found) < soak.times(4, 40):
        if config := attack.load(written(values := generator.configuration(), generator.random)):
            attack.check_repeatable(config)
            found.append(values)
    return found


def test_wrong_values_and_keys(soak: Any, attack: Attack, generator: Generator, sound: list[Values]) -> None:
    draw = generator.random
    for _ in range(soak.times(30, 4200)):
        values, place = damaged(draw.choice(sound), draw)
        config = attack.load(written(values, draw), mentions=place if "".join(map(str, place)).isprintable() else None)
        if config and draw.random() < 0.2:
            attack.check_repeatable(config)


def test_values_that_contradict_others(soak: Any, attack: Attack, generator: Generator, sound: list[Values]) -> None:
    draw = generator.random
    for _ in range(soak.times(20, 1500)):
        if (config := attack.load(written(contradicted(draw.choice(sound), draw), draw))) and draw.random() < 0.2:
            attack.check_repeatable(config)


def test_damaged_text(soak: Any, attack: Attack, generator: Generator, sound: list[Values]) -> None:
    draw = generator.random
    for _ in range(soak.times(25, 2300)):
        attack.load(damaged_text(written(draw.choice(sound), draw), draw))


def test_overrides(soak: Any, attack: Attack, generator: Generator, sound: list[Values]) -> None:
    draw = generator.random
    for _ in range(soak.times(20, 2000)):
        values = draw.choice(sound)
        attack.load(written(values, draw), overrides_of(damaged(values, draw)[0], draw))


def test_what_is_accepted_can_be_set_up(soak: Any, attack: Attack, generator: Generator, sound: list[Values]) -> None:
    """All that a run does before it starts workers succeeds, or is one clear error."""
    draw, tried = generator.random, 0
    while tried < soak.times(2, 60):
        config = attack.load(written(contradicted(draw.choice(sound), draw), draw))
        if config is None:
            continue
        tried += 1
        with suppress(UserError):
            dry_run(config)
