"""Draws docs/images/cluster.svg, from the laptop to the nodes, and how tasks fill jobs: python docs/plot_cluster.py.

The bunches are those that shoal packs (shoal/tasks/bunch.py), of made-up tasks. Who takes which is played by the rules:
a job takes the next one when it has a core free; the third job waits in the queue for a while.
"""

import heapq
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shoal.tasks.bunch import pack, shares

JOBS, CORES, STARTS = 4, 2, (0.0, 4.0, 30.0, 8.0)
# 60 tasks of 2 to 24 seconds, many short ones and a few long.
TIMES = {task: 2.0 + 22.0 * (task * 37 % 60 / 60) ** 3 for task in range(60)}
# Okabe and Ito's, told apart by the colour-blind: a bunch has the colour of its round, so that sizes can be compared.
COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#cc79a7", "#999999")
WIDTH, LEFT, UNIT, ROW, GAP, TOP = 860, 130, 10.0, 15, 14, 240
STATIONS = (  # x, width, title, lines
    (14, 200, "your laptop", ("train.py, prepare.py, tune.py", "shoal train train.py", "shoal map prepare.py:f ITEMS")),
    (
        244,
        210,
        "the login node",
        ("the same, with --slurm:", "writes the sbatch text,", "submits, shows the queue,", "then live progress"),
    ),
    (
        484,
        180,
        "a folder all nodes see",
        ("tasks, bunches, journals,", "run folders, checkpoints:", "all that the sides share"),
    ),
    (
        694,
        152,
        "the nodes",
        ("a few jobs of several", "minutes, each with as", "many tasks at once as", "its node has room for"),
    ),
)


class Bar(NamedTuple):
    """A task on a core of a job."""

    job: int
    core: int
    begin_s: float
    end_s: float
    bunch: int


def played() -> list[Bar]:
    """Return which core runs which task when: a free core takes the next of its job's bunch, or the next bunch."""
    total_s = sum(TIMES.values())
    bunches = [list(bunch) for bunch in pack(TIMES, shares(JOBS, total_s / CORES))]
    waiting = list(enumerate(bunches))
    mine: list[tuple[int, list[int]]] = [(-1, [])] * JOBS
    free = [(STARTS[job], job, core) for job in range(JOBS) for core in range(CORES)]
    heapq.heapify(free)
    bars = []
    while free:
        begin_s, job, core = heapq.heappop(free)
        if not mine[job][1]:
            if not waiting:
                continue
            mine[job] = waiting.pop(0)
        number, tasks = mine[job]
        end_s = begin_s + TIMES[tasks.pop(0)]
        bars.append(Bar(job, core, begin_s, end_s, number))
        heapq.heappush(free, (end_s, job, core))
    return bars


def stations() -> Iterator[str]:
    """Yield the way of a job: boxes, and arrows between them."""
    for x, width, title, lines in STATIONS:
        yield f'<rect x="{x}" y="44" width="{width}" height="118" rx="8" fill="#eef3f8" stroke="#7d8fa3"/>'
        yield _text(x + width / 2, 66, title, ' font-weight="bold"')
        for number, line in enumerate(lines):
            yield _text(x + width / 2, 90 + 19 * number, line)
    for (x, width, *_), (end, *_) in itertools.pairwise(STATIONS):
        begin, tip = x + width + 4, end - 4
        yield f'<path d="M {begin} 103 L {tip} 103 m -7 -5 l 7 5 l -7 5" fill="none" stroke="#333" stroke-width="2"/>'


def chart(bars: list[Bar]) -> Iterator[str]:
    """Yield the cores of each job over time."""
    for job in range(JOBS):
        top = TOP + job * (CORES * ROW + GAP)
        yield f'<text x="14" y="{top + ROW + 5}">job {job + 1}, {CORES} cores</text>'
        if STARTS[job] > 10:
            yield f'<text x="{LEFT}" y="{top + ROW + 5}" fill="#666">waits in the queue</text>'
    for bar in bars:
        x, y = LEFT + UNIT * bar.begin_s, TOP + bar.job * (CORES * ROW + GAP) + bar.core * ROW
        size = f'width="{UNIT * (bar.end_s - bar.begin_s):.1f}" height="{ROW - 1}"'
        fill = COLOURS[min(bar.bunch // JOBS, len(COLOURS) - 1)]
        yield f'<rect x="{x:.1f}" y="{y}" {size} fill="{fill}" stroke="white"/>'


def main() -> None:
    """Write the picture."""
    bars = played()
    height = TOP + JOBS * (CORES * ROW + GAP) + 30
    about = "From the laptop to the nodes, and how tasks of different lengths fill a few jobs"
    title = "Tasks, the longest first, in bunches that get smaller (a colour each size): all jobs end together"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="13" role="img" aria-label="{about}">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<text x="14" y="28" font-weight="bold" font-size="15">From a laptop to a cluster</text>',
        *stations(),
        f'<text x="14" y="{TOP - 22}" font-weight="bold" font-size="15">{title}</text>',
        *chart(bars),
        f'<text x="{WIDTH - 14}" y="{height - 10}" text-anchor="end" fill="#444">time</text>',
        "</svg>",
        "",
    ]
    (Path(__file__).parent / "images" / "cluster.svg").write_text("\n".join(lines))


def _text(x: float, y: float, line: str, extra: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" font-size="12.5" fill="#111"{extra}>{line}</text>'


if __name__ == "__main__":
    main()
