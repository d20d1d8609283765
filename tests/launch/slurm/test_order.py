"""The order of nodes by their switches: on golden topologies, and on any."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.launch.slurm.order import crossings, neighbours_first
from shoal.launch.slurm.topology import Switch, parse_switches

NAMED_ACROSS = """\
SwitchName=s0 Level=0 LinkSpeed=1 Nodes=a[1,3,5]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=a[2,6]
SwitchName=s2 Level=0 LinkSpeed=1 Nodes=a4
SwitchName=up Level=1 LinkSpeed=1 Nodes=a[1-6] Switches=s[0-2]
"""
# Odd racks are in one hall, even racks in the other; racks have two nodes each.
TWO_HALLS = """\
SwitchName=rack1 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=rack2 Level=0 LinkSpeed=1 Nodes=n[3-4]
SwitchName=rack3 Level=0 LinkSpeed=1 Nodes=n[5-6]
SwitchName=rack4 Level=0 LinkSpeed=1 Nodes=n[7-8]
SwitchName=hall1 Level=1 LinkSpeed=1 Nodes=n[1-2,5-6] Switches=rack[1,3]
SwitchName=hall2 Level=1 LinkSpeed=1 Nodes=n[3-4,7-8] Switches=rack[2,4]
SwitchName=core Level=2 LinkSpeed=1 Nodes=n[1-8] Switches=hall[1-2]
"""


def order(topology: str, nodes: str, **fields: int) -> str:
    return " ".join(neighbours_first(nodes.split(), parse_switches(topology), **fields))


def test_stages_end_where_switches_do_if_they_can() -> None:
    assert order(NAMED_ACROSS, "a1 a2 a3 a4 a5 a6", stage_nodes=2) == "a1 a3 a5 a4 a2 a6"
    assert order(NAMED_ACROSS, "a1 a2 a3 a4 a5 a6", stage_nodes=3) == "a1 a3 a5 a2 a6 a4"
    assert order(NAMED_ACROSS, "a2 a3 a4 a5") == "a2 a3 a5 a4"


def test_racks_of_one_hall_follow_each_other() -> None:
    assert order(TWO_HALLS, "n1 n2 n3 n4 n5 n6 n7 n8") == "n1 n2 n5 n6 n3 n4 n7 n8"
    assert order(TWO_HALLS, "n2 n3 n6 n7 n8", stage_nodes=1) == "n2 n6 n7 n8 n3"


@pytest.mark.parametrize("topology", ["", NAMED_ACROSS])
def test_nodes_that_no_switch_is_known_of_stay_as_they_are(topology: str) -> None:
    assert order(topology, "x3 x1 x2", stage_nodes=2) == "x3 x1 x2"


def test_neighbours_under_different_switches_are_counted() -> None:
    switches = parse_switches(NAMED_ACROSS)
    assert crossings(["a1", "a2", "a3", "a4", "a5", "a6"], switches) == 5
    assert crossings(["a1", "a3", "a5", "a4", "a2", "a6"], switches) == 2


@given(
    leaves=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    tops=st.lists(st.integers(0, 1), min_size=5, max_size=5),
    stage_nodes=st.integers(1, 5),
)
def test_all_nodes_are_there_the_first_stays_and_no_switch_is_come_back_to(
    leaves: list[int], tops: list[int], stage_nodes: int
) -> None:
    nodes = [f"n{number}" for number in range(len(leaves))]
    under = {leaf: tuple(node for node, other in zip(nodes, leaves, strict=True) if other == leaf) for leaf in range(5)}
    switches = [Switch(f"s{leaf}", 0, held) for leaf, held in under.items() if held]
    for top in range(2):
        held = tuple(node for leaf in range(5) if tops[leaf] == top for node in under[leaf])
        switches += [Switch(f"t{top}", 1, held)] if held else []
    found = neighbours_first(nodes, switches, stage_nodes=stage_nodes)
    assert sorted(found) == sorted(nodes)
    assert found[0] == nodes[0]
    assert crossings(found, switches) == len(set(leaves)) - 1
    halls = [Switch(switch.name, 0, switch.nodes) for switch in switches if switch.level == 1]
    assert crossings(found, halls) == len(halls) - 1
