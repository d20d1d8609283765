"""Functions that another process is to call: they go by reference, not as code.

A function of a module goes as the module's name and its own; one of the script that was started as the script's path
and its name. The worker imports the module, or runs the file as a module (so that what stands under
`if __name__ == "__main__":` is left out). Lambdas and functions inside functions have no such name: they go through
cloudpickle where that is installed.
"""

import importlib
import importlib.util
import os
import pickle
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from shoal.core.errors import ConfigError, JobError
from shoal.core.script import main_file
from shoal.launch.slurm.code import copied_file, use_code

IN_WORKER = "SHOAL_TASK_WORKER"
"""Set in the environment of workers, which must not start a map while they import the script."""
_COPIES: dict[str, Path] = {}
"""Files that are read from the copies that were made of them when a job was submitted."""
_CODE: list[Path] = []
"""The copies of code that this process uses."""


@dataclass(frozen=True)
class Reference:
    """Where a function is: in a module, in a file, or as cloudpickle wrote it."""

    module: str = ""
    file: str = ""
    name: str = ""
    is_main: bool = False
    pickled: bytes = b""

    def __str__(self) -> str:
        return f"{self.file or self.module}:{self.name}" if self.name else "a function without a name"


def refer(function: Callable[..., Any]) -> Reference:
    """Return how a worker finds `function`."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if isinstance(module, str) and name and _find(sys.modules.get(module), name) is function:
        if module != "__main__":
            file = getattr(sys.modules[module], "__shoal_file__", "")
            return Reference(file=file, name=name) if file else Reference(module=module, name=name)
        file = main_file()
        if file is not None and file.is_file():
            path = str(file.resolve())
            sys.modules[_module_name(path)] = sys.modules["__main__"]  # what workers send back names its classes so
            return Reference(file=path, name=name, is_main=True)
    return Reference(pickled=_pickled(function))


def _pickled(function: Callable[..., Any]) -> bytes:
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        name = getattr(function, "__qualname__", repr(function))
        raise ConfigError(
            f"workers cannot find {name}: it is a lambda, stands inside another function, or was typed into an "
            "interactive session. Write it with `def` at the top level of a file, or install cloudpickle."
        ) from None
    data: bytes = cloudpickle.dumps(function)
    return data


def load(reference: Reference) -> Callable[..., Any]:
    """Return the function; JobError where it is not there, or whatever its file raises."""
    if reference.pickled:
        function: Callable[..., Any] = pickle.loads(reference.pickled)  # noqa: S301  # from our own parent or folder
        return function
    module = load_file(reference.file, is_main=reference.is_main) if reference.file else None
    found = _find(module or importlib.import_module(reference.module), reference.name)
    if not callable(found):
        where = Path(reference.file).name if reference.file else reference.module
        raise JobError(f"{where} has no function {reference.name!r}.")
    return found  # type: ignore[no-any-return]


def load_file(path: str, *, is_main: bool = False) -> ModuleType:
    """Return the file as a module, run once in this process; as `__main__` too, for what was pickled by the script."""
    name = _module_name(path)
    if name not in sys.modules:
        source = _COPIES.get(path, Path(path))
        spec = importlib.util.spec_from_file_location(name, path, loader=_Loader(name, path, source))
        if spec is None or spec.loader is None or not source.is_file():
            raise ConfigError(f"there is no Python file {path}.")
        module = importlib.util.module_from_spec(spec)
        module.__dict__["__shoal_file__"] = path
        sys.modules[name] = module
        folder = str(Path(path).parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)  # as Python does with the script that it runs
        before = sys.modules["__main__"]
        if is_main:
            sys.modules["__main__"] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(name, None)
            sys.modules["__main__"] = before
            raise
    return sys.modules[name]


class _Loader(SourceFileLoader):
    """Loads a file that believes to be `path`, with the code of `source`."""

    def __init__(self, name: str, path: str, source: Path) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code; what Python keeps in its cache may be that of another day."""
        return compile(self._source.read_bytes(), self.get_filename(fullname), "exec", dont_inherit=True)


def use_copy(code: Path) -> None:
    """Let this process take its code from a copy that was made when the job was submitted."""
    use_code(code)
    _CODE.append(code)
    copied = copied_file(code)
    if copied is not None:
        _COPIES[copied[0]] = copied[1]


def used_copy() -> Path | None:
    """Return the copy of code that this process uses, if it does."""
    return _CODE[-1] if _CODE else None


def parse_function(text: str) -> tuple[Path, str]:
    """Return file and name of what `text` says: "prepare.py:resize"."""
    file, colon, name = text.rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise ConfigError(f"{text!r} names no function. Write it like prepare.py:resize.")
    if not Path(file).is_file():
        raise ConfigError(f"there is no file {file}.")
    return Path(file).resolve(), name


def refuse_inside_worker() -> None:
    """Raise if this is a worker that imports the script: the script would start workers without end."""
    if os.environ.get(IN_WORKER) == str(os.getpid()):
        raise ConfigError(
            "a worker imports the script that starts it, and the script starts workers again. Put what is to run once "
            'under: if __name__ == "__main__":'
        )


def _module_name(path: str) -> str:
    return f"__shoal_{Path(path).stem}_{zlib.crc32(path.encode()):08x}__"


def _find(module: ModuleType | None, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
