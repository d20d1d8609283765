"""`shoal probe --slurm`: the cluster as Slurm describes it, for the planner; nothing is measured."""

import argparse
import dataclasses
from collections.abc import Sequence

from shoal.cli import flags
from shoal.core.errors import ConfigError
from shoal.launch.slurm.nodes import NodeKind, read_nodes
from shoal.planner.catalog import read_device, read_link
from shoal.spec.cluster import Cluster, Node

PROCESSOR, LINK = "cpu-host", "ethernet-10"
"""The entries of the catalog for what Slurm does not know: how fast processors are, and the network."""


def add_slurm_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    group = parser.add_argument_group("of a cluster, from its login node")
    group.add_argument("--slurm", action="store_true", help="describe the nodes that Slurm has; measure nothing")
    group.add_argument("--partition", metavar="P", help="only those of this partition")
    group.add_argument("--device", metavar="D", help="which device of the catalog they have (default: as Slurm says)")
    group.add_argument("--link", metavar="L", help="between nodes: a link of the catalog, or a rate such as 100Gbps")


def describe(arguments: argparse.Namespace) -> tuple[Cluster, list[str]]:
    """Return the cluster, and a sentence for each thing that was guessed."""
    kinds = read_nodes(arguments.partition)
    return build(kinds, device=arguments.device, link=arguments.link)


def build(
    kinds: Sequence[NodeKind], *, device: str | None = None, link: str | None = None
) -> tuple[Cluster, list[str]]:
    """Return the cluster of nodes of these `kinds`, and a sentence for each thing that was guessed."""
    remarks = []
    nodes = []
    for kind in kinds:
        name, remark = _device(kind, device)
        remarks += [remark] if remark and remark not in remarks else []
        nodes.append(
            Node(
                host=kind.host,
                cores=kind.cores,
                memory_bytes=kind.memory_bytes,
                device=name,
                devices=kind.gpus,
                count=kind.count,
            )
        )
    between = None
    if sum(node.count for node in nodes) > 1:
        between = flags.link("--link", link) if link else dataclasses.replace(read_link(LINK), guessed=True)
        if not link:
            remarks.append(
                f"Slurm does not say what joins the nodes: predictions take {LINK}, and runs measure it. "
                "Say it with shoal probe --slurm --link ib-ndr."
            )
    return Cluster(nodes=tuple(nodes), between=between), remarks


def _device(kind: NodeKind, asked: str | None) -> tuple[str, str]:
    """Return the name of a node's device, and what was guessed."""
    if asked is not None:
        read_device(asked)
        return asked, ""
    if not kind.gpus:
        return PROCESSOR, f"Slurm does not say how fast processors are: {PROCESSOR} is taken. shoal probe measures one."
    if not kind.gpu:
        raise ConfigError(f"Slurm does not say which GPUs {kind.host} has. Say it with --device H100.")
    try:
        read_device(kind.gpu)
    except ConfigError as error:
        raise ConfigError(f"{kind.host} has GPUs that Slurm calls {kind.gpu!r}: {error} Give it as --device.") from None
    return kind.gpu, ""
