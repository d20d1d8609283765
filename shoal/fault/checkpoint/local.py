"""Checkpoints that are written to storage of the node first, and copied to the run folder from there.

    LOCAL/NAME-1a2b3c4d/step-00001200/    NAME is that of the run; the number that of its folder's path
      worker-N.safetensors, worker-N.json, common.json     as they will be in the run folder
      worker-N.part.json                                   worker N's part of the manifest: written last

1. The loop goes on, and memory is free for the next one, when the part is on the node's disk. The copy to the run
   folder follows; the commit there is as always (commit.py). What has been committed is removed from the node.
2. If a run ends between the two (killed, or the notice was over), its parts are still on the nodes. When it is gone on
   with, and the nodes at hand have all parts of a checkpoint newer than those in the run folder, they are copied then.
3. Parts carry the run's id, which is random, and lies in checkpoints/run-id. Those of another run that was under the
   same path, and was removed, do not count.

Example: nodes a and b, a worker each, killed while step 20 was copied; the run folder has step 10. Started anew, a says
that it has worker 0's part of step 20, and b worker 1's: both copy, worker 0 commits, and all go on after step 20.
"""

import contextlib
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import Store

from shoal.core.files import write_whole
from shoal.fault.checkpoint.commit import Commits
from shoal.fault.checkpoint.manifest import COMMON, committed, folder_of, step_of
from shoal.fault.checkpoint.part import Files, copy_part

_PART, _RUN_ID = ".part.json", "run-id"


def local_folder(setting: str, run: Path) -> Path | None:
    """Return where the run in the folder `run` keeps its checkpoints on this node; None without a `setting`.

    Variables in it ($TMPDIR) and ~ are those of this process: nodes need not have the same folder.
    """
    if not setting:
        return None
    number = zlib.crc32(str(run.resolve()).encode())
    return Path(os.path.expandvars(setting)).expanduser() / f"{run.name}-{number:08x}"


def note_part(path: Path, worker: int, piece: dict[str, Any], *, workers: int, attempt: str) -> None:
    """Say that the part of `worker` of `workers` in the node's folder `path` is whole."""
    said = {"workers": workers, "attempt": attempt, "piece": piece}
    write_whole(path / f"worker-{worker}{_PART}", json.dumps(said))


def drop_older(local: Path, worker: int, *, kept: set[int]) -> None:
    """Remove the parts of `worker` from the node, but those of the steps `kept`."""
    for path in _steps(local):
        if step_of(path) not in kept:
            for file in [*path.glob(f"worker-{worker}.*"), *([path / COMMON] if worker == 0 else [])]:
                file.unlink(missing_ok=True)
            remove_empty(path)


def drop_committed(local: Path, step: int) -> None:
    """Remove from the node all that is not needed when the checkpoint of `step` is in the run folder."""
    for path in _steps(local):
        if step_of(path) <= step:
            shutil.rmtree(path, ignore_errors=True)


def rescue(
    local: Path, checkpoints: Path, commits: Commits, *, index: int, store: Store | None, say: Callable[[str], None]
) -> str:
    """Bring the newest checkpoint that is whole on the nodes alone into the run folder. Called by every worker.

    Returns a word for this attempt at the run, the same on all workers: parts of different attempts do not match. It
    begins with the run's id.
    """
    attempt, choice = _agreed(local, checkpoints, commits, index=index, store=store, say=say)
    if choice is None:
        return attempt
    step, assigned = choice
    mine = [int(worker) for worker, holder in assigned.items() if holder == index]
    error, _ = commits.commit("local/copy", step, _copied(local, checkpoints, commits, step, mine))
    if error:
        say(f"A checkpoint of step {step} that is on the nodes was not taken: {error}")
    else:
        say(f"The checkpoint of step {step} was on the nodes alone, and was copied to {checkpoints}.")
        drop_committed(local, step)
    return attempt


