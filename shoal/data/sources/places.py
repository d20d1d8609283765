"""Which files are meant: a file, a folder, a pattern, a URL, or a list of them.

Example: "data/shard-{000..002}.tar" is the tree of `data` and three names; "s3://bucket/images/" is a tree that fsspec
reads, and the names of all files below it.
"""

import glob
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from shoal.core.errors import ConfigError
from shoal.data.sources.tree import LocalTree, UrlTree, is_url, open_tree, without_secrets

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


class Place(NamedTuple):
    """Files, and whether a folder was meant with all that is in it."""

    tree: LocalTree | UrlTree
    names: list[str]
    is_folder: bool


def find_files(src: str | Path | Iterable[str | Path]) -> Place:
    """Return a tree and the names in it that `src` means: a file, a folder, a pattern (`*`, `{00..09}`), or a list."""
    if isinstance(src, (str, Path)):
        if not is_url(src) and Path(src).exists():
            return _of_path(Path(src))
        found = [name for text in expand_braces(str(src)) for name in _matching(text)]
    else:
        found = [name for one in src for name in _matching(str(one))]
    if not found:
        raise ConfigError(
            f"There is nothing at {without_secrets(str(src))}: give a file, a folder, a pattern or a URL."
        )
    if len(found) == 1 and is_url(found[0]):
        return _of_url(found[0])
    if len(found) == 1:
        return _of_path(Path(found[0]))
    return _of_many(found)


def expand_braces(text: str) -> Iterator[str]:
    """Yield the names that `{000..009}` and `{a,b}` stand for: "s-{0..1}.tar" -> "s-0.tar", "s-1.tar"."""
    match = _BRACES.search(text)
    if match is None:
        yield text
        return
    numbers = _RANGE.fullmatch(match[1])
    if numbers:
        width = len(numbers[1])
        words = [f"{number:0{width}d}" for number in range(int(numbers[1]), int(numbers[2]) + 1)]
    else:
        words = match[1].split(",")
    for word in words:
        yield from expand_braces(text[: match.start()] + word + text[match.end() :])


def _matching(text: str) -> list[str]:
    if not is_url(text):
        if Path(text).exists():
            return [text]
        return sorted(glob.glob(text, recursive=True))  # noqa: PTH207  patterns may be absolute
    if not glob.has_magic(text):
        return [text]
    import fsspec  # for URLs alone: it takes 50 ms

    files, path = fsspec.core.url_to_fs(text)
    return sorted(files.unstrip_protocol(name) for name in files.glob(path))


def _of_path(path: Path) -> Place:
    if path.is_dir():
        tree = LocalTree(path)
        return Place(tree, list(tree.sizes()), is_folder=True)
    path = path.absolute()
    return Place(LocalTree(path.parent), [path.name], is_folder=False)


def _of_url(url: str) -> Place:
    tree = UrlTree(url)
    inside = tree.inside("")
    if tree.files.isfile(inside) and "::" not in url:
        folder, _, name = url.rstrip("/").rpartition("/")
        return Place(UrlTree(folder + "/" if folder.endswith(":/") else folder), [name], is_folder=False)
    names = list(tree.sizes())
    if not names:
        raise ConfigError(f"There is nothing at {without_secrets(url)}: give a file, a folder, a pattern or a URL.")
    return Place(tree, names, is_folder=True)


def _of_many(found: list[str]) -> Place:
    if not any(is_url(name) for name in found):
        found = [str(Path(name).absolute()) for name in found]
        for name in found:
            if not Path(name).is_file():
                raise ConfigError(f"{name} is not a file: in a list or a pattern, each name is that of a file.")
    shared = itertools.takewhile(
        lambda column: len(set(column)) == 1, zip(*(name.split("/") for name in found), strict=False)
    )
    parts = [column[0] for column in shared]
    if parts == found[0].split("/"):
        parts.pop()  # one file, given several times
    root = "/".join(parts)
    return Place(open_tree(root or "/"), [name[len(root) + 1 :] for name in found], is_folder=False)
