"""`shoal scale`: runs that get more workers and fewer while they train, and what is refused."""

import contextlib
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.core.errors import PlanError
from shoal.core.events import EventReader
from shoal.core.run_folder import RunFolder
from shoal.core.run_lock import held
from shoal.core.toml import read_toml, write_toml
from shoal.launch.wishes import Wishes, ask
from shoal.report.summary import summarize
from shoal.spec.on_loss import OnLoss
from shoal.spec.plan import Batch, Mesh, Plan
from shoal.spec.record import JobRecord
from shoal.spec.sync import Sync
from shoal.training.scaled import check_scaled
from tests.support.elastic import JOB, TOLERANCE, Ended, assert_samples_once, undisturbed_run
from tests.support.runs import make_run
from tests.support.training import Trace
from tests.support.waiting import wait_until

SLOW = """
    # From step 40 on steps are slow, until all has been asked for that the test asks for.
    if CALLS.step > 40 and not os.path.exists("go"):
        time.sleep(0.2 if CALLS.step < 130 else 5.0)
"""
WAIT_S = 120


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"))


@dataclass
class Training:
    """A run that `shoal train` trains, in a process of its own."""

    folder: Path
    process: "subprocess.Popen[str]"
    said: list[str] = field(default_factory=list)

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.folder / "runs" / "x")

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return self.ended().of_kind(kind)

    def ended(self) -> Ended:
        logs = sorted(self.run.events.glob("rank-*.jsonl"))
        events = {int(path.stem.removeprefix("rank-")): EventReader(path).poll() for path in logs}
        return Ended(self.run, "", [], [], [], events)

    def step(self) -> int:
        return max((event["step"] for event in self.of_kind("step")), default=0)

    def wait(self, kind: str, count: int) -> dict[str, Any]:
        """Wait for so many events of a kind; return the last."""
        wait_until(lambda: self.process.poll() is not None or len(self.of_kind(kind)) >= count, seconds=WAIT_S)
        assert len(self.of_kind(kind)) >= count, self.output()
        return self.of_kind(kind)[count - 1]

    def wait_beyond(self, step: int) -> None:
        wait_until(lambda: self.process.poll() is not None or self.step() > step, seconds=WAIT_S)
        assert self.process.poll() is None, self.output()

    def scale(self, workers: int) -> None:
        assert main(["scale", str(self.run.path), "--workers", str(workers)]) == 0

    def go(self) -> str:
        """Let it train to its end; return what it said."""
        (self.folder / "go").touch()
        return self.output()

    def output(self) -> str:
        return "".join(filter(None, self.process.communicate(timeout=WAIT_S)))


@contextlib.contextmanager
def training(folder: Path, *flags: str) -> Iterator[Training]:
    """Train the job by `shoal train`, from its tenth step on."""
    (folder / "job.py").write_text(JOB.replace("    # From step 30 on", f"{SLOW}    # From step 30 on"))
    command = [sys.executable, "-m", "shoal", "train", "job.py", "--name", "x", *flags]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        run = Training(folder, process)
        run.wait_beyond(9)
        yield run
    finally:
        process.kill()
        process.communicate(timeout=30)


def check(run: Training, undisturbed: Trace) -> None:
    """Assert that the run was that of one process to which nothing happened."""
    ended = run.ended()
    losses = ended.losses()
    assert sorted(losses) == list(range(1, len(undisturbed.losses) + 1))
    for step, found in losses.items():
        for loss in found:
            assert loss == pytest.approx(undisturbed.losses[step - 1], rel=TOLERANCE), f"step {step}"
    assert_samples_once(ended, undisturbed, 1)
    assert [event["step"] for event in ended.of_kind("eval")] == [50, 100, 150]
    pids = {event["pid"] for event in ended.of_kind("start")}
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def assert_refused(run: Training) -> None:
    """What the plan cannot do is refused before anybody is asked."""
    assert main(["scale", str(run.run.path), "--workers", "13"]) == 2
    assert not run.run.workers_json.exists()


def test_workers_are_added_and_ended_while_the_run_trains_and_it_is_the_same_training(
    tmp_path: Path, undisturbed: Trace
) -> None:
    with training(tmp_path, "--workers", "2") as run:
        assert_refused(run)
        run.scale(3)
        joined = run.wait("joined", 1)
        assert (joined["joined"], joined["workers"]) == ([2], 3)
        run.scale(1)
        loss = run.wait("loss", 1)
        assert (loss["dead"], loss["ended"], loss["workers"]) == ([1, 2], [1, 2], 1)
        assert loss["lost_steps"] <= 1
        run.scale(2)
        joined = run.wait("joined", 2)
        assert (joined["joined"], joined["workers"]) == ([1], 2)
        said = run.go()
        assert run.process.returncode == 0, said
        check(run, undisturbed)
        assert len(run.of_kind("loss")) == 1
    for sentence in (
        "worker 2 is added: the run was asked for 3 workers (shoal scale).",
        "workers 1, 2 are ended: the run was asked for 1 worker (shoal scale).",
        "worker 1 is added: the run was asked for 2 workers (shoal scale).",
    ):
        assert sentence in " ".join(said.split()), said
    summary = summarize(run.run)
    assert (summary.status, summary.workers, summary.steps) == ("done", 3, 150)


