"""The run folder: every path of a run, and nothing else. It is the only thing that launch, train and report share.

runs/NAME/
  run.toml            name, command, versions, host
  job.toml            where the job came from and its numbers
  plan.toml           how it was run, with what that was predicted to cost
  cluster.toml        what it was run on
  communication.toml  how the workers' gradients met, and what was measured to decide it
  code/               the job file as it was
  events/rank-N.jsonl one line a step and worker (see events.py)
  events/attempt-N/   those of the attempt number N, where the run was gone on with later
  checkpoints/        where it can be gone on from (see fault/checkpoint/manifest.py)
  traces/             rank-N-step-S.json: what worker N did in step S, moment by moment; opens in Perfetto
  tensorboard/        scalars from worker 0
  loggers/            NAME.json: which run of Weights & Biases or MLflow this one is, and how much of it is there
  wandb/              what Weights & Biases keeps of it
  export/             the final weights, where they are so small that loggers get them
  slurm/              the job on a cluster: its script, its output, and how often it was started
  parameters/         the final parameters, where `shoal verify` asked for them
  result.json         how it ended
  lock                held by whoever trains it, for as long as that is so (see run_lock.py)
  launcher.json       which process has started its workers and can start more, and how many there were at most
  workers.json        with how many workers it is asked to go on (see launch/wishes.py)
  report.html         the page about it
"""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError
from shoal.core.files import whole_folder, write_whole

_ABOUT_STEPS = ("step", "eval", "log", "checkpoint", "comm", "data", "memory", "trace", "shares")
"""The kinds that are about steps, and stay when a run is gone on with: up to the step that it goes on after."""
_FAULTS = ("hang", "loss", "joined", "caught_up")
"""Those about what went wrong, and was mended: they stay whatever the step was, for it has happened."""


class RunFolder:
    """The paths of one run; what each file holds stands above."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.run_toml = path / "run.toml"
        self.job_toml = path / "job.toml"
        self.plan_toml = path / "plan.toml"
        self.cluster_toml = path / "cluster.toml"
        self.communication_toml = path / "communication.toml"
        self.code = path / "code"
        self.events = path / "events"
        self.checkpoints = path / "checkpoints"
        self.traces = path / "traces"
        self.tensorboard = path / "tensorboard"
        self.loggers = path / "loggers"
        self.export = path / "export"
        self.slurm = path / "slurm"
        self.parameters = path / "parameters"
        self.result_json = path / "result.json"
        self.lock = path / "lock"
        self.launcher_json = path / "launcher.json"
        self.workers_json = path / "workers.json"
        self.report_html = path / "report.html"

    def events_of(self, rank: int) -> Path:
        """Return the event log of worker `rank`."""
        return self.events / f"rank-{rank}.jsonl"

    def trace_of(self, rank: int, step: int) -> Path:
        """Return the trace of worker `rank` in `step`."""
        return self.traces / f"rank-{rank}-step-{step}.json"

    @classmethod
    def create(cls, runs: Path, name: str | None, stem: str) -> "RunFolder":
        """Make the folder `runs/NAME`; without a name, the first of `stem-1`, `stem-2`, ... that is free."""
        if name is not None and (not name or Path(name).name != name):
            raise ConfigError(f"a run's name is one folder name, not {name!r}.")
        try:
            path = _make(runs / name) if name else _make_numbered(runs, stem)
            (path / "events").mkdir()
            (path / "code").mkdir()
        except FileExistsError:
            raise ConfigError(f"{runs / (name or stem)} exists already. Choose another --name, or remove it.") from None
        except OSError as error:
            raise ConfigError(f"no run folder can be made in {runs}: {error}.") from None
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Return the run at `path`, which must exist."""
        if not (path / "run.toml").is_file():
            raise ConfigError(f"{path} is not a run folder (it has no run.toml).")
        return cls(path)

    def begin_attempt(self, *, step: int, workers: int) -> None:
        """Make the folder of a run that has ended ready to be gone on with after `step`, by so many `workers`.

        The events so far are put aside; what they say of the steps up to `step` stands again at the beginning of the
        new ones. All of them are aside before the first is changed, and each is changed at once: whoever is killed in
        the middle has lost nothing, and the next call does the rest.
        """
        logs = sorted(self.events.glob("rank-*.jsonl"))
        with whole_folder(_free_numbered(self.events, "attempt")) as aside:
            for path in logs:
                _link(path, aside / path.name)
        kept_logs = {self.events_of(rank) for rank in range(workers)}
        for path in logs:
            lines = _kept_lines(path, step) if path in kept_logs else []
            if lines:
                write_whole(path, b"".join(lines))
            else:
                path.unlink()
        for path in (self.result_json, self.launcher_json, self.workers_json):
            path.unlink(missing_ok=True)

    def write_result(self, status: str, message: str = "", *, goes_on: bool = False) -> None:
        """Record how the run ended: done, failed or stopped; `goes_on` where its job will start it again."""
        result = {"status": status, "message": message} | ({"goes_on": True} if goes_on else {})
        write_whole(self.result_json, json.dumps(result) + "\n")

    def read_result(self) -> dict[str, Any]:
        """Return how the run ended; a run that was cut off, or still goes on, has status 'unfinished'."""
        try:
            result = json.loads(self.result_json.read_text())
        except (OSError, ValueError):
            return {"status": "unfinished", "message": ""}
        return result if isinstance(result, dict) else {"status": "unfinished", "message": ""}


def _make(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def _make_numbered(runs: Path, stem: str) -> Path:
    for number in range(1, 1_000_000):
        try:
            return _make(runs / f"{stem}-{number}")
        except FileExistsError:
            continue
    raise ConfigError(f"{runs} holds a million runs of {stem}; give this one a --name.")


def _free_numbered(folder: Path, stem: str) -> Path:
    """Return the first of `stem-1`, `stem-2`, ... that is free, where nobody else makes such."""
    return next(path for number in itertools.count(1) if not (path := folder / f"{stem}-{number}").exists())


def _link(path: Path, to: Path) -> None:
    """Give a file another name, which it keeps when another takes its place; a copy where no file has two names."""
    try:
        to.hardlink_to(path)
    except OSError:
        shutil.copy2(path, to)


def _kept_lines(path: Path, step: int) -> list[bytes]:
    """Return the lines about steps up to `step`, and about faults; not those about how the worker began and ended."""
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            event = json.loads(line)
            is_kept = event["kind"] in _FAULTS or (event["kind"] in _ABOUT_STEPS and event["step"] <= step)
            if is_kept and line[-1:] == b"\n":
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # a line that was cut off
    return kept
