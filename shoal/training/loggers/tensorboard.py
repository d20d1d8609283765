"""TensorBoard: files in the run folder, through tensorboardX."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from shoal.core.run_folder import RunFolder
from shoal.training.loggers.logger import Kept


class TensorBoard:
    """Writes the scalars of a run to a folder that TensorBoard reads.

    One event a step: `SummaryWriter.add_scalar` writes one a number, and seven numbers cost 1.1 ms of Python then,
    a tenth of a short step, against 0.2 ms together (2.8 GHz Xeon, tensorboardX 2.6.5, 2026-11).
    """

    is_apart: ClassVar[bool] = False

    def __init__(self, folder: RunFolder) -> None:
        from tensorboardX import FileWriter  # 0.3 s to import; only worker 0 needs it
        from tensorboardX.proto.summary_pb2 import Summary

        self._summary = Summary
        # A name of its own: tensorboardX counts in seconds, and would write over what a moment ago has begun.
        self._writer = FileWriter(str(folder.tensorboard), flush_secs=10, filename_suffix=f".{time.time_ns()}")

    @staticmethod
    def check() -> None:
        """Raise nothing: tensorboardX is no extra."""

    def start(self, config: Mapping[str, Any], kept: Kept) -> None:
        """Write the `config` as text; have TensorBoard forget the steps after `kept.step`, which are done again."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import text

        if kept.step:
            begins = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=kept.step + 1, wall_time=time.time(), session_log=begins))
        for name, fields in config.items():
            # Four spaces make it a block of code, as TensorBoard reads Markdown.
            lines = json.dumps(fields, indent=2, default=str).splitlines()
            self._writer.add_summary(text(name, "\n".join(f"    {line}" for line in lines)), kept.step)

    def scalars(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Write the numbers of one step."""
        summary = self._summary(value=[self._summary.Value(tag=tag, simple_value=x) for tag, x in values.items()])
        self._writer.add_summary(summary, step, walltime=time_s)

    def flush(self) -> None:
        """Have all of it in the file."""
        self._writer.flush()

    def artifact(self, path: Path, name: str) -> None:
        """Do nothing: the files of the run lie beside its scalars already."""

    def close(self, status: str) -> None:  # noqa: ARG002  # TensorBoard does not ask
        """Flush and close the file."""
        self._writer.close()
