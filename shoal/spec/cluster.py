"""Cluster: what to train on."""

from dataclasses import dataclass, field

from shoal.core.errors import ConfigError
from shoal.spec.device import Device, Link


@dataclass(frozen=True, kw_only=True)
class Node:
    """One host, or several that are alike."""

    host: str
    cores: int
    memory_bytes: int
    device: str
    """The name of its devices: of the processor where workers run on it, of the GPU where it has some."""
    devices: int = 0
    """How many GPUs it has."""
    count: int = 1
    """How many such hosts there are."""

    def __post_init__(self) -> None:
        if self.count < 1 or self.devices < 0:
            raise ConfigError(f"node {self.host!r}: count={self.count}, devices={self.devices} makes no node.")


@dataclass(frozen=True, kw_only=True)
class Storage:
    """A place that files are read from."""

    path: str
    read_bytes_per_s: float
    free_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The nodes a run has, and what was measured on them."""

    nodes: tuple[Node, ...]
    devices: dict[str, Device] = field(default_factory=dict)
    """Measured devices by the name that nodes give; a name that is not here is looked up in the catalog."""
    inside: Link | None = None
    """Between two devices of one node."""
    in_place: Link | None = None
    """Between two workers on a node's processor that sum gradients in its shared memory, in place."""
    copied: Link | None = None
    """The same for what is copied into that memory and out of it, as the shards of ZeRO are."""
    between: Link | None = None
    """Between two nodes: one network adapter."""
    adapters: int = 1
    """How many network adapters a node has; its devices share them."""
    storage: tuple[Storage, ...] = ()

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ConfigError("a cluster has at least one node.")
        if self.adapters < 1:
            raise ConfigError(f"adapters={self.adapters}: a node has at least one network adapter.")
