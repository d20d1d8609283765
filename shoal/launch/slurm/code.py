"""The code of a job as it was when it was submitted: a copy, so that what is edited later is not in what runs then.

1. Begin with the job's file. Whatever it imports, anywhere in it, and lies neither in Python's own library nor among
   installed packages, is copied: a module alone, a package whole, since packages import parts of themselves by name.
   What is copied is read for imports in turn.
2. Beside the modules lie files that they read. Small ones are copied, larger ones are linked; so are folders without
   Python in them. Runs, packs, environments and whatever is hidden are left out.
3. What would be more than `MOST_FILES` or `MOST_BYTES` is not copied, and that is said: modules are left out, files are
   linked, as many again. The job then sees them as they are by then.
4. In the job, the copy comes first wherever Python looks for modules, and the folders that it was made from after it.

Example: /home/me/exp/train.py imports model (beside it) and tools.text (of /home/me, on PYTHONPATH). The copy has
train.py, model.py, _1/tools/__init__.py and _1/tools/text.py; on the path are the copy, its _1, /home/me/exp, /home/me.
"""

import contextlib
import itertools
import json
import runpy
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.core.errors import ConfigError
from shoal.core.files import write_whole
from shoal.core.units import format_bytes
from shoal.launch.slurm.code_files import (
    MOST_FILES,
    OURS,
    data_beside,
    files_of,
    imported,
    is_installed,
    is_large,
    places,
)

MOST_BYTES = 50_000_000
MANIFEST = "_code.json"


@dataclass(frozen=True)
class CodeCopy:
    """What was copied, and what was not."""

    files: int
    num_bytes: int
    left_out: tuple[str, ...]

    @property
    def note(self) -> str:
        """What is to be said of it; nothing where it is one file, and all of it."""
        return str(self) if self.files > 1 or self.left_out else ""

    def __str__(self) -> str:
        said = (
            f"Copied {self.files:,} files of code ({format_bytes(self.num_bytes)}): later changes are not in the job."
        )
        if self.left_out:
            said += (
                f" Not copied: {', '.join(self.left_out)}, more than {MOST_FILES:,} files or {format_bytes(MOST_BYTES)}"
                ": of that, the job sees what is there when it runs."
            )
        return said


def copy_code(
    target: Path, *, file: Path | None = None, modules: Sequence[str] = (), path: Sequence[str] | None = None
) -> CodeCopy:
    """Copy `file`, `modules` and whatever of the user's they import into the folder `target`, which is emptied before.

    `path` is where Python looks for modules (default: sys.path).
    """
    if target.is_dir():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    beside = [str(file.resolve().parent)] if file is not None else []
    copier = _Copier(target.resolve(), [*beside, *(sys.path if path is None else path)])
    if file is not None:
        copier.add_file(file.resolve())
    copier.add_modules(modules)
    return copier.finish(file)


def code_path(target: Path) -> list[str]:
    """Return what comes first on Python's path where the copy is used: its folders, then those it was made from."""
    roots = _manifest(target)["roots"]
    return [*(str(target / name) for name in roots), *roots.values()]


def copied_file(target: Path) -> tuple[str, Path] | None:
    """Return the path of the file that the copy began with, and where its copy is; None where it began with modules."""
    file = _manifest(target)["file"]
    return (file, target / Path(file).name) if file else None


def use_code(target: Path) -> None:
    """Let this process import from the copy; whatever it has imported stays."""
    if (target / MANIFEST).is_file():
        first = code_path(target)
        sys.path[:] = [*first, *(entry for entry in sys.path if entry not in first)]
        sys.meta_path.insert(0, _CopyFirst([str(target / name) for name in _manifest(target)["roots"]]))


class _CopyFirst(MetaPathFinder):
    """Finds what is in the copy before anything else, also where the job puts a folder in front of Python's path."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = roots

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a module or package of the copy; of a package without __init__, other folders may have parts."""
        spec = None if path is not None else PathFinder.find_spec(fullname, self._roots)
        return spec if spec is not None and spec.loader is not None else None


