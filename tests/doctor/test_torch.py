"""torch as it is here, a broken one, one that hangs; and what is said of those that this machine does not have."""

import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.doctor.finding import OK, PROBLEM, WARNING
from shoal.doctor.torch_install import ask, check_torch, driver_version, judge_gpus, judge_sum, judge_torch

CPU = {"version": "2.13.0+cpu", "cuda": "", "hip": "", "has_gloo": True, "nccl": "", "import_s": 1.5}
CUDA = CPU | {"version": "2.13.0", "cuda": "13.0", "nccl": "2.28.3"}
NO_GPU = {"count": 0, "names": [], "is_available": False}
GPUS = {"count": 2, "names": [["NVIDIA H200", 150 * 10**9]] * 2, "is_available": True}
SUM = {"sum": 3.0, "seconds": 0.1}


def planted(folder: Path, source: str) -> dict[str, str]:
    """Return variables with which Python finds another torch."""
    (folder / "torch.py").write_text(textwrap.dedent(source))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


def test_two_processes_sum_with_the_torch_that_is_here() -> None:
    found, gpus, group = check_torch()
    assert (found.level, gpus.level, group.level) == (OK, OK, OK)
    assert torch.__version__ in found.fact
    assert "two processes summed by Gloo over loopback" in group.fact


def test_an_interface_that_is_not_there_keeps_them_from_summing() -> None:
    *_, group = check_torch({**os.environ, "GLOO_SOCKET_IFNAME": "eth77"})
    assert group.level == PROBLEM
    assert "do not sum by Gloo over loopback: RuntimeError" in group.fact
    assert "interfaces and variables" in group.remedy


def test_a_torch_that_cannot_be_imported_is_named_with_its_complaint(tmp_path: Path) -> None:
    env = planted(tmp_path, 'raise ImportError("libcudart.so.13: cannot open shared object file")')
    (found,) = check_torch(env)
    assert found.level == PROBLEM
    assert "libcudart.so.13: cannot open shared object file" in found.fact
    assert "pip install --force-reinstall" in found.remedy


def test_a_torch_that_crashes_is_named_with_its_signal(tmp_path: Path) -> None:
    (found,) = check_torch(planted(tmp_path, "import os\nos.abort()"))
    assert "signal 6" in found.fact


def test_a_torch_that_hangs_is_ended(tmp_path: Path) -> None:
    env = planted(tmp_path, "import os, time\nopen(os.environ['PID'], 'w').write(str(os.getpid()))\ntime.sleep(60)")
    facts = ask(env | {"PID": str(tmp_path / "pid")}, limit_s=2.0)
    assert facts == {"ended": {"how": "no answer within 2 s"}}
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("version", "level", "remedy"),
    [
        ("2.9.1+cu128", PROBLEM, "pip install 'torch>=2.11'"),
        ("2.11.0", OK, ""),
        ("2.13.1+cu130", OK, ""),
        ("2.14.0", WARNING, "pip install 'torch==2.13.*'"),
    ],
)
def test_the_version_must_be_one_that_shoal_knows(version: str, level: str, remedy: str) -> None:
    (found,) = judge_torch({"torch": CPU | {"version": version}})
    assert (found.level, remedy in found.remedy) == (level, True)


def test_an_import_from_slow_storage_is_a_warning() -> None:
    (found,) = judge_torch({"torch": CPU | {"import_s": 45.0}})
    assert found.level == WARNING
    assert "on a disk of this node" in found.remedy


@pytest.mark.parametrize(
    ("versions", "gpus", "driver", "level", "words"),
    [
        (CUDA, GPUS, "580.95", OK, "2 x NVIDIA H200 (150 GB), driver 580.95; each multiplies"),
        (CPU, NO_GPU, "", OK, "none: workers compute on the processor"),
        (CUDA, NO_GPU, "", OK, "none"),
        (CPU, NO_GPU, "580.95", WARNING, "built without CUDA"),
        (CUDA, NO_GPU, "470.1", PROBLEM, "finds no GPU"),
        (CUDA, {"error": "RuntimeError: no kernel image"}, "580.95", PROBLEM, "no kernel image"),
    ],
)
def test_gpus_that_are_there_are_used_or_it_is_said_why_not(
    versions: dict[str, Any], gpus: dict[str, Any], driver: str, level: str, words: str
) -> None:
    (found,) = judge_gpus({"torch": versions, "gpus": gpus}, driver)
    assert (found.level, words in found.fact) == (level, True)


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        ({"torch": CUDA, "sum": SUM, "nccl": {"sum": 3.0}}, OK, "and by NCCL 2.28.3"),
        (
            {"torch": CUDA, "sum": SUM, "nccl": {"error": "DistBackendError: unhandled system error"}},
            PROBLEM,
            "by NCCL",
        ),
        ({"torch": CPU, "sum": {"sum": 2.0}}, PROBLEM, "1 and 2 are 2.0"),
        ({"torch": CPU, "ended": {"how": "no answer within 90 s"}}, PROBLEM, "no answer within 90 s"),
        ({"torch": CPU | {"has_gloo": False}}, PROBLEM, "without Gloo"),
    ],
)
def test_a_sum_that_fails_is_a_problem(facts: dict[str, dict[str, Any]], level: str, words: str) -> None:
    (found,) = judge_sum(facts)
    assert (found.level, words in found.fact) == (level, True)


def test_the_drivers_version_is_read_from_the_kernel(tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12\n"
    )
    assert driver_version(file) == "580.95.05"
    assert driver_version(tmp_path / "none") == ""
