"""The script that was started, where people call shoal from Python."""

import sys
from pathlib import Path
from types import TracebackType

from shoal.core.errors import ConfigError, Stopped


def main_file() -> Path | None:
    """Return the script that was started; None in an interactive session."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return Path(file) if file else None


def origin_of(value: object) -> tuple[Path, str]:
    """Return the script that was started and the name of its variable that holds `value`, a job."""
    names = [name for name, held in vars(sys.modules["__main__"]).items() if held is value]
    file = main_file()
    if file is None or not names:
        raise ConfigError(
            "several workers read the job from the script that was started: keep it in a variable at the top level of "
            "that script (job = shoal.Job(...)), or train with workers=1."
        )
    return file, names[0]


def ending_of(error: Exception) -> str:
    """Return how a run ended that ended with `error`: failed; or stopped, and then so does a script that called it."""
    if not isinstance(error, Stopped):
        return "failed"
    _end_in_order(error)
    return "stopped"


def _end_in_order(stopped: Stopped) -> None:
    """Let a script that does not catch `stopped` end with its exit code, and its sentence instead of a traceback."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is not stopped:
            before(kind, error, trace)
            return
        print(f"{kind.__name__}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(stopped.exit_code)

    sys.excepthook = hook
