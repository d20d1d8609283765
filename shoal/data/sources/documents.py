"""Where documents begin and end in a stream of bytes, from wherever one begins to look."""

import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from shoal.core.errors import ConfigError, DataError
from shoal.data.sources.source import one_line

Document = tuple[str, bytes | DataError]
"""Its label, and what it says or why it cannot be read."""
TOGETHER_BYTES = 1 << 20
"""Encoded at once: enough for a tokenizer's threads, little memory."""
_PIECE_BYTES = 1 << 20


def separator_of(documents: str, separator: str | None) -> bytes | None:
    """Return what parts documents, or None where each file is one."""
    if separator is not None:
        if not separator:
            raise ConfigError("separator='' parts nothing. Give the text between documents.")
        return separator.encode()
    if documents not in ("file", "line"):
        raise ConfigError(f"documents={documents!r} is not known. Write 'file' or 'line', or give separator=...")
    return b"\n" if documents == "line" else None


def pieces(file: BinaryIO, begin: int, end: int, name: str) -> Iterator[bytes]:
    """Yield the bytes [begin, end) of a file, about a megabyte at a time."""
    try:
        file.seek(begin)
        while begin < end and (data := file.read(min(_PIECE_BYTES, end - begin))):
            begin += len(data)
            yield data
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{name} is broken after byte {begin}: {one_line(error)}.") from error


def parted(found: Iterable[bytes], separator: bytes, begin: int) -> Iterator[tuple[int, bytes]]:
    """Yield offset and bytes of each document in a stream that starts at a document, at offset `begin`."""
    rest: list[bytes] = []
    for piece in found:
        rest.append(piece)
        if len(separator) == 1 and separator not in piece:
            continue  # a long document is joined once, not at every piece
        *whole, last = b"".join(rest).split(separator)
        for data in whole:
            yield begin, data
            begin += len(data) + len(separator)
        rest = [last]
    yield begin, b"".join(rest)


def next_document(file: BinaryIO, begin: int, separator: bytes, size: int) -> int:
    """Return where a document starts after offset `begin`, one that starts there from wherever one began to look."""
    file.seek(begin)
    data = b""
    while True:
        more = file.read(max(1 << 16, len(data)))
        if not more:
            return size
        data += more
        first = len(data) - len(data.lstrip(separator))  # a byte that no separator has
        at = data.find(separator, first)
        if first < len(data) and at >= 0:
            return begin + at + len(separator)


def field_of(label: str, line: bytes, field: str) -> bytes | DataError:
    """Return the text in a field of a JSON line."""
    try:
        found: Any = json.loads(line)[field]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return DataError(f"{label} is no JSON object with {field!r}: {one_line(error)}.")
    if not isinstance(found, str):
        return DataError(f"{label}: {field!r} is a {type(found).__name__}, not text.")
    try:
        return found.encode()
    except UnicodeEncodeError as error:
        alone = found[error.start].encode("unicode_escape").decode()
        return DataError(f"{label}: {field!r} has the character {alone}, which no text has: half of a pair of UTF-16.")


def together(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield lists of documents of about TOGETHER_BYTES, without those that are empty."""
    found: list[Document] = []
    total = 0
    for label, data in documents:
        if isinstance(data, DataError) or data:
            found.append((label, data))
            total += 0 if isinstance(data, DataError) else len(data)
        if total >= TOGETHER_BYTES:
            yield found
            found, total = [], 0
    if found:
        yield found
