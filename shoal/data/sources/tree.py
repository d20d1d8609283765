"""The files under a folder or a URL, by their names: relative, with '/', sorted as text, hidden ones left out."""

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol, cast

from shoal.core.errors import ConfigError, DataError
from shoal.data.sources.source import one_line

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://|[a-z0-9]+::")
_STAMPS = ("size", "mtime", "ETag", "etag", "LastModified", "last_modified", "created", "generation", "version_id")
"""What file systems say of a file that changes when it is written; each has some of them."""


class Tree(Protocol):
    """Files by relative name."""

    @property
    def name(self) -> str:
        """What to call the whole, without the folders above it."""

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every file that is not hidden, sorted by name."""

    def open(self, name: str) -> BinaryIO:
        """Return the file, opened for reading."""

    def read(self, name: str) -> bytes:
        """Return what is in the file."""

    def size(self, name: str) -> int:
        """Return the file's bytes."""

    def stamp(self, name: str) -> str:
        """Return what changes when the file does."""

    def path(self, name: str) -> str:
        """Return the path or the URL for libraries that open files themselves."""


class LocalTree:
    """Files under a local folder."""

    def __init__(self, root: str | Path) -> None:
        self.root = str(Path(root).resolve())

    @property
    def name(self) -> str:
        """What to call the whole."""
        return Path(self.root).name

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every file, sorted by name; 0 of a link to nothing, which is an error when it is read."""
        found = {}
        for folder, folders, files in os.walk(self.root, followlinks=True):
            folders[:] = [name for name in folders if not name.startswith(".")]
            inside = os.path.relpath(folder, self.root).replace(os.sep, "/")
            prefix = "" if inside == "." else f"{inside}/"
            self._refuse_loops(prefix, folders)
            for name in files:
                if not name.startswith("."):
                    found[prefix + name] = self._size_or_0(prefix + name)
        return dict(sorted(found.items()))

    def _refuse_loops(self, prefix: str, folders: list[str]) -> None:
        """Raise where a link leads to a folder above itself, by whatever way: its files would be there for ever."""
        links = [name for name in folders if Path(self.path(prefix + name)).is_symlink()]
        if not links:
            return
        inside = Path(self.path(prefix.rstrip("/")))
        ways = [inside, *(above for above in inside.parents if above.is_relative_to(self.root))]
        above = {folder for way in ways for folder in (way.resolve(), *way.resolve().parents)}
        for name in links:
            if Path(self.path(prefix + name)).resolve() in above:
                raise ConfigError(f"{prefix}{name} is a link to a folder above itself. Remove the link.")

    def _size_or_0(self, name: str) -> int:
        try:
            return self.size(name)
        except DataError:
            return 0

    def path(self, name: str) -> str:
        """Return the file's path."""
        return f"{self.root}/{name}" if name else self.root

    def open(self, name: str) -> BinaryIO:
        """Return the file, opened for reading."""
        try:
            return Path(self.path(name)).open("rb")
        except OSError as error:
            raise _unreadable(name, error) from None

    def read(self, name: str) -> bytes:
        """Return what is in the file."""
        try:
            return Path(self.path(name)).read_bytes()
        except OSError as error:
            raise _unreadable(name, error) from None

    def size(self, name: str) -> int:
        """Return the file's bytes."""
        return self._stat(name).st_size

    def stamp(self, name: str) -> str:
        """Return size and time of change, or "gone"."""
        try:
            found = self._stat(name)
        except DataError:
            return "gone"
        return f"{found.st_size}-{found.st_mtime_ns}-{found.st_ino}"

    def _stat(self, name: str) -> os.stat_result:
        try:
            return os.stat(self.path(name))  # noqa: PTH116  a million of them: no Path objects
        except OSError as error:
            raise _unreadable(name, error) from None


class UrlTree:
    """Files that fsspec reads."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") or url
        self._opened: tuple[Any, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "_opened": None}  # connections stay in their process

    @property
    def name(self) -> str:
        """What to call the whole."""
        return PurePosixPath(self._root).name

    @property
    def files(self) -> Any:
        """The fsspec file system."""
        return self._connected()[0]

    @property
    def _root(self) -> str:
        return self._connected()[1]

    def _connected(self) -> tuple[Any, str]:
        if self._opened is None:
            try:
                import fsspec  # for URLs alone: it takes 50 ms

                self._opened = fsspec.core.url_to_fs(self.url)
            except (ImportError, ValueError) as error:
                raise ConfigError(f"{without_secrets(self.url)} cannot be opened: {one_line(error)}.") from None
        return cast(tuple[Any, str], self._opened)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every file, sorted by name."""
        found = self.files.find(self._root, detail=True)
        names = {path[len(self._root) :].lstrip("/"): int(info["size"] or 0) for path, info in found.items()}
        shown = {name: size for name, size in names.items() if not any(x.startswith(".") for x in name.split("/"))}
        return dict(sorted(shown.items()))

    def inside(self, name: str) -> str:
        """Return the path within the fsspec file system."""
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    def path(self, name: str) -> str:
        """Return the file's URL."""
        return f"{self.url}/{name}" if name else self.url

    def open(self, name: str) -> BinaryIO:
        """Return the file, opened for reading."""
        try:
            return cast(BinaryIO, self.files.open(self.inside(name), "rb"))
        except OSError as error:
            raise _unreadable(name, error) from None

    def read(self, name: str) -> bytes:
        """Return what is in the file."""
        try:
            return cast(bytes, self.files.cat_file(self.inside(name)))
        except OSError as error:
            raise _unreadable(name, error) from None

    def size(self, name: str) -> int:
        """Return the file's bytes."""
        try:
            return int(self.files.info(self.inside(name))["size"] or 0)
        except OSError as error:
            raise _unreadable(name, error) from None

    def stamp(self, name: str) -> str:
        """Return what the file system says of size, time and version, or "gone"."""
        self.files.invalidate_cache()
        try:
            info = self.files.info(self.inside(name))
        except OSError:
            return "gone"
        return "-".join(str(info[key]) for key in _STAMPS if key in info)


def described(kind: str, tree: Tree, names: Sequence[str], **more: Any) -> dict[str, Any]:
    """Return what `Source.describe` says of files: the kind, a name, how many and how large they are."""
    num_bytes = sum(tree.size(name) for name in names)
    name = tree.name if len(names) > 1 else names[0]
    return {"kind": kind, "name": name, "num_files": len(names), "num_bytes": num_bytes, **more}


def open_tree(root: str | Path) -> LocalTree | UrlTree:
    """Return the files under a folder, or under a URL."""
    return UrlTree(str(root)) if is_url(root) else LocalTree(root)


def is_url(src: object) -> bool:
    """Return whether `src` is for fsspec: "s3://bucket/key", "zip://a::file://b.zip"."""
    return isinstance(src, str) and _URL.match(src) is not None


def without_secrets(url: str) -> str:
    """Return the URL without a password or a query, which may hold a key."""
    return re.sub(r"://[^/@]*@", "://", url).partition("?")[0]


def _unreadable(name: str, error: Exception) -> DataError:
    return DataError(f"{name or 'the file'} cannot be read: {getattr(error, 'strerror', None) or one_line(error)}.")
