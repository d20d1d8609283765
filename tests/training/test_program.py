"""Programs: workers with parts of their own, who call each other, as runs like any other."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.comm.rank import Rank
from shoal.comm.store import connect, host_store
from shoal.core.errors import ConfigError, JobError, PeerLost, PlanError
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.spec.plan import Mesh, Plan
from shoal.spec.program import Program
from shoal.training.jobfile import load_any, load_job
from shoal.training.prepare import Asked
from shoal.training.program import ProgramRun, prepare_program, run_program
from tests.support.hosts import hosts, why_not
from tests.support.ranks import RankPool
from tests.support.tensorboard_file import shown

EXAMPLE = Path(__file__).parents[2] / "examples" / "actor_learner.py"
needs_hosts = pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}")


def play(rank: Rank, *, runs: str, steps: int) -> list[float]:
    """Be a worker of the example, and return what was logged."""
    program = load_any(EXAMPLE).with_steps(steps)
    assert isinstance(program, Program)
    return of_run(rank, program, runs=runs, name=f"play-{rank.workers}")


def of_run(rank: Rank, program: Program, *, runs: str, name: str) -> list[float]:
    folder = RunFolder(Path(runs) / name)
    folder.events.mkdir(parents=True, exist_ok=True)
    log = EventLog(folder.events_of(rank.index))
    store = connect(rank, timeout_s=60) if rank.workers > 1 else None
    run_program(program, folder, rank=rank, store=store, log=log)
    log.close()
    events = [json.loads(line) for line in folder.events_of(rank.index).read_text().splitlines()]
    assert events[0]["kind"] == "start"
    assert events[-1]["kind"] == "end"
    return [event["values"]["mean_return"] for event in events if event["kind"] == "log"]


def test_the_return_rises_and_more_actors_play_the_same_games(ranks: RankPool, tmp_path: Path) -> None:
    (alone,) = ranks.run(play, workers=1, runs=str(tmp_path), steps=60)
    learner, *actors = ranks.run(play, workers=3, runs=str(tmp_path), steps=60)
    assert learner == alone
    assert actors == [[], []]
    assert sum(learner[:5]) / 5 < 0 < 0.6 < sum(learner[-5:]) / 5


def fail() -> None:
    raise LookupError("no such board")


def sleep() -> None:
    time.sleep(3)


def ask(run: ProgramRun) -> None:
    if run.rank == 0:
        with pytest.raises(LookupError, match="no such board"):
            run.call(1, fail)
        with pytest.raises(PeerLost, match=r"worker 1 has not answered sleep\(\) in time"):
            run.call(1, sleep)


def be_asked(rank: Rank, *, runs: str) -> list[float]:
    return of_run(rank, Program(main=ask, call_timeout_s=0.5), runs=runs, name="ask")


def test_what_a_call_raises_comes_back_and_a_late_worker_is_named(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(be_asked, workers=2, runs=str(tmp_path)) == [[], []]


def shoal(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "shoal", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_the_example_starts_like_any_job_and_leaves_a_run_folder(tmp_path: Path) -> None:
    done = shoal(tmp_path, "train", str(EXAMPLE), "--workers", "3", "--steps", "12", "--json")
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    assert summary["status"] == "done"
    assert summary["steps"] == summary["planned_steps"] == 12
    assert summary["workers"] == 3
    assert summary["missing"] == []
    folder = RunFolder.open(Path(tmp_path / "runs" / "actor_learner-1"))
    assert folder.report_html.exists()
    assert "mean_return" in folder.events_of(0).read_text()
    shows, texts = shown(folder.tensorboard)
    assert [step for step, _ in shows["mean_return"]] == list(range(1, 13))
    for name in ("loss", "games_per_s", "seconds/comm", "seconds/forward"):
        assert shows[name][-1][0] == 12
    assert set(texts) == {"job/text_summary", "plan/text_summary", "run/text_summary"}


@needs_hosts
def test_workers_on_several_hosts_call_each_other(tmp_path: Path) -> None:
    """Started as torchrun would, a worker a host, whose name stands for loopback, as it does on many."""
    command = ["sh", "-c", 'hostname localhost && exec "$@"', "sh", sys.executable, "-m", "shoal"]
    command += ["train", str(EXAMPLE), "--steps", "3", "--name", "two"]
    with hosts(count=2, rate="1gbit") as cluster:
        store, port = host_store(host=cluster.machine, timeout_s=60)
        of_all = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": cluster.machine}
        of_all |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        workers = [
            cluster.start(
                index,
                command,
                cwd=tmp_path,
                env={**os.environ, **of_all, "RANK": str(index)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for index in range(2)
        ]
        said = [worker.communicate(timeout=120)[0] for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0], "\n".join(said)
        del store
    assert "Trained 3 steps on 2 workers" in said[0]


KILLED = """
import os, signal
import shoal

def vanish():
    os.kill(os.getpid(), signal.SIGKILL)

def main(run):
    if run.rank == 0:
        run.call(2, vanish)

job = shoal.Program(main=main)
"""


def test_a_killed_worker_is_named_and_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    done = shoal(tmp_path, "train", "killed.py", "--workers", "3")
    assert done.returncode == 1
    assert "worker 2" in done.stderr
    assert "SIGKILL" in done.stderr


def test_verbs_that_need_a_model_refuse_a_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import shoal\njob = shoal.Program(main=print)\n")
    with pytest.raises(JobError, match=r"is a shoal\.Program, which has no model .* shoal train program\.py"):
        load_job(tmp_path / "program.py")
    sharded = Plan(mesh=Mesh(shard=2), zero=3)
    for plan, trace in ((sharded, ""), (Plan(), "1:2")):
        with pytest.raises(PlanError, match="only --workers"):
            prepare_program(Program(main=print), plan, Asked(file=None, runs=tmp_path, trace=trace))


@pytest.mark.parametrize("wrong", [{"main": 3}, {"steps": 0}, {"call_timeout_s": 0}, {"threads": 0}, {"seed": "a"}])
def test_a_program_that_makes_no_sense_cannot_be_built(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"Program.{next(iter(wrong))}"):
        Program(**{"main": print, **wrong})
