"""WebDataset tar files: consecutive members of one key are one sample.

1. The key of a member is its name up to the first dot of its last part; what follows is its extension.
2. The extension says what it is and names the column: images are `image`, cls is `label`, .npy is an array.
3. A tar that is not compressed is cut between samples, at offsets that reading its headers alone finds.

Example: 0001.jpg, 0001.cls, 0002.jpg, 0002.cls -> two samples, {"image": ..., "label": ...},
named "s.tar: 0001" and "s.tar: 0002".
Pickles (.pyd, .pkl, .pth) stay bytes: nothing is unpickled. Nothing is unpacked, either: a member whose name points
outside of the tar, a link or a device makes its sample an error, and the samples after it are read.
"""

import io
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from shoal.core.errors import DataError
from shoal.data.pack.schema import Column
from shoal.data.sources.folder import IMAGE_EXTENSIONS
from shoal.data.sources.source import Sample, Slice, one_line
from shoal.data.sources.tree import Tree, described

_INTEGERS = ("cls", "cls2", "index", "inx", "id", "count")
_TEXTS = ("txt", "text", "transcript", "json", "caption")
_END = 1 << 62


class TarSource:
    """The samples of WebDataset tar files, file after file."""

    columns: tuple[Column, ...] | None = None  # tar files do not say: the writer infers them

    def __init__(self, tree: Tree, names: list[str], *, keys: bool = False) -> None:
        """`keys`: keep each sample's key as a column."""
        self.tree, self.names, self._keys = tree, tuple(names), keys

    def describe(self) -> dict[str, Any]:
        """Return the files' names and sizes."""
        return described("webdataset", self.tree, self.names)

    def slices(self, about_bytes: int) -> list[Slice]:
        """Return files, and pieces of those that are larger."""
        return [part for name in self.names for part in self._cut(name, about_bytes)]

    def read(self, part: Slice) -> Iterator[Sample]:
        """Yield the samples of a file, or of a piece of it."""
        name, group, key = part.items[0], dict[str, bytes | DataError](), None
        for member, data in self._members(name, part.begin, part.end):
            folder, key_here, extension = _split(member.name)
            if folder + key_here != key:
                if key is not None:
                    yield self._finished(name, key, group)
                key, group = folder + key_here, {}
            twice = f"{name}: {key} has two members that end in .{extension}: each sample needs its own key."
            group[extension] = DataError(twice) if extension in group else data
        if key is not None:
            yield self._finished(name, key, group)

    def fingerprint(self, part: Slice) -> str:
        """Return size and time of the file."""
        return self.tree.stamp(part.items[0])

    def _finished(self, name: str, key: str, group: dict[str, bytes | DataError]) -> Sample:
        label = f"{name}: {key}"
        try:
            values = dict(_decoded(label, extension, data) for extension, data in sorted(group.items()))
        except DataError as error:
            return label, error
        return label, values | ({"key": key} if self._keys else {})

    def _cut(self, name: str, about_bytes: int) -> list[Slice]:
        size = self.tree.size(name)
        if size <= 2 * about_bytes or not name.endswith(".tar"):
            return [Slice((name,), 0, _END, size)]
        begins, key = [0], None
        for member, _ in self._members(name, 0, _END, with_data=False):
            here = _split(member.name)[:2]
            if here != key and member.offset - begins[-1] >= about_bytes:
                begins.append(member.offset)
            key = here
        ends = [*begins[1:], _END]
        return [Slice((name,), begin, end, min(end, size) - begin) for begin, end in zip(begins, ends, strict=True)]

    def _members(
        self, name: str, begin: int, end: int, *, with_data: bool = True
    ) -> Iterator[tuple[tarfile.TarInfo, bytes | DataError]]:
        """Yield the members of a tar whose headers lie in [begin, end), and what is in them, or why it is not read."""
        last = f"offset {begin}"
        with self.tree.open(name) as file:
            try:
                file.seek(begin)
                # Plain tars are read with seeks, so that a piece can begin anywhere; others as a stream.
                with tarfile.open(fileobj=file, mode="r:" if name.endswith(".tar") else "r:*") as tar:
                    while (member := _next(tar, name)) is not None and member.offset < end:
                        last = member.name
                        if member.isdir():
                            continue
                        yield member, _refused(member, name) or (_content(tar, member, name) if with_data else b"")
            except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
                raise DataError(f"{name} is broken after {last}: {one_line(error)}.") from error


def _next(tar: tarfile.TarFile, name: str) -> tarfile.TarInfo | None:
    member = tar.next()
    tar.members.clear()  # type: ignore[attr-defined]  # tarfile keeps every member otherwise
    if member is None:
        _check_end(tar, name)
    return member


def _check_end(tar: tarfile.TarFile, name: str) -> None:
    """Raise a DataError unless zeros follow the last member: tarfile takes a damaged header for the end."""
    file = tar.fileobj
    assert file is not None
    file.seek(tar.offset)
    block = file.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        raise DataError(f"{name} has no end mark after its last member: it may have been cut off. Write it again.")
    if any(block):
        raise DataError(f"{name} is broken at byte {tar.offset}: what should be a member's header is none.")


def _refused(member: tarfile.TarInfo, name: str) -> DataError | None:
    """Return why a member is not read: a name that is not inside the tar, or no plain file."""
    label, path = f"{name}: {''.join(_split(member.name)[:2])}", PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        return DataError(f"{label}: its name {member.name!r} points outside of the tar. Such members are not read.")
    if not member.isreg() or member.issparse():  # a sparse one of a kilobyte may be a terabyte of zeros
        return DataError(f"{label}: {member.name!r} is a link, a device or sparse. Only plain files are read.")
    return None


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo, name: str) -> bytes:
    file = tar.extractfile(member)
    assert file is not None
    data = file.read()
    if len(data) != member.size:
        raise DataError(f"{name}: {member.name} is cut off: {len(data)} of its {member.size} bytes are there.")
    return data


def _split(name: str) -> tuple[str, str, str]:
    """Return folder, key and extension: "train/0001.left.jpg" -> "train/", "0001", "left.jpg"."""
    folder, slash, last = name.rpartition("/")
    key, _, extension = last.partition(".")
    return folder + slash, key, extension.lower()


def _decoded(label: str, extension: str, data: bytes | DataError) -> tuple[str, Any]:
    """Return a member's column and value."""
    if isinstance(data, DataError):
        raise data
    stem, _, kind = extension.rpartition(".")
    if f".{kind}" in IMAGE_EXTENSIONS:
        return stem or "image", data
    decode = _DECODERS.get(kind)
    if decode is None:
        return extension or "data", data
    try:
        return stem or {"cls": "label"}.get(kind, kind), decode(data)
    except Exception as error:  # NumPy's reader of headers alone raises half a dozen kinds
        raise DataError(f"{label}: .{extension} is not what its name says: {one_line(error)}.") from None


def _array(data: bytes) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(_INTEGERS, lambda data: np.int64(int(data))),
    **dict.fromkeys(_TEXTS, lambda data: data.decode()),
    "npy": _array,
}