def _manifest(target: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((target / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{target} is no copy of code: {error}.") from None
    return found


class _Copier:
    """Copies modules into a folder."""

    def __init__(self, target: Path, path: Sequence[str]) -> None:
        self._target = target
        self._path = [str(Path(entry or ".").resolve()) for entry in path]
        self._roots: dict[Path, str] = {}
        self._seen: set[str] = set()
        self._todo: list[str] = []
        self._files = self._bytes = 0
        self._left_out: list[str] = []

    def add_file(self, file: Path) -> None:
        """Copy a file that is run, and note what it imports."""
        self._copy([file], file.parent)
        self._todo += imported(file)

    def add_modules(self, names: Sequence[str]) -> None:
        """Copy modules by their names, and all that those which were noted import."""
        self._todo += [name.partition(".")[0] for name in names]
        while self._todo:
            name = self._todo.pop()
            if name not in self._seen and name not in (OURS, "__main__", *sys.builtin_module_names):
                self._seen.add(name)
                self._add(name)

    def _add(self, name: str) -> None:
        spec = PathFinder.find_spec(name, self._path)
        for place in places(spec):
            if not is_installed(place):
                found = files_of(place, self._target) if place.is_dir() else [place]
                files = list(itertools.islice(found, MOST_FILES + 1))  # more are too many
                if self._copy(files, place.parent):
                    for file in files:
                        self._todo += imported(file)
                elif name not in self._left_out:
                    self._left_out.append(name)

    def finish(self, file: Path | None) -> CodeCopy:
        """Copy or link what the modules may read, and write down what was copied."""
        for root in list(self._roots):
            self._add_beside(root)
        roots = {name: str(root) for root, name in self._roots.items()}
        said = {"file": str(file.resolve()) if file else "", "roots": roots}
        write_whole(self._target / MANIFEST, json.dumps(said, indent=1))
        return CodeCopy(self._files, self._bytes, tuple(self._left_out))

    def _add_beside(self, root: Path) -> None:
        """Copy or link what modules of `root` may read there; say what was linked for want of room, or left out."""
        found, is_all = _first(data_beside(root, self._target), 2 * MOST_FILES)
        linked = 0
        for path in sorted(found):
            with contextlib.suppress(FileNotFoundError):  # removed since
                is_linked = is_large(path)
                has_room = is_linked or self._has_room(1, path.stat().st_size)
                linked += not has_room
                self._put(path, root, is_linked=is_linked or not has_room)
        if linked:
            self._left_out.append(f"{linked:,} of the files in {root}")
        if not is_all:
            self._left_out.append(f"what else is in {root}")

    def _copy(self, files: Sequence[Path], root: Path) -> bool:
        """Copy files and link what is large, unless that is too much."""
        copied = [path for path in files if not is_large(path)]
        if not self._has_room(len(files), sum(path.stat().st_size for path in copied)):
            return False
        self._roots.setdefault(root, f"_{len(self._roots)}" if self._roots else ".")
        for path in files:
            self._put(path, root, is_linked=is_large(path))
        return True

    def _has_room(self, files: int, num_bytes: int) -> bool:
        return self._files + files <= MOST_FILES and self._bytes + num_bytes <= MOST_BYTES

    def _put(self, path: Path, root: Path, *, is_linked: bool) -> None:
        """Copy or link one file; what cannot be read, as a pipe, is linked."""
        to = self._target / self._roots[root] / path.relative_to(root)
        to.parent.mkdir(parents=True, exist_ok=True)
        if to.exists() or to.is_symlink():
            return
        if not is_linked:
            try:
                shutil.copy(path, to)
                self._files, self._bytes = self._files + 1, self._bytes + to.stat().st_size
                return
            except (shutil.SpecialFileError, PermissionError):
                to.unlink(missing_ok=True)
        to.symlink_to(path)


def _first(paths: Iterator[Path], most: int) -> tuple[list[Path], bool]:
    """Return the first of `paths`, and whether that is all of them; not so in a folder that may not be listed."""
    found: list[Path] = []
    try:
        for path in paths:
            if len(found) == most:
                return found, False
            found.append(path)
    except PermissionError:
        return found, False
    return found, True


def main() -> None:
    """Run shoal with the code of a run: `python -m shoal.launch.slurm.code CODE worker RUN`."""
    use_code(Path(sys.argv.pop(1)))
    runpy.run_module(OURS, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
