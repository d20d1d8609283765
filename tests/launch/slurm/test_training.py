"""Training in jobs of a real Slurm: what happens to a job changes when it is done, never what it trains."""

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.cli.main import main
from shoal.core.events import EventReader
from shoal.core.run_folder import RunFolder
from shoal.fault.checkpoint.manifest import committed
from shoal.fault.inject import environment, fail_at, struck
from shoal.fault.preempt import last_step
from shoal.launch.slurm.commands import JobState, states
from shoal.launch.slurm.following import OutputReader, output_of, read_submitted
from shoal.launch.slurm.topology import hosts
from shoal.training.jobfile import load_job
from tests.support.files import job_file
from tests.support.jobs import EXAMPLES
from tests.support.slurm import SlurmCluster
from tests.support.waiting import wait_until
from tests.support.wandb_file import read_offline

# Its first start is slow, so that something can happen to it; those after that are not.
SLOW_AT_FIRST = """
fields['steps'] = 60
plain_loss = fields['loss']

def slow_loss(output, batch):
    if "SLURM_PROCID" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:
        time.sleep(0.25)
    return plain_loss(output, batch)

fields['loss'] = slow_loss
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the same job in one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return [loss or 0.0 for loss in shoal.train(load_job(job_file(folder, SLOW_AT_FIRST)), runs=folder).losses]


def submit(folder: Path, *flags: str, body: str = SLOW_AT_FIRST) -> RunFolder:
    """Submit the slow job on two nodes, and return its run."""
    file = job_file(folder, body)
    asked = ["--slurm", "--nodes", "2", "--per-node", "1", "--runs", str(folder), "--name", "r", "--detach"]
    assert main(["train", str(file), *asked, *flags]) == 0
    return RunFolder.open(folder / "r")


def submit_with_a_fault(folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> RunFolder:
    """Submit the slow job, of which worker 1 is killed in step 20."""
    for name, value in environment([fail_at(worker=1, step=20)], folder=folder).items():
        monkeypatch.setenv(name, value)
    return submit(folder, "--time", "5m", "--checkpoint-every", "3", *flags)


def losses_of(run: RunFolder) -> list[dict[str, Any]]:
    """Return what was written down about workers that were lost while the others went on."""
    return [event for rank in range(2) for event in EventReader(run.events_of(rank)).poll() if event["kind"] == "loss"]


def steps_done(run: RunFolder) -> int:
    return sum(event["kind"] == "step" for event in EventReader(run.events_of(0)).poll())


def starts(run: RunFolder) -> list[int]:
    """Return after which step each start of the run's job went on."""
    path = run.slurm / "starts.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def saved_since(run: RunFolder) -> bool:
    """Return whether there is a checkpoint of the last start."""
    return (last_step(run.checkpoints) or 0) > starts(run)[-1]


def state_of(run: RunFolder) -> JobState:
    job = read_submitted(run).job
    return states([job])[job]


def leader(run: RunFolder) -> int:
    """Return the process that leads the run's job."""
    words = f"conduct\0{run.path.resolve()}\0".encode()
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and words in (process / "cmdline").read_bytes():
                return int(process.name)
    raise AssertionError("nobody leads the job")


