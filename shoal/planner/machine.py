"""Machine: a cluster as the arithmetic sees it, with every name looked up: equal nodes of equal devices."""

from dataclasses import dataclass

from shoal.core.errors import ConfigError
from shoal.planner.catalog import read_device, read_link
from shoal.planner.time.nearby import Nearby
from shoal.spec.cluster import Cluster, Node
from shoal.spec.device import Device, Link

_IN_PLACE_PASSES = 4.5
"""Of n bytes each of two workers adds up half, reading n and writing n: four passes, which took as long as 3.5 to 5.4
of an update in place (`shoal probe` on 2 cores of a 2.8 GHz Xeon, idle and busy, 2026-11)."""
_COPIED_PASSES = 26.0
"""To scatter and gather n bytes by way of slots, with FSDP2's own copies into memory that is new (measured there)."""
_MEMORY_LATENCY_S = 20e-6
"""Half of what the smallest sum of two workers takes: 4 us on idle cores, 47 us on busy ones (measured there)."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Nodes that are alike, with what joins their devices and what joins the nodes."""

    device: Device
    nodes: int = 1
    per_node: int = 1
    """How many workers a node takes."""
    shared: bool = False
    """Whether the workers of a node share one device's rates: those on a processor do."""
    inside: Link
    between: Link
    in_place: Link | None = None
    """What sums in shared memory take between workers on a node's processor; None: they meet over `inside`."""
    copied: Link | None = None
    """The same for what is copied through it."""
    adapters: int = 1
    """Network adapters of a node, each a `between`; its workers share them."""
    nearby: Nearby | None = None
    """What a calibration measured on it beside the rates (see calibrate.py)."""

    @property
    def workers(self) -> int:
        """How many workers there can be."""
        return self.nodes * self.per_node


def machine_of(cluster: Cluster, *, per_node: int | None = None) -> Machine:
    """Return the machine that `cluster` is; where devices differ, all count as the slowest of them."""
    devices = {node.device: find_device(cluster, node) for node in cluster.nodes}
    slowest = min(devices.values(), key=lambda device: device.bf16_matmul_flops_per_s)
    gpus = {node.devices for node in cluster.nodes}
    workers = per_node or max(1, min(gpus))
    inside = cluster.inside or read_link(slowest.link or "loopback")
    nodes = sum(node.count for node in cluster.nodes)
    if cluster.between is None and nodes > 1:
        raise ConfigError(f"the cluster has {nodes} nodes and no [between]: say which link joins them.")
    shared = gpus == {0}
    return Machine(
        device=slowest,
        nodes=nodes,
        per_node=workers,
        shared=shared,
        inside=inside,
        between=cluster.between or inside,
        in_place=(cluster.in_place or through_memory(slowest, _IN_PLACE_PASSES)) if shared else None,
        copied=(cluster.copied or through_memory(slowest, _COPIED_PASSES)) if shared else None,
        adapters=cluster.adapters,
    )


def through_memory(device: Device, passes: float) -> Link:
    """Return the link between two workers who together move `passes` times as many bytes as they sum.

    For processors where nobody has measured it: what sums in shared memory take is what memory takes.
    """
    return Link(
        source=f"{passes:g} passes over the memory of {device.title or device.source}",
        bytes_per_s=(device.update_bytes_per_s or device.memory_bytes_per_s) / passes,
        latency_s=_MEMORY_LATENCY_S,
        overlaps=False,
    )


def find_device(cluster: Cluster, node: Node) -> Device:
    """Return the device of `node`: as measured in `cluster`, else as the catalog has it."""
    return cluster.devices.get(node.device) or read_device(node.device)
