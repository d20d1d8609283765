"""The nodes of a cluster, as Slurm describes them: read from sinfo."""

import re
from collections import Counter
from dataclasses import dataclass

from shoal.core.errors import SlurmError
from shoal.launch.slurm.commands import call

FORMAT = "%N|%c|%m|%G|%P"
"""Of sinfo: the node, its cores, its memory in MiB, its generic resources, and a partition; * marks the default one."""
_USABLE = "--states=idle,alloc,mix,comp,resv,plnd,power_down,powered_down,powering_up"


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


def nodes_for(partition: str | None, *, is_any: bool = False) -> list[NodeKind]:
    """Return the nodes that a job may get which asks for `partition`, or, with None, for no partition.

    `is_any`: also those that cannot be used now.
    """
    options = [*_asked(partition), *([] if is_any else [_USABLE])]
    return _known(parse_nodes(call(["sinfo", *options]), is_default=partition is None), partition)


def read_nodes(partition: str | None = None) -> list[NodeKind]:
    """Return the nodes of the cluster, or of one partition, that can be used."""
    return _known(parse_nodes(call(["sinfo", *_asked(partition), _USABLE])), partition)


def _asked(partition: str | None) -> list[str]:
    return ["--noheader", "--Node", f"--format={FORMAT}", *([f"--partition={partition}"] if partition else [])]


def _known(kinds: list[NodeKind], partition: str | None) -> list[NodeKind]:
    if not kinds:
        where = f"the partition {partition!r}" if partition else "the cluster"
        raise SlurmError(f"sinfo shows no node of {where} that can be used. See: sinfo")
    return kinds


def parse_nodes(text: str, *, is_default: bool = False) -> list[NodeKind]:
    """Return the kinds of nodes in what sinfo printed by `FORMAT`, those of which there are most first.

    `is_default`: of the default partition alone, where there is one. Example: two lines
    "g1|64+|515000|gpu:a100:4(S:0-1)|gpu*" and "g2|64|515000|gpu:a100:4|gpu*" are one kind, with 4 GPUs.
    """
    seen: dict[str, tuple[int, int, str, int]] = {}
    rows = [line.strip().split("|") for line in text.splitlines() if line.count("|") == 4]
    is_marked = is_default and any(row[-1].endswith("*") for row in rows)
    for host, cores, memory, resources, partition in rows:
        if partition.endswith("*") or not is_marked:
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