def follow(run: RunFolder, capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Watch the run to its end, as its user does, and return what came of it."""
    capfd.readouterr()
    assert main(["attach", str(run.path), "--json"]) == 0, capfd.readouterr().err
    result: dict[str, Any] = json.loads(capfd.readouterr().out)
    return result


def test_four_nodes_train_what_one_process_does_whatever_the_names(
    slurm: SlurmCluster, tmp_path: Path, undisturbed: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / 'it\'s a "möwe" % \\ #1'
    folder.mkdir()
    file = job_file(folder, SLOW_AT_FIRST.replace("0.25", "0"), name="job 'q\" é.py")
    name = "run 'a' \"b\" ü %j \\ #2"
    asked = ["--slurm", "--nodes", "4", "--per-node", "1", "--time", "5m", "--runs", str(folder), "--name", name]
    assert main(["train", str(file), *asked, "--json"]) == 0, capfd.readouterr().err
    printed = capfd.readouterr()
    result = json.loads(printed.out)
    assert result["workers"] == 4
    assert result["losses"] == pytest.approx(undisturbed, rel=1e-6, abs=1e-6)  # the order of float32 sums
    assert "runs on node[1-4]" in printed.err
    assert "Checkpoints every" in printed.err


def test_a_program_runs_in_a_job_on_two_nodes(
    slurm: SlurmCluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = str(EXAMPLES / "actor_learner.py")
    asked = ["--slurm", "--nodes", "2", "--per-node", "1", "--runs", str(tmp_path), "--steps", "3", "--json"]
    assert main(["train", file, *asked]) == 0, capfd.readouterr().err
    printed = capfd.readouterr()
    result = json.loads(printed.out)
    assert (result["status"], result["steps"], result["workers"]) == ("done", 3, 2)
    assert "runs on node[1-2]" in printed.err


def test_a_run_longer_than_its_time_limit_goes_on_in_the_same_folder(
    slurm: SlurmCluster, tmp_path: Path, undisturbed: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    run = submit(tmp_path, "--time", "1m", "--notice", "50s")
    result = follow(run, capfd)
    assert result["losses"] == pytest.approx(undisturbed, rel=1e-6, abs=1e-6)
    assert len(starts(run)) > 1
    assert starts(run)[-1] > 0


def test_a_run_that_makes_way_for_another_job_goes_on_afterwards_as_one_curve(
    slurm: SlurmCluster,
    tmp_path: Path,
    undisturbed: list[float],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = submit(tmp_path, "--time", "5m", "--log", "wandb")
    wait_until(lambda: steps_done(run) > 2, seconds=150)
    slurm.run("sbatch", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=true")
    result = follow(run, capfd)
    assert result["losses"] == pytest.approx(undisturbed, rel=1e-6, abs=1e-6)
    assert len(starts(run)) == 2
    assert starts(run)[-1] > 0
    wait_until(lambda: state_of(run).is_over)  # what follows for loggers has said all by then
    ids, values, _, _ = read_offline(run.path)
    assert len(ids) == 1
    assert max(values) == 60
    assert values[60]["loss"] == pytest.approx(undisturbed[-1], rel=1e-6, abs=1e-6)


def test_a_run_that_loses_a_node_goes_on_without_it_and_is_requeued_when_it_loses_the_first(
    slurm: SlurmCluster, tmp_path: Path, undisturbed: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    """First the last of its nodes, where only a worker is; then the first, where it is led from."""
    run = submit(tmp_path, "--time", "5m", "--checkpoint-every", "3")
    wait_until(lambda: steps_done(run) > 2, seconds=150)
    first, last = hosts(state_of(run).nodes)
    try:
        slurm.kill_node(last)
        wait_until(lambda: bool(losses_of(run)), seconds=60)
        assert starts(run) == [0]
        wait_until(lambda: saved_since(run), seconds=60)
        slurm.kill_node(first)
        result = follow(run, capfd)
    finally:
        for node in (first, last):
            slurm.revive_node(node)
    assert result["losses"] == pytest.approx(undisturbed, rel=1e-6, abs=1e-6)
    assert len(starts(run)) == 2
    assert starts(run)[1] > 0


def test_a_worker_that_is_killed_is_replaced_in_its_job_and_changes_no_loss(
    slurm: SlurmCluster,
    tmp_path: Path,
    undisturbed: list[float],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the system does where memory runs out."""
    run = submit_with_a_fault(tmp_path, monkeypatch)
    result = follow(run, capfd)
    assert len(struck(tmp_path)) == 1
    assert result["losses"] == pytest.approx(undisturbed, rel=1e-6, abs=1e-6)
    assert starts(run) == [0]
    assert len(losses_of(run)) == 1
    output = output_of(run, read_submitted(run).job).read_text()
    assert "was killed by SIGKILL; " in output
    assert "another is started in its place." in output


def test_without_going_on_a_worker_that_is_killed_requeues_its_job_and_changes_no_loss(
    slurm: SlurmCluster,
    tmp_path: Path,
    undisturbed: list[float],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = submit_with_a_fault(tmp_path, monkeypatch, "--on-loss", "stop")
    result = follow(run, capfd)
    assert len(struck(tmp_path)) == 1  # once, in the first start
    assert result["losses"] == pytest.approx(undisturbed, rel=1e-6, abs=1e-6)
    assert len(starts(run)) == 2
    assert 0 < starts(run)[1] < 20


def test_a_job_that_is_to_be_requeued_while_the_controller_is_dead_goes_on_when_that_is_back(
    slurm: SlurmCluster, tmp_path: Path, undisturbed: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    run = submit(tmp_path, "--time", "5m")
    output = output_of(run, read_submitted(run).job)

    def has_asked_in_vain() -> bool:
        """Return whether scontrol has complained, after the last words of the job's leader."""
        _, last, after = output.read_text().rpartition("\nStopped: ")
        return bool(last) and after.count("\n") > 1

    wait_until(lambda: steps_done(run) > 2, seconds=150)
    slurm.wait_for_note_of_jobs()
    slurm.kill_controller()
    try:
        before = steps_done(run)
        wait_until(lambda: steps_done(run) > before, seconds=60)  # it goes on without
        os.kill(leader(run), signal.SIGUSR1)  # as a notice does
        wait_until(has_asked_in_vain, seconds=150)
    finally:
        slurm.start_controller()
        slurm.wait_for_nodes()
    result = follow(run, capfd)
    assert result["losses"] == pytest.approx(undisturbed, rel=1e-6, abs=1e-6)
    assert len(starts(run)) == 2
    assert starts(run)[-1] > 0


def test_a_cancelled_run_leaves_a_checkpoint_and_is_not_requeued(
    slurm: SlurmCluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = submit(tmp_path, "--time", "5m")
    wait_until(lambda: steps_done(run) > 2, seconds=150)
    assert main(["cancel", str(run.path)]) == 0
    assert "with a checkpoint" in capfd.readouterr().out
    assert len(committed(run.checkpoints)) == 1
    assert main(["attach", str(run.path)]) == 75
    assert state_of(run).is_over
    assert len(starts(run)) == 1


def test_a_job_that_fails_is_not_started_again_and_ctrl_c_leaves_it_alone(
    slurm: SlurmCluster, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    waits = f"while 'SLURM_PROCID' in os.environ and not os.path.exists({str(gate)!r}): time.sleep(0.05)"
    breaks = f"if os.path.exists({str(gate)!r}): raise RuntimeError('broken here')"
    file = job_file(tmp_path, f"{waits}\n{breaks}\n")
    asked = ["train", str(file), "--slurm", "--workers", "1", "--time", "5m", "--runs", str(tmp_path), "--name", "r"]
    with monkeypatch.context() as patched:
        patched.setattr(OutputReader, "poll", interrupted)  # as Ctrl-C does in the middle of the view
        assert main(asked) == 130
    assert f"shoal attach {tmp_path / 'r'}" in capfd.readouterr().err
    run = RunFolder.open(tmp_path / "r")
    assert main([*asked[:-2], "--resume", str(run.path)]) == 2
    assert "is being trained by job" in capfd.readouterr().err
    gate.touch()
    assert main(["attach", str(run.path)]) == 2
    assert "broken here" in capfd.readouterr().err
    assert len(starts(run)) == 1


def test_a_job_that_slurm_refuses_leaves_no_run_behind(
    slurm: SlurmCluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = ["--slurm", "--workers", "1", "--runs", str(tmp_path / "runs"), "--name", "r", "--slurm-option=--qos=none"]
    assert main(["train", str(job_file(tmp_path)), *asked, "--slurm-option=--nodelist=nowhere"]) == 69
    assert "sbatch failed" in capfd.readouterr().err
    assert not (tmp_path / "runs" / "r").exists()


def interrupted(_: OutputReader) -> list[str]:
    raise KeyboardInterrupt
