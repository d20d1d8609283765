"""Calibration: constants that were put in are found again, and mistakes in a CSV are named with their line."""

import dataclasses
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.core.errors import ConfigError
from shoal.core.events import STEP_PARTS, EventLog
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.planner.calibration.calibrate import fit, predict_s, rank_s
from shoal.planner.calibration.calibration import (
    Constants,
    calibrated,
    constants_of,
    find_calibration,
    save_calibration,
    with_constants,
)
from shoal.planner.calibration.measured import COLUMNS, Measured, read_rows
from shoal.planner.calibration.report import a100_nodes, calibrate_and_test
from shoal.planner.catalog import read_device
from shoal.planner.machine import Machine
from shoal.planner.time.nearby import Anchor, Nearby
from shoal.spec.cluster import Cluster, Node
from shoal.spec.plan import Mesh, Plan, Predicted

HEADER = ",".join([*COLUMNS, "step_ms"])
TRUTH = Constants(
    matmul_fraction=0.6,
    half_rate_flops=8e9,
    memory_bytes_per_s=1.5e12,
    operation_s=15e-6,
    inside_bytes_per_s=200e9,
    inside_latency_s=10e-6,
    between_bytes_per_s=18e9,
    between_latency_s=20e-6,
)
ROW = "8,16,2,1024,16,24,1024,2,2,2,100.0"


def shapes() -> Iterator[tuple[int, ...]]:
    """Yield what a row's columns say, in their order: 1 to 16 nodes, launch-bound to compute-bound."""
    for width, heads, layers in [(1024, 16, 24), (2048, 16, 24), (6144, 48, 40)]:
        for tensor, data, pipeline in [(1, 8, 1), (2, 2, 2), (8, 1, 1), (8, 8, 1), (4, 8, 4), (2, 16, 4), (16, 4, 2)]:
            for micro_batch in (1, 4):
                batch = data * micro_batch * 8
                gpus = tensor * data * pipeline
                yield gpus, batch, micro_batch, width, heads, layers, 1024, tensor, data, pipeline


def write_rows(path: Path, *, noise: float = 0.0, machine: Machine | None = None) -> Path:
    """Write a CSV whose times are those of a machine with the constants above, give or take `noise`."""
    machine = machine or with_constants(a100_nodes(), TRUTH)
    path.write_text("\n".join([HEADER, *(",".join(map(str, [*shape, 1.0])) for shape in shapes())]) + "\n")
    times = [1e3 * predict_s(row, machine) for row in read_rows(path)]
    spread = random.Random(1)
    lines = [
        ",".join(map(str, [*shape, time * math.exp(spread.gauss(0, noise))]))
        for shape, time in zip(shapes(), times, strict=True)
    ]
    path.write_text("\n".join([HEADER, *lines]) + "\n")
    return path


def mean_abs_error(rows: list[Measured], machine: Machine) -> float:
    return sum(abs(predict_s(row, machine) / row.step_s - 1) for row in rows) / len(rows)


def test_constants_that_were_put_in_are_found_again(tmp_path: Path) -> None:
    rows = read_rows(write_rows(tmp_path / "rows.csv", noise=0.01))
    found = dataclasses.asdict(constants_of(fit(rows, a100_nodes())))
    for name, value in dataclasses.asdict(TRUTH).items():
        # To 15%; what takes a small part of these steps, NVLink and latencies, less well.
        rel = {"inside_bytes_per_s": 0.4, "inside_latency_s": 1.0, "between_latency_s": 1.0}.get(name, 0.15)
        assert found[name] == pytest.approx(value, rel=rel), name


