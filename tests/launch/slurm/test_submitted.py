"""A job of a real Slurm is that which was submitted: edits that come later are not in it, and it is always found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.core.run_folder import RunFolder
from shoal.core.toml import read_toml
from shoal.launch.slurm.commands import states
from shoal.launch.slurm.following import JOB_TOML, Submitted, read_submitted
from tests.support.files import job_file
from tests.support.needs import need
from tests.support.slurm import SlurmCluster, sbatch_that_kills, slurm_cluster, why_not

ROOT = Path(__file__).parents[3]
BESIDE = """
import os, sys
sys.path.insert(0, os.path.dirname(__file__))
import beside

fields['steps'] = 2
fields['loss'] = lambda output, batch, plain=fields['loss']: beside.scale * plain(output, batch)
"""


def train(file: Path, *flags: str) -> list[str]:
    runs = ["--runs", str(file.parent), "--time", "5m", "--workers", "1"]
    return ["train", str(file), "--slurm", "--slurm-option=--hold", "--detach", *runs, *flags]


def test_a_job_trains_with_the_code_that_it_was_submitted_with(
    slurm: SlurmCluster, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where Python would look first
    (tmp_path / "beside.py").write_text("scale = 0.0\n")
    assert main(train(job_file(tmp_path, BESIDE), "--name", "r")) == 0
    assert "Copied 2 files of code" in capfd.readouterr().err
    (tmp_path / "beside.py").write_text("raise RuntimeError('edited')\n")
    (tmp_path / "tiny.py").write_text("raise RuntimeError('edited, too')\n")
    run = RunFolder.open(tmp_path / "r")
    slurm.run("scontrol", "release", read_submitted(run).job)
    assert main(["attach", str(run.path), "--json"]) == 0, capfd.readouterr().err
    assert '"losses": [0.0, 0.0]' in capfd.readouterr().out


def test_a_job_whose_submitter_was_killed_before_it_noted_the_number_is_found_again(
    slurm: SlurmCluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{sbatch_that_kills(tmp_path)}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "shoal", *train(job_file(tmp_path), "--name", "found")]
    assert subprocess.run(command, env=env, capture_output=True, timeout=90, check=False).returncode == -9
    run = RunFolder.open(tmp_path / "found")
    assert read_toml(Submitted, run.slurm / JOB_TOML).job == ""
    assert main([*train(tmp_path / "tiny.py"), "--resume", str(run.path)]) == 2
    assert "is being trained by job" in capfd.readouterr().err
    assert main(["cancel", str(run.path)]) == 0
    job = read_submitted(run).job
    assert states([job])[job].state == "CANCELLED"
    assert len(slurm.run("squeue", "-h", "--states=all", "--name=found").splitlines()) == 1


def test_workers_are_on_the_nodes_in_the_order_of_their_switches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    need(why_not())
    at = "os.path.join(os.path.dirname(__file__), 'at-' + os.environ['SLURM_PROCID'])"
    notes = f"open({at}, 'w').write(os.environ['SLURMD_NODENAME'])"
    file = job_file(tmp_path, f"fields['steps'] = 2\nif 'SLURM_PROCID' in os.environ:\n    {notes}\n")
    topology = "SwitchName=s0 Nodes=node[1,3]\nSwitchName=s1 Nodes=node[2,4]\nSwitchName=up Switches=s[0-1]\n"
    with slurm_cluster(nodes=4, cpus=2, topology=topology) as cluster:
        for name, value in cluster.env.items():
            monkeypatch.setenv(name, value)
        asked = ["--slurm", "--nodes", "4", "--per-node", "1", "--time", "5m", "--runs", str(tmp_path), "--json"]
        assert main(["train", str(file), *asked]) == 0, capfd.readouterr().err
    assert [path.read_text() for path in sorted(tmp_path.glob("at-*"))] == ["node1", "node3", "node2", "node4"]
