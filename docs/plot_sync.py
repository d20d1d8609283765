"""Draws docs/images/sync.svg, four workers, one of them slow, under each way to meet: python docs/plot_sync.py.

Played by the rules, not measured: a part takes 1 unit of time, 2.5 on the slow worker; an exchange 0.6 on everyone's
link.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

PART, EXCHANGE, LOCAL_STEPS, UNTIL = (1.0, 1.0, 1.0, 2.5), 0.6, 4, 14.0
# Okabe and Ito's: told apart by the colour-blind. A late gradient is orange.
COLOURS = {"computes": "#56b4e9", "computes, and will be late": "#e69f00", "exchanges": "#009e73", "waits": "#dddddd"}
LEFT, TOP, UNIT, ROW, GAP, RIGHT = 220, 56, 46, 17, 34, 20
HEIGHT = TOP + 5 * (4 * ROW + GAP)


class Bar(NamedTuple):
    """What a worker does for a while."""

    worker: int
    begin: float
    end: float
    what: str


def together(part: tuple[float, ...], steps: int = 1) -> Iterator[Bar]:
    """Yield what workers do who all wait for all after so many steps."""
    begin = 0.0
    while begin < UNTIL:
        ready = begin + steps * max(part)
        for worker, each in enumerate(part):
            for step in range(steps):
                yield Bar(worker, begin + step * each, begin + (step + 1) * each, "computes")
            yield Bar(worker, begin + steps * each, ready, "waits")
            yield Bar(worker, ready, ready + EXCHANGE, "exchanges")
        begin = ready + EXCHANGE


def all_reduce() -> Iterator[Bar]:
    """Yield all-reduce with equal shares."""
    return together(PART)


def live_shares() -> Iterator[Bar]:
    """Yield all-reduce with shares by which all are done together."""
    each = len(PART) / sum(1 / part for part in PART)
    return together((each,) * len(PART))


def local() -> Iterator[Bar]:
    """Yield local steps."""
    return together(PART, LOCAL_STEPS)


def deadline() -> Iterator[Bar]:
    """Yield steps that do not wait for the slow worker: what it has goes into the step that is open then."""
    begin, slow_begin = 0.0, 0.0
    while begin < UNTIL:
        ready, slow_ready = begin + PART[0], slow_begin + PART[3]
        for worker in range(3):
            yield Bar(worker, begin, ready, "computes")
            yield Bar(worker, ready, ready + EXCHANGE, "exchanges")
        if slow_ready <= ready:
            yield Bar(3, slow_begin, slow_ready, "computes, and will be late")
            yield Bar(3, slow_ready, ready, "waits")
            yield Bar(3, ready, ready + EXCHANGE, "exchanges")
            slow_begin = ready + EXCHANGE
        begin = ready + EXCHANGE
    yield Bar(3, slow_begin, slow_begin + PART[3], "computes, and will be late")


def server() -> Iterator[Bar]:
    """Yield asynchronous servers: nobody waits."""
    for worker, part in enumerate(PART):
        begin = 0.0
        while begin < UNTIL:
            is_late = part > PART[0]
            yield Bar(worker, begin, begin + part, "computes, and will be late" if is_late else "computes")
            yield Bar(worker, begin + part, begin + part + EXCHANGE, "exchanges")
            begin += part + EXCHANGE


WAYS: dict[str, tuple[str, Callable[[], Iterator[Bar]]]] = {
    "all-reduce": ("all wait for all", all_reduce),
    "all-reduce, live shares": ("the slow one has fewer samples", live_shares),
    "deadline": ("who is late joins a later step", deadline),
    f"local, {LOCAL_STEPS} steps": ("one exchange for all of them", local),
    "server, asynchronous": ("nobody waits", server),
}


def panel(top: float, title: str, about: str, bars: Iterator[Bar]) -> Iterator[str]:
    """Yield one way: its name, and a row for each worker."""
    yield f'<text x="14" y="{top + 2 * ROW - 4}" font-weight="bold">{title}</text>'
    yield f'<text x="14" y="{top + 3 * ROW - 2}" fill="#444">{about}</text>'
    for bar in bars:
        begin, end = min(bar.begin, UNTIL), min(bar.end, UNTIL)
        if end > begin:
            size = f'width="{UNIT * (end - begin):.1f}" height="{ROW - 3}"'
            at = f'x="{LEFT + UNIT * begin:.1f}" y="{top + ROW * bar.worker:.1f}"'
            yield f'<rect {at} {size} fill="{COLOURS[bar.what]}" stroke="white" stroke-width="0.7"/>'


def legend() -> Iterator[str]:
    """Yield what the colours mean."""
    at = LEFT
    for what, colour in COLOURS.items():
        yield f'<rect x="{at}" y="20" width="14" height="14" fill="{colour}"/>'
        yield f'<text x="{at + 20}" y="32">{what}</text>'
        at += 56 + 7 * len(what)


def main() -> None:
    """Write the picture."""
    width = LEFT + UNIT * UNTIL + RIGHT
    about = "Four workers, the last of them 2.5 times slower, under five ways for gradients to meet"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {HEIGHT}" font-family="sans-serif" '
        f'font-size="13" role="img" aria-label="{about}">',
        f'<rect width="{width:g}" height="{HEIGHT}" fill="white"/>',
        *legend(),
    ]
    for number, (title, (said, bars)) in enumerate(WAYS.items()):
        lines += panel(TOP + number * (4 * ROW + GAP), title, said, bars())
    axis = f'<text x="{LEFT + UNIT * UNTIL:g}" y="{HEIGHT - 8}" text-anchor="end" fill="#444">time</text>'
    (Path(__file__).parent / "images" / "sync.svg").write_text("\n".join([*lines, axis, "</svg>", ""]))


if __name__ == "__main__":
    main()
