"""The event log of one worker: a file of JSON lines, each written whole.

The kinds of line, by their `kind`:

    start       pid, host                             the worker is up
    staging     field, source, path, is_staged, why   where a pack of the job is read; a node's first worker only
    step        step, epoch, loss, part_loss, samples, weight, batch_weight, step_s and its parts (`STEP_PARTS`);
                with another sync.mode than all-reduce also took_part, met_weight, staleness, part
    eval        step, metrics                         worker 0 only
    shares      step, samples, shares, ...            each replica's part of a global batch from this step on; worker 0
    meeting     step, weight, bytes, seconds          local steps: workers have met, and trained on so much since
    caught_up   step, missed, bytes, seconds          deadline: a late worker has got the state of another
    log         step, values                          what the user logged
    comm        step, steps, calls                    the collectives since the last such line; see below
    data        step, steps, samples, bytes, wait_s,  what was loaded since the last such line; see below
                fill_s, fill_cpu_s, threads, depth, storage, peak_bytes
    memory      step, at_s, bytes, labels             what was held at moments of a traced step
    trace       step, file, why                       a trace was written: "asked", or "outlier: 3.1x the median"
    checkpoint  step, stall_s, write_s, bytes         one was written (by way of the node: local_s), or not: error
    snapshot    step, bytes, ...                      kept in memory for when a worker is lost; what it costs
    hang        sentence, blamed, still_s             why nothing goes on, as one worker says it for all
    loss        dead, generation, workers, step, detected_s, agreed_s, rebuilt_s, recovery_s, lost_steps;
                ended: those of the dead that were ended as asked (`shoal scale`)
    joined      joined, and else as for a loss        both: once the next step is done; one of the survivors
    error       type, message, traceback              the worker's last words
    end         step, peak_bytes, state_bytes         the worker finished; it holds so many parameters, gradients, ...

Each line also has `time` (seconds since 1970). `loss` is the mean over the global batch, the same on every worker;
`part_loss` the mean over this worker's part, which weighs `weight` of the batch's `batch_weight`. A loss that is not
finite is written as null.

Where workers may be apart (sync.mode), `loss` is the mean over the samples of those that `took_part`, which weigh
`met_weight` together. The parameters had gone on by `staleness` steps since this worker computed its gradient with
them. `part` says which part of the global batch it was; -1: none, at a boundary.

A step's time is that since the step before was done: `checkpoint_s` is what saving (checkpoints, snapshots) after the
step before held it up. What is in none of the parts is shoal's own work and the user's, between two steps.

`comm` and `data` are about the `steps` steps up to `step`, every 100 steps (but every 2 seconds at most) or 10 seconds,
and at the end. Each of `calls` is {op, algorithm, link, bytes, count, seconds}: so many calls of so many bytes each,
which took so long in all, beside computing or not. The link is "shm", "host" (sockets within it), "network" or "gpu".
`wait_s` is how long training waited for data, `fill_s` how long the `threads` that load were busy, added up over them,
and `fill_cpu_s` how long they computed meanwhile; `depth` is how many batches they are ahead, and `storage` what is
read: "dataset", which is the user's own code, or the kind of file system that a pack lies on. `at_s` of `memory` counts
from where the step's time begins; `labels` name what was done up to that moment, and are "" between two such.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shoal.core.lines import LineReader

STEP_PARTS = ("data_s", "forward_s", "backward_s", "comm_s", "bubble_s", "optimizer_s", "checkpoint_s")
"""The parts of a step's time that have names."""
PASSES = ("forward_s", "backward_s")
"""Those that grow with the samples."""
LATER_PARTS = frozenset({"checkpoint_s"})
"""Those that older logs do not have: 0 where they are absent."""

_ENCODE = json.JSONEncoder(allow_nan=False).encode
_STEP = (
    '{"kind": "step", "time": %.4f, "step": %d, "epoch": %d, "loss": %s, "part_loss": %s, "samples": %d, '
    '"weight": %s, "batch_weight": %s, ' + ", ".join(f'"{name}": %.6f' for name in ("step_s", *STEP_PARTS)) + "%s}\n"
)
"""The event of a step. There is one for every step, so it must be cheap: json takes five times as long."""
_OF_ITSELF = frozenset({"start", "step", "error", "end"})
"""The kinds by which a worker says how far it is; others may come after them, or between."""
_LAST_BYTES = 1 << 16


class EventLog:
    """Appends events to a file; every event is one write, so a crash can cut only the last line."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event."""
        line = _ENCODE({"kind": kind, "time": round(time.time(), 4), **fields})
        os.write(self._file, line.encode() + b"\n")

    def write_step(
        self,
        step: int,
        *,
        epoch: int,
        loss: float | None,
        part_loss: float | None,
        samples: int,
        weight: float,
        batch_weight: float,
        seconds: Mapping[str, float],
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Append the event of a step: `seconds` are its parts."""
        numbers: Sequence[object] = (loss, part_loss, weight, batch_weight)
        if loss is None or part_loss is None or not isfinite(loss + part_loss + weight + batch_weight):
            numbers = [_or_null(number) for number in (loss, part_loss, weight, batch_weight)]
        line = _STEP % (
            time.time(),
            step,
            epoch,
            *numbers[:2],
            samples,
            *numbers[2:],
            sum(seconds.values()),
            *[seconds.get(name, 0.0) for name in STEP_PARTS],
            f", {_ENCODE(more)[1:-1]}" if more else "",
        )
        os.write(self._file, line.encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _or_null(value: float | None) -> float | str:
    return value if value is not None and isfinite(value) else "null"


class EventReader:
    """Reads a growing event log: each call of `poll` returns the events written since the last."""

    def __init__(self, path: Path) -> None:
        self._lines = LineReader(path)
        self.damaged_lines = 0

    def poll(self) -> list[dict[str, Any]]:
        """Return the new whole events; a line still being written is left for the next call."""
        return list(self._parse(self._lines.poll()))

    def skip(self, *, all_but_bytes: int = 0) -> bool:
        """Leave out what is there, but for the last `all_but_bytes`; return whether that leaves anything out."""
        return self._lines.skip(all_but_bytes=all_but_bytes)

    def _parse(self, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                self.damaged_lines += 1
                continue
            if isinstance(event, dict) and "kind" in event:
                yield event
            else:
                self.damaged_lines += 1


def last_events(path: Path) -> list[dict[str, Any]]:
    """Return the last events of the log at `path`: at least one in which the worker says how far it is.

    None is older than the worker's last start. Only the end of the file is read: a log of 100,000 steps takes a second
    to read, and whoever asks for the last words of all workers may have a minute before its job is ended.
    """
    num_bytes = _LAST_BYTES
    while True:
        reader = EventReader(path)
        is_cut = reader.skip(all_but_bytes=num_bytes)
        events = reader.poll()  # half a line at the beginning is no JSON, and passed over
        if not is_cut or any(event["kind"] in _OF_ITSELF for event in events):
            break
        num_bytes *= 8
    starts = [number for number, event in enumerate(events) if event["kind"] == "start"]
    return events[starts[-1] :] if starts else events
