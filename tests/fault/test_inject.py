"""Faults on purpose: when they strike, how often, and what each does to a real process."""

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.core.errors import ConfigError
from shoal.fault import inject
from shoal.fault.inject import Fault, corrupt, cut, fail_at, fill_disk, slow, stop_at
from shoal.fault.inject_kinds import KINDS, flip
from tests.fault import inject_exercises
from tests.support.files import job_file
from tests.support.ranks import RankPool


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    inject.end()


@pytest.fixture
def struck(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds that have struck this process, instead of what they do."""
    kinds: list[str] = []

    def noting(kind: str) -> Callable[[float | None, Path | None], None]:
        return lambda _seconds, _path: kinds.append(kind)

    for kind in KINDS:
        monkeypatch.setitem(KINDS, kind, noting(kind))
    return kinds


def test_a_fault_strikes_its_worker_at_its_point_in_its_step_once(struck: list[str]) -> None:
    inject.begin(1, [fail_at(1, 3, point="backward"), stop_at(0, 1)])
    for step in (1, 2):
        inject.at("step begins", step)
        inject.at("backward", step)
    inject.at("step begins", 3)
    assert struck == []
    inject.at("backward", 3)
    inject.at("backward", 3)
    inject.at("backward", 4)
    assert struck == ["kill"]


def test_several_strike_at_once_and_a_point_without_a_step_has_the_last_one(struck: list[str]) -> None:
    inject.begin(0, [cut(0, 2), slow(0, 2, seconds=1), fill_disk(0, 2), corrupt(0, 5)])
    inject.at("step begins", 2)
    assert struck == ["cut", "slow"]
    inject.at("checkpoint: writing")
    assert struck == ["cut", "slow", "fill_disk"]
    inject.at("checkpoint: committing")
    assert len(struck) == 3
    inject.at("checkpoint: committing", 20)  # not every step has a checkpoint
    assert struck[-1] == "corrupt"


def test_a_slow_worker_is_slow_for_as_many_steps_as_it_says(struck: list[str]) -> None:
    inject.begin(0, [slow(0, 2, seconds=1, steps=3)])
    for step in range(1, 9):
        inject.at("step begins", step)
        inject.at("step begins", step)
    assert struck == ["slow"] * 3


def test_a_fault_before_the_first_step_strikes_at_the_start(struck: list[str]) -> None:
    inject.begin(0, [fail_at(0, 0, point="start"), fail_at(0, 0, point="recovery")])
    inject.at("start")
    inject.at("recovery")
    assert struck == ["kill", "kill"]


def test_with_a_folder_a_fault_strikes_once_among_all_processes(struck: list[str], tmp_path: Path) -> None:
    for _ in range(3):  # as if worker 0 were started anew
        inject.begin(0, [fail_at(0, 2), fail_at(0, 4)], folder=tmp_path)
        inject.at("step begins", 2)
    assert struck == ["kill"]
    inject.at("step begins", 4)
    assert struck == ["kill", "kill"]
    assert [(note["number"], note["step"], note["pid"]) for note in inject.struck(tmp_path)] == [
        (0, 2, os.getpid()),
        (1, 4, os.getpid()),
    ]


def test_faults_travel_by_the_environment(monkeypatch: pytest.MonkeyPatch, struck: list[str], tmp_path: Path) -> None:
    faults = [fail_at(1, 3, point="all-reduce"), slow(0, 5, seconds=2.5, steps=2), stop_at(1, 1, seconds=3)]
    for name, value in inject.environment(faults, folder=tmp_path).items():
        monkeypatch.setenv(name, value)
    inject.begin(1)
    inject.at("step begins", 1)
    assert struck == ["stop"]
    assert len(inject.struck(tmp_path)) == 1
    monkeypatch.setenv("SHOAL_FAULTS", '[{"kind": "kill", "worker": 1, "step": 3}]')
    inject.begin(1)
    inject.at("step begins", 3)
    assert struck == ["stop", "kill"]


def test_without_faults_nothing_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_FAULTS", raising=False)
    inject.begin(0)
    model = nn.Linear(2, 2)
    inject.into(model, lambda: 1)
    inject.at("step begins", 1)
    assert not model._forward_hooks


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("kill 1", "cannot be read"),
        ("{}", "cannot be read"),
        ("3", "cannot be read"),
        ('[{"kind": "kill"}]', "cannot be read"),
        ('[{"kind": "kil", "worker": 1}]', "Did you mean 'kill'"),
        ('[{"kind": "kill", "worker": 1, "point": "backwards"}]', "Did you mean 'backward'"),
        ('[{"kind": "slow", "worker": 1}]', "needs seconds"),
        ('[{"kind": "kill", "worker": -1}]', "0 or more"),
    ],
)
def test_what_is_no_fault_is_refused(monkeypatch: pytest.MonkeyPatch, text: str, why: str) -> None:
    monkeypatch.setenv("SHOAL_FAULTS", text)
    with pytest.raises(ConfigError, match=why):
        inject.begin(0)


def test_backward_passes_its_points_in_their_order(struck: list[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    inject.begin(0, [fail_at(0, 2, point="all-reduce"), stop_at(0, 2, point="backward")])
    steps: list[int] = []
    inject.into(model, lambda: steps[-1])
    for step in (1, 2):
        steps.append(step)
        loss = model(torch.randn(4, 3)).sum()
        assert struck == []
        loss.backward()
    assert struck == ["stop", "kill"]


# What each kind does.


def test_corrupt_flips_one_bit_of_the_largest_file(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x" * 10)
    (tmp_path / "large").write_bytes(bytes(range(256)))
    inject.begin(0, [corrupt(0, 1), corrupt(0, 2, path=str(tmp_path / "small"))])
    inject.at("checkpoint: committing", 1, tmp_path)
    changed = (tmp_path / "large").read_bytes()
    assert sum(a != b for a, b in zip(changed, bytes(range(256)), strict=True)) == 1
    assert (tmp_path / "small").read_bytes() == b"x" * 10
    inject.at("checkpoint: committing", 2, tmp_path)
    assert (tmp_path / "small").read_bytes() == b"xxxxxyxxxx"
    flip(tmp_path / "small", 0)
    assert (tmp_path / "small").read_bytes() == b"yxxxxyxxxx"


def test_fill_disk_raises_what_a_full_disk_does(tmp_path: Path) -> None:
    inject.begin(0, [fill_disk(0, 1)])
    with pytest.raises(OSError) as full:
        inject.at("checkpoint: writing", 1, tmp_path)
    assert full.value.errno == errno.ENOSPC


FILL = """
import sys
from pathlib import Path
from shoal.fault.inject_kinds import filled
folder = Path(sys.argv[1])
with filled(folder, leave_bytes=64 << 10):
    try:
        (folder / "x").write_bytes(b"x" * (256 << 10))
    except OSError as error:
        print(error.errno)
(folder / "x").write_bytes(b"x" * (256 << 10))
print("fits")
"""


def test_a_small_disk_can_be_filled_for_real(tmp_path: Path) -> None:
    script = f'mount -t tmpfs -o size=1m none "$1" && exec "$2" -c \'{FILL}\' "$1"'
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh", str(tmp_path), sys.executable]
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare")
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"this machine lets nobody mount: {done.stderr.strip()}")
    assert done.stdout.split() == [str(errno.ENOSPC), "fits"], done.stderr


def test_a_large_disk_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.fault import inject_kinds

    monkeypatch.setattr(inject_kinds, "_MOST_FILLED", 0)
    with pytest.raises(AssertionError, match="mount a small filesystem"), inject_kinds.filled(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


STEPS = """
import sys, time
from shoal.fault import inject
inject.begin(0)
for step in range(1, 6):
    inject.at("step begins", step)
    print(step, time.monotonic(), flush=True)
"""


def run_steps(*faults: Fault) -> tuple[int, list[float]]:
    """Run five empty steps with `faults`; return the exit code and when each step was passed."""
    env = {**os.environ, **inject.environment(faults)}
    command = [sys.executable, "-c", STEPS]
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=60)
    return done.returncode, [float(line.split()[1]) for line in done.stdout.splitlines()]


def test_a_killed_process_is_gone() -> None:
    code, passed = run_steps(fail_at(0, 3))
    assert code == -signal.SIGKILL
    assert len(passed) == 2


def test_a_stopped_process_goes_on_after_its_time_and_a_slow_one_by_itself() -> None:
    code, passed = run_steps(stop_at(0, 2, seconds=0.5), slow(0, 4, seconds=0.3, steps=2))
    assert code == 0
    gaps = [later - earlier for earlier, later in itertools.pairwise(passed)]
    assert gaps[0] >= 0.45  # what the script says, not how fast this machine is
    assert gaps[2] >= 0.3
    assert gaps[3] >= 0.3


def test_a_process_that_is_stopped_for_good_stays(tmp_path: Path) -> None:
    env = {**os.environ, **inject.environment([stop_at(0, 3)])}
    with subprocess.Popen([sys.executable, "-c", STEPS], env=env, stdout=subprocess.DEVNULL) as process:
        try:
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
        finally:
            process.kill()


def test_a_worker_that_is_cut_off_loses_the_others_and_the_store(ranks: RankPool) -> None:
    ended = ranks.run(inject_exercises.exchange_until_cut, workers=2, faults=[cut(1, 3)])
    assert [step for step, _, _ in ended] == [2, 2]
    assert all(is_peer_failure for _, is_peer_failure, _ in ended)
    assert [has_store for _, _, has_store in ended] == [True, False]


def test_a_training_is_struck_where_the_script_says(tmp_path: Path) -> None:
    faults = [fail_at(1, 4, point="all-reduce")]
    env = {**os.environ, **inject.environment(faults, folder=tmp_path)}
    arguments = ["--workers", "2", "--name", "x", "--on-loss", "stop"]
    command = [sys.executable, "-m", "shoal", "train", str(job_file(tmp_path)), *arguments]
    started = time.time()
    done = subprocess.run(command, check=False, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "worker 1 (pid " in done.stderr
    assert "was killed by SIGKILL after step 3" in done.stderr
    (note,) = inject.struck(tmp_path)
    assert (note["worker"], note["step"], note["point"]) == (1, 4, "all-reduce")
    assert float(str(note["time"])) > started
