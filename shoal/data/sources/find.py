"""Which format a source is of: by its type, by names, by what lies in a folder; or by `kind`, which settles it.

| `kind` | found by |
|---|---|
| folder | image files, or files of no other kind |
| webdataset | .tar, .tar.gz, .tgz |
| hdf5, beton, npz | .h5 .hdf5 .he5, .beton, .npz |
| npy | .npy: rows; the files of a folder are its columns |
| raw, tokens | only if asked for: a file of numbers does not say what they are |
| csv, parquet, arrow | .csv .tsv, .parquet, .arrow .feather .ipc |
| text | .txt .text .md .jsonl .ndjson, also with .gz |
| zarr, lmdb, huggingface | folders with their own files in them |
| squashfs | .squashfs .sqfs .sqsh .sfs: the format of what is inside is found as that of a folder |
| python | any other object: a map-style dataset, an iterable, a function that returns one |
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError, did_you_mean
from shoal.data.sources.beton import BetonSource
from shoal.data.sources.folder import IMAGE_EXTENSIONS, FolderSource
from shoal.data.sources.hdf5 import Hdf5Source
from shoal.data.sources.hugging_face import HuggingFaceSource
from shoal.data.sources.lmdb_store import LmdbSource
from shoal.data.sources.numpy_arrays import NpyColumns, NpySource, NpzSource, RawSource
from shoal.data.sources.places import find_files
from shoal.data.sources.python_objects import python_source
from shoal.data.sources.source import Source
from shoal.data.sources.squashfs import SquashTree
from shoal.data.sources.table_formats import TABLE_EXTENSIONS
from shoal.data.sources.tables import TableSource
from shoal.data.sources.tar import TarSource
from shoal.data.sources.text import TEXT_EXTENSIONS, TextSource
from shoal.data.sources.token_files import TokenSource
from shoal.data.sources.tree import Tree
from shoal.data.sources.zarr_store import ZarrSource

EXTENSIONS: dict[str, tuple[str, ...]] = {
    "folder": IMAGE_EXTENSIONS,
    "webdataset": (".tar", ".tar.gz", ".tgz"),
    "hdf5": (".h5", ".hdf5", ".he5"),
    "beton": (".beton",),
    "npz": (".npz",),
    "npy": (".npy",),
    **{kind: tuple(end for end, of in TABLE_EXTENSIONS.items() if of == kind) for kind in ("csv", "parquet", "arrow")},
    "text": TEXT_EXTENSIONS,
    "squashfs": (".squashfs", ".sqfs", ".sqsh", ".sfs"),
    "lmdb": (".lmdb", ".mdb"),
}
_MARKS = {
    "huggingface": ("state.json", "dataset_dict.json"),
    "zarr": ("zarr.json", ".zgroup", ".zarray"),
    "lmdb": ("data.mdb",),
}
_SINGLE = ("beton", "squashfs", "lmdb")


def open_source(src: Any, *, kind: str | None = None, **options: Any) -> Source:
    """Return the source of a path, a pattern, a URL, a list of them, or an object. `options` are the format's own."""
    if kind is not None and kind not in [*_BUILDERS, "python"]:
        raise ConfigError(f"kind={kind!r} is not known.{did_you_mean(kind, [*_BUILDERS, 'python'])}")
    if isinstance(src, Source):
        return src
    if _is_hugging_face(src):
        return _built(HuggingFaceSource, options, src)
    if kind == "python" or not _is_place(src):
        return _built(python_source, options, src)
    place = find_files(src)
    return _of_tree(place.tree, place.names, is_folder=place.is_folder, kind=kind, options=options)


def _of_tree(tree: Tree, names: list[str], *, is_folder: bool, kind: str | None, options: Mapping[str, Any]) -> Source:
    kind = kind or (_marked(tree) if is_folder else None) or _by_names(tree, names, is_folder=is_folder)
    if is_folder and kind in EXTENSIONS and kind != "folder":
        names = [name for name in names if _kind_of(name) == kind] or names
    if kind in _SINGLE and len(names) > 1 and not (kind == "lmdb" and is_folder):
        raise ConfigError(f"{tree.name} has {len(names)} files of kind {kind}: give one of them, like {names[0]}.")
    if kind == "squashfs":
        inner = SquashTree(tree, names[0])
        return _of_tree(inner, list(inner.sizes()), is_folder=True, kind=None, options=options)
    return _BUILDERS[kind](tree, names, is_folder, options)


