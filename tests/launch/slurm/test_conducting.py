"""How a start of a job ended, judged by what its workers have left; and what is asked of srun."""

from pathlib import Path

import pytest

from shoal.core.errors import ConfigError
from shoal.core.events import EventLog
from shoal.core.lines import LineReader
from shoal.core.run_folder import RunFolder
from shoal.launch.slurm.conducting import MOST_IN_VAIN, Start, _in_vain, _note_start, step_command
from shoal.launch.slurm.ending import judge
from shoal.launch.slurm.following import OutputReader, read_submitted
from shoal.launch.slurm.sbatch import CANCELLED


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder.create(tmp_path, "r", "r")
    run.slurm.mkdir()
    return run


def wrote(folder: RunFolder, rank: int, *words: str) -> None:
    """Let worker `rank` have written a start, and these last words: end, or the type of an error."""
    log = EventLog(folder.events_of(rank))
    log.write("start", pid=1, host="h")
    for word in words:
        if word == "end":
            log.write("end", step=3)
        else:
            log.write("error", type=word, message=f"{word} it was", traceback="")
    log.close()


@pytest.mark.parametrize(
    ("words", "code", "status", "can_go_on", "exit_code"),
    [
        (["end", "end"], 0, "done", False, 0),
        (["Stopped", "Stopped"], 75, "stopped", True, 75),
        (["Stopped", "PeerLost"], 75, "stopped", True, 75),
        (["PeerLost", ""], 137, "stopped", True, 75),
        (["PeerLost", "PeerLost"], 3, "stopped", True, 75),
        (["", ""], 1, "stopped", True, 75),
        (["DataError", "PeerLost"], 3, "failed", False, 2),
        (["ValueError", "PeerLost"], 3, "failed", False, 1),
        (["CheckpointError", "CheckpointError"], 74, "failed", False, 74),
        (["end", ""], 9, "stopped", True, 75),
    ],
)
def test_only_who_was_stopped_or_has_lost_somebody_goes_on(
    folder: RunFolder, words: list[str], code: int, status: str, can_go_on: bool, exit_code: int
) -> None:
    for rank, word in enumerate(words):
        wrote(folder, rank, *([word] if word else []))
    ending = judge(folder, workers=2, code=code, has_begun=True)
    assert (ending.status, ending.can_go_on, ending.exit_code) == (status, can_go_on, exit_code)


def test_a_run_that_cannot_go_on_has_failed_when_it_loses_somebody(folder: RunFolder) -> None:
    wrote(folder, 0, "PeerLost")
    wrote(folder, 1)
    ending = judge(folder, workers=2, code=137, has_begun=True, starts_again=False)
    assert (ending.status, ending.can_go_on) == ("failed", False)
    assert ending.exit_code not in (0, 75)


def test_workers_that_never_began_are_not_started_again(folder: RunFolder) -> None:
    ending = judge(folder, workers=2, code=1, has_begun=False)
    assert (ending.status, ending.can_go_on, ending.exit_code) == ("failed", False, 1)


def test_how_a_long_run_ended_is_told_by_the_last_lines_of_its_logs(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0

    def counted(self: LineReader) -> list[bytes]:
        nonlocal read
        lines = poll(self)
        read += sum(map(len, lines))
        return lines

    poll = LineReader.poll
    for rank in range(4):
        folder.events_of(rank).write_bytes(b'{"kind": "step", "step": 7}\n' * 50_000)
        wrote(folder, rank, "Stopped")
    monkeypatch.setattr(LineReader, "poll", counted)
    assert judge(folder, workers=4, code=75, has_begun=True).can_go_on
    assert read < sum(path.stat().st_size for path in folder.events.iterdir()) / 10


def test_who_was_cancelled_does_not_go_on(folder: RunFolder) -> None:
    wrote(folder, 0, "Stopped")
    (folder.slurm / CANCELLED).touch()
    ending = judge(folder, workers=1, code=75, has_begun=True)
    assert (ending.status, ending.can_go_on) == ("stopped", False)


def test_starts_that_bring_nothing_come_to_an_end() -> None:
    assert not _in_vain([0] * (MOST_IN_VAIN - 1), 0)
    assert _in_vain([0] * MOST_IN_VAIN, 0)
    assert not _in_vain([0] * MOST_IN_VAIN, 5)
    assert not _in_vain([0, 5, 5, 5], 5)


def test_starts_of_other_jobs_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "starts.jsonl"
    _note_start(path, Start("11", 1.0, 0))
    with path.open("a") as file:
        file.write('{"job": "12", "ti')  # cut off by a crash
    assert [start.step for start in _note_start(path, Start("12", 2.0, 7))] == [7]
    assert [start.step for start in _note_start(path, Start("12", 3.0, 9))] == [7, 9]
    assert len(path.read_text().splitlines()) == 4


def test_srun_starts_a_process_on_each_node_with_the_cores_of_its_workers() -> None:
    env = {"SLURM_CPUS_PER_TASK": "4", "SLURM_JOB_NUM_NODES": "2"}
    command = step_command(RunFolder(Path("/a b/r")), 8, env)
    assert command[0] == "srun"
    assert {"--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=16", "--no-kill"} <= set(command)
    assert command[-2:] == ["host", "/a b/r"]


def test_a_run_that_came_to_its_end_without_some_workers_is_done(folder: RunFolder) -> None:
    wrote(folder, 1, "PeerLost")
    assert judge(folder, workers=2, code=137, has_begun=True, is_finished=True).exit_code == 0


def test_a_run_on_this_machine_is_no_run_on_a_cluster(folder: RunFolder) -> None:
    with pytest.raises(ConfigError, match="no run on a cluster"):
        read_submitted(folder)


def test_output_is_read_line_by_line_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "o.txt"
    reader = OutputReader(path)
    assert reader.poll() == []
    path.write_bytes("ä one\ntw".encode())
    assert reader.poll() == ["ä one"]
    path.write_bytes("ä one\ntwo\n".encode())
    assert reader.poll() == ["two"]
