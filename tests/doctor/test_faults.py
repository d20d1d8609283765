"""Each fault, planted where its check looks, is named with its remedy; a healthy machine is called one."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.comm.shm.kept import open_room
from shoal.doctor import clock, environment, host, limits, native, network, packages, shared_memory, storage
from shoal.doctor.examine import Check, examine
from shoal.doctor.finding import OK, PROBLEM, WARNING, Finding, ok
from shoal.doctor.interfaces import why_not_gloo, why_not_nccl
from shoal.doctor.requirements import parse
from tests.doctor.planted import PLANTED, PLENTY, needs

STEP = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}


def single(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named_with_its_remedy(name: str) -> None:
    look, level, fact, remedy = PLANTED[name]
    found = single(look())
    assert (found.level, fact in found.fact, remedy in found.remedy) == (level, True, True), found


@pytest.mark.parametrize(
    "look",
    [
        packages.check_python,
        lambda: packages.check_packages([needs("numpy", "2.0")]),
        lambda: limits.check_limits(PLENTY, has_infiniband=True),
        lambda: host.check_cores({}, usable=2, quota=2.0),
        lambda: host.check_memory(total_bytes=8 << 30, available_bytes=6 << 30, limit_bytes=1 << 60),
        lambda: environment.check_variables({"PATH": "/bin"}),
        lambda: environment.check_variables(
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
        ),
        lambda: environment.check_variables(STEP | {"MASTER_ADDR": "node1"}),
        lambda: network.check_host_name("127.0.1.1", env={"GLOO_SOCKET_IFNAME": "lo"}),
        lambda: network.check_interfaces({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "^docker"}),
        network.check_ports,
        clock.check_clock,
        lambda: clock.check_storage_clock(Path()),
        storage.check_temporary,
        storage.check_tiers,
    ],
)
def test_what_is_well_is_said_to_be(look: Callable[[], list[Finding]]) -> None:
    assert single(look()).level == OK


def test_a_library_that_is_missing_or_broken_is_named_with_what_is_slower_without_it(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF and no more")
    own, jpeg = native.check_native(tmp_path / "gone.so", broken)
    assert (own.level, jpeg.level) == (WARNING, WARNING)
    assert "installed without gone.so: data loads slower" in own.fact
    assert "C compiler" in own.remedy
    assert "broken.so cannot be loaded" in jpeg.fact
    assert "libjpeg62-turbo-dev" in jpeg.remedy


def test_what_killed_runs_have_left_in_memory_is_removed_and_said(tmp_path: Path) -> None:
    assert shared_memory.check_left(tmp_path) == []
    dead, going = open_room("dead", shared=tmp_path), open_room("going", shared=tmp_path)
    (dead.path / "generation-0-worker-0-room-0.snapshot").write_bytes(bytes(5_000_000))
    dead.close()
    found = single(shared_memory.check_left(tmp_path))
    assert found.level == OK
    assert f"the snapshots of a run that was killed were still in {tmp_path}: 5 MB, removed now" in found.fact
    assert found.details == (str(dead.path),)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [going.path]
    going.close()


def test_extras_that_are_absent_say_what_they_would_give_and_half_of_one_is_a_warning() -> None:
    wanted = [needs("numpy", "2.0", "images"), needs("no-such-thing", "", "hdf5")]
    wanted += [needs("numpy", "2.0", "hf"), needs("no-such-thing", "", "hf"), needs("no-such-thing", "", "dev")]
    extras, half = packages.check_extras(wanted)
    assert extras.level == OK
    assert extras.fact == "1 of 3 are installed: images"
    assert "for packing HDF5 files: pip install 'shoal[hdf5]'" in extras.details
    assert half.level == WARNING
    assert half.fact == "hf is there by half: it lacks no-such-thing"


def test_requirements_are_read_as_the_metadata_has_them() -> None:
    assert parse("torch>=2.11") == needs("torch", "2.11")
    assert parse("h5py>=3.11; extra == 'hdf5'") == needs("h5py", "3.11", "hdf5")
    assert parse('nvidia-dali-cuda130; extra == "dali"') == needs("nvidia-dali-cuda130", "", "dali")
    assert parse("shoal[hf,text]; extra == 'dev'") == needs("shoal", "", "dev")


def test_names_of_interfaces_are_understood_as_gloo_and_nccl_do() -> None:
    names = ["lo", "eth0", "ib0", "docker0"]
    assert why_not_gloo("eth0,ib0", names) == ""
    assert why_not_gloo("eth", names) == "there is no interface eth"
    assert why_not_nccl("eth", names) == ""
    assert why_not_nccl("=eth", names) != ""
    assert why_not_nccl("=eth0", names) == ""
    assert why_not_nccl("^docker,lo", names) == ""
    assert why_not_nccl("^docker,eth,ib", names) == "it leaves no interface"


def test_the_clock_of_this_folder_is_this_hosts(tmp_path: Path) -> None:
    assert abs(clock.measured_offset(tmp_path)) < 1.0


def test_a_check_that_hangs_or_fails_is_named_and_the_others_are_told() -> None:
    def fail() -> list[Finding]:
        raise ValueError("out of order")

    def hang() -> list[Finding]:
        time.sleep(60)
        return []

    checks = [
        Check("first", lambda: [ok("first", "fine")]),
        Check("hangs", hang, limit_s=0.05),
        Check("fails", fail),
        Check("last", lambda: [ok("last", "fine")]),
    ]
    begin_s = time.monotonic()
    first, hangs, fails, last = examine(checks)
    assert time.monotonic() - begin_s < 30
    assert (first.level, last.level) == (OK, OK)
    assert (hangs.level, hangs.fact) == (PROBLEM, "no answer within 0.05 s")
    assert (fails.level, fails.fact) == (WARNING, "it could not be looked at: ValueError: out of order")
