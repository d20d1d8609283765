"""`shoal cost`: the textbook's figures on the command line, in a table and in JSON, and what it refuses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.planner.catalog import read_link
from shoal.planner.collectives import allreduce

ALLREDUCE = "allreduce --bytes 100MB --workers 64 --link 10Gbps --latency 20us"
BROADCAST = "broadcast --bytes 5MB --workers 8 --link 1MB/s"
COMPRESSION = "compression --bytes 400MB --workers 16 --link 10Gbps --step 300ms"


def ask(capfd: pytest.CaptureFixture[str], command: str) -> Any:
    """Return what `shoal cost COMMAND --json` prints: one object and nothing else."""
    assert main(["cost", *command.split(), "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def show(capfd: pytest.CaptureFixture[str], command: str) -> list[str]:
    """Return every line that `shoal cost COMMAND` prints, with single spaces."""
    assert main(["cost", *command.split()]) == 0
    return [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]


def test_all_eight_ways_to_all_reduce(capfd: pytest.CaptureFixture[str]) -> None:
    answer = ask(capfd, ALLREDUCE)
    steps = {name: cost["steps"] for name, cost in answer["algorithms"].items()}
    assert steps == {
        "ideal": 6,
        "parameter-server": 128,
        "naive": 126,
        "tree": 12,
        "ring": 126,
        "halving-doubling": 12,
        "recursive-doubling": 6,
        "two-level": 28,
    }
    assert answer["winner"] == "halving-doubling"
    assert answer["algorithms"]["ring"]["seconds"] == pytest.approx(0.16002)
    assert answer["algorithms"]["ring"]["bytes_per_worker"] == pytest.approx(2 * 63 / 64 * 100e6)
    assert [row["winner"] for row in answer["winners_by_size"]] == ["recursive-doubling", "halving-doubling"]


def test_at_a_small_size_the_fewest_steps_win(capfd: pytest.CaptureFixture[str]) -> None:
    assert ask(capfd, ALLREDUCE.replace("100MB", "1kB"))["winner"] == "recursive-doubling"


def test_the_table_has_the_same_figures_and_marks_the_winner(capfd: pytest.CaptureFixture[str]) -> None:
    lines = show(capfd, ALLREDUCE)
    assert "ring 126 197 MB 160 ms 1.016" in lines
    assert "halving-doubling 12 197 MB 158 ms 1.002 wins" in lines
    assert sum("wins" in line for line in lines) == 1
    sentence = "By size, on this link: recursive-doubling up to 37.2 kB, halving-doubling above."
    assert sentence in lines


def test_a_broadcast_takes_35_s_one_by_one_and_15_s_by_a_tree(capfd: pytest.CaptureFixture[str]) -> None:
    algorithms = ask(capfd, BROADCAST)["algorithms"]
    assert algorithms["one-by-one"]["seconds"] == 35
    assert algorithms["tree"]["seconds"] == 15
    lines = show(capfd, BROADCAST)
    assert "one-by-one 7 35 MB 35 s 7.000" in lines
    assert "tree 3 15 MB 15 s 3.000" in lines


def test_a_chain_says_its_best_chunks(capfd: pytest.CaptureFixture[str]) -> None:
    answer = ask(capfd, f"{BROADCAST} --latency 1ms")
    assert answer["chain_chunks"] == 173  # sqrt(6 * 5 s / 1 ms) = 173.2
    assert answer["algorithms"]["chain"]["seconds"] == pytest.approx((6 + 173) * (1e-3 + 5 / 173))
    assert answer["winner"] == "chain"


def test_two_levels_use_the_links_inside_the_nodes(capfd: pytest.CaptureFixture[str]) -> None:
    answer = ask(capfd, f"{ALLREDUCE} --per-node 8 --inside-link 300GB/s --inside-latency 5us")
    inside, between = allreduce.ring(100e6, 8, 300e9, 5e-6), allreduce.ring(12.5e6, 8, 1.25e9, 20e-6)
    two_level = answer["algorithms"]["two-level"]
    assert two_level["seconds"] == pytest.approx(inside.seconds + between.seconds)
    assert two_level["inside_bytes"] == pytest.approx(inside.bytes_per_worker)
    assert answer["winner"] == "two-level"
    assert answer["algorithms"]["ideal"]["seconds"] < two_level["seconds"]


def test_servers_are_as_many_as_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    cost = ask(capfd, f"{ALLREDUCE} --servers 16")["algorithms"]["parameter-server"]
    assert cost["seconds"] == pytest.approx(128 * (20e-6 + 100e6 / 16 / 1.25e9))


def test_a_link_of_the_catalog_brings_its_latency(capfd: pytest.CaptureFixture[str]) -> None:
    link = read_link("ethernet-10")
    answer = ask(capfd, "allreduce --bytes 100MB --workers 64 --link ethernet-10")
    assert (answer["link_bytes_per_s"], answer["latency_s"]) == (link.bytes_per_s, link.latency_s)
    assert ask(capfd, "broadcast --bytes 1MB --workers 4 --link ethernet-10 --latency 1ms")["latency_s"] == 1e-3


def test_one_worker_has_nothing_to_send(capfd: pytest.CaptureFixture[str]) -> None:
    answer = ask(capfd, "allreduce --bytes 1MB --workers 1 --link 1MB/s")
    assert (answer["winner"], answer["winners_by_size"]) == (None, [])
    assert "One worker has nothing to send." in show(capfd, "broadcast --bytes 1MB --workers 1 --link 1MB/s")


def test_compression_shows_both_sides_and_the_break_evens(capfd: pytest.CaptureFixture[str]) -> None:
    command = f"{COMPRESSION} --codec topk --encode-rate 2GB/s --iterations 1.1"
    answer = ask(capfd, command)
    assert answer["pays"] is True
    assert answer["original"]["total_s"] == pytest.approx(0.9)
    assert answer["compressed"]["total_s"] == pytest.approx(0.58 * 1.1, rel=1e-3)
    assert answer["break_even_iterations"] == pytest.approx(0.9 / 0.58, rel=1e-3)
    # 0.3 + 750 MB / r = 1.1 * (0.532 + 60 MB / r)
    assert answer["break_even_link_bytes_per_s"] == pytest.approx((750e6 - 66e6) / (1.1 * 0.532 - 0.3), rel=1e-3)
    lines = show(capfd, command)
    assert "T * I 900 ms 638 ms" in lines
    assert "T_comp * I_comp < T_orig * I_orig: topk pays (0.71 of the time)." in lines
    assert "Break-even: 1.55 times the iterations. It pays on links slower than 2.4 GB/s." in lines


def test_compression_that_needs_too_many_iterations_does_not_pay(capfd: pytest.CaptureFixture[str]) -> None:
    assert ask(capfd, f"{COMPRESSION} --codec topk --encode-rate 2GB/s --iterations 1.6")["pays"] is False


def test_a_ratio_alone_is_a_codec_that_adds_up(capfd: pytest.CaptureFixture[str]) -> None:
    answer = ask(capfd, f"{COMPRESSION} --ratio 0.5 --algorithm ring")
    assert answer["compressed"]["exchange"] == "ring"
    assert answer["compressed"]["exchange_s"] == pytest.approx(answer["original"]["exchange_s"] / 2)
    gathered = ask(capfd, f"{COMPRESSION} --ratio 0.5 --exchange all-gather")["compressed"]
    assert gathered["bytes_per_worker"] == pytest.approx(15 * 200e6)


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("alreduce", "shoal cost knows no 'alreduce'. Did you mean 'allreduce'?"),
        ("allreduce", "--bytes is missing. Write it like --bytes 100MB."),
        ("allreduce --bytes 1MB --link 1MB/s", "--workers is missing. Write it like --workers 64."),
        ("allreduce --bytes 1MB --workers 4", "--link is missing. Write it like --link 10Gbps."),
        ("allreduce --bytes 1MB --workers 0 --link 1MB/s", "--workers 0: give a number from 1 to 1,000,000,000."),
        ("allreduce --bytes 0 --workers 4 --link 1MB/s", "--bytes 0: there is nothing to send. Write it like"),
        ("broadcast --bytes=-5MB --workers 4 --link 1MB/s", "--bytes '-5MB' is not a number of bytes: it must be 0"),
        ("broadcast --bytes 5MX --workers 4 --link 1MB/s", "--bytes '5MX' is not a number of bytes. Write it like"),
        ("broadcast --bytes 5MB --workers 4 --link 10", "--link '10' is not a rate. Write it like 10Gbps (bits) or"),
        ("broadcast --bytes 5MB --workers 4 --link ethrnet-10", "the catalog has no 'ethrnet-10' in links. Did you"),
        (f"{BROADCAST} --latency 3parsec", "--latency '3parsec' is not a time. Write it like 20us"),
        (f"{BROADCAST} --servers 2", "--servers goes with shoal cost allreduce, not with broadcast."),
        (f"{ALLREDUCE} --servers 0", "--servers 0: give a number from 1 to 1,000,000,000."),
        (f"{ALLREDUCE} --per-node 5", "--per-node 5 does not divide --workers 64. Use 4 or 8."),
        (f"{ALLREDUCE} --per-node 128", "--per-node 128 is more than --workers 64."),
        (f"{ALLREDUCE} --inside-link 300GB/s", "--inside-link needs --per-node: say how many workers a node has."),
        (
            COMPRESSION,
            "say what compresses: --codec none, bf16, int8, int4, sign, topk, threshold, powersgd, or --ratio 0.1.",
        ),
        (f"{COMPRESSION} --codec topkk", "--codec 'topkk' is none. Did you mean 'topk'?"),
        (f"{COMPRESSION} --codec topk --algorithm rng", "--algorithm 'rng' is none. Did you mean 'ring'?"),
        (f"{COMPRESSION} --codec topk --ratio 2", "--ratio 2: encoded bytes over bytes is above 0, and 1 at most."),
        (f"{COMPRESSION} --codec topk --iterations 0", "--iterations 0: give a number above 0, and"),
        (COMPRESSION.replace("--step 300ms", "--codec topk"), "--step is missing. Write it like --step 300ms."),
    ],
)
def test_bad_input_gets_one_sentence(command: str, sentence: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", *command.split()]) == 2
    said = capfd.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"ConfigError: {sentence}")


def test_the_examples_of_the_documentation_are_what_is_printed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = (Path(__file__).parents[2] / "docs" / "cost.md").read_text()
    examples = re.findall(r"^\$ shoal cost (.*)\n((?:.+\n)+)```", text, re.MULTILINE)
    assert len(examples) == 5
    for command, printed in examples:
        assert main(["cost", *command.split()]) == 0
        assert [line.rstrip() for line in capfd.readouterr().out.splitlines()] == printed.splitlines(), command


@pytest.mark.parametrize("huge", ["--bytes 1e21 --workers 1000000000 --link 1bps --latency 1e21"])
def test_the_largest_numbers_are_figures_still(huge: str, capfd: pytest.CaptureFixture[str]) -> None:
    ask(capfd, f"allreduce {huge} --servers 1000000000 --per-node 1000")
    ask(capfd, f"broadcast {huge}")
    ask(capfd, f"broadcast {huge.replace('1e21', '1e-300')}")
    ask(capfd, f"compression {huge} --step 1e21 --codec powersgd --iterations 1e9 --encode-rate 1bps")
    show(capfd, f"allreduce {huge}")
