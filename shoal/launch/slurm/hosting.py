"""What runs on each node of a job: it starts the node's workers, watches them, and replaces those that are lost.

1. srun has started one such process a node (conducting.py), in the order in which nodes have workers: process P has the
   workers P * G ... P * G + G - 1, if each node has G.
2. It launches them as on a machine of one's own (launch/local.py), forked from a nursery that has imported torch. They
   meet those of other nodes in the store that whoever leads the job hosts.
3. A worker that is killed is replaced here, and the others go on meanwhile. Where a whole node is gone, so is this, and
   the workers of the other nodes go on without it, if these hold the whole model.
4. When one fails by itself, the others everywhere are ended. The exit code is that of the first that has ended
   otherwise than in order.
"""

import os
import sys
from collections.abc import Mapping, Sequence

from shoal.core.errors import ConfigError, Stopped
from shoal.core.run_folder import RunFolder
from shoal.launch.local import Watch, Worker, launch_part
from shoal.launch.nursery import Nursery, can_fork
from shoal.launch.part import Part
from shoal.launch.starting import Spawning, Starting
from shoal.spec.plan import Plan


def code_command(folder: RunFolder) -> list[str]:
    """Return what runs a verb of shoal with the code of the run."""
    return [sys.executable, "-m", "shoal.launch.slurm.code", str(folder.code)]


def host_workers(folder: RunFolder, plan: Plan, *, is_program: bool, env: Mapping[str, str] = os.environ) -> int:
    """Run this node's workers of the run in `folder` until they have ended, and return the exit code."""
    from shoal.comm.store import reach_store  # imports torch

    host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    ranks = ranks_of(plan.workers, env)
    store = reach_store(host, port, timeout_s=plan.timeout_s)
    watch = Watch(on_note=lambda line: print(line, flush=True), on_line=_print_line)
    part = Part(store, host, port, workers=plan.workers, ranks=ranks)
    on_loss = plan.on_loss if plan.goes_on and not is_program else None
    try:
        return exit_code_of(launch_part(_starting(folder), part, watch=watch, on_loss=on_loss))
    except Stopped as stopped:
        return stopped.exit_code


def ranks_of(workers: int, env: Mapping[str, str]) -> range:
    """Return the workers of this node, by srun's variables."""
    nodes, node = int(env["SLURM_STEP_NUM_TASKS"]), int(env["SLURM_PROCID"])
    if workers % nodes != 0:
        raise ConfigError(f"{workers} workers cannot be divided over {nodes} nodes. Use --nodes N --per-node G.")
    return range(node * workers // nodes, (node + 1) * workers // nodes)


def exit_code_of(workers: Sequence[Worker]) -> int:
    """Return the exit code of workers that have ended: 0 where all have done what they had to."""
    codes = [worker.exit_code or 0 for worker in workers if not worker.is_done and not worker.is_ended_by_us]
    first = next((code for code in codes if code not in (0, Stopped("").exit_code)), max(codes, default=0))
    return first if first >= 0 else 128 - first


def _starting(folder: RunFolder) -> Starting:
    command, arguments = code_command(folder), ["worker", str(folder.path)]
    if can_fork():
        return Nursery(arguments, command=[*command, "nursery"])
    return Spawning([*command, *arguments, "--parent", str(os.getpid())])


def _print_line(rank: int, line: str) -> None:
    print(f"[worker {rank}] {line}", flush=True)
