"""A job whose samples are loaded by processes: the same training, and Python that runs beside itself."""

import ctypes
import os
import select
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.cli.main import build_parser, main
from shoal.cli.plan_flags import read_plan
from shoal.comm.rank import ALONE
from shoal.core.errors import ConfigError, PlanError
from shoal.core.events import EventReader
from shoal.core.run_folder import RunFolder
from shoal.data.steps import StepLoader
from shoal.report.summary import summarize
from shoal.spec.job import Job
from shoal.spec.plan import Loading, Mesh, Plan
from shoal.spec.sync import Sync
from shoal.training.loader import open_loader
from tests.support.files import job_file
from tests.support.training import Trace, bare_folder, train_part

NUM_SAMPLES, STEPS = 50, 12


class Computed:
    """Samples that are computed in Python."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        numbers = [(index * 31 + place * 7) % 101 / 101 for place in range(8)]
        return {"x": torch.tensor(numbers), "y": torch.tensor(sum(numbers))}


class Signed(Computed):
    """The same, with the process that has computed it."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "pid": os.getpid()}


def computed() -> Job:
    """A job that learns them, with a last batch that is not full, and an evaluation."""
    return Job(
        model=lambda: torch.nn.Linear(8, 1),
        inputs=lambda batch: batch["x"],
        loss=lambda output, batch: ((output[:, 0] - batch["y"]) ** 2).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        data=Computed(),
        eval_data=Computed(),
        eval_every_steps=6,
        batch_size=8,
        steps=STEPS,
    )


def alone(folder: Path, loading: Loading) -> tuple[Trace, Path]:
    plan = Plan(loading=loading)
    made = bare_folder(folder, plan)
    return train_part(ALONE, builder=f"{__name__}:computed", arguments={}, plan=plan, folder=made), made


def test_processes_train_the_same_model_as_threads(tmp_path: Path) -> None:
    threads, _ = alone(tmp_path / "threads", Loading(threads=2))
    for count in (1, 3):
        processes, folder = alone(tmp_path / f"processes-{count}", Loading(workers=count))
        assert processes.samples == threads.samples
        assert processes.losses == threads.losses
        assert all(torch.equal(a, b) for a, b in zip(processes.parameters, threads.parameters, strict=True))
        (data, *_) = [e for e in EventReader(RunFolder(folder).events_of(0)).poll() if e["kind"] == "data"]
        assert data["threads"] == count


def test_workers_whose_samples_come_from_processes_train_the_same(tmp_path: Path) -> None:
    body = "from tests.training.test_loader_workers import Computed\nfields |= dict(data=Computed(), steps=9)\n"
    body += "fields |= dict(model=lambda: nn.Linear(8, 1), inputs=lambda batch: batch['x'])\n"
    body += "fields['loss'] = lambda output, batch: ((output[:, 0] - batch['y']) ** 2).mean()\n"
    file, losses = job_file(tmp_path, body), []
    for name, flags in (("threads", []), ("processes", ["--loader-workers", "2"])):
        command = ["train", str(file), "--workers", "2", "--runs", str(tmp_path), "--name", name, *flags]
        assert main(command) == 0
        losses.append(summarize(RunFolder.open(tmp_path / name)).losses)
    assert len(losses[0]) == 9
    assert losses[0] == losses[1]


def test_parts_come_from_as_many_processes_as_asked_also_by_other_shares() -> None:
    loader = StepLoader(Signed(), batch_size=8, shares=(0.5, 0.5), index=1, last_step=STEPS, workers=2, timeout_s=60)
    pids, found = set[int](), []
    for part in loader:
        pids |= set(part.batch["pid"].tolist())
        found.append((part.step, part.samples, part.batch["x"].tolist()))
    assert len(pids) == 2
    assert os.getpid() not in pids
    loader.go_on(5, (0.75, 0.25))
    assert [len(part.samples) for part in loader] == [2, 2, 0, 2, 2, 2, 2, 2]  # step 7 has the last two of the epoch
    alone = StepLoader(Computed(), batch_size=8, shares=(0.5, 0.5), index=1, last_step=STEPS, timeout_s=60)
    assert found == [(part.step, part.samples, part.batch["x"].tolist()) for part in alone]


class Holding:
    """Samples that are loaded two at a time, while Python's lock is held: two threads would wait for each other."""

    def __init__(self) -> None:
        self._pipes = os.pipe(), os.pipe()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        mine, other = self._pipes[index % 2][0], self._pipes[(index + 1) % 2][1]
        os.write(other, b"x")
        wanted = (ctypes.c_int * 2)(mine, select.POLLIN)
        assert ctypes.PyDLL(None).poll(wanted, 1, 60_000) == 1, "the other one has not come"
        os.read(mine, 1)
        return index


def test_python_that_holds_its_lock_is_loaded_by_several_processes_at_once() -> None:
    loader = StepLoader(Holding(), batch_size=1, shares=(1.0,), index=0, last_step=8, shuffle=False, workers=2)
    assert [part.samples for part in loader] == [(index,) for index in range(8)]


class Endless:
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(8)


def test_what_processes_cannot_load_is_refused() -> None:
    with pytest.raises(PlanError, match=r"loading.workers=2 beside loading.threads=3: processes load, or threads do"):
        Loading(workers=2, threads=3)
    with pytest.raises(PlanError, match=r"loading.workers=-1: from 1 to 256 processes"):
        Loading(workers=-1)
    with pytest.raises(PlanError, match=r"loading.workers=2 with sync.asynchronous"):
        Plan(loading=Loading(workers=2), mesh=Mesh(replicate=2), sync=Sync(mode="server", asynchronous=True))
    job = replace(computed(), data=Endless(), eval_data=None)
    with pytest.raises(ConfigError, match=r"Job.data is a stream, of which one thread reads all"):
        open_loader(job, Plan(loading=Loading(workers=2)), index=0, first_step=1, device=torch.device("cpu"))


def test_the_flag_asks_for_processes_in_the_place_of_threads(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("[loading]\nthreads = 3\n")
    arguments = build_parser().parse_args(["train", "train.py", "--plan", str(plan), "--loader-workers", "2"])
    assert read_plan(arguments).loading == Loading(workers=2)
