"""Taking turns at the source: how many nodes read it at once is what its measured bandwidth can serve.

1. Reading a file needs a turn; there are `limit` of them, at first one.
2. Whoever has read a file with all turns taken, when it began and when it ended, and as many of them, writes down the
   rate of all together: its own times their number.
3. If the last reader added at least half of what each of the others had got, there is one more turn; if not, one less.
4. A turn is a locked file (in the pack's own folder), or a key of the store whose holder counts it up while it reads:
   one that stands still for SILENT_S is another's. Where that folder cannot be written, is another user's, or has no
   locks, who finds no way to a turn reads without one.

Example: a server with a link of 1 Gb/s. One reader gets 118 MB/s, two get 59 each: 118 together, so `limit` goes back
to 1, and the nodes read one after the other: all take as long, but the first of four is done in a quarter of that. A
parallel file system gives 2 readers 1.9 GB/s where one got 1: 3 are tried next.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from shoal.core.files import write_whole
from shoal.data.stage.frames import SILENT_S
from shoal.data.stage.locks import FileLock
from shoal.data.stage.peers import Store

WORTH = 0.5
"""What another reader must add to the rate of all, of what one had on average before it."""
MOST_READERS = 64
_POLL_S = 0.05
_BEAT_S = 1.0


def next_limit(limit: int, rates: Mapping[int, float]) -> int:
    """Return how many may read at once, from what `rates` says that 1, 2, 3 ... readers got together."""
    if limit not in rates:
        return limit
    if limit - 1 in rates and not _is_worth(limit, rates):
        return limit - 1
    if limit + 1 in rates and not _is_worth(limit + 1, rates):
        return limit  # tried before
    return min(limit + 1, MOST_READERS)


def _is_worth(count: int, rates: Mapping[int, float]) -> bool:
    return rates[count] >= rates[count - 1] * (1 + WORTH / (count - 1))


def _waited_for(attempt: Callable[[], int | None], timeout_s: float, ended: threading.Event | None) -> int | None:
    """Return the number of the turn that an attempt has got; None where there was none in time, or until it `ended`."""
    end_s, ended = time.monotonic() + timeout_s, ended or threading.Event()
    while (number := attempt()) is None and time.monotonic() < end_s and not ended.wait(_POLL_S):
        pass
    return number


class Turn:
    """The right to read from the source."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.bytes_per_s = 0.0
        """What the holder measured, if it did."""
        self.readers = 0
        """How many read when it began; 0: there were free turns."""

    def beat(self) -> None:
        """Say that this reader still reads. Called now and then while reading."""


class Turns(Protocol):
    """Who may read from the source."""

    def take(self, *, timeout_s: float, ended: threading.Event | None = None) -> AbstractContextManager[Turn]:
        """Wait for a turn, and have it for the length of a `with` block; after `timeout_s` read without one.

        With `ended` set, too, nothing is waited for: whoever set it does not want to read any more.
        """

    def close(self) -> None:
        """Leave nothing behind."""


class NoTurns:
    """Anybody may read at any time: where there is no place to agree on more."""

    @contextmanager
    def take(self, *, timeout_s: float, ended: threading.Event | None = None) -> Iterator[Turn]:
        """Read at once."""
        del timeout_s, ended
        yield Turn(0)

    def close(self) -> None:
        """Do nothing."""


