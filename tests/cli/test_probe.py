"""`shoal probe`: real workers, measured for a moment; what comes of it is read back and used."""

import contextlib
import io
import json
import platform
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import build_parser, main
from shoal.core.host import processor_name, usable_cores
from shoal.core.toml import read_toml
from shoal.planner.machine import machine_of
from shoal.spec.cluster import Cluster
from tests.support.files import job_file


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The file that a short probe wrote, and what it printed as JSON."""
    folder = tmp_path_factory.mktemp("probe")
    options = ["--out", str(folder / "c.toml"), "--storage", str(folder), "--seconds", "0.3", "--json"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["probe", *options]) == 0
    assert [path.name for path in folder.iterdir()] == ["c.toml"]
    return folder / "c.toml", json.loads(printed.getvalue())


def test_the_file_is_a_cluster_of_this_host_with_everything_measured(probed: tuple[Path, dict[str, Any]]) -> None:
    path, printed = probed
    cluster = read_toml(Cluster, path)
    node = cluster.nodes[0]
    assert (node.host, node.cores, node.device) == (platform.node(), usable_cores(), processor_name())
    device = cluster.devices[node.device]
    assert "2 workers at once" in device.source
    rates = (device.matmul_flops_per_s, device.bf16_matmul_flops_per_s, device.memory_bytes_per_s, device.operation_s)
    assert min(*rates, device.copy_to_bytes_per_s, device.copy_from_bytes_per_s) > 0
    assert cluster.inside is not None
    assert not cluster.inside.overlaps
    for link in (cluster.in_place, cluster.copied):
        assert link is not None
        assert not link.overlaps
    assert [tier.path for tier in cluster.storage] == [str(path.parent.resolve())]
    assert printed["cluster"]["devices"][node.device]["matmul_flops_per_s"] == device.matmul_flops_per_s
    assert printed["file"] == str(path)


def test_the_rates_are_those_of_the_measured_sizes(probed: tuple[Path, dict[str, Any]]) -> None:
    path, printed = probed
    device = next(iter(read_toml(Cluster, path).devices.values()))
    for precision, full in (("fp32", device.matmul_flops_per_s), ("bf16", device.bf16_matmul_flops_per_s)):
        rates = [rate for _, rate in printed["products"][precision]]
        # A fit to all of them: above the slowest, and not far beyond the best, which the start of the operation, taken
        # off, and a disturbed round may hide.
        assert min(rates) <= full <= 4 * max(rates)
    sizes = [size for size, _ in printed["messages"]]
    assert sizes == sorted(sizes)
    for what in ("sums", "copies"):
        assert [size for size, _ in printed[what]] == (sizes if sys.platform == "linux" else [])


def test_the_planner_takes_the_cluster_as_it_is(probed: tuple[Path, dict[str, Any]]) -> None:
    cluster = read_toml(Cluster, probed[0])
    machine = machine_of(cluster, per_node=2)
    assert machine.shared
    assert machine.workers == 2
    assert machine.device == cluster.devices[cluster.nodes[0].device]
    assert machine.inside == cluster.inside
    assert machine.in_place == cluster.in_place
    assert machine.copied == cluster.copied


def test_one_worker_alone_measures_no_link_and_a_person_sees_a_table(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--workers", "1", "--seconds", "0.2", "--storage", str(tmp_path), "--out", str(tmp_path / "c.toml")]
    assert main(["probe", *options]) == 0
    shown = capfd.readouterr().out
    for words in ("products, fp32", "products, bf16", "FLOP/s", "start of an operation", "storage", "Written to"):
        assert words in shown
    assert "link between workers" not in shown
    assert read_toml(Cluster, tmp_path / "c.toml").inside is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--workers", "0"], "--workers 0: measure with at least 1 worker."),
        (["--seconds", "0"], "--seconds 0: measure for more than 0 seconds."),
        (["--seconds", "nan"], "--seconds nan: measure for more than 0 seconds."),
        (["--storage", "nowhere"], "--storage nowhere: there is no such folder."),
        (["--out", "nowhere/c.toml"], "--out nowhere/c.toml: there is no folder nowhere."),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_written(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["probe", *options]) == 2
    assert words in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_fails_is_told_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("shoal.training.probe.probe_command", lambda *_, **__: ["false"])
    options = ["--workers", "1", "--seconds", "0.1", "--storage", str(tmp_path), "--out", str(tmp_path / "c.toml")]
    assert main(["probe", *options]) == 1
    assert "the probe failed: worker 0 left with exit code 1" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_training_asks_for_a_probe_where_the_file_it_was_given_is_not_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(job_file(tmp_path)), "--cluster", str(tmp_path / "none.toml")]) == 2
    assert "none.toml. Measure this machine: shoal probe" in capfd.readouterr().err


def test_what_only_the_probe_itself_uses_is_not_in_the_help(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["probe", "--help"])
    shown = capfd.readouterr().out
    assert "--workers" in shown
    assert "--worker " not in shown
    assert "--parent" not in shown
