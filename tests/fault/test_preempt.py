"""Being asked to stop: by signals to any worker or to a launcher, and by the clock; with real processes."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import Stopped
from shoal.core.notice import SIGNALS
from shoal.fault import inject
from shoal.fault.preempt import Preemption, Reason
from shoal.launch.local import Watch, Worker, launch_local
from shoal.launch.starting import Spawning
from tests.fault import preempt_exercises
from tests.support.ranks import RankPool

PROGRAM = [sys.executable, "-m", "tests.fault.preempt_exercises"]
ROOT = Path(__file__).parents[2]


@contextmanager
def listening(**settings: Any) -> Iterator[Preemption]:
    preemption = Preemption(**{"notice_s": 60.0, **settings})
    try:
        yield preemption
    finally:
        preemption.close()


def reason_of(preemption: Preemption, timeout_s: float = 20) -> Reason | None:
    """Return why to stop after step 1, waiting for it."""
    deadline = time.monotonic() + timeout_s
    while (reason := preemption.requested(1)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return reason


# One worker, in this process.


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_asks_to_stop_after_this_step(number: signal.Signals) -> None:
    with listening() as preemption:
        assert preemption.requested(1) is None
        os.kill(os.getpid(), number)
        assert str(reason_of(preemption)) == f"{number.name} to worker 0"


def test_the_wall_clock_asks_to_stop_the_notice_before_the_end() -> None:
    with listening(notice_s=60.0, ends_at_s=time.time() + 59) as preemption:
        assert str(reason_of(preemption)) == "the wall-clock limit"
    with listening(notice_s=60.0, ends_at_s=time.time() + 3600) as preemption:
        assert preemption.requested(1) is None


def test_earlier_handlers_are_still_called_and_come_back() -> None:
    called: list[int] = []
    earlier = signal.signal(signal.SIGTERM, lambda number, _frame: called.append(number))
    ours = signal.getsignal(signal.SIGTERM)
    try:
        with listening() as preemption:
            os.kill(os.getpid(), signal.SIGTERM)
            assert reason_of(preemption) is not None
        assert called == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        signal.signal(signal.SIGTERM, earlier)


def test_a_handler_that_came_later_stays() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    later: Callable[..., None] = lambda _number, _frame: None  # noqa: E731
    try:
        with listening():
            signal.signal(signal.SIGUSR1, later)
        assert signal.getsignal(signal.SIGUSR1) is later
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_in_another_thread_nothing_is_installed() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    during: list[object] = []

    def listen() -> None:
        with listening():
            during.extend(signal.getsignal(number) for number in SIGNALS)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join(20)
    assert during == before


def test_signals_are_heard_beside_an_event_loop_that_has_the_descriptor() -> None:
    async def listen() -> Reason | None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, lambda: None)  # so it takes the descriptor
        with listening() as preemption:
            os.kill(os.getpid(), signal.SIGUSR2)
            return reason_of(preemption)

    assert str(asyncio.run(listen())) == "SIGUSR2 to worker 0"


def _sleep() -> None:
    time.sleep(60)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_that_is_ended_does_not_ask_its_parent_to_stop() -> None:
    with listening() as preemption:
        child = multiprocessing.get_context("fork").Process(target=_sleep)
        child.start()
        child.terminate()
        child.join(20)
        assert child.exitcode == -signal.SIGTERM
        assert reason_of(preemption, timeout_s=0.2) is None


def test_what_follows_is_the_checkpoint_and_stopped() -> None:
    saved: list[int] = []
    with listening() as preemption, pytest.raises(Stopped, match="stopped by SIGTERM to worker 0 after step 7") as end:
        preemption.stop(Reason("SIGTERM", 0, 30.0), 7, lambda: saved.append(7))
    assert saved == [7]
    assert end.value.exit_code == 75


def test_a_checkpoint_that_fails_is_told_with_what_is_left() -> None:
    def full() -> None:
        raise OSError("No space left on device.")

    with listening(last_saved=lambda: 5) as preemption, pytest.raises(Stopped) as end:
        preemption.stop(Reason("the wall-clock limit", 0, 30.0), 7, full)
    assert str(end.value) == (
        "stopped by the wall-clock limit after step 7, but its checkpoint could not be written: "
        "No space left on device. The last checkpoint is that of step 5."
    )
    assert end.value.exit_code == 75


# Several workers, in the pool: many rounds, so that requests come at many moments.


def test_all_workers_stop_after_the_same_step_whoever_is_asked(ranks: RankPool) -> None:
    requests = [[0], [1], [2], [0, 1], [2, 0, 1]] * 3
    ended = ranks.run(preempt_exercises.stop_many_times, workers=3, requests=requests, look_s=0.003)
    assert ended[0] == ended[1] == ended[2]
    for asked, (step, why) in zip(requests, ended[0], strict=True):
        assert why in [f"SIGUSR1 to worker {worker}" for worker in asked]
        assert step >= 3, "the step in which the first of them was asked, or a later one"


# Launched: the whole way.


def launched(
    *, workers: int, on_up: Callable[[int, int], None] = lambda rank, pid: None
) -> tuple[list[Worker], list[tuple[int, str]]]:
    """Run the program as `workers` workers; `on_up` is called once each has done its third step. Return their lines."""
    lines: list[tuple[int, str]] = []
    up: dict[int, int] = {}

    def on_line(rank: int, line: str) -> None:
        lines.append((rank, line))
        if line.startswith("up "):
            up[rank] = int(line.split()[1])
            if len(up) == workers:
                for each in sorted(up):
                    on_up(each, up[each])

    ended = launch_local(Spawning(PROGRAM), workers=workers, timeout_s=60, watch=Watch(on_line=on_line))
    return ended, lines


def saved_steps(lines: list[tuple[int, str]]) -> list[str]:
    return [line for _, line in lines if line.startswith("saved")]


@pytest.fixture
def _at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.usefixtures("_at_root")
def test_a_signal_to_one_worker_stops_all_with_75() -> None:
    ended, lines = launched(workers=3, on_up=lambda rank, pid: os.kill(pid, signal.SIGUSR1) if rank == 1 else None)
    assert [worker.exit_code for worker in ended] == [75, 75, 75]
    assert len(saved_steps(lines)) == 3
    assert len(set(saved_steps(lines))) == 1


@pytest.mark.usefixtures("_at_root")
def test_a_signal_to_the_launcher_is_passed_on() -> None:
    ended, lines = launched(
        workers=2, on_up=lambda rank, pid: os.kill(os.getpid(), signal.SIGTERM) if rank == 1 else None
    )
    assert [worker.exit_code for worker in ended] == [75, 75]
    assert not any(worker.is_ended_by_us for worker in ended)
    assert len(saved_steps(lines)) == 2
    assert len(set(saved_steps(lines))) == 1


@pytest.mark.usefixtures("_at_root")
def test_the_clock_that_runs_out_during_the_start_stops_all_at_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_NOTICE_S", "120")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 119))
    ended, lines = launched(workers=2)
    assert [worker.exit_code for worker in ended] == [75, 75]
    assert len(set(saved_steps(lines))) == 1
    assert any("stopped by the wall-clock limit after step" in line for _, line in lines)


@pytest.mark.usefixtures("_at_root")
def test_a_step_that_outlasts_the_notice_ends_with_75_and_says_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 1 does not come to the exchange of step 4; worker 0, deep in it, gets the signal."""
    monkeypatch.setenv("SHOAL_NOTICE_S", "4")
    for name, value in inject.environment([inject.slow(worker=1, step=4, seconds=120.0)]).items():
        monkeypatch.setenv(name, value)
    ended, lines = launched(workers=2, on_up=lambda rank, pid: os.kill(pid, signal.SIGTERM) if rank == 0 else None)
    assert [worker.exit_code for worker in ended] == [75, 75]
    assert saved_steps(lines) == []
    said = "stopped by SIGTERM to worker 0: the 4 s of notice ended in the step after step 3. "
    assert (0, f"worker 0: {said}The last checkpoint is that of step 2.") in lines


def test_a_second_signal_ends_at_once() -> None:
    """Again and again, as people do: those within a second are one."""
    fault = inject.environment([inject.slow(worker=0, step=4, seconds=120.0)])
    env = {**os.environ, **fault, "RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(PROGRAM, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("up"):
                break
        deadline = time.monotonic() + 30
        while process.poll() is None and time.monotonic() < deadline:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        said, _ = process.communicate(timeout=10)
    finally:
        process.kill()
        process.wait(10)
    assert process.returncode == 75
    assert "ended at once by a second signal (SIGTERM) in the step after step 3." in said


def test_under_torchrun_a_signal_to_the_agent_stops_the_workers_at_the_same_step() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = [*torchrun, "-m", "tests.fault.preempt_exercises"]
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    lines: list[str] = []
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.strip())
                if line.startswith("up") and sum(each.startswith("up") for each in lines) == 2:
                    process.send_signal(signal.SIGTERM)
            process.wait(60)
        finally:
            process.kill()
    saved = [line for line in lines if line.startswith("saved")]
    assert len(saved) == 2
    assert len(set(saved)) == 1
