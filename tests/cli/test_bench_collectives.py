"""`shoal bench collectives`: real workers, for a moment; the figures, the table, the picture, and what it refuses."""

import contextlib
import dataclasses
import io
import itertools
import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.bench import collectives_mpi, turns
from shoal.bench.collectives import Measured, bench_collectives, predict
from shoal.bench.collectives_worker import Side, check_sums, ways
from shoal.cli.main import main
from shoal.comm.algorithms import ALL_REDUCE
from shoal.comm.group import joined
from shoal.comm.rank import Rank
from shoal.comm.shm.group import join
from shoal.comm.store import connect
from shoal.planner.collectives import allreduce
from shoal.spec.device import Link
from tests.support.ranks import RankPool

MESSAGES = ["naive", "tree", "ring", "halving-doubling", "recursive-doubling"]
OURS = [*MESSAGES, "shared-memory", "shared-in-place", "Gloo"]
LINK = Link(source="", bytes_per_s=1e9, latency_s=1e-4)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """What a run of about a second printed as JSON, and the picture that it drew."""
    plot = tmp_path_factory.mktemp("bench") / "c.svg"
    options = ["--workers", "2", "--sizes", "64KB,4KB", "--seconds", "1", "--plot", str(plot), "--json"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["bench", "collectives", *options]) == 0
    assert [path.name for path in plot.parent.iterdir()] == ["c.svg"]
    return json.loads(printed.getvalue()), plot.read_text()


def test_every_algorithm_is_measured_at_every_size(measured: tuple[Any, str]) -> None:
    (run,) = measured[0]["measured"]
    with_mpi = [] if run["left_out"] else ["MPI"]
    assert run["workers"] == 2
    assert [row["bytes"] for row in run["sizes"]] == [4000, 64000]
    for row in run["sizes"]:
        assert list(row["seconds"]) == OURS + with_mpi
        assert min(row["seconds"].values()) > 0
        assert row["fastest"] == min(row["seconds"], key=row["seconds"].get)
        assert row["rounds"] >= turns.LEAST_ROUNDS


def test_what_has_a_formula_stands_beside_it(measured: tuple[Any, str]) -> None:
    (run,) = measured[0]["measured"]
    link = Link(source="", bytes_per_s=run["link_bytes_per_s"], latency_s=run["latency_s"])
    assert link.bytes_per_s > 0
    assert list(run["measured_over_predicted"]) == MESSAGES
    for row in run["sizes"]:
        assert row["predicted_s"] == pytest.approx(predict(row["bytes"], 2, link))
        assert row["planner"]["chosen"] in MESSAGES
        fastest_s = min(row["seconds"][name] for name in MESSAGES)
        assert row["seconds"][row["planner"]["fastest"]] == fastest_s
        assert row["planner"]["over_fastest"] == row["seconds"][row["planner"]["chosen"]] / fastest_s


def test_without_mpi_a_sentence_says_how_to_have_it(measured: tuple[Any, str]) -> None:
    (run,) = measured[0]["measured"]
    assert run["left_out"] == ([collectives_mpi.why_not()] if collectives_mpi.why_not() else [])
    if run["left_out"]:
        assert "MPI is left out" in run["left_out"][0]
        assert "pip install mpi4py" in run["left_out"][0]


def test_the_picture_has_a_line_for_every_algorithm_and_a_dashed_one_for_every_formula(
    measured: tuple[Any, str],
) -> None:
    root = ET.fromstring(measured[1])
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {*OURS, "2 workers"} <= texts
    lines = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert sum("stroke-dasharray" in line.attrib for line in lines) == len(MESSAGES)
    assert sum("stroke-dasharray" not in line.attrib for line in lines) == len(
        measured[0]["measured"][0]["sizes"][0]["seconds"]
    )


def test_the_table_has_a_row_a_size_and_marks_the_fastest(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "collectives", "--workers", "4", "--sizes", "4KB,64KB", "--seconds", "1"]) == 0
    lines = [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]
    assert lines[0].startswith("all-reduce among 4 workers of this host, ms; between two alone")
    assert lines[2].startswith("naive tree ring doubling doubling level memory in-place Gloo")  # two-level, too
    rows = [line for line in lines if line.startswith(("4 kB", "64 kB"))]
    assert [line.count("*") for line in rows] == [1, 1, 0, 0]
    assert {word for line in rows[2:] for word in line.split()[2:4]} <= set(MESSAGES)
    assert any(line.startswith("Measured over predicted, median over sizes: naive") for line in lines)
    assert any(line.startswith("Times as fast as Gloo") for line in lines)


