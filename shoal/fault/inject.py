"""Faults on purpose: the script of every fault test.

    faults = [fail_at(worker=1, step=3), slow(worker=0, step=5, seconds=2.0)]
    subprocess.run([..., "shoal", "train", ...], env={**os.environ, **environment(faults, folder=tmp_path)})

1. A fault names a worker, a step and a point. It strikes when that worker passes that point in that step, or in the
   first later one (not every step has a checkpoint), once; `slow` for as many steps as it says.
2. The places that are such points call `at`; without faults that is one comparison with None.
3. Faults reach a process by the variable SHOAL_FAULTS (JSON), read by `begin`, or by `begin` itself.
4. With a folder, a fault strikes once among all processes of the test, also if a worker is started anew: whoever is
   the first to make the file `struck-N` there. It holds who was struck, and when.

Example: `fail_at(1, 3, point="all-reduce")` kills worker 1 in step 3, when the sums of most gradients are under way.
"""

import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.core.errors import ConfigError, did_you_mean
from shoal.fault.inject_kinds import KINDS

VARIABLE = "SHOAL_FAULTS"
POINTS = (
    "start",
    "step begins",
    "backward",
    "all-reduce",
    "checkpoint: copying",
    "checkpoint: writing",
    "checkpoint: copying out",
    "checkpoint: committing",
    "recovery",
)
"""Where a fault can strike. "backward" begins, "all-reduce" is late in it, with the gradients on their way."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, before it has struck."""

    kind: str
    """kill, stop, slow, cut, corrupt, fill_disk: what each does stands in inject_kinds.py."""
    worker: int
    step: int = 0
    """The first step in which it can strike; 0: also before the first."""
    point: str = "step begins"
    seconds: float | None = None
    """slow: how long, each time. stop: after how long the worker is continued; None: never."""
    steps: int = 1
    """slow: how many times."""
    path: str = ""
    """corrupt, fill_disk: which file or folder; without it, the one that is being written."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"there is no fault {self.kind!r}.{did_you_mean(self.kind, list(KINDS))}")
        if self.point not in POINTS:
            raise ConfigError(f"no fault can strike at {self.point!r}.{did_you_mean(self.point, list(POINTS))}")
        if self.worker < 0 or self.step < 0 or self.steps < 1 or (self.seconds is not None and not self.seconds >= 0):
            raise ConfigError(f"{self}: worker, step and seconds are 0 or more, steps 1 or more.")
        if self.kind == "slow" and self.seconds is None:
            raise ConfigError(f"{self}: slow needs seconds.")


def fail_at(worker: int, step: int, *, point: str = "step begins") -> Fault:
    """Return a SIGKILL of `worker`."""
    return Fault(kind="kill", worker=worker, step=step, point=point)


def stop_at(worker: int, step: int, *, seconds: float | None = None, point: str = "step begins") -> Fault:
    """Return a SIGSTOP of `worker`, continued after `seconds`, or never."""
    return Fault(kind="stop", worker=worker, step=step, seconds=seconds, point=point)


def slow(worker: int, step: int, *, seconds: float, steps: int = 1, point: str = "step begins") -> Fault:
    """Return a worker that takes `seconds` longer in each of `steps` steps."""
    return Fault(kind="slow", worker=worker, step=step, seconds=seconds, steps=steps, point=point)


def cut(worker: int, step: int, *, point: str = "step begins") -> Fault:
    """Return a worker whose connections are closed, to the others and to the store."""
    return Fault(kind="cut", worker=worker, step=step, point=point)


def corrupt(worker: int, step: int, *, path: str = "", point: str = "checkpoint: committing") -> Fault:
    """Return a byte that flips in the file `path`, or in the largest file of that folder."""
    return Fault(kind="corrupt", worker=worker, step=step, path=path, point=point)


def fill_disk(worker: int, step: int, *, point: str = "checkpoint: writing") -> Fault:
    """Return a disk that is full when `worker` comes to write."""
    return Fault(kind="fill_disk", worker=worker, step=step, point=point)


def environment(faults: Sequence[Fault], *, folder: Path | None = None) -> dict[str, str]:
    """Return the variables that bring `faults` to the processes of a test."""
    script = {"faults": [asdict(fault) for fault in faults], "folder": str(folder.resolve()) if folder else ""}
    return {VARIABLE: json.dumps(script)}


def begin(worker: int, faults: Sequence[Fault] | None = None, *, folder: Path | None = None) -> None:
    """Let `faults` strike this process, which is `worker`; without them, those of SHOAL_FAULTS, if there are any."""
    global _script  # noqa: PLW0603 - points are passed in many rooms, and a process is one worker
    if faults is None:
        faults, folder = _read(os.environ.get(VARIABLE, ""))
    _script = _Script(worker, faults, folder) if faults else None


def end() -> None:
    """Let nothing strike any more."""
    global _script  # noqa: PLW0603
    _script = None


def at(point: str, step: int | None = None, path: Path | None = None) -> None:
    """Say that this worker passes `point`, in `step` if that is known, working on `path`. Faults strike here."""
    if _script is not None:
        _script.at(point, step, path)


def into(model: nn.Module, step: Callable[[], int]) -> None:
    """Make the backward pass of `model` pass its points, if a fault waits for it there; `step` tells the step."""
    if _script is None or not _script.waits_for("backward", "all-reduce"):
        return
    _at_gradient_of(model, "backward", step)
    # The gradient of what the first layer gave is the last but one to be computed.
    first = next((module for module in model.modules() if next(module.parameters(False), None) is not None), model)
    _at_gradient_of(first, "all-reduce", step)


def struck(folder: Path) -> list[dict[str, object]]:
    """Return what has struck so far, in the order of time: number, kind, worker, point, step, time."""
    notes = [json.loads(path.read_text()) for path in folder.glob("struck-*")]
    return sorted(notes, key=lambda note: note["time"])


class _Script:
    """The faults that wait for one worker."""

    def __init__(self, worker: int, faults: Sequence[Fault], folder: Path | None) -> None:
        self._worker, self._folder = worker, folder
        self._waiting = {number: fault for number, fault in enumerate(faults) if fault.worker == worker}
        self._hits: dict[int, set[int]] = {}
        self._step = 0

    def waits_for(self, *points: str) -> bool:
        """Return whether a fault waits at one of these."""
        return any(fault.point in points for fault in self._waiting.values())

    def at(self, point: str, step: int | None, path: Path | None) -> None:
        """Strike with whatever is due."""
        self._step = self._step if step is None else step
        due = [(n, f) for n, f in list(self._waiting.items()) if f.point == point and self._step >= f.step]
        for number, fault in due:
            if self._claim(number, fault):
                KINDS[fault.kind](fault.seconds, Path(fault.path) if fault.path else path)

    def _claim(self, number: int, fault: Fault) -> bool:
        """Return whether the fault strikes now; with its last hit it waits no more."""
        hits = self._hits.setdefault(number, set())
        if self._step in hits and fault.steps > 1:
            return False
        hits.add(self._step)
        if len(hits) >= fault.steps:
            del self._waiting[number]
        return len(hits) > 1 or self._note(number, fault)

    def _note(self, number: int, fault: Fault) -> bool:
        """Write down that the fault strikes; return whether it has not before, in another process."""
        if self._folder is None:
            return True
        note = {"number": number, **asdict(fault), "step": self._step, "pid": os.getpid(), "time": time.time()}
        draft = self._folder / f".struck-{number}-{os.getpid()}"
        draft.write_text(json.dumps(note))
        try:
            os.link(draft, self._folder / f"struck-{number}")  # whole, and only if there is none yet
        except FileExistsError:
            self._waiting.pop(number, None)
            return False
        finally:
            draft.unlink()
        return True


_script: _Script | None = None


def _read(text: str) -> tuple[list[Fault], Path | None]:
    """Return the faults of SHOAL_FAULTS, and the folder; a plain list of faults will do."""
    if not text:
        return [], None
    try:
        script = json.loads(text)
        script = {"faults": script} if isinstance(script, list) else script
        return [Fault(**fields) for fields in script["faults"]], Path(script["folder"]) if script.get(
            "folder"
        ) else None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{VARIABLE} cannot be read ({error}). Write it like "
            '[{"kind": "kill", "worker": 1, "step": 3}], or unset it.'
        ) from None


def _at_gradient_of(module: nn.Module, point: str, step: Callable[[], int]) -> None:
    """Pass `point` when the gradient of what `module` gives is there."""

    def hook(_module: nn.Module, _given: object, output: object) -> None:
        for leaf in itertools.islice((t for t in tree_leaves(output) if isinstance(t, Tensor)), 1):
            if leaf.requires_grad:
                leaf.register_hook(lambda _gradient: at(point, step()))  # type: ignore[no-untyped-call]

    module.register_forward_hook(hook)
