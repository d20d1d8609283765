"""Files of tokens that somebody has encoded already: nothing but integers, as nanoGPT (uint16) and llm.c (after a
header of 1024 bytes) write them.

1. With `end_token`, a row is a document up to and with that token; without, a row is a stretch of `row_tokens`.
2. A slice begins where a row does: from a position, the first one after an end token.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import ConfigError, DataError
from shoal.data.pack.schema import Column, Flat
from shoal.data.sources.rows import rows_of
from shoal.data.sources.source import Batch, Sample, Slice
from shoal.data.sources.tree import Tree, described

_PIECE_TOKENS = 1 << 20


class TokenSource:
    """The documents of files of tokens."""

    def __init__(
        self,
        tree: Tree,
        names: list[str],
        *,
        dtype: str = "uint16",
        skip_bytes: int = 0,
        end_token: int | None = None,
        row_tokens: int = _PIECE_TOKENS,
        column: str = "tokens",
    ) -> None:
        self.tree, self.names, self._column = tree, tuple(names), column
        self._dtype, self._skip_bytes = np.dtype(dtype), skip_bytes
        self._end, self._row_tokens = end_token, row_tokens
        if self._dtype.kind not in "iu":
            raise ConfigError(f"dtype={dtype!r}: tokens are integers. Write 'uint16' or 'uint32'.")

    @property
    def columns(self) -> tuple[Column, ...]:
        """The tokens."""
        extra = {} if self._end is None else {"end_token": self._end}
        return (Column(self._column, "tokens", self._dtype.newbyteorder("=").name, extra=extra),)

    def describe(self) -> dict[str, Any]:
        """Return the files, and how they are read."""
        more = {"dtype": str(self._dtype), "skip_bytes": self._skip_bytes, "end_token": self._end}
        return described("tokens", self.tree, self.names, **more, row_tokens=self._row_tokens)

    def slices(self, about_bytes: int) -> list[Slice]:
        """Return stretches of each file that begin where a row does."""
        found = []
        about = max(1, int(about_bytes) // self._dtype.itemsize)
        for name in self.names:
            size = self._num_tokens(name)
            begins = [0] if size else []
            while begins and begins[-1] + about < size:
                begins.append(self._next_row(name, begins[-1] + about, size))
            ranges = zip(begins, [*begins[1:], size], strict=True)
            width = self._dtype.itemsize
            found += [
                Slice((name,), begin, end, (end - begin) * width, self._num_rows(end - begin))
                for begin, end in ranges
                if end > begin
            ]
        return found

    def read(self, part: Slice) -> Iterator[Sample]:
        """Yield the rows of a stretch."""
        for batch in self.read_batches(part):
            yield from rows_of(batch, self.columns)

    def read_batches(self, part: Slice) -> Iterator[Batch]:
        """Yield the rows of a stretch, many at a time."""
        name, rest, begin = part.items[0], np.empty(0, self._dtype), part.begin
        for tokens in self._pieces(name, part.begin, part.end):
            rest = np.concatenate([rest, tokens])
            cuts = self._cuts(rest)
            if len(cuts):
                yield self._batch(name, begin, rest[: cuts[-1]], cuts)
                begin, rest = begin + int(cuts[-1]), rest[cuts[-1] :]
        if len(rest):
            yield self._batch(name, begin, rest, np.asarray([len(rest)]))

    def fingerprint(self, part: Slice) -> str:
        """Return size and time of the file."""
        return self.tree.stamp(part.items[0])

    def _batch(self, name: str, begin: int, tokens: NDArray[Any], cuts: NDArray[Any]) -> Batch:
        offsets = np.concatenate([[0], cuts]).astype(np.int64)
        values = tokens.astype(self._dtype.newbyteorder("="), copy=False)
        return (
            len(cuts),
            lambda row: f"{name}: token {begin + int(offsets[row])}",
            {self._column: Flat(values, offsets)},
        )

    def _cuts(self, tokens: NDArray[Any]) -> NDArray[Any]:
        """Return where rows end that are whole."""
        if self._end is None:
            return np.arange(self._row_tokens, len(tokens) + 1, self._row_tokens)
        return np.flatnonzero(tokens == self._end) + 1

    def _num_rows(self, tokens: int) -> int | None:
        return -(-tokens // self._row_tokens) if self._end is None else None

    def _next_row(self, name: str, begin: int, size: int) -> int:
        if self._end is None:
            return min(size, -(-begin // self._row_tokens) * self._row_tokens)
        for tokens in self._pieces(name, begin, size):
            found = np.flatnonzero(tokens == self._end)
            if len(found):
                return begin + int(found[0]) + 1
            begin += len(tokens)
        return size

    def _num_tokens(self, name: str) -> int:
        size = self.tree.size(name) - self._skip_bytes
        if size < 0 or size % self._dtype.itemsize:
            raise DataError(
                f"{name} has {size} bytes, and a token has {self._dtype.itemsize}: token "
                f"{max(size, 0) // self._dtype.itemsize} is not whole. Check dtype and skip_bytes."
            )
        return size // self._dtype.itemsize

    def _pieces(self, name: str, begin: int, end: int) -> Iterator[NDArray[Any]]:
        width = self._dtype.itemsize
        with self.tree.open(name) as file:
            file.seek(self._skip_bytes + begin * width)
            for at in range(begin, end, _PIECE_TOKENS):
                data = file.read(min(_PIECE_TOKENS, end - at) * width)
                if len(data) < min(_PIECE_TOKENS, end - at) * width:
                    raise DataError(
                        f"{name} ends in token {at + len(data) // width}, and had {end} when it was opened."
                    )
                yield np.frombuffer(data, self._dtype)