def test_shards_are_dealt_anew_and_one_worker_alone_can_get_others(tmp_path: Path, undisturbed: Trace) -> None:
    with training(tmp_path, "--mesh", "shard=2", "--zero", "3") as run:
        run.scale(1)
        assert run.wait("loss", 1)["workers"] == 1
        run.scale(2)
        assert run.wait("joined", 1)["workers"] == 2
        run.scale(3)
        assert run.wait("joined", 2)["workers"] == 3
        said = run.go()
        assert run.process.returncode == 0, said
        check(run, undisturbed)


def test_of_several_wishes_the_last_counts_and_those_of_a_launcher_before_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.launch.wishes.LOOK_S", 0.0)
    run = make_run(tmp_path, status=None)
    ask(run, 7)
    wishes = Wishes(run, 2)
    assert wishes.look() is None
    ask(run, 4)
    ask(run, 3)
    assert [wishes.look(), wishes.look()] == [3, None]
    for nonsense in ("", "[]", "{}", '{"workers": 0}', '{"workers": "many"}'):
        run.workers_json.write_text(nonsense)
        assert wishes.look() is None
    assert not run.workers_json.exists()


JOB_OF_12 = JobRecord(file="job.py", num_samples=50, batch_size=12, steps=150, seed=0, unit="samples")


@pytest.mark.parametrize(
    ("plan", "workers", "sentence"),
    [
        (Plan(mesh=Mesh(replicate=2)), 13, r"13 workers for a global batch of 12 samples\. Use at most 12"),
        (Plan(mesh=Mesh(replicate=2, tensor=2)), 5, r"5 workers with tensor=2: each copy .* takes 2\. Use 4 or 6\."),
        (Plan(mesh=Mesh(pipeline=2, tensor=2)), 1, r"1 worker with pipeline=2 and tensor=2: .* takes 4\. Use 4\."),
        (Plan(mesh=Mesh(pipeline=2, replicate=2)), 10, r"parts of 2 to 3 samples: all replicas of a pipeline take"),
        (Plan(batch=Batch(shares=(0.95, 0.05)), mesh=Mesh(replicate=2)), 5, r"less than one sample"),
        (Plan(mesh=Mesh(replicate=2), on_loss=OnLoss(go_on=False)), 3, r"on_loss\.go_on=false .*--resume"),
        (Plan(mesh=Mesh(shard=2), zero=1, engine="deepspeed"), 3, r"engine='deepspeed': .*--resume"),
        (Plan(mesh=Mesh(replicate=2), sync=Sync(mode="server")), 3, r"sync\.mode='server': only .*--workers 3\."),
        (Plan(mesh=Mesh(shard=3), zero=3, on_loss=OnLoss(snapshot="never")), 2, r"on_loss\.snapshot='never'"),
    ],
)
def test_what_a_plan_cannot_go_on_with_is_refused(plan: Plan, workers: int, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        check_scaled(plan, workers, JOB_OF_12, most=plan.workers)


@pytest.mark.parametrize(
    ("plan", "workers", "mesh"),
    [
        (Plan(batch=Batch(micro_batch=6), mesh=Mesh(replicate=2)), 12, Mesh(replicate=12)),
        (Plan(batch=Batch(micro_batch=3), mesh=Mesh(pipeline=2)), 6, Mesh(pipeline=2, replicate=3)),
        (Plan(mesh=Mesh(shard=3), zero=3, on_loss=OnLoss(snapshot="never")), 4, Mesh(shard=4)),
    ],
)
def test_parts_may_be_smaller_than_the_plans_micro_batch(plan: Plan, workers: int, mesh: Mesh) -> None:
    assert check_scaled(plan, workers, JOB_OF_12, most=plan.workers).mesh == mesh


def test_a_run_that_cannot_be_asked_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, status=None)

    def refusal(workers: int = 3) -> str:
        assert main(["scale", str(run.path), "--workers", str(workers)]) == 2
        assert not run.workers_json.exists()
        return capsys.readouterr().err

    assert "--workers 0: give a number from 1" in refusal(0)
    assert f"nobody trains {run.path} now. Go on with it: shoal train FILE --resume" in refusal()
    with held(run, job="17"):
        assert "is trained by job 17 of Slurm" in refusal()
    with held(run):
        assert re.search(r"is trained by process \d+ on .*, which starts no workers \(a loop of one's own", refusal())
        Wishes(run, 2)
        assert "for a global batch of 8 samples" in refusal(9)
        record = read_toml(JobRecord, run.job_toml)
        write_toml(run.job_toml, dataclasses.replace(record, is_program=True))
        run.launcher_json.unlink()
        assert "is that of a shoal.Program" in refusal()
    run.write_result("done")
    assert "has come to its end" in refusal()


def test_what_was_asked_for_can_be_read_by_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, status=None)
    with held(run):
        Wishes(run, 2)
        assert main(["scale", str(run.path), "--workers", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "run": str(run.path),
        "workers": 1,
        "message": f"{run.path} is asked to go on with 1 worker.",
    }
    assert json.loads(run.workers_json.read_text()) == {"workers": 1}