def test_rows_that_were_held_out_are_predicted_as_well_as_the_noise_allows(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.csv", noise=0.02)
    report = calibrate_and_test([path])
    assert report.held_out is not None
    assert report.held_out.rows == report.calibration.rows == len(list(shapes()))
    assert report.held_out.mean_abs_error < 0.04
    assert mean_abs_error(read_rows(path), a100_nodes()) > 0.15


def test_one_wild_row_does_not_bend_the_fit(tmp_path: Path) -> None:
    rows = read_rows(write_rows(tmp_path / "rows.csv"))
    wild = [dataclasses.replace(rows[0], step_s=3 * rows[0].step_s), *rows[1:]]
    assert mean_abs_error(rows[1:], fit(wild, a100_nodes())) < 0.02


def test_what_one_place_takes_longer_is_learnt_there_and_forgotten_far_away(tmp_path: Path) -> None:
    def slow(row: Measured) -> bool:
        return row.plan.mesh.tensor == 4

    rows = read_rows(write_rows(tmp_path / "rows.csv"))
    odd = [dataclasses.replace(row, step_s=1.2 * row.step_s) if slow(row) else row for row in rows]
    fitted = fit(odd, a100_nodes())
    for row in odd:
        factor = predict_s(row, fitted) / rank_s(row, fitted)
        assert factor == pytest.approx(1.15 if slow(row) else 1.0, abs=0.08)


def test_few_rows_leave_the_catalog_its_say(tmp_path: Path) -> None:
    rows = read_rows(write_rows(tmp_path / "rows.csv"))[:2]  # on one node: nothing is said about others
    found, known = constants_of(fit(rows, a100_nodes())), constants_of(a100_nodes())
    assert found.between_bytes_per_s == pytest.approx(known.between_bytes_per_s)
    assert found.matmul_fraction == pytest.approx(known.matmul_fraction, rel=0.5)


def test_anchors_fade_with_distance() -> None:
    anchor = Anchor(layer_flops=1e12, tensor=2, pipeline=1, micro_batch=4, weight=0.1)

    def factor(tensor: int) -> float:
        return Nearby((anchor,)).factor(1e12, tensor=tensor, pipeline=1, micro_batch=4)

    assert factor(2) == pytest.approx(math.exp(0.1))
    assert factor(4) == pytest.approx(math.exp(0.1 * math.exp(-2)))  # an octave is two of its scales
    assert factor(16) == pytest.approx(1)


def test_a_calibration_is_kept_beside_the_cluster_and_used_from_there(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.csv", noise=0.01)
    report = calibrate_and_test([path])
    assert find_calibration(tmp_path) is None
    save_calibration(report.calibration, tmp_path)
    found = find_calibration(tmp_path)
    assert found == report.calibration
    assert found.fits(a100_nodes())
    rows = read_rows(path)
    assert mean_abs_error(rows, calibrated(a100_nodes(), found)) < 0.03
    other = dataclasses.replace(a100_nodes().device, title="another")
    assert not found.fits(dataclasses.replace(a100_nodes(), device=other))


def test_the_error_of_a_test_is_that_of_rows_the_fit_has_not_seen(tmp_path: Path) -> None:
    train, test = write_rows(tmp_path / "train.csv"), tmp_path / "test.csv"
    rows = read_rows(train)
    lines = train.read_text().splitlines()
    twice = lines[1].rsplit(",", 1)
    test.write_text("\n".join([HEADER, f"{twice[0]},{2 * float(twice[1])}", lines[2]]))
    figures = calibrate_and_test([train], [test]).as_json()
    assert figures["rows"] == 2
    assert figures["worst_abs_error"] == pytest.approx(0.5, abs=0.02)  # half of what is said to be measured
    assert figures["mean_abs_error"] == pytest.approx(0.25, abs=0.02)
    assert figures["files"][str(test)]["rows"] == 2
    assert figures["held_out"]["rows"] == figures["fitted_on"]["rows"] == len(rows)
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures


def test_ways_to_train_one_model_are_ranked(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    ways = [(1, 8, 1), (2, 4, 1), (4, 2, 1), (8, 1, 1), (2, 2, 2), (1, 2, 4)]
    lines = [f"8,64,4,2048,16,24,1024,{t},{d},{p},{100 + number}" for number, (t, d, p) in enumerate(ways)]
    path.write_text("\n".join([HEADER, *lines]))
    report = calibrate_and_test([path], [path])
    (ranking,) = report.rankings
    assert ranking.model == "24 x 2048 on 8 devices, batch 64"
    assert ranking.rows == 6
    assert ranking.behind == pytest.approx((ranking.place - 1) / 100)
    assert ranking.among_three == (ranking.place <= 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpus,step_ms\n8,1", "line 1 lacks the column 'global_batch'. It needs: gpus,global_batch"),
        (f"{HEADER},heds\n{ROW},1", "line 1 has an unknown column 'heds'. Did you mean 'heads'"),
        (f"{HEADER}\n{ROW}\n{ROW[:-5]}fast", "line 3: step_ms='fast' is no number"),
        (f"{HEADER}\n{ROW.replace('100.0', '-1')}", "line 2: step_ms=-1 must be more than 0"),
        (f"{HEADER}\n{ROW.replace('8,16', '8.5,16')}", "line 2: gpus=8.5 must be a whole number"),
        (
            f"{HEADER}\n{ROW}\n\n{ROW.replace('8,16', '4,16')}",
            "line 4: tensor=2 x data=2 x pipeline=2 is 8, not gpus=4",
        ),
        (f"{HEADER}\n{ROW.replace(',24,', ',1,')}", "line 2: pipeline=2 with layers=1"),
        (f"{HEADER}\n{ROW.replace(',16,24', ',9,24')}", "line 2: width=1024 must divide by heads=9"),
        (f"{HEADER}\n{ROW.replace('8,16,2', '8,15,2')}", "line 2: global_batch=15 does not divide by data=2 x micro_b"),
        (f"{HEADER}\n8,16", "line 2 does not have as many values"),
        (HEADER, "has no rows below its header"),
        ("", "line 1 lacks the column 'gpus'"),
    ],
)
def test_a_mistake_in_a_csv_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_rows(path)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)


def test_rows_of_gpus_are_not_held_against_a_processor(tmp_path: Path) -> None:
    host = dataclasses.replace(a100_nodes(), device=read_device("cpu-host"), shared=True)
    report = calibrate_and_test([write_rows(tmp_path / "rows.csv")], machine=host)
    assert report.calibration.device == a100_nodes().device.title


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        calibrate_and_test([tmp_path / "nothing.csv"])


def make_run(path: Path, *, busy_s: float, comm_s: float, predicted: bool = True) -> Path:
    """Make the folder of a run of 2 workers, predicted to be busy for 80 ms of a step and to wait for 20."""
    folder = RunFolder.create(path.parent, path.name, "run")
    cost = Predicted(step_s=0.1, comm_s=0.02, samples_per_s=80, peak_bytes=(1, 1))
    node = Node(host="here", cores=2, memory_bytes=1, device="cpu-host")
    write_toml(folder.cluster_toml, Cluster(nodes=(node,)))
    write_toml(folder.plan_toml, Plan(mesh=Mesh(replicate=2), predicted=cost if predicted else None))
    folder.run_toml.write_text("")
    for rank in range(2):
        log = EventLog(folder.events_of(rank))
        for step in range(8):
            late_s = 5.0 if step == 0 else 0.0  # the first step pays for what later ones do not
            wait_s = comm_s + (0.01 if rank else 0.0)  # the other worker waits for the slowest
            own_s = busy_s - (0.01 if rank else 0.0) + late_s
            parts = dict.fromkeys(STEP_PARTS, 0.0) | {"data_s": 0.5, "backward_s": own_s, "comm_s": wait_s}
            log.write("step", step=step, step_s=sum(parts.values()), **parts)
        log.close()
    return path


def test_runs_scale_the_rates_by_what_they_took_longer(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", busy_s=0.1, comm_s=0.03)
    report = calibrate_and_test([run], [run])
    assert report.calibration.device == read_device("cpu-host").source  # which has no title
    before, after = report.before, report.calibration.constants
    assert after.matmul_fraction == pytest.approx(before.matmul_fraction * 80 / 100)
    assert after.memory_bytes_per_s == pytest.approx(before.memory_bytes_per_s * 80 / 100)
    assert after.operation_s == pytest.approx(before.operation_s * 100 / 80)
    assert after.inside_bytes_per_s == pytest.approx(before.inside_bytes_per_s * 20 / 30)
    assert after.between_bytes_per_s == before.between_bytes_per_s
    assert report.as_json()["mean_abs_error"] == pytest.approx(0, abs=1e-9)
    assert report.held_out is None  # one run alone says nothing about another


def test_each_of_several_runs_is_predicted_from_the_others(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", busy_s=0.1, comm_s=0.02), make_run(tmp_path / "b", busy_s=0.11, comm_s=0.02)]
    held_out = calibrate_and_test(runs).held_out
    assert held_out is not None
    assert held_out.worst_abs_error == pytest.approx(0.13 / 0.12 - 1)


def test_a_fit_that_predicts_others_no_better_than_none_does_not_help(tmp_path: Path) -> None:
    alike = [make_run(tmp_path / "a", busy_s=0.16, comm_s=0.02), make_run(tmp_path / "b", busy_s=0.17, comm_s=0.02)]
    assert calibrate_and_test(alike).helps
    disturbed = [make_run(tmp_path / "c", busy_s=0.07, comm_s=0.02), make_run(tmp_path / "d", busy_s=0.9, comm_s=0.02)]
    report = calibrate_and_test(disturbed)
    assert not report.helps
    assert report.unfitted is not None
    assert report.unfitted.worst_abs_error == pytest.approx(1 - 0.1 / 0.92)


def test_a_run_without_prediction_or_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no prediction"):
        calibrate_and_test([make_run(tmp_path / "a", busy_s=1, comm_s=1, predicted=False)])
    empty = make_run(tmp_path / "b", busy_s=1, comm_s=1)
    for log in (empty / "events").iterdir():
        log.unlink()
    with pytest.raises(ConfigError, match="no steps in its event logs"):
        calibrate_and_test([empty])
    csv = write_rows(tmp_path / "rows.csv")
    with pytest.raises(ConfigError, match="give one kind"):
        calibrate_and_test([csv], [empty])
