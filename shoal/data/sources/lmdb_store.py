"""LMDB databases: one sample a key, in the order of the keys.

A value that begins as an image does is `image`, any other is `data` (bytes); `decode(key, value)` may make more of it.
Keys that begin with "__" are left out: databases keep their own notes there. Pickles are refused, for they run code.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from shoal.core.errors import ConfigError, DataError
from shoal.data.pack.infer import is_image
from shoal.data.pack.schema import Column
from shoal.data.sources.source import Sample, Slice, library, one_line
from shoal.data.sources.tree import LocalTree, Tree

Decode = Callable[[bytes, bytes], Mapping[str, Any]]


class LmdbSource:
    """The values of an LMDB database."""

    def __init__(self, tree: Tree, name: str = "", *, decode: Decode | None = None, keys: bool = False) -> None:
        """`tree` is the database's folder, or the folder of the file `name`; `keys`: keep each key as a column."""
        if not isinstance(tree, LocalTree):
            raise ConfigError("LMDB databases are mapped into memory: copy it to a local path first.")
        self.tree, self.name, self._decode, self._keys = tree, name, decode, keys
        with self._reading() as transaction:
            first = next(self._pairs(transaction, b""), None)
        self._column = "image" if first and is_image(first[1][:16]) else "data"

    @property
    def columns(self) -> tuple[Column, ...] | None:
        """`image` or `data`, and `key` if asked for; unknown where `decode` makes the samples."""
        if self._decode is not None:
            return None
        kind = "image" if self._column == "image" else "bytes"
        return (Column(self._column, kind), *([Column("key", "text")] if self._keys else []))

    def describe(self) -> dict[str, Any]:
        """Return the database's name and size."""
        with self._reading() as transaction:
            num_keys = transaction.stat()["entries"]
        name, num_bytes = self.name or self.tree.name, self.tree.size(self._file)
        return {"kind": "lmdb", "name": name, "num_keys": num_keys, "num_bytes": num_bytes}

    def slices(self, about_bytes: int) -> list[Slice]:
        """Return ranges of keys, found by walking the keys without their values."""
        with self._reading() as transaction:
            keys = [key for key in transaction.cursor().iternext(keys=True, values=False) if not key.startswith(b"__")]
            row_bytes = self.tree.size(self._file) / max(len(keys), 1)
        rows = max(1, int(about_bytes // max(row_bytes, 1)))
        ranges = [(begin, min(begin + rows, len(keys))) for begin in range(0, len(keys), rows)]
        return [
            Slice((keys[begin].hex(),), begin, end, int((end - begin) * row_bytes), end - begin)
            for begin, end in ranges
        ]

    def read(self, part: Slice) -> Iterator[Sample]:
        """Yield the values of a range of keys."""
        with self._reading() as transaction:
            pairs = self._pairs(transaction, bytes.fromhex(part.items[0]))
            for _, (key, value) in zip(range(part.begin, part.end), pairs, strict=False):
                label = f"{self.name or self.tree.name}: {_text(key)}"
                try:
                    yield label, self._sample(label, key, value)
                except DataError as error:
                    yield label, error

    def fingerprint(self, part: Slice) -> str:
        """Return the number of the last write, and the file's size and time."""
        del part
        with self._reading() as transaction:
            return f"{transaction.id()}-{self.tree.stamp(self._file)}"

    @property
    def _file(self) -> str:
        return self.name or "data.mdb"

    def _sample(self, label: str, key: bytes, value: bytes) -> Mapping[str, Any]:
        if self._decode is not None:
            try:
                return self._decode(key, value)
            except Exception as error:  # the user's function
                raise DataError(f"{label}: decode raised {type(error).__name__}: {one_line(error)}.") from error
        if _is_pickle(value):
            raise DataError(
                f"{label} is a pickle, which shoal does not open: it could run anything. If you trust it, give "
                "decode=lambda key, value: pickle.loads(value)."
            )
        return {self._column: value} | ({"key": _text(key)} if self._keys else {})

    def _pairs(self, transaction: Any, begin: bytes) -> Iterator[tuple[bytes, bytes]]:
        cursor = transaction.cursor()
        if cursor.set_range(begin) if begin else cursor.first():
            for key, value in cursor.iternext():
                if not key.startswith(b"__"):
                    yield bytes(key), bytes(value)

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        """Open the database for a while: it may be open once in a process, and not across a fork."""
        lmdb = library("lmdb", extra="lmdb", what="LMDB databases")
        path = self.tree.path(self.name)
        try:
            environment = lmdb.open(
                path, readonly=True, lock=False, subdir=not self.name, readahead=False, create=False
            )
        except lmdb.Error as error:
            raise DataError(f"{self.name or self.tree.name} cannot be opened: {one_line(error)}.") from error
        try:
            self._check_whole(environment)
            with environment.begin(buffers=False) as transaction:
                yield transaction
        except lmdb.Error as error:
            raise DataError(f"{self.name or self.tree.name} is damaged: {one_line(error)}.") from error
        finally:
            environment.close()

    def _check_whole(self, environment: Any) -> None:
        """Raise a DataError if pages are missing: reading one through the map would end the process."""
        expected = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
        size = self.tree.size(self._file)
        if size < expected:
            raise DataError(f"{self.name or self.tree.name} is cut off: {size} of its {expected} bytes are there.")


def _is_pickle(data: bytes) -> bool:
    return len(data) > 3 and data[0] == 0x80 and 2 <= data[1] <= 5 and data.endswith(b".")


def _text(key: bytes) -> str:
    return key.decode("utf-8", "backslashreplace") if key.isascii() and key.decode().isprintable() else key.hex()
