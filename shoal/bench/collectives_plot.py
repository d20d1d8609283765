"""A picture of `shoal bench collectives`: seconds against bytes, measured as lines, predicted dashed, a panel a number
of workers."""

import math
from collections.abc import Iterator, Mapping, Sequence

from shoal.bench.collectives import Measured
from shoal.core.units import format_bytes, format_seconds

# Told apart by the colour-blind (Okabe and Ito); the peers are grey and brown.
COLOURS = {
    "naive": "#000000",
    "tree": "#e69f00",
    "ring": "#0072b2",
    "halving-doubling": "#009e73",
    "recursive-doubling": "#d55e00",
    "two-level": "#56b4e9",
    "shared-memory": "#cc79a7",
    "shared-in-place": "#7a0177",
    "Gloo": "#777777",
    "MPI": "#8c510a",
}
_WIDTH, _HEIGHT, _TOP, _LEFT, _GAP, _LEGEND = 380, 400, 62, 62, 50, 170


def draw_plot(all_measured: Sequence[Measured]) -> str:
    """Return the picture as SVG; every panel has the same axes."""
    sizes = sorted({float(size) for measured in all_measured for size in measured.seconds})
    times = [s for measured in all_measured for s in _all_seconds(measured)]
    frame = Frame(bytes_span=_decades(sizes), seconds_span=_decades(times))
    width = _LEFT + len(all_measured) * (_WIDTH + _GAP) + _LEGEND
    heading = "all-reduce on one host: measured (lines) and predicted from the measured link (dashed)"
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_TOP + _HEIGHT + 50}" '
        f'font-family="sans-serif" font-size="12" role="img" aria-label="{heading}">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{heading}</text>',
    ]
    for number, measured in enumerate(all_measured):
        body.append(f'<g transform="translate({_LEFT + number * (_WIDTH + _GAP)} {_TOP})">')
        body += [*_grid(frame, labels_seconds=number == 0), *_panel(measured, frame), "</g>"]
    names = [name for name in COLOURS if any(name in measured.names for measured in all_measured)]
    body += [*_legend(names, left=width - _LEGEND), "</svg>", ""]
    return "\n".join(body)


class Frame:
    """Where bytes and seconds lie in a panel; both axes are logarithmic."""

    def __init__(self, *, bytes_span: tuple[int, int], seconds_span: tuple[int, int]) -> None:
        self.bytes_span, self.seconds_span = bytes_span, seconds_span

    def x(self, num_bytes: float) -> float:
        """Return how far to the right `num_bytes` lie."""
        low, high = self.bytes_span
        return _WIDTH * (math.log10(num_bytes) - low) / (high - low)

    def y(self, seconds: float) -> float:
        """Return how far down `seconds` lie."""
        low, high = self.seconds_span
        return _HEIGHT * (high - math.log10(seconds)) / (high - low)

    def line(self, points: Mapping[int, float]) -> str:
        """Return `points`, seconds by bytes, as a line has them."""
        return " ".join(f"{self.x(size):.1f},{self.y(seconds):.1f}" for size, seconds in points.items())


def _all_seconds(measured: Measured) -> list[float]:
    rows = [*measured.seconds.values(), *measured.predicted.values()]
    return [seconds for row in rows for seconds in row.values()]


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """Return the powers of ten that hold all values."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _grid(frame: Frame, *, labels_seconds: bool) -> Iterator[str]:
    for power in range(frame.bytes_span[0], frame.bytes_span[1] + 1):
        at = frame.x(10.0**power)
        yield f'<path d="M{at:.1f} 0v{_HEIGHT}" stroke="#ddd"/>'
        yield f'<text x="{at:.1f}" y="{_HEIGHT + 18}" text-anchor="middle">{format_bytes(10**power)}</text>'
    for power in range(frame.seconds_span[0], frame.seconds_span[1] + 1):
        at = frame.y(10.0**power)
        yield f'<path d="M0 {at:.1f}h{_WIDTH}" stroke="#ddd"/>'
        if labels_seconds:
            yield f'<text x="-8" y="{at + 4:.1f}" text-anchor="end">{format_seconds(10.0**power)}</text>'


def _panel(measured: Measured, frame: Frame) -> Iterator[str]:
    yield f'<text x="{_WIDTH / 2}" y="-10" text-anchor="middle" font-size="13">{measured.workers} workers</text>'
    predicted = measured.predicted
    for name in measured.names:
        took = {size: row[name] for size, row in measured.seconds.items()}
        look = f'fill="none" stroke="{COLOURS[name]}"'
        if all(name in row for row in predicted.values()):
            said = frame.line({size: row[name] for size, row in predicted.items()})
            yield f'<polyline points="{said}" {look} stroke-width="1.2" stroke-dasharray="4 4"/>'
        yield f'<polyline points="{frame.line(took)}" {look} stroke-width="2"><title>{name}</title></polyline>'
        for size, seconds in took.items():
            title = f"<title>{name}, {format_bytes(size)}: {format_seconds(seconds)}</title>"
            place = f'cx="{frame.x(size):.1f}" cy="{frame.y(seconds):.1f}"'
            yield f'<circle {place} r="3" fill="{COLOURS[name]}">{title}</circle>'


def _legend(names: Sequence[str], *, left: int) -> Iterator[str]:
    for number, name in enumerate(names):
        y, colour = _TOP + 12 + 22 * number, COLOURS[name]
        yield f'<path d="M{left} {y - 4}h22" stroke="{colour}" stroke-width="2"/>'
        yield f'<circle cx="{left + 11}" cy="{y - 4}" r="3" fill="{colour}"/>'
        yield f'<text x="{left + 30}" y="{y}">{name}</text>'
