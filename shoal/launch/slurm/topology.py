"""How the workers of a mesh are placed on the nodes of an allocation: a pure function.

1. Workers are numbered tensor first, then shard, replicate and pipeline (comm/mesh.py), and Slurm fills one node after
   the other with them (--distribution=block). So the members of a tensor group sit on one node where their number
   divides that of a node's workers; with 8 workers a node and tensor=4, workers 0 to 3 and 4 to 7 do.
2. Where they do not, every layer waits for the network: that is said, with what to ask for instead.
3. Where several nodes are needed and Slurm knows the switches, as few of these as can hold them are asked for
   (--switches), for `WAIT_MINUTES`: then any will do.

Example: tensor=2, pipeline=4 on 4 nodes of 2 workers under switches of 16 nodes each. Each stage is one node, and all
four are under one switch: --distribution=block --switches=1@10.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.core.errors import SlurmError
from shoal.launch.slurm.commands import call
from shoal.spec.plan import Mesh

WAIT_MINUTES = 10
"""Longer in the queue costs more than another switch between nodes does, in most runs."""
_MOST_HOSTS = 100_000


@dataclass(frozen=True)
class Switch:
    """A switch that nodes are connected to, or other switches."""

    name: str
    level: int
    """0: nodes are connected to it."""
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Placement:
    """What is asked of Slurm so that neighbours in the mesh are neighbours in the machine."""

    distribution: str
    switches: str | None
    warning: str


def place(mesh: Mesh, *, nodes: int, per_node: int, switches: Sequence[Switch] = ()) -> Placement:
    """Return how the workers of `mesh` are placed on `nodes` nodes with `per_node` of them each."""
    needed = switches_needed(nodes, switches)
    asked = f"{needed}@{WAIT_MINUTES}" if needed is not None and nodes > 1 else None
    warnings = []
    if nodes > 1 and per_node % mesh.tensor != 0:
        fitting = [n for n in range(1, per_node + 1) if per_node % n == 0]
        warnings.append(
            f"The groups of tensor={mesh.tensor} do not fit whole on nodes with {per_node} workers: each layer waits "
            f"for the network. Use tensor={' or '.join(map(str, fitting))}, or --per-node {mesh.tensor}."
        )
    if needed is not None and needed > 1 and mesh.pipeline > 1:
        warnings.append(
            f"{nodes} nodes lie under {needed} switches at least: some pipeline stages are neighbours across."
        )
    return Placement("block", asked, " ".join(warnings))


def switches_needed(nodes: int, switches: Sequence[Switch]) -> int | None:
    """Return the fewest switches that hold so many nodes; None where the switches are not known, or hold too few."""
    sizes = sorted((len(switch.nodes) for switch in switches if switch.level == 0), reverse=True)
    held = list(itertools.accumulate(sizes))
    return next((count + 1 for count, total in enumerate(held) if total >= nodes), None)


def read_switches() -> tuple[Switch, ...]:
    """Return the switches that Slurm knows of; none where its topology is flat."""
    try:
        said = call(["scontrol", "show", "topology"])
    except SlurmError:
        return ()
    return parse_switches(said)


def parse_switches(text: str) -> tuple[Switch, ...]:
    """Return the switches of what `scontrol show topology` prints."""
    found = []
    for line in text.splitlines():
        fields = dict(item.split("=", 1) for item in line.split() if "=" in item)
        if fields.keys() >= {"SwitchName", "Level", "Nodes"}:
            found.append(Switch(fields["SwitchName"], int(fields["Level"]), tuple(hosts(fields["Nodes"]))))
    return tuple(found)


def hosts(text: str) -> list[str]:
    """Return the hosts of a list as Slurm writes it: "gpu[03-05,09]-a,login1" -> gpu03-a, gpu04-a, ..."""
    items = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text)  # up to commas outside of brackets
    return list(itertools.islice((host for item in items for host in _expanded(item)), _MOST_HOSTS))


def _expanded(item: str) -> Iterator[str]:
    match = re.match(r"([^\[]*)\[([^\]]*)\](.*)", item)
    if match is None:
        yield item
        return
    for part in match[2].split(","):
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        for number, rest in itertools.product(numbers, list(_expanded(match[3]))):
            yield f"{match[1]}{number:0{len(first)}d}{rest}"
