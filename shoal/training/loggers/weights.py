"""The final weights of a run, as a file for loggers, where that is cheap."""

from pathlib import Path

from shoal.core.run_folder import RunFolder

MOST_BYTES = 50_000_000
"""More is for `shoal export`, and for somebody who wants it: a second on a link of 400 Mbit/s."""


def cheap_weights(folder: RunFolder) -> list[Path]:
    """Return the files of the weights after the last step, exported now; none if there is no checkpoint of it.

    None either where they are larger than `MOST_BYTES`, or where the run did not come to its end.
    """
    checkpoints = sorted(folder.checkpoints.glob("step-*"))
    if folder.read_result()["status"] != "done" or not checkpoints:
        return []
    if sum(path.stat().st_size for path in checkpoints[-1].rglob("*") if path.is_file()) > 4 * MOST_BYTES:
        return []  # a checkpoint also has the optimizer's state: at most three times as much for those that there are
    from shoal.fault.checkpoint.weights import export  # imports torch

    export(folder.path, folder.export)
    found = sorted(path for path in folder.export.iterdir() if path.is_file())
    return found if sum(path.stat().st_size for path in found) <= MOST_BYTES else []
