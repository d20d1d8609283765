"""The code of a map in jobs: a copy in the folder, one for each start whose code differs, so that no job sees edits."""

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.core.script import main_file
from shoal.launch.slurm.code import CodeCopy, copy_code
from shoal.tasks.folder import TaskFolder


def keep_code(
    folder: TaskFolder, function: Callable[..., Any], *, file: Path | None = None
) -> tuple[Path, CodeCopy | None]:
    """Return where the code of `function`, or of `file`, is kept, and what was copied, if it is not there already.

    Jobs of an earlier start have a copy of their own: what it was then.
    """
    versions = sorted(folder.code.glob("[0-9]*"), key=lambda path: int(path.name))
    hidden = folder.code / ".new"
    copied = _copy(hidden, function, file)
    if versions and _is_same(versions[-1], hidden):
        shutil.rmtree(hidden)
        return versions[-1], None
    target = folder.code / str(int(versions[-1].name) + 1 if versions else 1)
    hidden.rename(target)
    return target, copied


def _copy(target: Path, function: Callable[..., Any], file: Path | None) -> CodeCopy:
    if file is not None:
        return copy_code(target, file=file)
    module = getattr(function, "__module__", None) or "builtins"
    loaded = getattr(sys.modules.get(module), "__shoal_file__", "")
    script = main_file() if module == "__main__" else Path(loaded) if loaded else None
    if script is not None and script.is_file():
        return copy_code(target, file=script)
    return copy_code(target, modules=[module])


def _is_same(one: Path, other: Path) -> bool:
    return _contents(one) == _contents(other)


def _contents(root: Path) -> dict[str, bytes]:
    """Return what each file of a copy is: its content in short, or where its link leads."""
    found = {}
    for folder, folders, names in os.walk(root):
        for path in (Path(folder, name) for name in (*folders, *names)):
            if path.is_symlink():
                found[str(path.relative_to(root))] = str(path.readlink()).encode()
            elif path.is_file():
                found[str(path.relative_to(root))] = hashlib.sha256(path.read_bytes()).digest()
    return found
