"""The nodes of a cluster as Slurm describes them, and the planner's picture of it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.cli import slurm_train
from shoal.cli.main import main
from shoal.cli.probe_slurm import build
from shoal.core.errors import ConfigError
from shoal.core.toml import read_toml
from shoal.launch.slurm.nodes import FORMAT, NodeKind, nodes_for, parse_nodes
from shoal.planner.machine import machine_of
from shoal.spec.cluster import Cluster
from tests.support.slurm import SlurmCluster

SINFO = """\
g1|64+|515000|gpu:h100:4(S:0-1)|gpu*
g2|64|515000|gpu:h100:4(S:0-3),tmp:900G|gpu*
g1|64|515000|gpu:h100:4(S:0-1)|all
c1|128|256000|(null)|all
old|16|64000|gpu:2|all
"""


def test_nodes_that_are_alike_are_counted_and_those_in_two_partitions_once() -> None:
    kinds = parse_nodes(SINFO)
    assert kinds[0] == NodeKind("g1", 64, 515000 * 2**20, "h100", 4, 2)
    assert sorted((kind.host, kind.gpu, kind.gpus) for kind in kinds[1:]) == [("c1", "", 0), ("old", "", 2)]


def test_a_job_that_names_no_partition_gets_nodes_of_the_default_one() -> None:
    assert [kind.host for kind in parse_nodes(SINFO, is_default=True)] == ["g1"]
    assert len(parse_nodes(SINFO.replace("*", ""), is_default=True)) == 3, "there is no default"


def test_the_planner_reads_what_was_made_of_them() -> None:
    cluster, remarks = build(parse_nodes(SINFO)[:1], link="ib-ndr")
    machine = machine_of(cluster)
    assert (machine.nodes, machine.per_node, remarks) == (2, 4, [])
    assert "H100" in machine.device.title


def test_a_run_that_no_file_describes_says_what_its_prediction_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_train, "nodes_for", lambda _: parse_nodes(SINFO)[:1])
    said: list[str] = []
    request: Any = SimpleNamespace(partition="gpu", gpus_per_worker=1)
    cluster = slurm_train._described(request, said.append)
    assert cluster.between is not None
    assert cluster.between.guessed
    assert said == build(parse_nodes(SINFO)[:1])[1]
    assert "runs measure it" in said[0]


@pytest.mark.parametrize(
    ("gpu", "said"), [("a100", "'a100-40' or 'a100-80'"), ("", "does not say which"), ("tpu9", "the catalog has no")]
)
def test_gpus_that_cannot_be_told_are_asked_for(gpu: str, said: str) -> None:
    kind = NodeKind("g1", 64, 10**11, gpu, 4, 2)
    with pytest.raises(ConfigError, match=said):
        build([kind])
    assert build([kind], device="a100-80", link="ib-hdr")[0].nodes[0].device == "a100-80"


def test_probe_describes_a_real_slurm(slurm: SlurmCluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--slurm", "--out", str(tmp_path / "c.toml"), "--json"]) == 0
    remarks = json.loads(capfd.readouterr().out)["remarks"]
    cluster = read_toml(Cluster, tmp_path / "c.toml")
    assert [(node.host, node.cores, node.count) for node in cluster.nodes] == [("node1", 2, 4)]
    assert any("--link" in remark for remark in remarks)
    assert machine_of(cluster).nodes == 4
    assert "|low*" in slurm.run("sinfo", "--noheader", "--Node", f"--format={FORMAT}"), "the default is marked"
    assert [(kind.cores, kind.count) for kind in nodes_for(None)] == [(2, 4)]
