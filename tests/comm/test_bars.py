"""The benchmarks whose figures docs/communication.md has: a figure below its bar is said, and ends them with 1."""

from typing import Any

import pytest

from benchmarks import shared_memory, slow_links, time_to_loss

MS = 1e-3
LINK = {"latency_s": 1e-4, "bytes_per_s": 119e6, "crowd_s": 0.0}


@pytest.mark.parametrize(
    ("workers", "size_mb", "ours", "mpi", "missed"),
    [
        (2, 1, 5.1, 10.0, []),
        (2, 1, 4.9, 9.0, ["1 MB with 2 workers: 4.9 times Gloo, not 5"]),
        (4, 64, 3.1, None, []),
        (4, 64, 2.9, None, ["64 MB with 4 workers: 2.9 times Gloo, not 3"]),
        (2, 4, 6.0, 13.0, ["4 MB with 2 workers: 0.46 of Open MPI's, not 0.5"]),
        (2, 16, 6.0, 6.5, ["16 MB with 2 workers: 0.92 of Open MPI's, not 1"]),
    ],
)
def test_shared_memory_is_held_against_gloo_and_open_mpi(
    workers: int, size_mb: int, ours: float, mpi: float | None, missed: list[str]
) -> None:
    rate = {"gloo": 1.0, "shared buffer": ours, **({} if mpi is None else {"mpi": mpi})}
    assert shared_memory.missed_rates(workers, size_mb, rate) == missed


def test_a_step_in_shared_memory_costs_a_quarter_of_what_gloo_adds() -> None:
    assert shared_memory.missed_share({"ddp": 40.0, "shared": 10.0}) == []
    assert len(shared_memory.missed_share({"ddp": 40.0, "shared": 10.5})) == 1


def slow(ring: float, **small: float) -> dict[str, Any]:
    """Return figures of 1 Gb/s and 4 hosts: 1 MB takes 12.6 ms at least, and `ring` times as long."""
    fast = dict.fromkeys((*slow_links.NAMES, "gloo"), 100 * MS) | {"halving-doubling": 13.5 * MS}
    tiny = dict.fromkeys((*slow_links.NAMES, "gloo"), 9 * MS) | {name: s * MS for name, s in small.items()}
    seconds = {str(4 << 10): tiny, str(8 << 10): tiny, str(1 << 20): fast | {"ring": ring * 12.58 * MS}}
    return {"rate": "1gbit", "workers": 4, "link": LINK, "seconds": seconds}


def test_slow_links_are_held_against_the_bound_and_the_choice_against_the_fastest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chosen = {"recursive-doubling": 1.0, "tree": 1.0}
    assert slow_links.show(slow(1.1, **chosen)) == []
    assert "within 5% of it, at 2 of 3 sizes. It is so at 3." in capsys.readouterr().out
    assert slow_links.show(slow(1.2, **chosen)) == ["1gbit, 1024 KB: ring takes 1.20 of the bound, not 1.15 or less"]
    missed = slow_links.show(slow(1.1, naive=0.5, **chosen))
    assert missed == ["1gbit: the choice is the fastest at 1 of 3 sizes"]


@pytest.mark.parametrize(
    ("best", "torch", "missed"),
    [(4.1, 3.8, 0), (3.9, 3.8, 1), (4.1, 4.2, 1), (3.9, 4.2, 2), (4.1, None, 0), (None, 3.8, 1)],
)
def test_the_best_codec_is_held_against_ddp_and_torchs_hook(
    best: float | None, torch: float | None, missed: int
) -> None:
    faster = {"ddp": 1.0, "torch-powersgd": torch, "sign": None, "powersgd": best}
    assert len(time_to_loss.missed_bars({name: {"faster": value} for name, value in faster.items()})) == missed
