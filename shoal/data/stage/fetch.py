"""Bringing the parts here, one after the other: from the node before this one, or else from the source.

1. For each file ask the nodes before this one, best first (see peers), then the source.
2. A node that is gone or silent is passed over from then on. One that sends a wrong file is asked once more (it may
   have been the wire), then passed over for this file. The source gets a few tries, as it is the last.
3. What the source itself has wrong twice is an error, which names the file; the other parts go on.
4. Where the room ends, this part and those after it are read in place.
"""

import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shoal.core.errors import DataError
from shoal.data.pack.manifest import Manifest, PartFile
from shoal.data.stage.arrivals import PIECE_BYTES, Arrivals, Incoming, Mismatch
from shoal.data.stage.ask import Neighbour, Refused
from shoal.data.stage.origin import Origin, Stream
from shoal.data.stage.peers import Peer, Peers
from shoal.data.stage.turns import NoTurns, Turns

_TRIES = 2
_SOURCE_TRIES = 4
_RETRY_S = 0.25
_TURN_S = 600.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class NoRoom(Exception):
    """The storage is full."""


class Ended(Exception):
    """The fetching was told to end."""


@dataclass
class Counts:
    """What was moved."""

    source_bytes: int = 0
    """Read from the source by this node."""
    neighbour_bytes: int = 0
    """Received from other nodes."""
    refetched: int = 0
    """Files that had to be fetched again, because they were wrong or their sender was lost."""
    failed: dict[int, str] = field(default_factory=dict)
    elsewhere: list[int] = field(default_factory=list)


