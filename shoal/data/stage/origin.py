"""Where a pack is read from: a folder, or a URL (http by the standard library, all others by fsspec)."""

import contextlib
import http.client
import importlib
import io
import socket
import urllib.parse
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any, Protocol

from shoal.core.errors import ConfigError, DataError

_TIMEOUT_S = 60.0
_ALLOWED = "/-._~"
_MOVED = (301, 302, 303, 307, 308)
_MOST_MOVES = 5


class Stream(Protocol):
    """A file that is being read."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Put the next bytes into `buffer`; return how many, 0 at the end."""

    def interrupt(self) -> None:
        """Make a `readinto` of another thread end soon, where that can be done."""


class Origin(Protocol):
    """A pack's own place, shared by many: read as seldom as can be."""

    name: str

    def open(self, name: str) -> AbstractContextManager[Stream]:
        """Return file `name` of the pack, from its start. Raises OSError."""


class FolderOrigin:
    """A pack in a folder, usually of a shared file system."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)

    def open(self, name: str) -> AbstractContextManager[Stream]:
        """Return file `name`, from its start."""
        return closing(_File(self.path / name))


class _File(io.FileIO):
    def interrupt(self) -> None:
        """Do nothing: a file system answers, or nobody can make it."""


class HttpOrigin:
    """A pack behind http:// or https://. A query is sent with each file; a file that has moved is followed."""

    def __init__(self, url: str) -> None:
        asked = urllib.parse.urlsplit(url)
        if asked.username is not None:
            raise ConfigError(f"{asked.hostname}: names and passwords in an address are not supported.")
        self._url = asked._replace(path=asked.path.rstrip("/"), fragment="")
        self.name = self._url._replace(query="").geturl()

    def open(self, name: str) -> AbstractContextManager[Stream]:
        """Return file `name`, from its start."""
        path = f"{self._url.path}/{urllib.parse.quote(name, safe=_ALLOWED)}"
        url = self._url._replace(path=path)
        for _ in range(_MOST_MOVES):
            try:
                found = _ask(url)
            except (OSError, http.client.HTTPException) as error:
                raise OSError(f"{self.name}/{name}: {error or type(error).__name__}") from None
            if isinstance(found, _Answer):
                return closing(found)
            moved = urllib.parse.urlsplit(urllib.parse.urljoin(url.geturl(), found))
            if moved.scheme not in (url.scheme, "https"):
                raise OSError(f"{self.name}/{name}: the server leads from {url.scheme} to {moved.scheme or 'nowhere'}")
            url = moved
        raise OSError(f"{self.name}/{name}: the server has led elsewhere {_MOST_MOVES} times")


def _ask(url: urllib.parse.SplitResult) -> "_Answer | str":
    """Return what the server answers, or the address that it names instead."""
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.netloc, timeout=_TIMEOUT_S)
    try:
        connection.connect()
        wire = connection.sock  # once the answer has begun, it may be the answer's alone
        connection.request("GET", url._replace(scheme="", netloc="", fragment="").geturl() or "/")
        answer = connection.getresponse()
        elsewhere = answer.getheader("Location") if answer.status in _MOVED else None
        if answer.status != http.client.OK and elsewhere is None:
            raise OSError(f"{answer.status} {answer.reason}")
    except (OSError, http.client.HTTPException):
        connection.close()
        raise
    if elsewhere is not None:
        connection.close()
        return elsewhere
    return _Answer(connection, answer, wire)


class _Answer:
    """What a server answers; closing it closes the connection."""

    def __init__(
        self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse, wire: socket.socket
    ) -> None:
        self._connection, self._answer, self._wire = connection, answer, wire

    def readinto(self, buffer: memoryview, /) -> int:
        try:
            return self._answer.readinto(buffer)
        except http.client.HTTPException as error:
            raise OSError(str(error)) from None

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):
            self._wire.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


class FsspecOrigin:
    """A pack behind any other URL that fsspec knows: s3://, gs://, memory:// ..."""

    def __init__(self, url: str) -> None:
        self.name = url.rstrip("/")

    def open(self, name: str) -> AbstractContextManager[Stream]:
        """Return file `name`, from its start."""
        try:
            fsspec = importlib.import_module("fsspec")
        except ImportError:
            raise ConfigError(f"{self.name}: reading from this URL needs fsspec. pip install fsspec") from None
        try:
            return closing(_Opened(fsspec.open(f"{self.name}/{name}", "rb").open()))
        except (ImportError, ValueError) as error:  # the scheme's own package, or no such scheme
            raise ConfigError(f"{self.name} cannot be read: {error}") from None


class _Opened:
    def __init__(self, file: Any) -> None:
        self._file = file

    def readinto(self, buffer: memoryview, /) -> int:
        count: int = self._file.readinto(buffer)
        return count

    def interrupt(self) -> None:
        """Do nothing: fsspec has no such call."""

    def close(self) -> None:
        self._file.close()


def open_origin(source: str | Path) -> Origin:
    """Return where the pack `source` is read from."""
    text = str(source)
    if text.startswith(("http://", "https://")):
        return HttpOrigin(text)
    if "://" in text:
        return FsspecOrigin(text)
    path = Path(source).resolve()
    if not (path / "manifest.json").is_file():
        raise DataError(f"{source} is no pack: it has no manifest.json. Make one: shoal pack SRC {source}")
    return FolderOrigin(path)


def read_small(origin: Origin, name: str, *, most_bytes: int = 1 << 30) -> bytes:
    """Return all of a small file. Raises DataError where there is none."""
    pieces, buffer = [], memoryview(bytearray(1 << 20))
    try:
        with origin.open(name) as stream:
            while count := stream.readinto(buffer):
                pieces.append(bytes(buffer[:count]))
                if len(pieces) * len(buffer) > most_bytes + len(buffer):
                    raise DataError(f"{origin.name}/{name} is larger than any manifest.")
    except OSError as error:
        raise DataError(f"{origin.name} cannot be read as a pack: {error}") from None
    return b"".join(pieces)
