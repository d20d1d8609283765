"""What `shoal doctor` says about a real Slurm."""

from pathlib import Path

import pytest

from shoal.doctor.finding import OK, WARNING
from shoal.doctor.slurm import check_slurm
from tests.support.slurm import SlurmCluster


def test_a_slurm_that_answers_says_its_version_and_partitions_and_would_take_a_job(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    version, takes, elsewhere = check_slurm(tmp_path, env={})
    assert (version.level, takes.level) == (OK, OK)
    assert "low (4 nodes)" in version.fact
    assert takes.fact == "it would take a job"
    assert elsewhere.level == WARNING
    assert "which other nodes may not see" in elsewhere.fact


def test_a_job_that_slurm_refuses_is_said_in_its_words(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site.toml"
    site.write_text('partition = "nowhere"\n')
    monkeypatch.setenv("SHOAL_SITE", str(site))
    _, takes, _ = check_slurm(tmp_path, env={})
    assert takes.level == WARNING
    assert "invalid partition" in takes.fact
    assert "--partition P" in takes.remedy


def test_the_number_of_a_job_that_has_ended_is_named(slurm: SlurmCluster, tmp_path: Path) -> None:
    *_, left = check_slurm(tmp_path, env={"SLURM_JOB_ID": "99999"})
    assert left.level == WARNING
    assert "SLURM_JOB_ID=99999 is set, and that job is GONE" in left.fact
    assert "unset SLURM_JOB_ID" in left.remedy


def test_a_controller_that_is_not_there_is_a_warning(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=gone\nSlurmctldHost=nowhere(127.0.0.1)\nSlurmctldPort=1\nMessageTimeout=1\n")
    monkeypatch.setenv("SLURM_CONF", str(conf))
    (found,) = check_slurm(tmp_path, env={})
    assert found.level == WARNING
    assert "it is installed, but sinfo" in found.fact
    assert "scontrol ping" in found.remedy