class Fetcher:
    """Fetches parts of a pack into the folder `path`."""

    def __init__(
        self, path: Path, manifest: Manifest, origin: Origin, *, peers: Peers | None = None, turns: Turns | None = None
    ) -> None:
        self._path, self._manifest, self._origin = path, manifest, origin
        self._peers, self._turns = peers, turns or NoTurns()
        self.arrivals, self.counts, self.ended = Arrivals(), Counts(), threading.Event()
        self._neighbour: tuple[Peer, Neighbour] | None = None
        self._stream: Stream | None = None

    def expect(self, parts: list[int]) -> None:
        """Say which parts will come, so that others who ask for them wait."""
        for part in parts:
            for file in self._manifest.parts[part].files:
                self.arrivals.expect(file.name, self._path / file.name, file.num_bytes, file.checksum)

    def run(self, parts: list[int], *, on_part: Callable[[int], None]) -> None:
        """Fetch `parts`, in this order; `on_part` is called for each that is here, or given up."""
        self.expect(parts)
        try:
            for place, part in enumerate(parts):
                try:
                    self._fetch_part(part)
                except NoRoom:
                    self._give_up(parts[place:])
                    on_part(part)
                    return
                except DataError as error:
                    self._give_up([part], why=str(error))
                on_part(part)
        except Ended:
            pass
        finally:
            self._hang_up()

    def end(self) -> None:
        """Make `run` return soon. Called by another thread."""
        self.ended.set()
        neighbour = self._neighbour
        if neighbour is not None:
            neighbour[1].interrupt()
        stream = self._stream
        if stream is not None:
            stream.interrupt()

    def _give_up(self, parts: list[int], *, why: str | None = None) -> None:
        for part in parts:
            if why is None:
                self.counts.elsewhere.append(part)
            else:
                self.counts.failed[part] = why
            for file in self._manifest.parts[part].files:
                self.arrivals.refuse(file.name)

    def _fetch_part(self, part: int) -> None:
        for file in self._manifest.parts[part].files:
            final = self._path / file.name
            if final.exists():
                continue
            final.parent.mkdir(exist_ok=True)
            try:
                self._fetch_file(part, file)
            except OSError as error:
                if error.errno in _NO_ROOM:
                    raise NoRoom from None
                raise DataError(
                    f"{file.name} of {self._origin.name} cannot be written to {self._path}: {error}"
                ) from None

    def _fetch_file(self, part: int, file: PartFile) -> None:
        wrong: dict[int, int] = {}
        while self._peers is not None:
            asked = [peer for peer in self._peers.before(part) if wrong.get(peer.number, 0) < _TRIES]
            if not asked:
                break
            if self._try_neighbour(asked[0], file, wrong):
                return
            self.counts.refetched += 1
        self._fetch_from_source(file)

    def _try_neighbour(self, peer: Peer, file: PartFile, wrong: dict[int, int]) -> bool:
        """Return whether the file came from `peer`; if not, take note of why."""
        assert self._peers is not None
        with self._incoming(file) as incoming:
            try:
                neighbour = self._connected(peer)
                before = neighbour.received_bytes
                try:
                    neighbour.fetch(file.name, incoming)
                finally:
                    self.counts.neighbour_bytes += neighbour.received_bytes - before
                incoming.finish()
            except Refused:
                wrong[peer.number] = _TRIES
                self._hang_up()
            except Mismatch:
                wrong[peer.number] = wrong.get(peer.number, 0) + 1
                self._hang_up()
            except OSError as error:
                if error.errno in _NO_ROOM:
                    raise
                if self.ended.is_set():
                    raise Ended from None
                self._hang_up()
                self._peers.silent(peer, is_gone=isinstance(error, ConnectionRefusedError))
            else:
                return True
        return False

    def _fetch_from_source(self, file: PartFile) -> None:
        mismatches, said = 0, ""
        for attempt in range(_SOURCE_TRIES):
            if attempt > 0:
                self.counts.refetched += 1
                if self.ended.wait(_RETRY_S * (attempt - mismatches) ** 2):  # at once if the bytes were wrong
                    raise Ended
            with self._incoming(file) as incoming:
                try:
                    self._read(file, incoming)
                    incoming.finish()
                except Mismatch as error:
                    mismatches, said = mismatches + 1, str(error)
                except OSError as error:
                    if error.errno in _NO_ROOM:
                        raise
                    said = str(error)
                    if isinstance(error, FileNotFoundError):
                        break
                else:
                    return
                finally:
                    self._stream = None
            if mismatches == _TRIES:
                break
        name = self._origin.name
        if mismatches == _TRIES:
            raise DataError(
                f"{file.name} of {name} is not what its manifest says: {said}. Check it: shoal pack --check {name}"
            )
        raise DataError(f"{file.name} of {name} cannot be read: {said}")

    def _read(self, file: PartFile, incoming: Incoming) -> None:
        buffer, read_s, got = memoryview(bytearray(PIECE_BYTES)), 0.0, 0
        with ExitStack() as opened:
            turn = opened.enter_context(self._turns.take(timeout_s=_TURN_S, ended=self.ended))
            if self.ended.is_set():
                raise Ended
            self._stream = stream = opened.enter_context(self._origin.open(file.name))
            while True:
                if self.ended.is_set():
                    raise Ended
                begin_s = time.perf_counter()
                count = stream.readinto(buffer)
                read_s += time.perf_counter() - begin_s
                if not count:
                    break
                got += count
                self.counts.source_bytes += count
                incoming.write(buffer[:count])
                turn.beat()
            turn.bytes_per_s = got / read_s if read_s > 0 else 0.0

    @contextmanager
    def _incoming(self, file: PartFile) -> Iterator[Incoming]:
        arrival = self.arrivals.expect(file.name, self._path / file.name, file.num_bytes, file.checksum)
        incoming = Incoming(arrival, self.arrivals.changed())
        try:
            yield incoming
        finally:
            incoming.drop()

    def _connected(self, peer: Peer) -> Neighbour:
        assert self._peers is not None
        if self._neighbour is None or self._neighbour[0] != peer:
            self._hang_up()
            self._neighbour = (peer, Neighbour(peer.address, self._peers.token))
        return self._neighbour[1]

    def _hang_up(self) -> None:
        if self._neighbour is not None:
            self._neighbour[1].close()
            self._neighbour = None
