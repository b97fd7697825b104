"""`Session`: the parts of a run that stay open from one cell of a notebook to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from rlframework.base.errors import ConfigError
from rlframework.config.load import Source, compose
from rlframework.config.problems import NOT_GIVEN
from rlframework.plugins.configure import load_config
from rlframework.runner.parts import build_parts

if TYPE_CHECKING:
    from rlframework.config.policy import SchedulerConfig
    from rlframework.config.sections import RunConfig
    from rlframework.datasets.sources.memory import Data

UNUSED: Mapping[str, str] = {"algorithm": "sft", "environment": "addition"}
"""The parts in the sections that a loop of your own may leave out: these need no reference model and no data."""


def loop_config(source: Source, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a configuration like `load_config`, which may leave out `algorithm` and `environment`.

    For a loop of your own that uses neither. Raises `ConfigError` for a schedule that decays if nothing says when.
    """
    tree = compose(source, overrides)
    unused = [f"{key}.name={name}" for key, name in UNUSED.items() if tree.get((key, "name")) is NOT_GIVEN]
    config = load_config(source, [*overrides, *unused])
    if all(tree.get(("algorithm", key)) is NOT_GIVEN for key in ("name", "num_steps")):
        _require_end(config.policy.scheduler)
    return config


def _require_end(scheduler: SchedulerConfig) -> None:
    if scheduler.name != "constant" and scheduler.total_steps is None:
        raise ConfigError(
            f"`policy.scheduler.total_steps`: required key is missing: without an algorithm, a {scheduler.name} "
            "schedule does not know after how many calls of `train` it ends. Set it, or policy.scheduler.name=constant"
        )


class Session:
    """The `Parts` of `build_parts`, from the constructor to `close`, for several cells of a notebook.

    `policy`, `generation`, `tokenizer` and `config` are those of `parts`, which functions such as `rollout` take. It is
    also a context manager, and ends with the program. An error in a worker process, and an interrupt while a call of
    `policy` waits for one, end the workers: close the session then, and open another.
    """

    def __init__(self, source: Source, overrides: Sequence[str] = (), *, data: Data | None = None) -> None:
        """Start the workers. `source` and `overrides`: see `loop_config`; `data`: see `with_data`."""
        self._open = ExitStack()
        self.parts = self._open.enter_context(build_parts(loop_config(source, overrides), data=data))
        self.config, self.tokenizer = self.parts.config, self.parts.tokenizer
        self.policy, self.generation = self.parts.policy, self.parts.generation
        self._is_open = True

    def close(self) -> None:
        """Shut the workers down; nothing if that was done."""
        self._is_open = False
        self._open.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        group = self.config.worker_group
        failed = self.policy.worker_group.ended is not None
        state = "closed" if not self._is_open else "failed: open a new Session" if failed else "open"
        return (
            f"<Session of {self.config.policy.model_name}: {self.config.policy.backend}, "
            f"{group.num_workers} x {group.name}, {state}>"
        )
