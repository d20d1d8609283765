"""The last thing that is done for a run: what came of it is written down, which must not change what came of it."""

import shlex
import sys

from shoal.core.run_folder import RunFolder
from shoal.report.page.write import write_page


def conclude(run: RunFolder, status: str, message: str, *, goes_on: bool = False) -> None:
    """Write down how the run ended, and its page; none where it `goes_on`, for its job is requeued only after this.

    What cannot be written, be it that the disk is full, is said on stderr and not raised: whoever waits for the run's
    own error, or for its exit code, gets that.
    """
    try:
        run.write_result(status, message, goes_on=goes_on)
    except Exception as error:
        _say(f"that {run.path} is {status} could not be written down: {type(error).__name__}: {error}")
    if goes_on:
        return
    try:
        write_page(run)
    except Exception as error:
        again = shlex.join(["shoal", "report", str(run.path)])
        _say(f"there is no page of {run.path}: {type(error).__name__}: {error}. To try again: {again}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
