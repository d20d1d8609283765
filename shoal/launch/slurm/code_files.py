"""Which files belong to the code of a job: what it imports, where that is, and what lies beside it."""

import ast
import os
import sysconfig
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

OURS = "shoal"
MOST_FILES = 2000
SMALL_BYTES = 1_000_000
"""Of a file that is no Python: such a one is copied, as a configuration is; a larger one is data, and linked."""
_SKIPPED = {"__pycache__", "runs", "node_modules", "wandb", "mlruns", "site-packages"}
_SKIPPED_ENDS = (".pack", ".egg-info", ".dist-info", ".pyc")
_MODULES = (".py", ".so", ".pyi")


def imported(file: Path) -> set[str]:
    """Return the top names of the modules that a Python file imports, wherever in it."""
    if file.suffix != ".py":
        return set()
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def places(spec: ModuleSpec | None) -> list[Path]:
    """Return where a module is: its file, or the folders of a package."""
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [Path(place) for place in spec.submodule_search_locations]
    return [Path(spec.origin)] if spec.origin and Path(spec.origin).is_file() else []


def is_installed(place: Path) -> bool:
    """Return whether it is Python's own, or of an installed package."""
    if {"site-packages", "dist-packages"} & set(place.parts):
        return True
    return any(place.is_relative_to(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))


def files_of(folder: Path, target: Path) -> Iterator[Path]:
    """Yield what belongs to a package: its files, and as a whole the folders in it that have no Python."""
    for entry in sorted(folder.iterdir()):
        if _is_skipped(entry, target):
            continue
        if entry.is_dir() and not entry.is_symlink() and _has_python(entry):
            yield from files_of(entry, target)
        elif entry.exists():
            yield entry


def data_beside(root: Path, target: Path) -> Iterator[Path]:
    """Yield what modules of `root` may read there; a folder of modules that is linked is what it is without a link."""
    for entry in root.iterdir() if root.is_dir() else ():
        if not _is_module(entry) and entry.name != OURS and entry.exists() and not _is_skipped(entry, target):
            yield entry


def _is_skipped(entry: Path, target: Path) -> bool:
    is_named = entry.name.startswith(".") or entry.name in _SKIPPED or entry.name.endswith(_SKIPPED_ENDS)
    if not entry.is_dir():
        return is_named
    if (entry / "__init__.py").is_file():
        return False
    is_ours = target.is_relative_to(entry) or (entry / "map.json").is_file() or (entry / "run.toml").is_file()
    return is_named or is_ours or (entry / "pyvenv.cfg").is_file()


def _has_python(folder: Path) -> bool:
    """Return whether there is Python in a folder; a very large one counts as data."""
    seen = 0
    for _, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _SKIPPED]
        if any(name.endswith(_MODULES) for name in names):
            return True
        seen += len(names)
        if seen > MOST_FILES:
            return False
    return False


def _is_module(path: Path) -> bool:
    return path.suffix in _MODULES


def is_large(path: Path) -> bool:
    """Return whether it is data, a folder or a large file, which is linked."""
    return path.is_dir() or (not _is_module(path) and path.stat().st_size > SMALL_BYTES)
