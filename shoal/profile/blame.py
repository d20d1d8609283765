"""Which line of the user's a failed trace stands on, and what to say about it."""

import traceback
from pathlib import Path
from typing import Any

import torch

from shoal.core.errors import PlanError
from shoal.profile.torch_private import DataDependentOutputException, DynamicOutputShapeException

_OURS = tuple(f"{folder.resolve()}/" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))


def untraceable(error: Exception, builder: Any) -> PlanError:
    """Return the error that names the user's line; where no line of theirs is on the stack, that of `builder`."""
    where = _line_of_user(error) or _line_of(builder)
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return PlanError(
            f"{where} needs the value of a tensor ({error.func}), and the model is traced without values. "
            "Write it with operations on whole tensors, such as torch.where instead of if, or plan this job by hand."
        )
    return PlanError(f"the job cannot be traced: {where} raises {type(error).__name__}: {_first_line(error)}")


def _line_of_user(error: Exception) -> str | None:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not str(Path(frame.filename).resolve()).startswith(_OURS) and not frame.filename.startswith("<frozen")
    ]
    # A library's line says what failed; the user's own says where to mend it.
    own = [frame for frame in frames if "site-packages" not in frame.filename and "/lib/python" not in frame.filename]
    last = (own or frames)[-1:]
    return f"{last[0].filename}:{last[0].lineno}" if last else None


def _line_of(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
