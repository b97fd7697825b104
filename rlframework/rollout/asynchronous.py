"""Rollouts in the background of training: groups are generated for later steps, as the ledger admits them.

A thread drives the engines, another one plays groups, and a third joins the groups of the next step into its batch. The
driver's own thread trains, and calls what is here: it publishes the weights of each step to the engines, then waits for
the batch of the next.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rlframework.base.errors import ConfigError, EngineFault, RLFrameworkError, UserError
from rlframework.base.logs import debug_span
from rlframework.config.asynchrony import AsyncConfig
from rlframework.generation.interruptible import InterruptibleCompletions
from rlframework.generation.remote import RemoteGeneration
from rlframework.interfaces.policy_worker import SAMPLED_NOW
from rlframework.observers.timeline import TRAINER, timed
from rlframework.rollout.episode_thread import Bridge, play_beside
from rlframework.rollout.ledger import Ledger
from rlframework.rollout.result import Rollout
from rlframework.rollout.seeds import ticket_seeds
from rlframework.rollout.step_rollouts import StepRollouts, add_rewards_of_models, group_player
from rlframework.rollout.tickets import FailureLog, Settled, StepStaleness, Ticket

if TYPE_CHECKING:
    from rlframework.rollout.parts import Parts

R = TypeVar("R")

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


class AsynchronousRollouts(StepRollouts):
    """Generates while the driver trains; every token within `config.max_staleness`, for steps up to `last_step`."""

    def __init__(self, parts: Parts, config: AsyncConfig, groups: int, rows: int, last_step: int) -> None:
        """Start nothing. Raises like `check_asynchronous`."""
        check_asynchronous(parts)
        super().__init__(parts, groups, rows, config.max_staleness)
        self._config, self._last_step = config, last_step
        self._player = group_player(parts)
        self._ledger: Ledger[int, Any] = Ledger(
            groups=groups,
            max_staleness=config.max_staleness,
            last_step=last_step,
            attempts=config.attempts,
            deadline=config.deadline,
            clock=time.monotonic,
        )
        self._changed = threading.Condition()  # guards the ledger, the loader and what follows
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._raised: list[asyncio.Task[None]] = []
        self._failures = FailureLog()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._ending = False
        self._step_of: dict[int, int] = {}
        """The training step after which the weights of an engine's version were sent."""
        self._staleness: dict[int, StepStaleness] = {}
        self._joining = ThreadPoolExecutor(1, thread_name_prefix="joining")
        self._joined: tuple[int, Future[Rollout]] | None = None
        """The last step whose groups are joined as soon as they are there, while the step before is trained."""
        self._idle, self._since, self._busy = 0.0, time.perf_counter(), 0.0

    # -- steps ---------------------------------------------------------------------------------------------------------

    def publish(self, step: int) -> None:
        """See `StepRollouts.publish`. Replaces engines that are lost."""
        generation = self._parts.generation
        assert isinstance(generation, RemoteGeneration)
        running = self._thread is not None
        if running:
            interrupt = self._config.weight_updates == "in_flight"
            paused = debug_span(_LOG, "step %d: stopping generation, which the new weights wait for", step)
            with paused, timed(self._parts.timeline, TRAINER, "wait"):
                self._in_loop(lambda: self._completions.close(interrupt=interrupt))
        generation.prepare_for_generation()
        version = generation.weights_version
        assert version is not None
        if not self._step_of and generation.shares_gpu:
            raise ConfigError(
                "algorithm.async generates while the policy is trained, but an engine shares a GPU with the trainer, "
                "which take turns there; place the engines on GPUs of their own (generation.workers.group=ray), or "
                "remove algorithm.async"
            )
        if not self._step_of:
            self._since = time.perf_counter()
        with self._changed:
            if self._ledger.taken < step:  # resumed from a synchronous run
                self._ledger.start_after(step)
            self._step_of[version] = step
            self._ledger.published(step)
        if running:
            self._in_loop(self._completions.open)
            self._wake_player()

    def rollout(self, step: int, number: int) -> Rollout:
        """See `StepRollouts.rollout`. Waits for the groups; those that have failed are in it, but not trained on.

        Raises `UserError` if all have failed.
        """
        if self._thread is None:
            self._start()
        if number:
            with self._changed:
                self._ledger.extend(step, self._prompts.draw)
            self._wake_player()
        begun = time.perf_counter()
        with debug_span(_LOG, "step %d: waiting for its groups", step):
            self._wait(lambda: self._settled(step) is not None)
        self._idle += time.perf_counter() - begun
        settled = self._settled(step) or []
        found = settled[number * self._groups : (number + 1) * self._groups]
        if all(each.failed for each in found):
            raise UserError(f"all {len(found)} groups of step {step} failed; the first: {found[0].reason}")
        self._staleness.setdefault(step, StepStaleness(step)).add(found, self._step_of, self._player.spans)
        joined = self._joined
        result = joined[1].result() if not number and joined and joined[0] == step else self._join(found)
        if self._config.max_staleness:
            result.data[SAMPLED_NOW] = result.sampled_with(self._parts.generation.weights_version)
        add_rewards_of_models(self._parts, result)
        with self._changed:
            self._prompts.note(step, self._success([each.ticket.prompt for each in found], result))
        return result

    def _join(self, found: Sequence[Settled[int, Any]]) -> Rollout:
        """Return the rollout of groups, some of which may have failed."""
        groups = [(self._samples[each.ticket.prompt], self._rows, each.reason or each.group) for each in found]
        return self._player.rollout(groups)

    def _join_ahead(self) -> None:
        """Begin to join the first rollout of the next step, if its groups are there. The caller guards the ledger."""
        step = self._ledger.taken + 1
        if step > self._last_step or (self._joined is not None and self._joined[0] == step):
            return
        found = self._ledger.settled(step)
        if found and not all(each.failed for each in found):
            self._joined = step, self._joining.submit(self._join, found)

    def take(self, step: int) -> dict[str, float]:
        """See `StepRollouts.take`."""
        with self._changed:
            taken = self._ledger.take(step) or []
            given_up = self._ledger.given_up
            self._join_ahead()
        self._failures.end(step)
        oldest = step - self._config.max_staleness
        self._step_of = {version: of for version, of in self._step_of.items() if of >= oldest - 1}
        metrics = self._staleness.pop(step).metrics()
        metrics["async/failed_groups"] = float(sum(each.failed for each in taken))
        metrics["async/given_up_prompts"] = float(given_up)
        client, now = self._parts.generation.client, time.perf_counter()
        elapsed, busy = max(now - self._since, 1e-9), client.busy_seconds - self._busy
        metrics["async/engine_idle_fraction"] = max(0.0, 1.0 - busy / elapsed / len(client.engines))
        metrics["async/trainer_idle_fraction"] = min(1.0, self._idle / elapsed)
        self._idle, self._since, self._busy = 0.0, now, client.busy_seconds
        return metrics

    def _settled(self, step: int) -> list[Settled[int, Any]] | None:
        with self._changed:
            return self._ledger.settled(step)

    # -- state ---------------------------------------------------------------------------------------------------------

    def pop_metrics(self) -> dict[str, float]:
        """See `StepRollouts.pop_metrics`."""
        with self._changed:
            return self._prompts.pop_metrics()

    def state_dict(self) -> dict[str, Any]:
        """See `StepRollouts.state_dict`. Includes the ledger, at the same moment."""
        with self._changed:
            return self._prompts.state_dict() | {"ledger": self._ledger.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `StepRollouts.load_state_dict`; also takes the state of a synchronous run."""
        self._prompts.load_state_dict(state)
        if "ledger" in state:
            self._ledger.load_state_dict(state["ledger"])

    # -- threads -------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """See `StepRollouts.finish`. Waits for the groups in progress, which are kept for their steps."""
        if self._thread is not None:
            self._ending = True
            self._wake_player()
            thread = self._thread
            self._wait(lambda: not thread.is_alive())
            self._thread = None

    def close(self) -> None:
        """See `StepRollouts.close`. Gives up the groups in progress."""
        if self._thread is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._serving.cancel)
            self._thread.join()
            self._thread = None
        self._joining.shutdown(cancel_futures=True)
        self._player.close()

    def _start(self) -> None:
        self._ending = False
        self._ready.clear()
        _LOG.debug("rollouts: starting their thread")
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()
        self._wait(self._ready.is_set)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            pass  # by `close`
        except BaseException as error:  # noqa: BLE001 - raised in the driver's thread
            self._error = error
        _LOG.debug("rollouts: their thread ends; raised: %s", type(self._error).__name__ if self._error else "nothing")
        with self._changed:
            self._changed.notify_all()

    async def _serve(self) -> None:
        """Drive the engines in the loop of this thread, and play groups in another."""
        self._loop, serving = asyncio.get_running_loop(), asyncio.current_task()
        assert serving is not None
        self._serving = serving
        generation, stops = self._parts.generation, self._player.stop_token_ids
        async with generation.completions(stop_token_ids=stops, kind=InterruptibleCompletions) as completions:
            assert isinstance(completions, InterruptibleCompletions)
            self._completions = completions
            config, client = self._parts.config.environment, generation.client
            gathered = not self._config.max_staleness  # the rows of a step are decoded together, as in synchronous runs
            await play_beside(self._play_tickets, completions, client, config, gathered=gathered)

    async def _play_tickets(self, bridge: Bridge) -> None:
        """Play each ticket that the ledger admits, until `finish`."""
        self._player_loop, self._woken = asyncio.get_running_loop(), asyncio.Event()
        async with self._player.playing(bridge):
            self._ready.set()
            with self._changed:
                self._changed.notify_all()
            try:
                while not (self._ending and not self._tasks):
                    self._woken.clear()
                    while not self._ending and (ticket := self._admit()) is not None:
                        task = self._tasks[ticket.number] = asyncio.create_task(self._play(ticket))
                        task.add_done_callback(partial(self._played, ticket.number))
                    if self._raised:
                        self._raised[0].result()
                    await self._woken.wait()
            finally:
                for task in self._tasks.values():
                    task.cancel()
                await asyncio.gather(*self._tasks.values(), return_exceptions=True)
                self._tasks.clear()
                self._raised.clear()

    def _played(self, number: int, task: asyncio.Task[None]) -> None:
        """Keep a task that has raised for `_play_tickets`, which raises it; others have removed themselves."""
        if self._tasks.get(number) is task:
            self._raised.append(task)
            self._woken.set()

    def _admit(self) -> Ticket[int] | None:
        with self._changed:
            return self._ledger.admit(self._prompts.draw)

    async def _play(self, ticket: Ticket[int]) -> None:
        """Play the group of `ticket`, and settle it."""
        seeds = ticket_seeds(self._parts.config.seed, ticket.step, ticket.slot, self._rows, self._groups)
        try:
            group = await self._player.play(self._samples[ticket.prompt], seeds)
            with self._changed:
                self._ledger.complete(ticket, group, self._steps_of(ticket, group))
                self._join_ahead()
        except RLFrameworkError:  # `_play_tickets` raises it
            raise
        except Exception as error:  # noqa: BLE001 - an environment may raise anything, which costs this group alone
            self._fail(ticket, f"{type(error).__name__}: {error}")
        finally:
            self._woken.set()
        del self._tasks[ticket.number]
        with self._changed:
            self._changed.notify_all()

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

    def _fail(self, ticket: Ticket[int], reason: str) -> None:
        with self._changed:
            failed = self._ledger.fail(ticket, reason)
            self._join_ahead()
        if failed:
            self._failures.add(ticket.step, f"{ticket} failed: {reason}")

    def _wake_player(self) -> None:
        with suppress(RuntimeError):  # the loop has ended, of which `_wait` raises the reason
            self._player_loop.call_soon_threadsafe(self._woken.set)

    def _wait(self, done: Callable[[], bool]) -> None:
        """Wait until `done()`. Meanwhile, fail tickets whose deadline passes, and replace engines if all are lost."""
        while not done():
            if self._error is not None:
                raise self._error
            if self._ready.is_set() and self._completions.lost:
                self.publish(self._ledger.taken)  # the trainer has the weights after it
            with self._changed:
                late = self._ledger.expire()
                if not (late or done()):
                    self._changed.wait(_POLL)
            for ticket in late:
                late_by = f"not complete {self._config.deadline:g} seconds after its admission"
                self._failures.add(ticket.step, f"{ticket} failed: {late_by}")
                with suppress(RuntimeError):
                    self._player_loop.call_soon_threadsafe(self._cancel, ticket.number)

    def _cancel(self, number: int) -> None:
        if (task := self._tasks.pop(number, None)) is not None:
            task.cancel()
        self._woken.set()

    def _in_loop(self, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Run `work()` in the loop that drives the engines."""
        if self._error is not None:
            raise self._error
        future: Future[R] = asyncio.run_coroutine_threadsafe(work(), self._loop)
        while True:
            try:
                return future.result(_POLL)
            except TimeoutError:
                if self._thread is None or not self._thread.is_alive():
                    raise self._error or RLFrameworkError("the thread of rollouts has ended") from None
