"""Where the workers of a mesh are placed: arithmetic."""

import pytest

from shoal.launch.slurm.topology import Switch, hosts, parse_switches, place, switches_needed
from shoal.spec.plan import Mesh

TOPOLOGY = """\
SwitchName=leaf0 Level=0 LinkSpeed=1 Nodes=n[0-3]
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[4-5,7]
SwitchName=spine Level=1 LinkSpeed=1 Nodes=n[0-5,7] Switches=leaf[0-1]
"""
LEAVES = parse_switches(TOPOLOGY)


def test_switches_are_read_as_slurm_writes_them() -> None:
    assert LEAVES[1] == Switch("leaf1", 0, ("n4", "n5", "n7"))
    assert [switch.level for switch in LEAVES] == [0, 0, 1]
    assert parse_switches("") == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a1", ["a1"]),
        ("gpu[03-05,09]-a,login1", ["gpu03-a", "gpu04-a", "gpu05-a", "gpu09-a", "login1"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("", []),
    ],
)
def test_lists_of_hosts_are_read_as_slurm_writes_them(text: str, expected: list[str]) -> None:
    assert hosts(text) == expected


@pytest.mark.parametrize(("nodes", "needed"), [(1, 1), (4, 1), (5, 2), (7, 2), (8, None)])
def test_as_few_switches_as_hold_the_nodes(nodes: int, needed: int | None) -> None:
    assert switches_needed(nodes, LEAVES) == needed


@pytest.mark.parametrize(
    ("mesh", "nodes", "per_node", "switches", "words"),
    [
        (Mesh(tensor=4, replicate=4), 2, 8, None, ()),
        (Mesh(tensor=8, replicate=2), 2, 8, None, ()),
        (Mesh(tensor=4, pipeline=2), 2, 4, None, ()),
        (Mesh(tensor=4, replicate=3), 2, 6, None, ("tensor=4", "nodes with 6 workers", "tensor=1 or 2 or 3 or 6")),
        (Mesh(tensor=16), 2, 8, None, ("tensor=16", "--per-node 16")),
        (Mesh(tensor=16), 1, 16, None, ()),
    ],
)
def test_tensor_groups_that_span_nodes_are_named(
    mesh: Mesh, nodes: int, per_node: int, switches: str | None, words: tuple[str, ...]
) -> None:
    placement = place(mesh, nodes=nodes, per_node=per_node)
    assert (placement.distribution, placement.switches) == ("block", switches)
    assert bool(placement.warning) == bool(words)
    for word in words:
        assert word in placement.warning


def test_nodes_are_asked_for_under_as_few_switches_as_can_be() -> None:
    assert place(Mesh(pipeline=4), nodes=4, per_node=1, switches=LEAVES).switches == "1@10"
    assert place(Mesh(pipeline=4), nodes=4, per_node=1, switches=LEAVES).warning == ""
    across = place(Mesh(pipeline=6), nodes=6, per_node=1, switches=LEAVES)
    assert across.switches == "2@10"
    assert "under 2 switches" in across.warning
    assert place(Mesh(), nodes=1, per_node=1, switches=LEAVES).switches is None
    assert place(Mesh(replicate=9), nodes=9, per_node=1, switches=LEAVES).switches is None
