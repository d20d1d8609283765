"""Checkpoints on disk: complete or not there, whatever happens while they are written, or after."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.comm.rank import ALONE, Rank
from shoal.core.errors import CheckpointError, ConfigError
from shoal.core.events import EventReader
from shoal.core.run_folder import RunFolder
from shoal.fault import inject
from shoal.fault.checkpoint.manifest import committed, is_committed, step_of
from shoal.fault.checkpoint.reader import Checkpoint
from shoal.spec.job import Job
from shoal.spec.plan import Checkpoints, Mesh, Plan
from tests.support.jobs import linear
from tests.support.ranks import RankPool, WorkerError
from tests.support.training import bare_folder, train_part

EVERY_2 = Plan(checkpoint=Checkpoints(every_steps=2))


def wide(steps: int) -> Job:
    """The regression of `linear` with another model."""
    return linear(steps=steps, model=lambda: nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 1)))


def deep(steps: int) -> Job:
    """The regression of `linear` with a model of other names."""
    return linear(steps=steps, model=lambda: nn.Sequential(nn.Sequential(nn.Linear(5, 8)), nn.Tanh(), nn.Linear(8, 1)))


def bigger_batches(steps: int) -> Job:
    """The regression of `linear` with other batches."""
    return linear(steps=steps, batch_size=10)


def with_adam(steps: int) -> Job:
    """The regression of `linear` with another optimizer."""
    return linear(steps=steps, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01))


def train(folder: Path, *, steps: int, job: str = "tests.support.jobs:linear") -> dict[int, float]:
    """Train in `folder`, in this process, and return the losses of its steps."""
    first = len(losses(folder))
    train_part(ALONE, builder=job, arguments={"steps": steps}, plan=Plan(), folder=folder)
    return dict(list(losses(folder).items())[first:])


def losses(folder: Path) -> dict[int, float]:
    events = EventReader(RunFolder(folder).events_of(0)).poll()
    return {number: e["loss"] for number, e in enumerate(e for e in events if e["kind"] == "step")}


def steps_in(folder: Path) -> list[int]:
    return [step_of(path) for path in committed(RunFolder(folder).checkpoints)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has ended after step 4, with checkpoints of the steps 2 and 4."""
    folder = bare_folder(tmp_path, EVERY_2)
    train(folder, steps=4)
    assert steps_in(folder) == [2, 4]
    return folder


def numbers(checkpoint: Path) -> Path:
    return checkpoint / "worker-0.safetensors"


def _flip(checkpoint: Path) -> None:
    data = bytearray(numbers(checkpoint).read_bytes())
    data[-5] ^= 1
    numbers(checkpoint).write_bytes(data)


def _truncate(checkpoint: Path) -> None:
    os.truncate(numbers(checkpoint), numbers(checkpoint).stat().st_size - 7)


def _lose(checkpoint: Path) -> None:
    numbers(checkpoint).unlink()


def _spoil_json(checkpoint: Path) -> None:
    text = (checkpoint / "common.json").read_text()
    (checkpoint / "common.json").write_text(text.replace('"step": 4', '"step": 5'))


DAMAGE = [
    (_flip, "is damaged: its checksum is not that of what was written"),
    (_truncate, "were written: it is truncated"),
    (_lose, "cannot be read: No such file or directory"),
    (_spoil_json, "common.json is damaged"),
]


