"""Faults, each planted at the input of its check: what it must say, and which remedy."""

from collections.abc import Callable
from pathlib import Path

from shoal.doctor import clock, environment, host, limits, network, packages, shared_memory, storage
from shoal.doctor.finding import PROBLEM, WARNING, Finding
from shoal.doctor.requirements import Requirement

NO_LIMIT = -1
PLENTY = {"n": 65536, "u": 65536, "l": NO_LIMIT, "v": NO_LIMIT, "f": NO_LIMIT}


def needs(package: str, least: str = "", extra: str = "") -> Requirement:
    return Requirement(package, least, extra)


PLANTED: dict[str, tuple[Callable[[], list[Finding]], str, str, str]] = {
    "an old Python": (lambda: packages.check_python((3, 10, 2)), PROBLEM, "3.10.2 is older than 3.11", "-m venv"),
    "a package that is missing": (
        lambda: packages.check_packages([needs("numpy", "2.0"), needs("no-such-thing", "1.0")]),
        PROBLEM,
        "no-such-thing: missing",
        "pip install 'no-such-thing>=1.0'",
    ),
    "a package that is too old": (
        lambda: packages.check_packages([needs("numpy", "99.0")]),
        PROBLEM,
        "(99.0 or newer is needed)",
        "pip install 'numpy>=99.0'",
    ),
    "a shoal that is not installed": (lambda: packages.check_packages([]), WARNING, "not installed", "pip install ."),
    "the shared memory of a container": (
        lambda: shared_memory.check_shared_memory(size_bytes=64 << 20),
        WARNING,
        "has 67.1 MB, as in a container",
        "--shm-size=8g",
    ),
    "little shared memory": (
        lambda: shared_memory.check_shared_memory(size_bytes=500 << 20),
        WARNING,
        "only 524 MB",
        "remount,size=50%",
    ),
    "no shared memory": (
        lambda: shared_memory.check_shared_memory(Path("/no/such/folder")),
        WARNING,
        "there is no /no/such/folder",
        "mount -t tmpfs",
    ),
    "shared memory that cannot be written to": (
        lambda: shared_memory.check_shared_memory(Path("/proc")),
        WARNING,
        "/proc cannot be written to",
        "mount -t tmpfs",
    ),
    "a host name without an address": (
        lambda: network.check_host_name("no-such-host.invalid", env={}),
        WARNING,
        "no-such-host.invalid has no address",
        "no-such-host.invalid",
    ),
    "the same in a job of two nodes": (
        lambda: network.check_host_name("no-such-host.invalid", env={"SLURM_JOB_NUM_NODES": "2"}),
        PROBLEM,
        "runs of several machines fail",
        "no-such-host.invalid",
    ),
    "a host name that is loopback, in a job of two nodes": (
        lambda: network.check_host_name("127.0.1.1", env={"SLURM_JOB_NUM_NODES": "2"}),
        PROBLEM,
        "127.0.1.1, which other machines cannot reach",
        "127.0.1.1",
    ),
    "a host name that is another host's": (
        lambda: network.check_host_name("203.0.113.7", env={}),
        WARNING,
        "no address of this host",
        "/etc/hosts",
    ),
    "no loopback": (lambda: network.check_ports("203.0.113.7"), PROBLEM, "no connection", "ip link set lo up"),
    "an interface that is not there": (
        lambda: network.check_interfaces({"GLOO_SOCKET_IFNAME": "eth77"}),
        PROBLEM,
        "GLOO_SOCKET_IFNAME=eth77: there is no interface eth77",
        "unset GLOO_SOCKET_IFNAME",
    ),
    "few open files": (
        lambda: limits.check_limits(PLENTY | {"n": 256}, has_infiniband=False),
        WARNING,
        "256 files open",
        "ulimit -n",
    ),
    "too few open files": (
        lambda: limits.check_limits(PLENTY | {"n": 64}, has_infiniband=False),
        PROBLEM,
        "64 files open",
        "ulimit -n",
    ),
    "few processes": (
        lambda: limits.check_limits(PLENTY | {"u": 100}, has_infiniband=False),
        WARNING,
        "100 processes",
        "ulimit -u",
    ),
    "few addresses": (
        lambda: limits.check_limits(PLENTY | {"v": 10**10}, has_infiniband=False),
        WARNING,
        "10 GB",
        "ulimit -v",
    ),
    "small files": (
        lambda: limits.check_limits(PLENTY | {"f": 10**9}, has_infiniband=False),
        WARNING,
        "a checkpoint that is larger",
        "ulimit -f",
    ),
    "InfiniBand without memory to lock": (
        lambda: limits.check_limits(PLENTY | {"l": 65536}, has_infiniband=True),
        WARNING,
        "65.5 kB of memory may be locked",
        "LimitMEMLOCK",
    ),
    "a quota below the cores": (
        lambda: host.check_cores({}, usable=64, quota=2.0),
        WARNING,
        "64 cores are seen, but the control group allows the time of 2",
        "OMP_NUM_THREADS=2",
    ),
    "more threads than cores": (
        lambda: host.check_cores({"OMP_NUM_THREADS": "64"}, usable=2, quota=99.0),
        WARNING,
        "OMP_NUM_THREADS=64, and 2 cores",
        "unset OMP_NUM_THREADS",
    ),
    "one thread on many cores": (
        lambda: host.check_cores({"OMP_NUM_THREADS": "1"}, usable=8, quota=99.0),
        WARNING,
        "computes on one",
        "unset OMP_NUM_THREADS",
    ),
    "little memory": (
        lambda: host.check_memory(available_bytes=500 << 20, limit_bytes=1 << 60),
        WARNING,
        "524 MB available",
        "top",
    ),
    "a small control group": (
        lambda: host.check_memory(total_bytes=64 << 30, available_bytes=60 << 30, limit_bytes=512 << 20),
        WARNING,
        "the control group allows 537 MB",
        "top",
    ),
    "a clock of 1970": (lambda: clock.check_clock(1000.0), PROBLEM, "1970-01-01", "chronyc"),
    "storage with another time": (
        lambda: clock.check_storage_clock(Path(), offset_s=-95.0),
        WARNING,
        "behind this host's clock",
        "file server",
    ),
    "a variable that slows runs down": (
        lambda: environment.check_variables({"NCCL_P2P_DISABLE": "1"}),
        WARNING,
        "NCCL_P2P_DISABLE=1",
        "unset NCCL_P2P_DISABLE",
    ),
    "a rank by accident": (
        lambda: environment.check_variables({"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "29500"}),
        PROBLEM,
        "takes itself for worker 0 of 4, and waits for the others",
        "unset RANK WORLD_SIZE MASTER_PORT",
    ),
    "half a rank": (
        lambda: environment.check_variables({"RANK": "0", "WORLD_SIZE": "4"}),
        PROBLEM,
        "MASTER_PORT is not set",
        "unset RANK WORLD_SIZE",
    ),
    "an address left over": (
        lambda: environment.check_variables({"MASTER_ADDR": "node7"}),
        WARNING,
        "MASTER_ADDR=node7",
        "unset MASTER_ADDR",
    ),
    "GPUs that are hidden": (
        lambda: environment.check_variables({"CUDA_VISIBLE_DEVICES": ""}),
        WARNING,
        "hides all GPUs",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "faults on purpose": (
        lambda: environment.check_variables({"SHOAL_FAULTS": "fail:1"}),
        WARNING,
        "faults are made on purpose",
        "unset SHOAL_FAULTS",
    ),
    "a full disk": (
        lambda: storage.check_runs(Path(), free_bytes=1 << 20),
        PROBLEM,
        "has 1.05 MB free",
        "--runs DIR",
    ),
    "little disk": (lambda: storage.check_runs(Path(), free_bytes=1 << 30), WARNING, "little for", "--runs DIR"),
    "runs where nothing can be written": (
        lambda: storage.check_runs(Path("/proc/runs")),
        PROBLEM,
        "/proc, where run folders go",
        "--runs DIR",
    ),
    "no place for temporary files": (
        lambda: storage.check_temporary(Path("/proc")),
        PROBLEM,
        "none can be written",
        "TMPDIR",
    ),
}
