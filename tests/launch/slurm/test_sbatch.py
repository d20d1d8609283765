"""The text of batch scripts, held against files; SHOAL_GOLDEN=write writes them anew."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.core.errors import ConfigError
from shoal.launch.slurm.sbatch import Submission, sbatch_text, slurm_time
from shoal.launch.slurm.site import Site, read_site

GOLDEN = Path(__file__).parent / "golden"
SITES = Path(__file__).parents[3] / "catalog" / "sites"
RUN = Path("/home/me/runs/gpt-1")

CASES = {
    "training_gpu": (
        Submission(
            name="gpt-1",
            command=("/venv/bin/python", "-m", "shoal", "conduct", str(RUN)),
            folder=RUN / "slurm",
            directory=Path("/home/me"),
            time_s=4 * 3600,
            nodes=4,
            tasks_per_node=8,
            cpus_per_task=8,
            gpus_per_node=8,
            distribution="block",
            switches="1@10",
        ),
        "gpu.toml",
    ),
    "training_cpu": (
        Submission(
            name="gpt-1",
            command=("/venv/bin/python", "-m", "shoal", "conduct", str(RUN)),
            folder=RUN / "slurm",
            directory=Path("/home/me"),
            time_s=90,
            tasks_per_node=2,
            cpus_per_task=16,
            memory_bytes_per_node=64 * 10**9,
            account="other",
            extra=("--qos=high",),
            notice_s=30,
        ),
        "cpu.toml",
    ),
    "array": (
        Submission(
            name="map",
            command=("/venv/bin/python", "work.py"),
            folder=Path("/home/me/map"),
            time_s=1800,
            array=40,
            array_at_once=10,
            dependency="afterany:12",
            requeue=False,
            per_task=True,
        ),
        None,
    ),
    "hostile": (
        Submission(
            name="a 'b' \"c\" é % \\ #d",
            command=("python", "it's.py", "$HOME", 'a "b"', "`x`", "ü %j"),
            folder=Path("/tmp/a \"b\" 'c' %j \\ é #1/slurm"),
            directory=Path("/tmp/a \"b\" 'c' %j \\ é #1"),
            time_s=86400 + 60,
            extra=('--comment=it\'s "so"',),
        ),
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_script_is_the_one_in_the_file(name: str) -> None:
    submission, site = CASES[name]
    text = sbatch_text(submission, read_site(SITES / site) if site else Site())
    path = GOLDEN / f"{name}.sh"
    if os.environ.get("SHOAL_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.sh")), ids=lambda path: path.stem)
def test_every_script_is_bash(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=10)


def stand_in(folder: Path, name: str, body: str) -> None:
    """Have a program of that name in `folder`: these tests are about bash, not about Slurm."""
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


def run_script(folder: Path, *command: str, site: Site | None = None) -> tuple[int, list[str]]:
    """Run the script of `command` as job 12, and return its exit code, and how scontrol was called."""
    text = sbatch_text(Submission(name="n", command=command, folder=folder, time_s=60), site or Site())
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"}
    done = subprocess.run(["bash", "-c", text], cwd=folder, env=env, check=False, timeout=30)
    said = folder / "said"
    return done.returncode, said.read_text().splitlines() if said.exists() else []


@pytest.mark.parametrize(
    ("code", "is_cancelled", "expected"),
    [(0, False, []), (2, False, []), (75, False, ["requeue 12"]), (75, True, [])],
)
def test_only_what_stopped_in_order_and_was_not_cancelled_is_requeued(
    tmp_path: Path, code: int, is_cancelled: bool, expected: list[str]
) -> None:
    stand_in(tmp_path, "scontrol", f'echo "$@" >>"{tmp_path / "said"}"')
    stand_in(tmp_path, "sleep", "false")  # ended with the rest of the job
    if is_cancelled:
        (tmp_path / "cancelled").touch()
    assert run_script(tmp_path, "bash", "-c", f"exit {code}") == (code, expected)


def test_a_controller_that_does_not_answer_is_asked_again_until_it_does(tmp_path: Path) -> None:
    stand_in(tmp_path, "sleep", f'[ "$1" = 60 ] || echo >>"{tmp_path / "waits"}"')
    is_up = f'[ "$(wc -l <"{tmp_path / "waits"}" 2>/dev/null || echo 0)" -ge 20 ]'
    stand_in(tmp_path, "scontrol", f'echo "$1" >>"{tmp_path / "said"}"; {is_up}')
    assert run_script(tmp_path, "bash", "-c", "exit 75") == (75, ["requeue", "ping"] * 20 + ["requeue"])


def test_a_controller_that_refuses_is_asked_three_times(tmp_path: Path) -> None:
    stand_in(tmp_path, "sleep", "")
    stand_in(tmp_path, "scontrol", f'echo "$1" >>"{tmp_path / "said"}"; [ "$1" = ping ]')
    assert run_script(tmp_path, "bash", "-c", "exit 75") == (75, ["requeue", "ping"] * 3)


def test_a_job_that_is_cancelled_while_the_controller_is_away_is_not_requeued(tmp_path: Path) -> None:
    stand_in(tmp_path, "sleep", f'touch "{tmp_path / "cancelled"}"')
    stand_in(tmp_path, "scontrol", f'echo "$1" >>"{tmp_path / "said"}"; false')
    assert run_script(tmp_path, "bash", "-c", "exit 75") == (75, ["requeue", "ping"])


def test_a_module_that_cannot_be_loaded_ends_the_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stand_in(tmp_path, "module", '[ "$2" = there ]')
    assert run_script(tmp_path, "touch", "ran", site=Site(modules=("there",)))[0] == 0
    assert (tmp_path / "ran").exists()
    (tmp_path / "ran").unlink()
    assert run_script(tmp_path, "touch", "ran", site=Site(modules=("there", "it's not")))[0] == 1
    assert not (tmp_path / "ran").exists()
    assert "module load" in capfd.readouterr().err


def test_a_notice_reaches_the_command_and_its_exit_code_comes_back(tmp_path: Path) -> None:
    handles = "import signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))"
    command = (sys.executable, "-c", f"{handles}; print('up', flush=True); time.sleep(60)")
    script = sbatch_text(Submission(name="n", command=command, folder=tmp_path, time_s=60), Site())
    with subprocess.Popen(["bash", "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGUSR1)
        assert process.wait(20) == 7


@pytest.mark.parametrize(("time_s", "text"), [(1, "0-00:01:00"), (90, "0-00:02:00"), (90061, "1-01:02:00")])
def test_time_is_written_in_whole_minutes_up(time_s: int, text: str) -> None:
    assert slurm_time(time_s) == text


@pytest.mark.parametrize(
    "wrong", [{"name": "a\nb"}, {"extra": ("--a\n#SBATCH --b",)}, {"nodes": 0}, {"array": 0}, {"command": ()}]
)
def test_what_no_script_can_say_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Submission(**{"name": "n", "command": ("x",), "folder": Path("f"), "time_s": 60, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gpu.toml", "cpu.toml"])
def test_the_examples_of_sites_can_be_read(name: str) -> None:
    assert read_site(SITES / name).cpus_per_worker > 1


def test_a_site_is_found_by_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s.toml").write_text('partition = "p"\narray_limit = 5\n')
    monkeypatch.setenv("SHOAL_SITE", str(tmp_path / "s.toml"))
    assert (read_site().partition, read_site().array_limit) == ("p", 5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("partitoin = 'p'", "Did you mean 'partition'"),
        ("gpu_flag = '--gpus=2'", "{count}"),
        ("job_limit = 0", "at least 1 job"),
        ("modules = ['a\\nb']", "more than one line"),
    ],
)
def test_a_wrong_site_is_refused_in_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "s.toml").write_text(text.replace("'", '"'))
    with pytest.raises(ConfigError, match=said.replace("{", r"\{").replace("}", r"\}")):
        read_site(tmp_path / "s.toml")