@pytest.mark.skipif(bool(collectives_mpi.why_not()), reason="MPI is not installed")
def test_mpi_is_measured_before_and_after() -> None:
    said: list[str] = []
    found = bench_collectives(workers=2, sizes=[4000], seconds=1, say=said.append)
    assert found.seconds[4000]["MPI"] > 0
    assert said[0] == said[-1] == "MPI"


def test_an_mpirun_that_fails_leaves_mpi_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    link = dataclasses.asdict(LINK)
    answer = json.dumps({"link": link, "seconds": {"4000": {name: [1, 3, 9] for name in OURS}}, "left_out": []})

    def worker_command(folder: Path, **_: Any) -> list[str]:
        """Stands for workers that measure: writes what they would."""
        return ["sh", "-c", f"echo '{answer}' > '{folder}/times.json'"]

    monkeypatch.setattr(collectives_mpi, "why_not", lambda: "")
    monkeypatch.setattr(collectives_mpi, "start_command", lambda *_, **__: ["sh", "-c", "echo no slots; exit 1"])
    monkeypatch.setattr("shoal.bench.collectives.worker_command", worker_command)
    found = bench_collectives(workers=2, sizes=[4000], seconds=1, say=lambda _: None)
    assert found.seconds == {4000: dict.fromkeys(OURS, 3)}
    assert found.left_out == ["MPI is left out: worker 0 of the benchmark failed: no slots"]


def test_mpi_talks_over_shared_memory_and_loopback_and_root_is_allowed_where_it_is_root() -> None:
    command = collectives_mpi.mpirun_command(4, ["x"], is_root=False)
    assert command[:3] == ["mpirun", "-n", "4"]
    assert {"oob_tcp_if_include", "^tcp", "--oversubscribe"} <= set(command)
    assert "--allow-run-as-root" not in command
    assert "--allow-run-as-root" in collectives_mpi.mpirun_command(4, ["x"], is_root=True)


def test_a_worker_that_finds_a_wrong_sum_fails_the_command_with_its_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = "import sys; print('WorkerFailed: ring gave a wrong sum.', flush=True); sys.exit(1)"
    monkeypatch.setattr("shoal.bench.collectives.worker_command", lambda *_, **__: [sys.executable, "-c", program])
    monkeypatch.setattr(collectives_mpi, "why_not", lambda: "MPI is left out.")
    assert main(["bench", "collectives", "--workers", "2", "--sizes", "4KB", "--seconds", "1"]) == 1
    assert "of the benchmark failed: ring gave a wrong sum." in capfd.readouterr().err


def check_planted(rank: Rank) -> list[str]:
    """Return what is said about every right way, and about one that leaves out the last number. Runs in the pool."""
    store, said = connect(rank, timeout_s=60), []
    with joined(rank, store, device=torch.device("cpu"), timeout_s=60):
        with join(store, index=rank.index, count=rank.workers, timeout_s=60) as shared:
            good = ways(dist.new_group(), shared, numel=1001)
            check_sums(good, rank, [4, 4004])
            said.append(f"{sorted(good)}: {sum(float(side.place.abs().sum()) for side in good.values())}")
        place = torch.zeros(1000)
        planted = {"planted": Side(all_reduce=lambda numel: dist.all_reduce(place[: numel - 1]), place=place)}
        try:
            check_sums(planted, rank, [4000])
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_a_sum_that_lacks_one_number_is_refused_and_right_ones_leave_zeros(ranks: RankPool) -> None:
    answers = ranks.run(check_planted, workers=4)
    every = sorted([*OURS, "two-level"])
    assert set(ALL_REDUCE) <= set(every)
    for index, said in enumerate(answers):
        assert said[0] == f"{every}: 0.0"
        # Worker w gives number i as (i + 7 w) mod 61: number 999 is 23, 30, 37 and 44.
        assert said[1] == (
            f"WorkerFailed: planted gave worker {index} of 4 a wrong sum of 4 kB: "
            f"number 999 is {(999 + 7 * index) % 61}, not 134."
        )


def test_every_size_has_its_rounds_and_the_order_of_turns_changes() -> None:
    calls: list[str] = []
    sides = {size: {name: lambda key=f"{name}{size}": calls.append(key) for name in "ab"} for size in (4, 8)}
    said: list[float] = []
    times = turns.take_turns(sides, seconds=1e-9, wait=lambda: None, agree=lambda value: value, say=said.append)
    assert {len(seconds) for row in times.values() for seconds in row.values()} == {turns.LEAST_ROUNDS}
    in_a_row = [key for key, _ in itertools.groupby(calls)]
    # Two calls each to learn how long they take; then the turns: a first, b first, a first; and the same at 8.
    assert in_a_row == ["a4", "b4", "a8", "b8", "a4", "b4", "a4", "b4", "a8", "b8", "a8", "b8"]
    assert said[-1] == 1.0


