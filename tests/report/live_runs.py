"""Run folders that grow under the eyes of a live view, written by the same classes that real runs write theirs with."""

from contextlib import closing
from pathlib import Path
from typing import Any

from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.spec.plan import Mesh, Plan, Predicted
from shoal.spec.record import JobRecord, RunRecord

START_S = 1_700_000_000.0
STEP_S = 0.1


class Growing:
    """A run of which each worker writes when it is told to; a step takes 0.1 s, and its batch weighs 40 a worker."""

    def __init__(self, runs: Path, *, workers: int = 2, steps: int = 100, name: str = "gpt-1") -> None:
        self.folder = RunFolder.create(runs, name, "run")
        self.workers = workers
        record = RunRecord(name=name, started="2025-01-31 12:00:00", command="shoal train t.py", host="a", versions={})
        write_toml(self.folder.run_toml, record)
        job = JobRecord(file="t.py", num_samples=800, batch_size=4 * workers, steps=steps, seed=7, unit="tokens")
        write_toml(self.folder.job_toml, job)
        predicted = Predicted(step_s=0.09, comm_s=0.01, samples_per_s=1.0, peak_bytes=(50_000_000,) * workers)
        write_toml(self.folder.plan_toml, Plan(mesh=Mesh(replicate=workers), predicted=predicted))
        for rank in range(workers):
            self.folder.events_of(rank).touch()

    def write(self, rank: int, kind: str, at_step: float = 0, **fields: Any) -> None:
        """Have worker `rank` write an event at the time of a step."""
        with closing(EventLog(self.folder.events_of(rank))) as log:
            log.write(kind, **{"time": START_S + STEP_S * at_step, **fields})

    def start(self) -> None:
        """Have all workers start, four on a host."""
        for rank in range(self.workers):
            self.write(rank, "start", pid=1, host=f"node-{rank // 4}")

    def step(self, rank: int, number: int, **fields: Any) -> None:
        """Have a worker write a step."""
        self.write(rank, "step", number, **(self._step_fields(rank, number) | fields))

    def _step_fields(self, rank: int, number: int) -> dict[str, Any]:
        """Return a step: worker 0 computes 80 of its 100 ms, the others 60, and wait longer."""
        busy_s = 0.08 if rank == 0 else 0.06
        parts = {"data_s": 0.01, "forward_s": busy_s / 2, "backward_s": busy_s / 2, "comm_s": 0.09 - busy_s}
        parts |= {"bubble_s": 0.0, "optimizer_s": 0.0, "checkpoint_s": 0.0}
        numbers = {"step": number, "epoch": 0, "loss": 4 / number, "samples": 4, "weight": 40.0}
        numbers["batch_weight"] = 40.0 * self.workers
        return numbers | {"step_s": STEP_S} | parts

    def steps(self, first: int, last: int, ranks: range | None = None) -> None:
        """Have all workers, or those in `ranks`, write the steps from `first` to `last`."""
        for rank in ranks or range(self.workers):
            with closing(EventLog(self.folder.events_of(rank))) as log:
                for number in range(first, last + 1):
                    log.write("step", **{"time": START_S + STEP_S * number, **self._step_fields(rank, number)})

    def put_aside(self, step: int) -> None:
        """Begin a new attempt after `step`, as a run that is gone on with does."""
        self.folder.begin_attempt(step=step, workers=self.workers)
