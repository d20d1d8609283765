"""A folder of files, one sample each: `image` (encoded, as it is) or `data` (bytes), and `label` by class folders.

Class folders: every file lies in a folder of the first level; the classes are those folders' names, sorted, and `label`
is their number. Example: cat/1.jpg, cat/2.jpg, dog/1.jpg -> labels 0, 0, 1, and extra={"classes": ["cat", "dog"]}.
Where some files are images, the others are left out, and counted in `describe()`.
"""

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from shoal.core.errors import ConfigError, DataError
from shoal.data.pack.schema import Column
from shoal.data.sources.source import Sample, Slice, group_files
from shoal.data.sources.tree import Tree

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")


class FolderSource:
    """The files of a tree, sorted by name."""

    def __init__(
        self,
        tree: Tree,
        *,
        classes: bool | None = None,
        extensions: tuple[str, ...] | list[str] | None = None,
        names: bool = False,
        inside: str = "",
    ) -> None:
        """`classes`: whether folders are classes (found out if None); `names`: keep each file's name as a column."""
        self.tree, self._names, self._inside = tree, names, inside.strip("/") + "/" if inside else ""
        self._extensions = tuple(extensions) if extensions is not None else None
        self._sizes, self._is_image, self._ignored = self._list()
        self._num_files = len(self._sizes)
        if not self._sizes:
            raise ConfigError(f"There is no file to read in {tree.name}. Give extensions=[...] or another folder.")
        self.classes = self._find_classes(classes)
        self._numbers = {name: number for number, name in enumerate(self.classes)}

    def __getstate__(self) -> dict[str, Any]:
        # Slices hold the names: what goes to another process stays small.
        return self.__dict__ | {"_sizes": {}}

    @property
    def columns(self) -> tuple[Column, ...]:
        """`image` or `data`, then `label` and `name` where there are such."""
        found = [Column("image", "image") if self._is_image else Column("data", "bytes")]
        if self.classes:
            found.append(Column("label", "scalar", "int64", extra={"classes": list(self.classes)}))
        if self._names:
            found.append(Column("name", "text"))
        return tuple(found)

    def describe(self) -> dict[str, Any]:
        """Return the folder's name, and how many files of it are read."""
        counts = {"num_files": self._num_files, "ignored_files": self._ignored, "num_classes": len(self.classes)}
        return {"kind": "folder", "name": self.tree.name, **counts}

    def slices(self, about_bytes: int) -> list[Slice]:
        """Return runs of files."""
        if not self._sizes:  # came from another process
            self._sizes = self._list()[0]
        return group_files(self._sizes, about_bytes)

    def read(self, part: Slice) -> Iterator[Sample]:
        """Yield the files, as they are."""
        for name in part.items:
            try:
                yield name, self._sample(name)
            except DataError as error:
                yield name, error

    def fingerprint(self, part: Slice) -> str:
        """Return sizes and times of the files."""
        return ";".join(self.tree.stamp(name) for name in part.items)

    def _list(self) -> tuple[dict[str, int], bool, int]:
        found = {name: size for name, size in self.tree.sizes().items() if name.startswith(self._inside)}
        sizes, is_image = _wanted(found, self._extensions)
        return sizes, is_image, len(found) - len(sizes)

    def _sample(self, name: str) -> dict[str, Any]:
        data = self.tree.read(name)
        if not data:
            raise DataError(f"{name} is empty.")
        sample: dict[str, Any] = {"image" if self._is_image else "data": data}
        if self.classes:
            sample["label"] = np.int64(self._numbers[self._class_of(name)])
        if self._names:
            sample["name"] = name
        return sample

    def _class_of(self, name: str) -> str:
        return name[len(self._inside) :].partition("/")[0]

    def _find_classes(self, asked: bool | None) -> tuple[str, ...]:
        flat = [name for name in self._sizes if "/" not in name[len(self._inside) :]]
        if asked and flat:
            raise ConfigError(
                f"classes=True, but {flat[0]} lies in no class folder. Move it, or give extensions=[...]."
            )
        if asked is False or flat:
            return ()
        return tuple(sorted({self._class_of(name) for name in self._sizes}))


def _wanted(found: dict[str, int], extensions: tuple[str, ...] | None) -> tuple[dict[str, int], bool]:
    """Return the files to read, and whether they are images."""
    if extensions is not None:
        asked = tuple("." + extension.lower().lstrip(".") for extension in extensions)
        chosen = {name: size for name, size in found.items() if name.lower().endswith(asked)}
        return chosen, bool(chosen) and all(_is_image(name) for name in chosen)
    images = {name: size for name, size in found.items() if _is_image(name)}
    return (images, True) if images else (found, False)


def _is_image(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in IMAGE_EXTENSIONS
