"""Uploads checkpoints from a thread of the driver while training continues."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlframework.base.errors import RunInterrupted
from rlframework.base.logs import debug_span, plugin_logger
from rlframework.base.secrets import hide_in_text
from rlframework_storage.remote_folder import RemoteFolder, StorageError
from rlframework_storage.transfer import complete_checkpoints, delete, delete_unfinished, send

_LOG = plugin_logger(__name__)

ATTEMPTS = 5
"""Attempts at an upload, before it counts as failed."""
FIRST_WAIT = 1.0
"""Seconds before the second attempt; doubled for each further one."""

Keep = Callable[[Mapping[str, float | None]], Collection[str]]
"""The names of the checkpoints to keep, of all with their scores."""


@dataclass(frozen=True)
class _Job:
    path: Path
    score: float | None


class Uploads:
    """Uploads one checkpoint at a time to `remote`; of those that wait, only the newest.

    `keep` chooses which of the complete remote checkpoints are kept after an upload. `first_wait`: seconds before the
    second of `attempts`, doubled for each further one. A failed upload is a warning and counts in the metrics; `finish`
    raises if the last one failed.
    """

    def __init__(
        self, remote: RemoteFolder, keep: Keep, *, first_wait: float = FIRST_WAIT, attempts: int = ATTEMPTS
    ) -> None:
        self._remote, self._keep = remote, keep
        self._first_wait, self._attempts = first_wait, attempts
        self._changed = threading.Condition()
        self._current: _Job | None = None
        self._next: _Job | None = None
        self._thread: threading.Thread | None = None
        self._metrics: defaultdict[str, float] = defaultdict(float)
        self._failure: str | None = None

    def add(self, path: Path, score: float | None = None) -> None:
        """Upload the local checkpoint `path` when the current upload has ended; replaces one that waits.

        `score` is the metric by which the best checkpoints are kept.
        """
        with self._changed:
            if self._next is not None:
                _LOG.info("%s is not uploaded: %s is newer, and the upload before is not done", self._next.path, path)
            self._next = _Job(path, score)
            self._changed.notify_all()
            if self._thread is None:
                _LOG.debug("uploads: starting their thread")
                self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
                self._thread.start()

    def in_use(self) -> set[Path]:
        """The checkpoints that are being uploaded or wait for it: their files must stay."""
        with self._changed:
            return {job.path for job in (self._current, self._next) if job is not None}

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of uploads that have ended since the last call."""
        with self._changed:
            metrics, self._metrics = dict(self._metrics), defaultdict(float)
            return metrics

    def finish(self) -> None:
        """Wait for all uploads. Raises `StorageError` if the last one failed."""
        with self._changed:
            if self._current is not None or self._next is not None:
                _LOG.info("waiting for the upload of a checkpoint to %s", hide_in_text(self._remote.url))
            while self._current is not None or self._next is not None:
                self._changed.wait(1.0)  # with a timeout, so that signals are handled
            if self._failure is not None:
                raise StorageError(self._failure)

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """On exit wait for the last upload, also after an error or the first interrupt; that error is the one raised.

        A second interrupt does not wait.
        """
        try:
            yield
        except (Exception, RunInterrupted):
            try:
                self.finish()
            except StorageError as error:
                _LOG.warning("%s", error)
            raise
        self.finish()

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._next is None:
                    self._changed.wait()
                job = self._current = self._next
                self._next = None
            try:
                self._upload(job)
            finally:
                with self._changed:
                    self._current = None
                    self._changed.notify_all()

    def _upload(self, job: _Job) -> None:
        started = time.perf_counter()
        for attempt in range(1, self._attempts + 1):
            try:
                with debug_span(_LOG, "upload of %s: attempt %d", job.path, attempt):
                    sent = send(job.path, self._remote, job.score)
                    self._delete_old()
            except Exception as error:  # noqa: BLE001 - reported; training must go on
                if attempt == self._attempts:
                    self._failed(job, error)
                    return
                seconds = self._first_wait * 2.0 ** (attempt - 1)
                _LOG.warning("upload of %s: %s; again in %g s", job.path, _first_line(error), seconds)
                time.sleep(seconds)
            else:
                self._succeeded(sent.bytes, time.perf_counter() - started)
                return

    def _delete_old(self) -> None:
        found = {name: manifest.score for name, manifest in complete_checkpoints(self._remote).items()}
        for name in sorted(set(found) - set(self._keep(found))):
            delete(self._remote, name)
        if found:
            delete_unfinished(self._remote, before=max(found))

    def _succeeded(self, count: int, seconds: float) -> None:
        with self._changed:
            self._failure = None
            self._metrics["checkpoint/upload_bytes"] += count
            self._metrics["checkpoint/upload_seconds"] += seconds

    def _failed(self, job: _Job, error: Exception) -> None:
        text = (
            f"the checkpoint {job.path} was not uploaded to {hide_in_text(self._remote.url)} "
            f"in {self._attempts} attempt(s): {_first_line(error)}"
        )
        _LOG.warning("%s", text)
        with self._changed:
            self._failure = f"{text}. It is complete on the local disk; resuming the run uploads it"
            self._metrics["checkpoint/upload_failures"] += 1.0


def _first_line(error: Exception) -> str:
    return hide_in_text(str(error) or type(error).__name__).partition("\n")[0]
