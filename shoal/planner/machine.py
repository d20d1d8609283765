"""Machine: a cluster as the arithmetic sees it, with every name looked up: equal nodes of equal devices."""

from dataclasses import dataclass

from shoal.core.errors import ConfigError
from shoal.planner.catalog import read_device, read_link
from shoal.planner.time.nearby import Nearby
from shoal.spec.cluster import Cluster, Node
from shoal.spec.device import Device, Link


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
    return Machine(
        device=slowest,
        nodes=nodes,
        per_node=workers,
        shared=gpus == {0},
        inside=inside,
        between=cluster.between or inside,
        adapters=cluster.adapters,
    )


def find_device(cluster: Cluster, node: Node) -> Device:
    """Return the device of `node`: as measured in `cluster`, else as the catalog has it."""
    return cluster.devices.get(node.device) or read_device(node.device)
