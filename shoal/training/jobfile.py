"""Reading the Job out of a user's file, without running the file's main."""

import sys
import traceback
from pathlib import Path
from types import ModuleType

from shoal.core.errors import JobError, ShoalError
from shoal.spec.job import Job
from shoal.spec.program import Program


def load_job(path: Path, *, source: Path | None = None, variable: str = "job") -> Job:
    """Return the Job that the file `path` holds in `variable`.

    With `source`, the code is read from there (a run's own copy) but believes to be `path`: its `__file__`, its
    tracebacks and the modules beside it are those of the original.
    """
    job = load_any(path, source=source, variable=variable)
    if isinstance(job, Program):
        raise JobError(
            f"{variable!r} in {path.name} is a shoal.Program, which has no model that can be looked at. It can be run: "
            f"shoal train {path.name} --workers N. All else needs a shoal.Job."
        )
    return job


def load_any(path: Path, *, source: Path | None = None, variable: str = "job") -> Job | Program:
    """Return the Job or the Program that the file `path` holds in `variable`; `source` as for `load_job`."""
    module = _execute(path, source or path)
    job = vars(module).get(variable)
    if isinstance(job, (Job, Program)):
        return job
    others = [name for name, value in vars(module).items() if isinstance(value, (Job, Program))]
    if variable in vars(module):
        raise JobError(f"{variable!r} in {path.name} is a {type(job).__name__}, not a shoal.Job.")
    hint = f" It has {others[0]!r}: rename that." if others else f" Write: {variable} = shoal.Job(...)."
    raise JobError(f"{path.name} has no {variable!r}.{hint}")


def _execute(path: Path, source: Path) -> ModuleType:
    try:
        code = compile(source.read_bytes(), str(path), "exec")
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}.") from None
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise JobError(f"{path.name}{line} is not Python: {error}.") from None
    name = f"shoal_job_{path.stem}"  # not __main__: the file's main must not run
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # where dataclasses and pickle look a class's module up
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        exec(code, vars(module))  # noqa: S102  the user asked for exactly this file
    except ShoalError:
        raise
    except Exception as error:
        raise JobError(f"{_place(path, error)} raises {type(error).__name__}: {error}.") from error
    return module


def _place(path: Path, error: Exception) -> str:
    """Return "train.py:12" for the last line of the job file itself that led to `error`."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path.name}:{lines[-1]}" if lines else path.name