def test_the_size_that_had_the_least_time_goes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def spend(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=lambda: now_s))
    sides = {size: {"a": lambda size=size: spend(1e-8 * size)} for size in (4_000_000, 40_000)}  # 40 and 0.4 ms
    times = turns.take_turns(sides, seconds=0.5, wait=lambda: None, agree=lambda value: value, say=lambda _: None)
    large, small = (len(times[size]["a"]) for size in sides)
    assert large >= turns.LEAST_ROUNDS
    assert small == pytest.approx(10 * large, abs=10)  # 10 calls make a turn of 4 ms


def test_two_workers_are_predicted_by_the_formulas_and_four_share_what_carries_the_bytes() -> None:
    two, four = predict(64_000_000, 2, LINK), predict(64_000_000, 4, LINK)
    assert two == {name: allreduce.ALLREDUCE[name](64e6, 2, 1e9, 1e-4).seconds for name in MESSAGES}
    assert four["ring"] == pytest.approx(6 * (0.2e-3 + 16e6 / 0.5e9))  # 193 ms
    assert four["naive"] == pytest.approx(6 * (0.1e-3 + 64e6 / 1e9))  # one message at a time has the link alone
    assert four["tree"] == pytest.approx(4 * (0.1e-3 + 64e6 / 1e9))
    assert four["two-level"] == pytest.approx(2 * (0.2e-3 + 32e6 / 0.5e9) + 2 * (0.2e-3 + 16e6 / 0.5e9))


def test_the_planners_choice_is_held_against_the_fastest_that_it_chooses_from() -> None:
    took = dict.fromkeys(MESSAGES, 4e-3) | {
        "tree": 2e-3,
        "recursive-doubling": 3e-3,
        "shared-memory": 1e-3,
        "Gloo": 6e-3,
    }
    found = Measured(workers=2, link=LINK, seconds={4000: took}, rounds={4000: 3}, left_out=[])
    choice = found.choices()[4000]
    assert (choice.chosen, choice.fastest, choice.over_fastest) == ("recursive-doubling", "tree", 1.5)
    assert found.over_predicted()["recursive-doubling"] == pytest.approx(3e-3 / 104e-6)
    assert found.times_gloo() == pytest.approx(
        {name: 6e-3 / seconds for name, seconds in took.items() if name != "Gloo"}
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("collectives --workers 1", "--workers 1: this needs at least 2 and at most 64 workers on this machine."),
        ("collectives --workers 2,x", "--workers '2,x' is not a list of numbers. Write it like --workers 2,4."),
        ("collectives --workers 65", "--workers 65: this needs at least 2"),
        ("collectives --sizes 4KB,huge", "--sizes 'huge' is not a number of bytes. Write it like 100MB"),
        (
            "collectives --sizes 0",
            "--sizes 0: 32-bit numbers are summed, so a size is a multiple of 4 bytes, like 4KB.",
        ),
        ("collectives --sizes 10", "--sizes 10: 32-bit numbers"),
        ("collectives --sizes 1PB", "--sizes 1PB: 4 workers need about 24 PB, but there are"),
        ("collectives --seconds 0", "--seconds 0: give a number above 0"),
        ("collectives --plot nowhere/c.svg", "--plot nowhere/c.svg: there is no folder nowhere."),
        ("step nowhere.py", "there is no nowhere.py."),
        ("step --workers 0 .", "--workers 0: this needs at least 1"),
        ("step . --rounds 0", "--rounds 0: give a number from 1"),
        ("start nowhere", "there is no nowhere."),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_written(
    options: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *options.split()]) == 2
    assert words in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", ["--json step nowhere.py", "step --json nowhere.py", "step nowhere.py --json"])
def test_json_may_stand_anywhere(options: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *options.split()]) == 2
    assert json.loads(capfd.readouterr().out)["error"]["message"] == "there is no nowhere.py."


def test_its_help_has_an_example_and_only_its_own_flags(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "collectives", "--help"])
    shown = capfd.readouterr().out
    assert ended.value.code == 0
    assert "shoal bench collectives --workers 2 --sizes" in shown
    assert "--plot" in shown
    assert "--rounds" not in shown
