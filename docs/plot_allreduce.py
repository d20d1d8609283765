"""Draws docs/images/allreduce.svg, time against message size of every all-reduce: python docs/plot_allreduce.py."""

import math
from collections.abc import Iterator
from pathlib import Path

from shoal.bench.collectives_plot import COLOURS
from shoal.core.units import format_bytes, format_seconds
from shoal.planner.collectives.allreduce import Cost
from shoal.planner.collectives.contest import allreduce_contest
from shoal.spec.device import Link

LINK = Link(source="", bytes_per_s=1.25e9, latency_s=20e-6)
INSIDE = Link(source="", bytes_per_s=300e9, latency_s=5e-6)
SIZES = [10 ** (3 + step / 8) for step in range(7 * 8 + 1)]  # 1 kB to 10 GB
TIMES = (1e-5, 1e4)
LEFT, TOP, WIDTH, HEIGHT, LABELS = 70, 40, 560, 440, 170
# The bound is grey.
COLOURS = COLOURS | {"ideal": "#888888", "parameter-server": "#cc79a7"}


def costs(num_bytes: float) -> dict[str, Cost]:
    """Return what each costs at one size: 64 workers, 8 in a node, 8 servers."""
    contest = allreduce_contest(num_bytes, 64, LINK, servers=8, per_node=8, inside=INSIDE)
    return {"ideal": contest.ideal, **contest.costs}


def x(num_bytes: float) -> float:
    """Return where a size lies."""
    return LEFT + WIDTH * math.log(num_bytes / SIZES[0]) / math.log(SIZES[-1] / SIZES[0])


def y(seconds: float) -> float:
    """Return where a time lies."""
    return TOP + HEIGHT * (1 - math.log(seconds / TIMES[0]) / math.log(TIMES[1] / TIMES[0]))


def grid() -> Iterator[str]:
    """Yield a line and its label for every power of ten."""
    for power in range(3, 11):
        at = x(10**power)
        yield f'<path d="M{at:.1f} {TOP}v{HEIGHT}" stroke="#ddd"/>'
        yield f'<text x="{at:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{format_bytes(10**power)}</text>'
    for power in range(-5, 5):
        at = y(10**power)
        yield f'<path d="M{LEFT} {at:.1f}h{WIDTH}" stroke="#ddd"/>'
        label = format_seconds(10**power) if power < 2 else f"{10**power:,} s"
        yield f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{label}</text>'


def curves() -> Iterator[str]:
    """Yield each algorithm's line, and its name at the right end, moved down where two would overlap."""
    rows = [costs(size) for size in SIZES]
    lowest = -math.inf
    for name in sorted(rows[-1], key=lambda name: -rows[-1][name].seconds):
        points = " ".join(f"{x(size):.1f},{y(row[name].seconds):.1f}" for size, row in zip(SIZES, rows, strict=True))
        dash = ' stroke-dasharray="5 4"' if name == "ideal" else ""
        yield f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"{dash}/>'
        lowest = max(y(rows[-1][name].seconds) + 4, lowest + 16)
        yield f'<text x="{LEFT + WIDTH + 8}" y="{lowest:.1f}" fill="{COLOURS[name]}">{name}</text>'


def main() -> None:
    """Write the picture."""
    title = "all-reduce among 64 workers, 8 in a node: 10 Gb/s and 20 us between, 300 GB/s and 5 us inside"
    size = f'width="{LEFT + WIDTH + LABELS}" height="{TOP + HEIGHT + 35}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    back = '<rect width="100%" height="100%" fill="white"/>'
    heading = f'<text x="{LEFT}" y="22" font-size="14">{title}</text>'
    path = Path(__file__).parent / "images" / "allreduce.svg"
    path.write_text("\n".join([head, back, heading, *grid(), *curves(), "</svg>", ""]))


if __name__ == "__main__":
    main()