@pytest.mark.parametrize(("damage", "sentence"), DAMAGE, ids=["a bit", "truncated", "lost", "common"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_loaded(
    damage: object, sentence: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(committed(RunFolder(run).checkpoints)[-1])  # type: ignore[operator]
    whole = bare_folder(tmp_path, Plan())
    expected = list(train(whole, steps=6).values())
    assert list(train(run, steps=6).values()) == expected[2:]
    said = capsys.readouterr().err
    assert "The checkpoint of step 4 is not used" in said
    assert sentence in said


def _unreadable(checkpoint: Path, file: str = "COMMIT") -> None:
    """Have the file system refuse to read a file that is there, to root as well."""
    (checkpoint / file).rename(checkpoint / "aside")
    (checkpoint / file).symlink_to(file)


@pytest.mark.parametrize(("damage", "what"), [(_flip, "is damaged"), (_unreadable, "cannot be read")])
def test_where_all_are_damaged_that_is_said_instead_of_starting_anew(damage: object, what: str, run: Path) -> None:
    for checkpoint in committed(RunFolder(run).checkpoints):
        damage(checkpoint)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=rf"no checkpoint in .* can be read\. .*step-00000004.* {what}"):
        train(run, steps=6)
    assert steps_in(run) == [2, 4]


def _no_commit(checkpoint: Path) -> None:
    (checkpoint / "COMMIT").unlink()


def _other_manifest(checkpoint: Path) -> None:
    manifest = (checkpoint / "manifest.json").read_text()
    (checkpoint / "manifest.json").write_text(manifest.replace('"step":4', '"step":3'))


def _half_a_commit(checkpoint: Path) -> None:
    (checkpoint / "COMMIT").write_text((checkpoint / "COMMIT").read_text()[:3])


@pytest.mark.parametrize("tear", [_no_commit, _other_manifest, _half_a_commit])
def test_what_was_not_committed_is_never_picked_and_is_cleaned_up(
    tear: object, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = committed(RunFolder(run).checkpoints)[-1]
    tear(torn)  # type: ignore[operator]
    assert not is_committed(torn)
    assert len(train(run, steps=3)) == 1  # step 3: from the checkpoint of step 2
    assert "step 4 was never finished" in capsys.readouterr().err
    assert not torn.exists()


@pytest.mark.parametrize("file", ["COMMIT", "manifest.json"])
def test_one_that_cannot_be_read_for_a_while_is_passed_over_and_stays(
    file: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = committed(RunFolder(run).checkpoints)[-1]
    _unreadable(last, file)
    assert len(train(run, steps=3)) == 1  # step 3: from the checkpoint of step 2
    said = capsys.readouterr().err
    assert f"The checkpoint of step 4 is not used: {last} cannot be read: Too many levels of symbolic links." in said
    (last / "aside").replace(last / file)
    assert Checkpoint(last).damage() == ""


@pytest.mark.parametrize(
    ("job", "sentence"),
    [
        ("wide", r"has model/0.weight of shape \[8, 5\], but the model's is \[9, 5\]: it is of another model"),
        ("deep", "has no model/0.0.weight: it is of another model"),
        ("bigger_batches", "was saved with batch_size=8, and the job has batch_size=10"),
        ("with_adam", "was saved with the optimizer SGD, and the job has Adam"),
    ],
)
def test_a_checkpoint_of_another_job_is_refused_in_one_sentence(job: str, sentence: str, run: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        train(run, steps=6, job=f"tests.fault.test_checkpoint:{job}")
    assert steps_in(run) == [2, 4]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 160 KB, mounted."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160k", "shoal", str(disk)], capture_output=True, check=False, timeout=30
    )
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True, timeout=30)


def test_a_full_disk_is_said_training_goes_on_and_the_checkpoint_before_is_still_there(
    small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = bare_folder(tmp_path, EVERY_2)
    RunFolder(folder).checkpoints.symlink_to(small_disk)
    train(folder, steps=2)
    (small_disk / "filler").write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * 4096 - 8192))
    assert len(train(folder, steps=6)) == 4
    said = capsys.readouterr().err
    assert "The checkpoint of step 4 could not be written" in said
    assert "No space left on device" in said
    assert "That of step 2 is still there. Training goes on." in said
    assert steps_in(folder) == [2]
    assert [path.name for path in small_disk.glob("step-*")] == ["step-00000002"]
    (small_disk / "filler").unlink()
    assert len(train(folder, steps=6)) == 4
    assert steps_in(folder) == [4, 6]


def test_a_folder_that_cannot_be_written_to_is_said(
    small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = bare_folder(tmp_path, EVERY_2)
    RunFolder(folder).checkpoints.symlink_to(small_disk)
    train(folder, steps=2)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True, timeout=30)
    assert len(train(folder, steps=4)) == 2
    assert "Read-only file system" in capsys.readouterr().err
    assert steps_in(folder) == [2]


def test_a_run_stops_at_a_full_disk_if_the_plan_says_so(tmp_path: Path) -> None:
    folder = bare_folder(tmp_path, Plan(checkpoint=Checkpoints(every_steps=2, on_error="stop")))
    inject.begin(0, [inject.fill_disk(0, 4)])
    try:
        with pytest.raises(CheckpointError, match=r"No space left on device.*step 2 is still there.*says to stop"):
            train(folder, steps=1000)
    finally:
        inject.end()
    assert 4 not in steps_in(folder)
    assert 4 <= len(losses(folder)) < 1000  # it is looked at after each step


def test_a_byte_that_flips_before_the_commit_is_found_when_it_is_read(tmp_path: Path) -> None:
    folder = bare_folder(tmp_path, EVERY_2)
    inject.begin(0, [inject.corrupt(0, 4)])
    try:
        train(folder, steps=4)
    finally:
        inject.end()
    last = committed(RunFolder(folder).checkpoints)[-1]
    assert "is damaged" in Checkpoint(last).damage()


def failing_part(rank: Rank, *, folder: Path, worker: int, steps: int = 6) -> list[float]:
    """Be a worker of a run in which the disk of `worker` is full in step 4. Runs in the pool."""
    inject.begin(rank.index, [inject.fill_disk(worker, 4)])
    try:
        trace = train_part(
            rank, builder="tests.support.jobs:linear", arguments={"steps": steps}, plan=Plan(), folder=folder
        )
    finally:
        inject.end()
    return trace.losses


@pytest.mark.parametrize("worker", [0, 1])
def test_where_one_worker_cannot_write_nothing_is_committed_and_all_are_told(
    worker: int, ranks: RankPool, tmp_path: Path
) -> None:
    plan = Plan(mesh=Mesh(replicate=2), checkpoint=Checkpoints(every_steps=2))
    folder = bare_folder(tmp_path, plan)
    found = ranks.run(failing_part, workers=2, folder=folder, worker=worker)
    assert found[0] == found[1]
    assert steps_in(folder) == [2, 6]
    for rank in range(2):
        events = EventReader(RunFolder(folder).events_of(rank)).poll()
        errors = {e["step"]: e.get("error", "") for e in events if e["kind"] == "checkpoint"}
        assert f"by worker {worker}: No space left on device" in errors[4]
        assert not errors[2]
        assert not errors[6]


def test_where_the_plan_says_so_all_workers_stop_together(ranks: RankPool, tmp_path: Path) -> None:
    settings = Checkpoints(every_steps=2, on_error="stop")
    folder = bare_folder(tmp_path, Plan(mesh=Mesh(replicate=2), checkpoint=settings))
    with pytest.raises(WorkerError, match="by worker 1: No space left on device"):
        ranks.run(failing_part, workers=2, folder=folder, worker=1, steps=1000)
    assert 4 not in steps_in(folder)
    first, second = (EventReader(RunFolder(folder).events_of(rank)).poll() for rank in range(2))
    done = [[e["step"] for e in events if e["kind"] == "step"] for events in (first, second)]
    assert done[0] == done[1]
    assert 4 <= len(done[0]) < 1000