def _is_place(src: Any) -> bool:
    if isinstance(src, (list, tuple)):
        return bool(src) and all(isinstance(one, (str, Path)) for one in src)
    return isinstance(src, (str, Path))


def _is_hugging_face(src: Any) -> bool:
    return type(src).__module__.startswith("datasets.") and type(src).__name__ in ("Dataset", "DatasetDict")


def _marked(tree: Tree) -> str | None:
    """Return the kind of a folder by the files that only this format has."""
    if isinstance(tree, SquashTree):
        return None  # libraries that open folders themselves cannot see inside
    found = (kind for kind, marks in _MARKS.items() if any(tree.stamp(mark) != "gone" for mark in marks))
    return next(found, None)


def _by_names(tree: Tree, names: list[str], *, is_folder: bool) -> str:
    kinds: dict[str, str] = {}
    for name in names:
        if (kind := _kind_of(name)) is not None:
            kinds.setdefault(kind, name)
    if len(kinds) > 1:
        kinds.pop("text", None)  # README.md and the like
    if len(kinds) > 1:
        said = ", ".join(f"{kind} ({name})" for kind, name in kinds.items())
        raise ConfigError(
            f"{tree.name} has files of several kinds: {said}. Say which to read with kind='{next(iter(kinds))}'."
        )
    if kinds:
        return next(iter(kinds))
    if is_folder:
        return "folder"
    raise ConfigError(f"What {names[0]} is cannot be told from its name. Say kind=..., one of {', '.join(_BUILDERS)}.")


def _kind_of(name: str) -> str | None:
    return next((kind for kind, ends in EXTENSIONS.items() if name.lower().endswith(ends)), None)


def _built(make: Callable[..., Source], options: Mapping[str, Any], *arguments: Any) -> Source:
    """Call `make`, and say which options there are if one is not known."""
    known = _options_of(make)
    for name in options:
        if name not in known:
            raise ConfigError(f"This source has no option {name!r}.{did_you_mean(name, known)}")
    try:
        return make(*arguments, **options)
    except TypeError as error:
        raise ConfigError(f"The options do not fit this source: {error}.") from error


def _options_of(make: Callable[..., Source]) -> list[str]:
    """Return the keywords that a class and those it inherits from, or a function, take."""
    makers = (
        [vars(one)["__init__"] for one in make.__mro__ if "__init__" in vars(one)] if inspect.isclass(make) else [make]
    )
    parameters = [one for maker in makers for one in inspect.signature(maker).parameters.values()]
    return sorted({one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY})


def _npy(tree: Tree, names: list[str], is_folder: bool, options: Mapping[str, Any]) -> Source:
    return _built(NpyColumns if is_folder and len(names) > 1 else NpySource, options, tree, names)


def _files(make: Callable[..., Source]) -> Callable[[Tree, list[str], bool, Mapping[str, Any]], Source]:
    return lambda tree, names, is_folder, options: _built(make, options, tree, names)  # noqa: ARG005


def _folder(make: Callable[..., Source]) -> Callable[[Tree, list[str], bool, Mapping[str, Any]], Source]:
    return lambda tree, names, is_folder, options: _built(make, options, tree)  # noqa: ARG005


def _one(make: Callable[..., Source]) -> Callable[[Tree, list[str], bool, Mapping[str, Any]], Source]:
    return lambda tree, names, is_folder, options: _built(make, options, tree, names[0])  # noqa: ARG005


_BUILDERS: dict[str, Callable[[Tree, list[str], bool, Mapping[str, Any]], Source]] = {
    "folder": _folder(FolderSource),
    "webdataset": _files(TarSource),
    "hdf5": _files(Hdf5Source),
    "zarr": _folder(ZarrSource),
    "lmdb": lambda tree, names, is_folder, options: _built(LmdbSource, options, tree, "" if is_folder else names[0]),
    "npy": _npy,
    "npz": _files(NpzSource),
    "raw": _files(RawSource),
    "tokens": _files(TokenSource),
    "csv": _files(TableSource),
    "parquet": _files(TableSource),
    "arrow": _files(TableSource),
    "huggingface": _folder(HuggingFaceSource),
    "squashfs": _files(TextSource),  # never built: what is inside is
    "text": _files(TextSource),
    "beton": _one(BetonSource),
}
