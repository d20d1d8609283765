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
    checkpoint  step, stall_s, write_s, bytes         one was written (by way of the node: local_s), or not: error
    snapshot    step, bytes, ...                      kept in memory for when a worker is lost; what it costs
    hang        sentence, blamed, still_s             why nothing goes on, as one worker says it for all
    loss        dead, generation, workers, step, detected_s, agreed_s, rebuilt_s, recovery_s, lost_steps
    joined      joined, and else as for a loss        both: once the next step is done; one of the survivors
    error       type, message, traceback              the worker's last words
    end         step, peak_bytes, state_bytes         the worker finished; it holds so many parameters, gradients, ...

Each line also has `time` (seconds since 1970). `loss` is the mean over the global batch, the same on every worker;
`part_loss` the mean over this worker's part, which weighs `weight` of the batch's `batch_weight`. A loss that is not
finite is written as null.

Where workers may be apart (sync.mode), `loss` is the mean over the samples of those that `took_part`, which weigh
`met_weight` together. The parameters had gone on by `staleness` steps since this worker computed its gradient with
them. `part` says which part of the global batch it was; -1: none, at a boundary.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from shoal.core.lines import LineReader

STEP_PARTS = ("data_s", "forward_s", "backward_s", "comm_s", "bubble_s", "optimizer_s")


class EventLog:
    """Appends events to a file; every event is one write, so a crash can cut only the last line."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event."""
        line = json.dumps({"kind": kind, "time": round(time.time(), 4), **fields}, allow_nan=False)
        os.write(self._file, line.encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class EventReader:
    """Reads a growing event log: each call of `poll` returns the events written since the last."""

    def __init__(self, path: Path) -> None:
        self._lines = LineReader(path)
        self.damaged_lines = 0

    def poll(self) -> list[dict[str, Any]]:
        """Return the new whole events; a line still being written is left for the next call."""
        return list(self._parse(self._lines.poll()))

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
