"""What a checkpoint holds training up: the copy of what each worker saves. It is written while training goes on.

Workers share what is to be saved, parameters and the optimizer's state, and each copies its part into the host's memory
(fault/checkpoint/writer.py). Those on the processor of a node share its memory.

Example: 128 MB of state and 2 workers on a processor that copies 5 GB in a second: 2 x 64 MB take 26 ms.
"""

from shoal.planner.machine import Machine
from shoal.spec.plan import Plan
from shoal.spec.profile import Profile


def checkpoint_stall_s(profile: Profile, plan: Plan, machine: Machine) -> float:
    """Return the seconds that a checkpoint holds training up; 0 where nobody has measured how fast a device copies."""
    rate = machine.device.copy_from_bytes_per_s
    if not rate > 0:
        return 0.0
    own_bytes = (profile.parameter_bytes + profile.optimizer_bytes) / plan.workers
    at_once = min(machine.per_node, plan.workers) if machine.shared else 1
    return at_once * own_bytes / rate