def _agreed(
    local: Path, checkpoints: Path, commits: Commits, *, index: int, store: Store | None, say: Callable[[str], None]
) -> tuple[str, tuple[int, dict[str, int]] | None]:
    """Return the word for this attempt, and what is to be copied by whom, as worker 0 decides it."""
    held = _held(local)
    if store is not None:
        store.set(f"local/{index}", json.dumps(held))
    if index > 0:
        attempt, choice = json.loads(commits.wait_for(["local/choice"])[0])
        return attempt, choice
    keys = [f"local/{worker}" for worker in range(commits.workers)]
    everybody = [held] if store is None else [json.loads(value) for value in commits.wait_for(keys)]
    last = max((step_of(path) for path in committed(checkpoints)), default=-1)
    run_id = _run_id(checkpoints, say)
    decided = f"{run_id}/{uuid.uuid4().hex}", _choose(everybody, last, run_id)
    if store is not None:
        store.set("local/choice", json.dumps(decided))
    return decided


def _run_id(checkpoints: Path, say: Callable[[str], None]) -> str:
    """Return the id of the run with these `checkpoints`, made when it is first asked for."""
    path, made = checkpoints / _RUN_ID, uuid.uuid4().hex
    try:
        with contextlib.suppress(FileNotFoundError):
            return path.read_text().strip()
        checkpoints.mkdir(exist_ok=True)
        write_whole(path, made)
    except OSError as error:
        say(
            f"{path} cannot be read or written ({error.strerror or error}): a checkpoint that is on the nodes alone "
            "will not be found when the run is gone on with."
        )
    return made


def _copied(local: Path, checkpoints: Path, commits: Commits, step: int, workers: list[int]) -> dict[str, Any]:
    """Copy the parts of `workers`, and return what to say of it."""
    source, pieces = folder_of(local, step), []
    try:
        for worker in workers:
            piece = json.loads((source / f"worker-{worker}{_PART}").read_text())["piece"]
            files: Files = piece["files"]
            copy_part(source, folder_of(checkpoints, step), files, tick=lambda: None)
            pieces.append(piece)
    except Exception as error:
        return {"error": commits.sentence(step, error, 0)}
    return {"pieces": pieces}


def _held(local: Path) -> dict[str, dict[str, tuple[int, str]]]:
    """Return whose whole parts this node has, by step: with how many the checkpoint has, and the attempt's word."""
    held: dict[str, dict[str, tuple[int, str]]] = {}
    for path in _steps(local):
        for file in path.glob(f"worker-*{_PART}"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                said = json.loads(file.read_text())
                worker = file.name.removeprefix("worker-").removesuffix(_PART)
                held.setdefault(str(step_of(path)), {})[worker] = int(said["workers"]), str(said["attempt"])
    return held


def _choose(
    everybody: Sequence[Mapping[str, Mapping[str, Sequence[Any]]]], last: int, run_id: str
) -> tuple[int, dict[str, int]] | None:
    """Return the newest step after `last` of which all parts of one attempt are held, and who is to copy each.

    Only attempts at the run `run_id` count.
    """
    holders: dict[tuple[int, str], dict[str, int]] = {}
    wanted: dict[tuple[int, str], int] = {}
    for index, held in enumerate(everybody):
        for step, parts in held.items():
            for worker, (workers, attempt) in parts.items():
                if not attempt.startswith(f"{run_id}/"):
                    continue
                wanted[int(step), attempt] = workers
                holders.setdefault((int(step), attempt), {}).setdefault(worker, index)
    whole = [key for key, found in holders.items() if key[0] > last and len(found) == wanted[key]]
    return (max(whole)[0], holders[max(whole)]) if whole else None


def _steps(local: Path) -> list[Path]:
    return sorted(path for path in local.glob("step-*") if path.is_dir())


def remove_empty(path: Path) -> None:
    """Remove a folder if nothing is in it."""
    with contextlib.suppress(OSError):  # something is left in it
        path.rmdir()
