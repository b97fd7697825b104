"""Rollouts in the background of training: groups are generated for later steps, as the ledger admits them.

Four threads, and what belongs to each:

- the driver's: the trainer, the refits, and `AsynchronousRollouts` with its `IdleTimes`;
- `TicketThread`: the client of the engines, and the completions;
- the loop of the players, which that thread starts beside it: the tasks of the tickets, and the player;
- the thread of the `Joiner`.

The driver's and the loop of the players share what they use inside of `with` the `SharedLedger`. What always holds:

1. Bound: a ticket is admitted only if no token of it can be staler than `max_staleness` (`Ledger.admit`).
2. Order: the prompt of a slot depends on the slots before it, never on time (`Ledger`).
3. Settled once: a ticket is completed or fails, once, and its group is trained in the step of the ticket (`Ledger`).
4. One version: while requests are sent, all engines that get them have the weights that were published last; so
   `publish` stops requests, refits, notes the version, and only then has requests sent again.
5. One lock: the ledger, the prompts, the versions and the failures are used inside of `with` the `SharedLedger` alone,
   where nobody waits for another thread.
6. No silent end: what ends a thread is raised in the driver's thread, by its next wait or call (`TicketThread`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rlframework.base.errors import ConfigError, EngineFault, RLFrameworkError, UserError
from rlframework.base.logs import debug_span
from rlframework.config.asynchrony import AsyncConfig
from rlframework.generation.remote import RemoteGeneration
from rlframework.interfaces.policy_worker import SAMPLED_NOW
from rlframework.observers.timeline import TRAINER, timed
from rlframework.rollout.ledger import Ledger
from rlframework.rollout.result import Rollout
from rlframework.rollout.seeds import ticket_seeds
from rlframework.rollout.step_rollouts import StepRollouts, add_rewards_of_models, group_player
from rlframework.rollout.ticket_thread import TicketThread
from rlframework.rollout.tickets import FailureLog, Settled, Ticket, staleness_metrics

if TYPE_CHECKING:
    from rlframework.generation.client import GenerationClient
    from rlframework.rollout.parts import Parts

_LOG = logging.getLogger(__name__)

_POLL = 0.2
"""Seconds after which a wait looks for lost engines and passed deadlines."""


def check_asynchronous(parts: Parts) -> None:
    """Raise `ConfigError` for a run that cannot generate while it trains."""
    workers = parts.config.generation.workers
    if workers is None or workers.group == "inline":
        given = "not set" if workers is None else "with group=inline"
        raise ConfigError(
            f"algorithm.async generates while the policy is trained, but generation.workers is {given}, so that one "
            "process does both; set generation.workers={group: processes, num_workers: N} or group: ray, or remove "
            "algorithm.async"
        )
    if getattr(parts.config.generation, "cache_after_update", "recompute") != "recompute":
        raise ConfigError(
            "generation.cache_after_update=keep has no effect with algorithm.async, which ends requests before a refit "
            "and computes the keys and values of their tokens again with the new weights; set it to recompute"
        )


def _require_own_gpus(parts: Parts) -> None:
    generation = parts.generation
    assert isinstance(generation, RemoteGeneration)
    if generation.shares_gpu:
        raise ConfigError(
            "algorithm.async generates while the policy is trained, but an engine shares a GPU with the trainer, "
            "which take turns there; place the engines on GPUs of their own (generation.workers.group=ray), or "
            "remove algorithm.async"
        )


class SharedLedger:
    """The ledger of several threads, one of which uses it at a time: `with shared as ledger`."""

    def __init__(
        self, ledger: Ledger[int, Any], last_step: int, settled: Callable[[int, Sequence[Settled[int, Any]]], None]
    ) -> None:
        """`settled(step, tickets)`: called once when the step that is taken next, up to `last_step`, is settled."""
        self._ledger, self._last_step, self._settled = ledger, last_step, settled
        self._passed_on = 0
        """The last step that `settled` was called for."""
        self._changed = threading.Condition()

    def __enter__(self) -> Ledger[int, Any]:
        """Return the ledger."""
        self._changed.acquire()
        return self._ledger

    def __exit__(self, *_: object) -> None:
        """Pass on the next step if it is settled, and have `wait` look again."""
        try:
            step = self._ledger.taken + 1
            if self._passed_on < step <= self._last_step and (settled := self._ledger.settled(step)):
                self._passed_on = step
                self._settled(step, settled)
            self._changed.notify_all()
        finally:
            self._changed.release()

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait until the ledger was used, but not for long, unless `done()`."""
        with self._changed:
            if not done():
                self._changed.wait(_POLL)

    def notify(self) -> None:
        """Have `wait` look again."""
        with self._changed:
            self._changed.notify_all()


