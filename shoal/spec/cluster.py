"""Cluster: what to train on."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Node:
    """One host."""

    host: str
    cores: int
    memory_bytes: int
    device: str
    """The name of its devices: of the processor where workers run on it, of the GPU where it has some."""
    devices: int = 0
    """How many GPUs it has."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The nodes a run has."""

    nodes: tuple[Node, ...]
