"""The nodes of a cluster, as Slurm describes them: read from sinfo."""

import re
from collections import Counter
from dataclasses import dataclass

from shoal.core.errors import SlurmError
from shoal.launch.slurm.commands import call

FORMAT = "%N|%c|%m|%G"
"""Of sinfo: the node, its cores, its memory in MiB, its generic resources."""


@dataclass(frozen=True)
class NodeKind:
    """Nodes that are alike."""

    host: str
    """The first of them."""
    cores: int
    memory_bytes: int
    gpu: str
    """What Slurm calls the type of its GPUs; empty where it has none, or none with a type."""
    gpus: int
    count: int


def read_nodes(partition: str | None = None) -> list[NodeKind]:
    """Return the nodes of the cluster, or of one partition, that can be used."""
    usable = "--states=idle,alloc,mix,comp,resv,plnd,power_down,powered_down,powering_up"
    options = [
        "--noheader",
        "--Node",
        usable,
        f"--format={FORMAT}",
        *([f"--partition={partition}"] if partition else []),
    ]
    kinds = parse_nodes(call(["sinfo", *options]))
    if not kinds:
        where = f"the partition {partition!r}" if partition else "the cluster"
        raise SlurmError(f"sinfo shows no node of {where} that can be used. See: sinfo")
    return kinds


def parse_nodes(text: str) -> list[NodeKind]:
    """Return the kinds of nodes in what sinfo printed by `FORMAT`, those of which there are most first.

    Example: two lines "g1|64+|515000|gpu:a100:4(S:0-1)" and "g2|64|515000|gpu:a100:4" are one kind, with 4 GPUs.
    """
    seen: dict[str, tuple[int, int, str, int]] = {}
    for line in text.splitlines():
        if line.count("|") == 3:
            host, cores, memory, resources = line.strip().split("|")
            gpu, gpus = _gpus(resources)
            seen[host] = (
                int(cores.rstrip("+")),
                int(memory.rstrip("+")) * 2**20,
                gpu,
                gpus,
            )  # once, in two partitions too
    kinds = Counter(seen.values())
    first = {kind: host for host, kind in reversed(seen.items())}
    return [NodeKind(first[kind], *kind, count=count) for kind, count in kinds.most_common()]


def _gpus(resources: str) -> tuple[str, int]:
    """Return type and number of the GPUs in a list like "gpu:a100:4(S:0-1),tmp:900G", or "gpu:2"."""
    found = re.findall(r"(?:^|,)gpu:(?:([^,:()]+):)?(\d+)", resources)
    if not found:
        return "", 0
    return found[0][0], sum(int(count) for _, count in found)