class Joiner:
    """Joins settled groups into a rollout: those of the next step in a thread, while the step before is trained."""

    def __init__(self, join: Callable[[Sequence[Settled[int, Any]]], Rollout]) -> None:
        self._join = join
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="joining")
        self._ahead: tuple[int, Future[Rollout]] | None = None

    def begin(self, step: int, settled: Sequence[Settled[int, Any]]) -> None:
        """Begin to join the first rollout of `step`, the next one, unless all its groups have failed."""
        if not all(each.failed for each in settled):
            self._ahead = step, self._thread.submit(self._join, settled)

    def rollout(self, step: int, number: int, settled: Sequence[Settled[int, Any]]) -> Rollout:
        """Return the rollout of this number of `step`, with the groups `settled`."""
        ahead = self._ahead
        return ahead[1].result() if ahead and ahead[0] == step and not number else self._join(settled)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)


class IdleTimes:
    """The fractions of the time of a step in which the trainer waited for groups, and engines had no requests."""

    def __init__(self, client: GenerationClient) -> None:
        """Begin now."""
        self._client = client
        self._begin()

    def _begin(self) -> None:
        self._waited, self._since, self._busy = 0.0, time.perf_counter(), self._client.busy_seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as one in which the trainer waits."""
        begun = time.perf_counter()
        yield
        self._waited += time.perf_counter() - begun

    def pop_metrics(self) -> dict[str, float]:
        """Return the fractions since the last call."""
        elapsed = max(time.perf_counter() - self._since, 1e-9)
        busy = (self._client.busy_seconds - self._busy) / elapsed / len(self._client.engines)
        metrics = {
            "async/engine_idle_fraction": max(0.0, 1.0 - busy),
            "async/trainer_idle_fraction": min(1.0, self._waited / elapsed),
        }
        self._begin()
        return metrics


class AsynchronousRollouts(StepRollouts):
    """Generates while the driver trains; every token within `config.max_staleness`, for steps up to `last_step`."""

    def __init__(self, parts: Parts, config: AsyncConfig, groups: int, rows: int, last_step: int) -> None:
        """Start nothing. Raises like `check_asynchronous`."""
        check_asynchronous(parts)
        super().__init__(parts, groups, rows, config.max_staleness)
        self._config = config
        self._player = group_player(parts)
        self._joiner = Joiner(self._join)
        ledger: Ledger[int, Any] = Ledger(
            groups=groups,
            max_staleness=config.max_staleness,
            last_step=last_step,
            attempts=config.attempts,
            deadline=config.deadline,
            clock=time.monotonic,
        )
        self._ledger = SharedLedger(ledger, last_step, self._joiner.begin)
        self._failures = FailureLog()
        self._step_of: dict[int, int] = {}
        """The training step after which the weights of an engine's version were sent."""
        self._thread: TicketThread | None = None
        self._idle: IdleTimes | None = None

    # -- steps ---------------------------------------------------------------------------------------------------------

    def publish(self, step: int) -> None:
        """See `StepRollouts.publish`. Engines that have started in place of lost ones are among those that serve."""
        generation, thread = self._parts.generation, self._thread
        if thread is not None:
            paused = debug_span(_LOG, "step %d: stopping generation, which the new weights wait for", step)
            with paused, timed(self._parts.timeline, TRAINER, "wait"):
                thread.stop_requests(interrupt=self._config.weight_updates == "in_flight")
        generation.prepare_for_generation()
        version = generation.weights_version
        assert version is not None
        if self._idle is None:
            _require_own_gpus(self._parts)
            self._idle = IdleTimes(generation.client)
        with self._ledger as ledger:
            if ledger.taken < step:  # resumed from a synchronous run
                ledger.start_after(step)
            self._step_of[version] = step
            ledger.published(step)
        if thread is not None:
            thread.send_requests()

    def rollout(self, step: int, number: int) -> Rollout:
        """See `StepRollouts.rollout`. Waits for the groups; those that have failed are in it, but not trained on.

        Raises `UserError` if all have failed.
        """
        assert self._idle is not None
        thread = self._running_thread()
        if number:
            with self._ledger as ledger:
                ledger.extend(step, self._prompts.draw)
            thread.wake()
        with debug_span(_LOG, "step %d: waiting for its groups", step), self._idle.waiting():
            self._wait(thread, lambda: self._settled(step) is not None)
        settled = (self._settled(step) or [])[number * self._groups : (number + 1) * self._groups]
        if all(each.failed for each in settled):
            raise UserError(f"all {len(settled)} groups of step {step} failed; the first: {settled[0].reason}")
        result = self._joiner.rollout(step, number, settled)
        if self._config.max_staleness:
            result.data[SAMPLED_NOW] = result.sampled_with(self._parts.generation.weights_version)
        add_rewards_of_models(self._parts, result)
        with self._ledger:
            self._prompts.note(step, self._success([each.ticket.prompt for each in settled], result))
        return result

    def take(self, step: int) -> dict[str, float]:
        """See `StepRollouts.take`."""
        assert self._idle is not None
        with self._ledger as ledger:
            settled = ledger.take(step) or []
            metrics = staleness_metrics(step, settled, self._step_of, self._player.spans)
            metrics["async/failed_groups"] = float(sum(each.failed for each in settled))
            metrics["async/given_up_prompts"] = float(ledger.given_up)
            self._failures.end(step)
            oldest = step - 1 - self._config.max_staleness
            self._step_of = {version: of for version, of in self._step_of.items() if of >= oldest}
        return metrics | self._idle.pop_metrics()

    def _settled(self, step: int) -> list[Settled[int, Any]] | None:
        with self._ledger as ledger:
            return ledger.settled(step)

    # -- state ---------------------------------------------------------------------------------------------------------

    def pop_metrics(self) -> dict[str, float]:
        """See `StepRollouts.pop_metrics`."""
        with self._ledger:
            return super().pop_metrics()

    def state_dict(self) -> dict[str, Any]:
        """See `StepRollouts.state_dict`. Includes the ledger, at the same moment."""
        with self._ledger as ledger:
            return super().state_dict() | {"ledger": ledger.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `StepRollouts.load_state_dict`; also takes the state of a synchronous run."""
        with self._ledger as ledger:
            super().load_state_dict(state)
            if "ledger" in state:
                ledger.load_state_dict(state["ledger"])

    # -- threads -------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """See `StepRollouts.finish`. Waits for the groups in progress, which are kept for their steps."""
        if (thread := self._thread) is not None:
            thread.end()
            self._wait(thread, lambda: not thread.alive)
            self._thread = None
            thread.abort()
            thread.require_no_error()

    def close(self) -> None:
        """See `StepRollouts.close`. Gives up the groups in progress."""
        if self._thread is not None:
            self._thread.abort()
            self._thread = None
        self._joiner.close()
        self._player.close()

    def _running_thread(self) -> TicketThread:
        if (thread := self._thread) is None:
            gathered, ended = not self._config.max_staleness, self._ledger.notify
            thread = self._thread = TicketThread(self._player, self._admit, self._play, ended, gathered=gathered)
            thread.start()
        return thread

    def _wait(self, thread: TicketThread, done: Callable[[], bool]) -> None:
        """Wait until `done()`. Meanwhile, fail tickets whose deadline passes, and refit if no engine is left."""
        while not done():
            thread.require_no_error()
            with self._ledger as ledger:
                late, trained = ledger.expire(), ledger.taken
                for ticket in late:
                    late_by = f"not complete {self._config.deadline:g} seconds after its admission"
                    self._failures.add(ticket.step, f"{ticket} failed: {late_by}")
            for ticket in late:
                thread.cancel(ticket.number)
            if thread.without_engines:
                self.publish(trained)  # the trainer has the weights after it
            self._ledger.wait(done)

    # -- the loop of the players ---------------------------------------------------------------------------------------

    def _admit(self) -> Ticket[int] | None:
        with self._ledger as ledger:
            return ledger.admit(self._prompts.draw)

    async def _play(self, ticket: Ticket[int]) -> None:
        """Play the group of `ticket`, and settle it."""
        seeds = ticket_seeds(self._parts.config.seed, ticket.step, ticket.slot, self._rows, self._groups)
        try:
            group = await self._player.play(self._samples[ticket.prompt], seeds)
            with self._ledger as ledger:
                ledger.complete(ticket, group, self._steps_of(ticket, group))
        except RLFrameworkError:  # ends the thread
            raise
        except Exception as error:  # noqa: BLE001 - an environment may raise anything, which costs this group alone
            reason = f"{type(error).__name__}: {error}"
            with self._ledger as ledger:
                if ledger.fail(ticket, reason):
                    self._failures.add(ticket.step, f"{ticket} failed: {reason}")

    def _steps_of(self, ticket: Ticket[int], group: Any) -> set[int]:
        """Return the training steps after which the weights of a group's tokens were sent to the engines.

        Raises `EngineFault` for a version that was never sent, or so long ago that no token may have it.
        """
        versions = {span.version for span in self._player.spans(group)}
        if unknown := versions - self._step_of.keys():
            raise EngineFault(
                f"{ticket} has tokens of weights version {min(unknown)}, but those that it may be sampled with are "
                f"{', '.join(map(str, sorted(self._step_of)))}: the spans of engine "
                f"{self._parts.config.generation.name!r} are wrong, so nobody knows how stale its tokens are. "
                "Report it to its authors"
            )
        return {self._step_of[version] for version in versions}

    def _join(self, settled: Sequence[Settled[int, Any]]) -> Rollout:
        """Return the rollout of groups, some of which may have failed."""
        groups = [(self._samples[each.ticket.prompt], self._rows, each.reason or each.group) for each in settled]
        return self._player.rollout(groups)
