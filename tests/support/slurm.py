"""A real Slurm on this machine: munge, a controller and some nodes, each a process of this one.

    with slurm_cluster(nodes=4, cpus=2) as cluster:
        subprocess.run(["sbatch", "job.sh"], env={**os.environ, **cluster.env})
        cluster.kill_node("node2")

Everything lies in a folder of its own and listens on loopback only, on ports that were free, so that several test runs
can have theirs at once. All daemons and all that jobs have started are ended when the block ends; what a killed run has
left, the next one ends.

Partition `low` is the default, and makes way for `high`: USR1 at once to a job that has asked for notice, and TERM
after 10 s, then KILL. A job that is requeued waits 7 s.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.core.host import memory_bytes
from tests.support.needs import why_no
from tests.support.waiting import wait_until

_PACKAGES = ("slurm-wlm", "munge")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
_TIMEOUT_S = 60.0
_USABLE = {"idle", "mixed", "allocated", "completing"}
_CONF = """\
ClusterName=test
SlurmUser={user}
SlurmdUser={user}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthInfo=socket={state}/munge.socket,cred_expire=6
StateSaveLocation={state}/controller
SlurmdSpoolDir={state}/spool.%n
SlurmctldPidFile={state}/slurmctld.pid
SlurmdPidFile={state}/%n.pid
SlurmctldLogFile={state}/log/slurmctld.log
SlurmdLogFile={state}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
PropagateResourceLimits=NONE
JobCompType=jobcomp/none
MinJobAge=3600
SlurmdTimeout=10
KillWait=5
ReturnToService=2
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
NodeName=node[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs={cpus} RealMemory={memory}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=10
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
{extra}
"""
# cred_expire=6: a requeued job waits 7 s instead of 121 s; 2 is ignored in silence. config_overrides: a node has as
# many CPUs as it says, although the machine may have fewer.


def why_not() -> str | None:
    """Return why this machine cannot have a Slurm, or None; its packages are installed where that can be done."""
    return "a Slurm for tests needs root" if os.geteuid() != 0 else why_no(_PROGRAMS, _PACKAGES)


@contextmanager
def slurm_cluster(*, nodes: int = 4, cpus: int = 2, topology: str = "") -> Iterator["SlurmCluster"]:
    """Have a Slurm with nodes called node1, node2, ...; `topology` is its topology.conf, if it has switches."""
    _end_what_is_left()
    state = Path(tempfile.mkdtemp(prefix=f"slurm-{os.getpid()}-"))
    state.chmod(0o755)  # munged wants its socket where everybody can reach it
    cluster = SlurmCluster(state, nodes=nodes, cpus=cpus, topology=topology)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(state, ignore_errors=True)


def sbatch_that_kills(folder: Path) -> Path:
    """Return a folder for PATH whose sbatch submits the job, and then kills whoever called it, before it has heard."""
    program = folder / "killing" / "sbatch"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\n{shutil.which("sbatch")} "$@" >/dev/null && kill -9 $PPID\n')
    program.chmod(0o755)
    return program.parent


class SlurmCluster:
    """The daemons of a Slurm whose files lie in `state`."""

    def __init__(self, state: Path, *, nodes: int, cpus: int, topology: str = "") -> None:
        self.state, self.cpus = state, cpus
        self.nodes = [f"node{index + 1}" for index in range(nodes)]
        self.env = {"SLURM_CONF": str(state / "slurm.conf")}
        """What a process needs in its environment to reach this Slurm."""
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        for folder in ("controller", "log"):
            (state / folder).mkdir()
        port = _free_ports(nodes + 1)
        text = _CONF.format(
            user="root",
            host=socket.gethostname().partition(".")[0],
            state=state,
            port=port,
            first=port + 1,
            last=port + nodes,
            nodes=nodes,
            cpus=cpus,
            memory=int(memory_bytes() / 2**20 * 0.9),
            extra="TopologyPlugin=topology/tree" if topology else "",
        )
        (state / "slurm.conf").write_text(text)
        (state / "topology.conf").write_text(topology)
        (state / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # read although no cgroups are used
        (state / "munge.key").write_bytes(os.urandom(1024))
        (state / "munge.key").chmod(0o600)

    def start(self) -> None:
        """Start whatever of it does not run, and return when every node is up."""
        socket_file, log = self.state / "munge.socket", self.state / "log" / "munged.log"
        files = [f"--key-file={self.state / 'munge.key'}", f"--socket={socket_file}", f"--log-file={log}"]
        files += [f"--pid-file={self.state / 'munged.pid'}", f"--seed-file={self.state / 'munge.seed'}"]
        self._start("munged", ["munged", "--foreground", *files])
        wait_until(lambda: self._can("munge", "-n", "-S", str(socket_file)))
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        self.wait_for_nodes()

    def start_controller(self) -> None:
        """Start the controller, if it does not run, and return when it answers."""
        self._start("slurmctld", ["slurmctld", "-D"])
        wait_until(lambda: self._can("scontrol", "ping"))

    def kill_controller(self) -> None:
        """Kill the controller: no job learns of it, and Slurm's programs get no answer."""
        self._kill("slurmctld")

    def wait_for_note_of_jobs(self) -> None:
        """Return when the controller has noted its jobs as they are now: some seconds late.

        Started anew, it goes by its note: it starts what waited then a second time, and ends what it finds running.
        """
        mark, notes = uuid.uuid4().hex, self.state / "controller" / "job_state"
        for job in set(self.run("squeue", "-h", "-o", "%A").split()):
            self.run("scontrol", "update", f"JobId={job}", f"Comment={mark}")
        wait_until(lambda: notes.exists() and mark.encode() in notes.read_bytes())

    def start_node(self, node: str) -> None:
        """Start a node's daemon, if it does not run."""
        self._start(node, ["slurmd", "-D", "-N", node])

    def wait_for_nodes(self, *nodes: str) -> None:
        """Return when the controller holds these nodes, or all of them, for usable."""
        asked = ["sinfo", "-h", "-N", "-p", "low", "-o", "%T", "-n", ",".join(nodes or self.nodes)]

        def are_up() -> bool:
            said = self._ask(*asked).split()
            return len(said) == len(nodes or self.nodes) and set(said) <= _USABLE

        wait_until(are_up, seconds=_TIMEOUT_S)

    def kill_node(self, node: str) -> None:
        """Kill a node as a power cut does, with all that runs there; the controller is told, and so knows at once."""
        steps = _steps(self.state / "log" / f"slurmd.{node}.log")
        self._kill(node)
        _kill_all(steps)
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=killed")

    def revive_node(self, node: str) -> None:
        """Bring a killed node back, and return when it can be used."""
        self.start_node(node)
        # Refused where its daemon was quicker to come back: Slurm then takes the node by itself (ReturnToService).
        self._ask("scontrol", "update", f"NodeName={node}", "State=RESUME")
        self.wait_for_nodes(node)

    def run(self, *command: str) -> str:
        """Run one of Slurm's programs and return what it printed."""
        env = {**os.environ, **self.env}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def clear(self) -> None:
        """End all jobs, and return when they have left their nodes."""
        self._ask("scancel", "--user=root")
        self._ask("scancel", "--user=root", "--signal=KILL", "--full")
        wait_until(lambda: not self._ask("squeue", "-h").split(), seconds=_TIMEOUT_S)

    def end(self) -> None:
        """End all jobs and all daemons."""
        if "slurmctld" in self._daemons:
            with suppress(AssertionError, subprocess.TimeoutExpired):
                self.clear()
        steps = _steps(self.state / "log")
        for name in [*self.nodes, "slurmctld", "munged"]:
            self._kill(name)
        _kill_all(steps)

    def _start(self, name: str, command: Sequence[str]) -> None:
        if name in self._daemons and self._daemons[name].poll() is None:
            return
        # If this process is killed, the kernel ends the daemon.
        with (self.state / "log" / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _kill(self, name: str) -> None:
        daemon = self._daemons.pop(name, None)
        if daemon is not None:
            daemon.kill()
            daemon.wait(_TIMEOUT_S)

    def _ask(self, *command: str) -> str:
        """Return what one of Slurm's programs printed, also where it failed."""
        env = {**os.environ, **self.env}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        return done.stdout

    def _can(self, *command: str) -> bool:
        env = {**os.environ, **self.env}
        with suppress(subprocess.TimeoutExpired):
            return subprocess.run(command, env=env, capture_output=True, timeout=2, check=False).returncode == 0
        return False


def _end_what_is_left() -> None:
    """End the jobs of processes that are no more: their daemons have ended with them, not what these had started."""
    for state in Path(tempfile.gettempdir()).glob("slurm-*-*"):
        owner = state.name.split("-")[1]
        if owner.isdigit() and not Path("/proc", owner).exists():
            _kill_all(_steps(state / "log"))
            shutil.rmtree(state, ignore_errors=True)


def _steps(log: Path) -> list[int]:
    """Return the processes of job steps: those that watch them hold `log`, or a file in it, and outlive a node."""
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit() and (process / "comm").read_text().startswith("slurmstepd"):
                files = [file.readlink() for file in (process / "fd").iterdir()]
                found += _tree(int(process.name)) if any(file == log or log in file.parents for file in files) else []
    return found


def _kill_all(processes: Sequence[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _tree(process: int) -> list[int]:
    """Return a process and all that it has started."""
    found = [process]
    with suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _tree(int(child))
    return found


def _free_ports(count: int) -> int:
    """Return the first of `count` ports in a row that nobody listens on."""
    for attempt in range(200):
        first = 33000 + (os.getpid() * 37 + attempt * 211) % 25000
        with suppress(OSError):
            opened = []
            try:
                for port in range(first, first + count):
                    opened.append(socket.create_server(("127.0.0.1", port)))
                return first
            finally:
                for one in opened:
                    one.close()
    raise AssertionError(f"no {count} free ports in a row")
