"""The keys and values of a session's latest turn, kept for its next one."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor

from rlframework_transformers.row_forward import Prefix


@dataclass(frozen=True)
class _Turn:
    version: int
    ids: Tensor  # of the tokens that `prefix` has
    prefix: Prefix


class SessionPrefixes:
    """The latest turn of each session, of up to `limit` tokens in all: the sessions used least recently leave first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._turns: OrderedDict[str, _Turn] = OrderedDict()

    @property
    def tokens(self) -> int:
        """The number of tokens that are kept."""
        return sum(len(turn.ids) for turn in self._turns.values())

    @property
    def bytes(self) -> int:
        """The memory of what is kept."""
        return sum(part.nbytes for turn in self._turns.values() for layer in turn.prefix for part in layer)

    def store(self, session: str, version: int, ids: Tensor, prefix: Prefix) -> None:
        """Keep `prefix`, computed with the weights of `version` from `ids [m]`."""
        self._turns.pop(session, None)
        self._turns[session] = _Turn(version, ids, prefix)
        while self.tokens > self._limit:
            self._turns.popitem(last=False)

    def find(self, session: str, version: int, ids: Tensor) -> Prefix | None:
        """Return what is known of the beginning of `ids [n]`, at most of all but the last; None if nothing is."""
        turn = self._turns.get(session)
        if turn is None or turn.version != version:
            return None
        self._turns.move_to_end(session)
        size = min(len(turn.ids), len(ids) - 1)
        differs = (turn.ids[:size] != ids[:size]).nonzero()
        size = int(differs[0]) if len(differs) else size
        return [(keys[:, :size], values[:, :size]) for keys, values in turn.prefix] if size else None

    def drop(self) -> int:
        """Forget all; return the number of tokens that were kept."""
        tokens = self.tokens
        self._turns.clear()
        return tokens
