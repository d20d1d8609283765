"""Unequal nodes: how a plan's batch is shared out among replicas on devices of different speed.

Workers are numbered node by node, in the cluster's order; a replica is as fast as its slowest device. The stages of a
pipeline hand whole micro-batches on at one pace, so only replicas that are no pipeline take unequal shares.
"""

import dataclasses

from shoal.planner.machine import Machine, find_device
from shoal.planner.search.shares import Shared, share_batch
from shoal.planner.time.steptime import StepTime, step_time
from shoal.spec.cluster import Cluster
from shoal.spec.device import Device
from shoal.spec.plan import Batch, Plan
from shoal.spec.profile import Profile


def is_uneven(cluster: Cluster) -> bool:
    """Return whether the devices of the nodes differ."""
    return len({node.device for node in cluster.nodes}) > 1


def share_out(
    plan: Plan, profile: Profile, cluster: Cluster, machine: Machine, *, batch_size: int
) -> tuple[Plan, Shared] | None:
    """Return the plan with shares under which all its replicas are done together; None where it has none to give."""
    if plan.mesh.data == 1 or plan.mesh.pipeline > 1 or not is_uneven(cluster):
        return None
    devices = _devices_of_replicas(plan, cluster, machine)
    if len(set(devices)) == 1:
        return None
    rates = {device: _samples_per_s(plan, profile, machine, device, batch_size) for device in set(devices)}
    shared = share_batch(batch_size, rates=[rates[device] for device in devices])
    batch = Batch(micro_batch=plan.batch.micro_batch, shares=shared.shares)
    return dataclasses.replace(plan, batch=batch), shared


def with_shares(time: StepTime, shared: Shared) -> StepTime:
    """Return the step time of equal parts on the slowest devices, with what unequal parts gain."""
    return dataclasses.replace(time, compute_s=time.compute_s / shared.gain, tensor_s=time.tensor_s / shared.gain)


def _devices_of_replicas(plan: Plan, cluster: Cluster, machine: Machine) -> list[Device]:
    """Return the slowest device of each replica."""
    each_node = [find_device(cluster, node) for node in cluster.nodes for _ in range(node.count)]
    workers = [device for device in each_node for _ in range(machine.per_node)]
    width = plan.mesh.tensor
    groups = [workers[first : first + width] for first in range(0, plan.mesh.data * width, width)]
    return [min(group, key=lambda device: device.bf16_matmul_flops_per_s) for group in groups]


def _samples_per_s(plan: Plan, profile: Profile, machine: Machine, device: Device, batch_size: int) -> float:
    there = dataclasses.replace(machine, device=device)
    time = step_time(profile, plan, there, batch_size=batch_size)
    return batch_size / plan.mesh.data / (time.compute_s + time.tensor_s)
