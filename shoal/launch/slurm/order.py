"""In which order the nodes of an allocation get the workers of a mesh, so that neighbours share a switch.

Slurm lists nodes by their names, and fills them with workers in that order; switches need not follow the names. Then
pipeline stages, and the rings in which gradients meet, go to and fro between switches. So:

1. Nodes under one switch follow each other; and so do the switches under one switch above, all the way up.
2. The first node stays the first: the job is led from there, and the workers meet there.
3. Of several switches, that one comes next with which a stage ends where the switch does; else the one with most nodes.
   A stage whose nodes are under two switches waits for the network above in each of its own collectives.

Example: nodes a1 to a6 in stages of two; a1, a3, a5 under s0, a2, a6 under s1, and a4 under s2. The order is
a1 a3 a5 a4 a2 a6: only the second stage, a5 and a4, is under two switches. By name, each of the three would be.
"""

import itertools
from collections.abc import Sequence

from shoal.launch.slurm.topology import Switch

_ALONE = ""


def neighbours_first(nodes: Sequence[str], switches: Sequence[Switch], *, stage_nodes: int = 1) -> list[str]:
    """Return `nodes` in the order in which they get workers; `stage_nodes` of them make a pipeline stage."""
    top = max((switch.level for switch in switches), default=-1)
    return _ordered(list(nodes), switches, top, offset=0, stage_nodes=max(1, stage_nodes))


def crossings(order: Sequence[str], switches: Sequence[Switch]) -> int:
    """Return how many neighbours in `order` are under different switches."""
    leaf = {node: switch.name for switch in switches if switch.level == 0 for node in switch.nodes}
    return sum(leaf.get(one) != leaf.get(next_one) for one, next_one in itertools.pairwise(order))


def _ordered(nodes: list[str], switches: Sequence[Switch], level: int, *, offset: int, stage_nodes: int) -> list[str]:
    """Return the nodes below one switch of the level above in order, where `offset` nodes have their place already."""
    if level < 0 or len(nodes) < 2:
        return nodes
    groups = _groups(nodes, [switch for switch in switches if switch.level == level])
    found: list[str] = []
    while groups:
        # The first node's group comes first, and so does that node in it: whoever comes first by name did before.
        group = (
            groups[0] if offset + len(found) == 0 else _next(groups, (offset + len(found)) % stage_nodes, stage_nodes)
        )
        groups.remove(group)
        found += _ordered(group, switches, level - 1, offset=offset + len(found), stage_nodes=stage_nodes)
    return found


def _groups(nodes: Sequence[str], switches: Sequence[Switch]) -> list[list[str]]:
    """Return the nodes by the switch that they are under; those that are under none are together."""
    under = {node: switch.name for switch in switches for node in switch.nodes}
    groups: dict[str, list[str]] = {}
    for node in nodes:
        groups.setdefault(under.get(node, _ALONE), []).append(node)
    return list(groups.values())


def _next(groups: Sequence[list[str]], begun: int, stage_nodes: int) -> list[str]:
    """Return the group that comes next, where a stage has `begun` nodes: one after which no stage is cut, if it can."""
    return max(groups, key=lambda group: ((begun + len(group)) % stage_nodes == 0, len(group)))