class FolderTurns:
    """Turns by locked files in `folder`. Where that has no place for them, or no locks, everybody reads without one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._locks = [FileLock(folder / f"{number}.lock") for number in range(MOST_READERS)]

    @contextmanager
    def take(self, *, timeout_s: float, ended: threading.Event | None = None) -> Iterator[Turn]:
        """Wait for a turn; after `timeout_s`, or where none can be had, read without one."""
        number: int | None = None
        with contextlib.suppress(OSError):
            number = _waited_for(self._try, timeout_s, ended)
        turn = Turn(-1 if number is None else number)
        turn.readers = self._readers(turn)
        try:
            yield turn
            with contextlib.suppress(OSError):
                self._learn(turn)
        finally:
            if number is not None:
                self._locks[number].release()

    def close(self) -> None:
        """Remove the folder if nobody else has a turn, and it is ours to remove."""
        with contextlib.suppress(OSError):
            if all(lock.take() for lock in self._locks if lock.path.exists()):
                for path in self._folder.glob("*"):
                    path.unlink(missing_ok=True)
        for lock in self._locks:
            lock.release()
        with contextlib.suppress(OSError):  # somebody reads, or another user made it
            self._folder.rmdir()

    def _try(self) -> int | None:
        self._folder.mkdir(exist_ok=True)
        limit = self._board()["limit"]
        return next((number for number in range(limit) if self._locks[number].take()), None)

    def _board(self) -> dict[str, Any]:
        """Return what is written down, if that is what one of us would write: others can write to the folder."""
        try:
            said = json.loads((self._folder / "rates.json").read_bytes())
            rates = {int(count): float(rate) for count, rate in said["rates"].items()}
            return {"limit": min(max(1, int(said["limit"])), MOST_READERS), "rates": rates}
        except (OSError, ValueError, TypeError, LookupError, AttributeError):
            return {"limit": 1, "rates": {}}

    def _readers(self, turn: Turn) -> int:
        """Return how many read, where all turns are taken, and this is one of them; else 0."""
        limit = self._board()["limit"]
        others = [lock for number, lock in enumerate(self._locks[:limit]) if number != turn.number]
        return limit if 0 <= turn.number < limit and not any(_is_free(lock.path) for lock in others) else 0

    def _learn(self, turn: Turn) -> None:
        board = self._board()
        if turn.bytes_per_s <= 0 or not turn.readers == board["limit"] == self._readers(turn):
            return
        rates = {**board["rates"], board["limit"]: turn.bytes_per_s * board["limit"]}
        new = {"limit": next_limit(board["limit"], rates), "rates": rates}
        write_whole(self._folder / "rates.json", json.dumps(new))


def _is_free(path: Path) -> bool:
    with FileLock(path) as lock:
        return lock.take()


class StoreTurns:
    """Turns by keys of the rendezvous store, where nodes can reach that."""

    def __init__(self, store: Store, pack_id: str, *, me: str, silent_s: float = SILENT_S) -> None:
        self._store, self._prefix, self._me, self._silent_s = store, f"stage/{pack_id}/turn", me, silent_s
        self._seen: dict[int, tuple[str, float]] = {}

    @contextmanager
    def take(self, *, timeout_s: float, ended: threading.Event | None = None) -> Iterator[Turn]:
        """Wait for a turn; after `timeout_s`, or when the store is gone, read without one."""
        number: int | None = None
        with contextlib.suppress(RuntimeError):
            number = _waited_for(self._try, timeout_s, ended)
        turn = _StoreTurn(self, -1 if number is None else number)
        with contextlib.suppress(RuntimeError):
            turn.readers = self._readers(turn)
        try:
            yield turn
            with contextlib.suppress(RuntimeError):
                self._learn(turn)
        finally:
            with contextlib.suppress(RuntimeError):
                if number is not None and self._value(number).startswith(f"{self._me}:"):
                    self._store.set(f"{self._prefix}/{number}", "free")

    def close(self) -> None:
        """Do nothing: the store goes with the run."""

    def mark(self, number: int, count: int) -> None:
        """Show that turn `number` is still ours."""
        with contextlib.suppress(RuntimeError):
            if self._value(number).startswith(f"{self._me}:"):
                self._store.set(f"{self._prefix}/{number}", f"{self._me}:{count}")

    def _try(self) -> int | None:
        return next((number for number in range(self._board()["limit"]) if self._have(number)), None)

    def _have(self, number: int) -> bool:
        value, now_s = self._value(number), time.monotonic()
        if value != "free":
            before, since_s = self._seen.get(number, ("", now_s))
            self._seen[number] = (value, since_s if before == value else now_s)
            if before != value or now_s - since_s < self._silent_s:
                return False
        wanted = f"{self._me}:0"
        return self._store.compare_set(f"{self._prefix}/{number}", value, wanted).decode() == wanted

    def _value(self, number: int) -> str:
        return self._store.compare_set(f"{self._prefix}/{number}", "", "free").decode()

    def _board(self) -> dict[str, Any]:
        first = json.dumps({"limit": 1, "rates": {}})
        board: dict[str, Any] = json.loads(self._store.compare_set(f"{self._prefix}/rates", "", first))
        return board

    def _readers(self, turn: Turn) -> int:
        """Return how many read, where all turns are taken, and this is one of them; else 0."""
        limit: int = self._board()["limit"]
        is_full = not any(self._value(number) == "free" for number in range(limit))
        return limit if 0 <= turn.number < limit and is_full else 0

    def _learn(self, turn: Turn) -> None:
        board = self._board()
        if turn.bytes_per_s <= 0 or not turn.readers == board["limit"] == self._readers(turn):
            return
        rates = {int(count): rate for count, rate in board["rates"].items()}
        rates[board["limit"]] = turn.bytes_per_s * board["limit"]
        new = {"limit": next_limit(board["limit"], rates), "rates": rates}
        self._store.set(f"{self._prefix}/rates", json.dumps(new))


class _StoreTurn(Turn):
    def __init__(self, turns: StoreTurns, number: int) -> None:
        super().__init__(number)
        self._turns, self._count, self._last_s = turns, 0, time.monotonic()

    def beat(self) -> None:
        if self.number >= 0 and time.monotonic() - self._last_s > _BEAT_S:
            self._count, self._last_s = self._count + 1, time.monotonic()
            self._turns.mark(self.number, self._count)
