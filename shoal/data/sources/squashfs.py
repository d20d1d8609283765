"""Squashfs images: the folder inside is read without mounting it, by PySquashfsImage.

It reads gzip and xz; zstd needs the package zstandard, lz4 the package lz4.
"""

import io
import threading
import weakref
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from shoal.core.errors import ConfigError, DataError
from shoal.data.sources.source import library, one_line
from shoal.data.sources.tree import Tree


class SquashTree:
    """The files inside a squashfs image, itself a file of another tree."""

    def __init__(self, outer: Tree, image: str) -> None:
        self.outer, self.image = outer, image
        self._opened: dict[str, Any] | None = None
        self._lock = threading.Lock()  # one file position serves all readers

    def __reduce__(self) -> tuple[Any, ...]:
        return SquashTree, (self.outer, self.image)

    @property
    def name(self) -> str:
        """What to call the whole: the image's name."""
        return PurePosixPath(self.image).name

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every file, sorted by name."""
        shown = {name: file for name, file in self._files().items() if not _is_hidden(name)}
        return {name: int(file.size) for name, file in sorted(shown.items())}

    def size(self, name: str) -> int:
        """Return the file's bytes."""
        return int(self._file(name).size)

    def open(self, name: str) -> BinaryIO:
        """Return the file's bytes as a file."""
        return io.BytesIO(self.read(name))

    def read(self, name: str) -> bytes:
        """Return what is in the file."""
        file = self._file(name)
        with self._lock:
            try:
                data = bytes(file.read_bytes())
            except Exception as error:  # zlib.error, struct.error, OSError: whatever the damage is
                raise DataError(f"{name} in {self.image} cannot be read: {one_line(error)}.") from error
        if len(data) != file.size:
            raise DataError(f"{name} in {self.image} cannot be read: {len(data)} of its {file.size} bytes are there.")
        return data

    def stamp(self, name: str) -> str:
        """Return size and time of the image: what is inside changes only with it."""
        del name
        return self.outer.stamp(self.image)

    def path(self, name: str) -> str:
        """Refuse: only shoal reads inside the image."""
        raise ConfigError(
            f"{name} in {self.image} cannot be opened by other libraries: unpack it with unsquashfs first."
        )

    def _file(self, name: str) -> Any:
        try:
            return self._files()[name]
        except KeyError:
            raise DataError(f"{name} is not in {self.image}.") from None

    def _files(self) -> dict[str, Any]:
        if self._opened is None:
            squashfs = library("PySquashfsImage", extra="squashfs", what="squashfs images")
            try:
                file = self.outer.open(self.image)
                weakref.finalize(self, file.close)
                image = squashfs.SquashFsImage(file, closefd=False)
                self._opened = {file.path.lstrip("/"): file for file in image if file.is_file}
            except ImportError as error:
                raise ConfigError(
                    f"{self.image} is compressed in a way that needs {error.name}. Run: pip install {error.name}"
                ) from None
            except DataError:
                raise
            except Exception as error:  # struct.error, zlib.error, OSError: whatever the damage is
                raise DataError(f"{self.image} is not a whole squashfs image: {one_line(error)}.") from error
        return self._opened


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))
