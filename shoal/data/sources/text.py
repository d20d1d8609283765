"""Plain text to tokens: a row a document, where a document is a file, a line, a JSON line, or ends at a separator.

1. Files that are cut by separators are sliced between documents: from an offset, go on to a byte that no separator has,
   then to the end of the next separator. From such a byte on, the same separators are found wherever one began.
2. Documents are collected to about a megabyte and encoded together; empty ones are left out.
3. The numbers are kept in the smallest of uint8, uint16 and int32 that holds the vocabulary.

Example: "one\\ntwo\\n\\nthree" by line, as bytes: [111, 110, 101], [116, 119, 111], [116, 104, 114, 101, 101], named
"a.txt: byte 0", "a.txt: byte 4" and "a.txt: byte 9".
"""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import ConfigError, DataError
from shoal.data.pack.schema import Column, Flat
from shoal.data.sources.documents import Document, field_of, next_document, parted, pieces, separator_of, together
from shoal.data.sources.source import Batch, Sample, Slice, group_files
from shoal.data.sources.tokenizer import open_tokenizer
from shoal.data.sources.tree import Tree, described

TEXT_EXTENSIONS = (".txt", ".text", ".md", ".jsonl", ".ndjson", ".txt.gz", ".jsonl.gz")
_END = 1 << 62


class TextSource:
    """The documents of text files, as tokens."""

    def __init__(
        self,
        tree: Tree,
        names: list[str],
        *,
        tokenizer: Any = "bytes",
        documents: str | None = None,
        separator: str | None = None,
        field: str | None = None,
        end_token: str | int | None = None,
        column: str = "tokens",
    ) -> None:
        """`documents` is "file" or "line", or `separator` ends them; `field` of JSON lines; `end_token` is added."""
        self.tree, self.names, self._column = tree, tuple(names), column
        is_json = self.names[0].removesuffix(".gz").endswith(("jsonl", "ndjson"))
        self._field = field or ("text" if is_json else None)
        self._separator = separator_of(documents or ("line" if self._field else "file"), separator)
        self._tokenizer = open_tokenizer(tokenizer)
        self._end = self._number(end_token)
        self._dtype = _smallest(max(self._tokenizer.vocabulary, 1 + (self._end or 0)))

    @property
    def columns(self) -> tuple[Column, ...]:
        """The tokens; `extra` says how many different ones there can be, and which ends a document."""
        extra = {"vocabulary": self._tokenizer.vocabulary} | ({} if self._end is None else {"end_token": self._end})
        return (Column(self._column, "tokens", self._dtype, extra=extra),)

    def describe(self) -> dict[str, Any]:
        """Return the files, how documents are found, and the tokenizer."""
        separator = None if self._separator is None else self._separator.decode()
        more = {"separator": separator, "field": self._field, "end_token": self._end}
        return described("text", self.tree, self.names, **more, tokenizer=self._tokenizer.describe())

    def slices(self, about_bytes: int) -> list[Slice]:
        """Return runs of files, or stretches of a file between documents."""
        sizes = {name: self.tree.size(name) for name in self.names}
        if self._separator is None:
            return group_files(sizes, about_bytes)
        return [part for name, size in sizes.items() for part in self._cut(name, size, max(1, int(about_bytes)))]

    def read(self, part: Slice) -> Iterator[Sample]:
        """Yield the documents' tokens."""
        for documents in together(self._documents(part)):
            for (label, _), tokens in zip(documents, self._encoded(documents), strict=True):
                yield label, tokens if isinstance(tokens, DataError) else {self._column: tokens}

    def read_batches(self, part: Slice) -> Iterator[Batch]:
        """Yield the documents' tokens, many documents at a time."""
        for documents in together(self._documents(part)):
            tokens = self._encoded(documents)
            for found in tokens:
                if isinstance(found, DataError):
                    raise found
            rows = cast(list[NDArray[Any]], tokens)
            offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
            labels = [label for label, _ in documents]
            yield len(rows), labels.__getitem__, {self._column: Flat(np.concatenate(rows), offsets)}

    def fingerprint(self, part: Slice) -> str:
        """Return sizes and times of the files."""
        return ";".join(self.tree.stamp(name) for name in part.items)

    def _number(self, token: str | int | None) -> int | None:
        number = self._tokenizer.number(token) if isinstance(token, str) else token
        if token is not None and (number is None or number < 0):
            raise ConfigError(
                f"end_token={token!r} is no token of {self._tokenizer.describe()['name']}. Give another, or a number."
            )
        return number

    def _encoded(self, documents: list[Document]) -> list[NDArray[Any] | DataError]:
        """Return the tokens of each document, those that cannot be read as their errors."""
        readable = [(label, data) for label, data in documents if not isinstance(data, DataError)]
        found = iter(self._tokenizer.encode(readable))
        tokens = [data if isinstance(data, DataError) else next(found) for _, data in documents]
        end = np.asarray([] if self._end is None else [self._end], self._dtype)
        return [x if isinstance(x, DataError) else np.concatenate([x.astype(self._dtype), end]) for x in tokens]

    def _documents(self, part: Slice) -> Iterator[Document]:
        if self._separator is None:
            yield from ((name, self._whole(name)) for name in part.items)
            return
        name = part.items[0]
        with self._open(name) as file:
            for offset, data in parted(pieces(file, part.begin, part.end, name), self._separator, part.begin):
                label = f"{name}: byte {offset}"
                line = data.removesuffix(b"\r") if self._separator == b"\n" else data
                yield label, field_of(label, line, self._field) if self._field and line.strip() else line

    def _whole(self, name: str) -> bytes | DataError:
        try:
            with self._open(name) as file:
                return b"".join(pieces(file, 0, _END, name))
        except DataError as error:
            return error

    @contextmanager
    def _open(self, name: str) -> Iterator[BinaryIO]:
        with self.tree.open(name) as file:
            yield cast(BinaryIO, gzip.GzipFile(fileobj=file)) if name.endswith(".gz") else file

    def _cut(self, name: str, size: int, about_bytes: int) -> list[Slice]:
        if name.endswith(".gz"):
            return [Slice((name,), 0, _END, size)]  # where documents begin is known after decompressing only
        begins = [0]
        with self.tree.open(name) as file:
            while begins[-1] + about_bytes < size:
                begins.append(next_document(file, begins[-1] + about_bytes, cast(bytes, self._separator), size))
        ranges = zip(begins, [*begins[1:], size], strict=True)
        return [Slice((name,), begin, end, end - begin) for begin, end in ranges if end > begin]


def _smallest(vocabulary: int) -> str:
    return "uint8" if vocabulary <= 1 << 8 else "uint16" if vocabulary <= 1 << 16 else "int32"
