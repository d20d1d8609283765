"""A loss that comes while a worker meets nobody: in the middle of an evaluation, or while samples are on their way."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.comm.rank import ALONE
from shoal.core.errors import PeerLost
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.data.loading.patience import Patience
from shoal.spec.job import Job
from shoal.spec.plan import Batch, Plan
from shoal.training.loader import PartLoader
from shoal.training.run import Run
from tests.support.jobs import linear


class Watch:
    """Finds somebody lost when it is asked for the third time."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.asked, self._then = 0, then

    def check(self) -> None:
        """Raise, the third time."""
        self.asked += 1
        if self.asked >= 3:
            self._then()
            raise PeerLost("worker 1 was killed by SIGKILL")


class Stuck(torch.utils.data.Dataset[Any]):
    """Samples that do not come until they are let go."""

    def __init__(self) -> None:
        self.is_let_go = threading.Event()

    def __len__(self) -> int:
        """Return how many there are said to be."""
        return 40

    def __getitem__(self, index: int) -> Any:
        """Return a sample, much later."""
        assert self.is_let_go.wait(60)
        return torch.zeros(5), torch.zeros(())


@contextmanager
def worker(job: Job, folder: Path, watch: Any) -> Iterator[Run]:
    """Be the worker of a run whose others are played by `watch`."""
    run_folder = RunFolder.create(folder, "run", stem="run")
    log = EventLog(run_folder.events_of(0))
    plan, device = Plan(batch=Batch(micro_batch=2)), torch.device("cpu")
    run = Run(job, plan, run_folder, rank=ALONE, store=None, device=device, log=log, watch=watch)
    try:
        yield run
    finally:
        run.close()
        log.close()


def test_an_evaluation_ends_between_two_micro_batches(tmp_path: Path) -> None:
    scored = []
    job = linear()

    def metric(output: torch.Tensor, _: Any) -> torch.Tensor:
        scored.append(len(output))
        return output.mean()

    evaluated = linear(eval_data=job.data, metrics={"mean": metric})
    with worker(evaluated, tmp_path, Watch()) as run:
        with pytest.raises(PeerLost, match="worker 1"):
            run.evaluate()
        assert scored == [2, 2], "of 25 micro-batches"
        assert run.model.training


@pytest.mark.parametrize("of_what", ["data", "eval_data"])
def test_samples_that_do_not_come_are_not_waited_for(of_what: str, tmp_path: Path) -> None:
    stuck = Stuck()
    fields: dict[str, Any] = {of_what: stuck}
    watch = Watch(stuck.is_let_go.set)  # what loads is given some seconds to end
    with worker(linear(**fields), tmp_path, watch) as run, pytest.raises(PeerLost, match="worker 1"):
        next(run.batches()) if of_what == "data" else run.evaluate()


def test_nor_is_a_part_that_a_worker_has_a_ticket_for() -> None:
    is_let_go = threading.Event()
    patience = Patience(60, check=Watch().check)
    loader: Any = SimpleNamespace(new_slot=lambda: None, load=lambda *_: is_let_go.wait(60), patience=patience)
    parts = PartLoader(lambda _: loader)
    with pytest.raises(PeerLost, match="worker 1"):
        parts.start(3, 1)()
    is_let_go.set()
    parts.close()
