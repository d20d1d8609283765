"""Which cluster to plan for: a file, flags, both (the flags change what the file says), or neither: this machine."""

import argparse
import dataclasses
from pathlib import Path

from shoal.cli import flags
from shoal.core.errors import ConfigError
from shoal.core.toml import read_toml
from shoal.planner.catalog import read_device
from shoal.spec.cluster import Cluster, Node

_HERE = Path("cluster.toml")
_PER_NODE = 8
"""GPUs of a node, unless said otherwise."""


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that say what to plan for."""
    group = parser.add_argument_group("what to train on (default: cluster.toml in this folder, else this machine)")
    group.add_argument("--cluster", type=Path, metavar="TOML", help="a cluster file, as `shoal probe` writes it")
    group.add_argument("--nodes", type=int, metavar="N", help="how many nodes")
    group.add_argument("--per-node", type=int, metavar="G", help="how many workers a node has (GPUs: 8 unless said)")
    group.add_argument("--device", metavar="D", help="a device of the catalog, such as H100 or A100-80")
    group.add_argument("--link", metavar="L", help="between nodes: a link of the catalog, or a rate such as 100Gbps")
    group.add_argument("--inside", metavar="L", help="inside a node (default: what joins such devices as a rule)")
    group.add_argument("--adapters", type=int, metavar="A", help="how many links a node has to the others (default: 1)")


def find_cluster(arguments: argparse.Namespace) -> Cluster | None:
    """Return the cluster that the flags name; None: this machine, to be measured."""
    for flag in ("nodes", "per_node", "adapters"):
        if getattr(arguments, flag) is not None:
            flags.whole(f"--{flag.replace('_', '-')}", getattr(arguments, flag))
    if arguments.cluster is not None:
        cluster = read_toml(Cluster, arguments.cluster)
    elif arguments.device is not None:
        cluster = _from_device(arguments)
    elif _HERE.is_file():
        cluster = read_toml(Cluster, _HERE)
    elif arguments.nodes or arguments.link:
        raise ConfigError("--nodes and --link say nothing without a device. Add --device H100, or --cluster FILE.")
    else:
        return None
    return _changed(cluster, arguments)


def cluster_folder(arguments: argparse.Namespace) -> Path:
    """Return where the cluster's file lies, and its calibration beside it."""
    return arguments.cluster.parent if arguments.cluster is not None else Path()


def _from_device(arguments: argparse.Namespace) -> Cluster:
    device = read_device(arguments.device)
    is_processor = not device.memory_bytes  # of a processor, the memory is the host's, which the catalog cannot know
    node = Node(
        host="node",
        cores=arguments.per_node or 1,
        memory_bytes=0,
        device=arguments.device,
        devices=0 if is_processor else arguments.per_node or _PER_NODE,
        count=1,
    )
    return Cluster(nodes=(node,))


def _changed(cluster: Cluster, arguments: argparse.Namespace) -> Cluster:
    nodes = cluster.nodes
    if arguments.nodes is not None:
        if len(nodes) > 1:
            raise ConfigError(
                f"--nodes {arguments.nodes}: the cluster has {len(nodes)} kinds of nodes. "
                "Give each its count in the file."
            )
        nodes = (dataclasses.replace(nodes[0], count=arguments.nodes),)
    if arguments.device is not None:
        read_device(arguments.device)
        nodes = tuple(dataclasses.replace(node, device=arguments.device) for node in nodes)
    if arguments.per_node is not None:
        nodes = tuple(dataclasses.replace(node, devices=arguments.per_node) if node.devices else node for node in nodes)
    between = flags.link("--link", arguments.link) if arguments.link else cluster.between
    count = sum(node.count for node in nodes)
    if count > 1 and between is None:
        raise ConfigError(f"{count} nodes need --link: what joins them, such as ib-ndr or 100Gbps.")
    return dataclasses.replace(
        cluster,
        nodes=nodes,
        between=between,
        inside=flags.link("--inside", arguments.inside) if arguments.inside else cluster.inside,
        adapters=arguments.adapters or cluster.adapters,
    )
