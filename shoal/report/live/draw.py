"""A run at one moment as lines of a terminal: as much as its width and height have room for."""

import itertools
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, ConsoleOptions
from rich.text import Text

from shoal.core.units import format_bytes, format_count, format_seconds
from shoal.report.live.draw_workers import is_over_prediction, percent, worker_lines
from shoal.report.live.state import TROUBLE, LiveState
from shoal.report.split import PARTS

_COLOURS = dict(zip(PARTS, ("bright_black", "blue", "yellow", "red", "magenta", "cyan", "white"), strict=True))
# Each part has its own sign, so that the bar reads without colour; letters where the terminal knows only ASCII.
_BLOCKS = dict(zip(PARTS, "·█▒~+░-", strict=True))
_LETTERS = dict(zip(PARTS, ".#cb+w-", strict=True))
_HEIGHTS = "▁▂▃▄▅▆▇█"
_BAR_CELLS = 48
_LEAST_PART = 0.005
_MOST_REMARK_LINES = 4
_STATUS_STYLES = {"done": "green", "failed": "red", "stopped": "yellow"}


class Drawing:
    """A state to be printed by rich; `most_lines` of it, whatever the terminal's height is."""

    def __init__(self, state: LiveState, *, most_lines: int | None = None) -> None:
        self._state, self._most_lines = state, most_lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        # One line less than there are: the cursor needs one.
        height = self._most_lines or (options.height or console.height) - 1
        yield from draw(self._state, width=options.max_width, height=height, is_ascii=options.ascii_only)


def draw(state: LiveState, *, width: int, height: int, is_ascii: bool = False) -> list[Text]:
    """Return the lines of the view, none wider than `width`, and `height` of them at most."""
    lines = [
        *flow(_head(state, width, is_ascii=is_ascii), width),
        *flow(_numbers(state, width, is_ascii=is_ascii), width),
        *_split(state, width, is_ascii=is_ascii),
        *_remarks(state, width),
    ]
    lines += worker_lines(state, width=width, room=max(1, height - len(lines)), is_ascii=is_ascii)
    for line in lines:
        line.truncate(width, overflow="crop" if is_ascii else "ellipsis")
    return lines[:height]


def plain(state: LiveState) -> str:
    """Return the state in one line, for where there is no terminal."""
    chunks = [f"step {state.step}/{state.steps}" if state.steps else f"step {state.step}", *_measured(state)]
    if state.left_s is not None and state.left_s > 0:
        chunks.append(_left(state.left_s))
    chunks += [f"{name} {percent(fraction)}" for name, fraction in _largest_parts(state)[:3]]
    chunks += [f"worker {worker.rank}: {worker.words}" for worker in state.workers if worker.state in TROUBLE][:3]
    if state.is_over:
        chunks.append(": ".join(filter(None, (state.status, " ".join(state.message.split())))))
    return "  ".join(chunks)


def loss_in_words(state: LiveState) -> str:
    """Return the loss with four digits behind the point."""
    return "not finite" if state.is_lost_loss else "-" if state.loss is None else f"{state.loss:.4f}"


def flow(chunks: Iterable[Text], width: int, gap: int = 2) -> list[Text]:
    """Return `chunks` in as few lines as they fit into, in their order, none broken."""
    lines: list[Text] = []
    for chunk in chunks:
        if lines and lines[-1].cell_len + gap + chunk.cell_len <= width:
            lines[-1].append(" " * gap).append_text(chunk)
        else:
            lines.append(Text().append_text(chunk))  # a copy would give its style to the whole line
    return lines


def _left(seconds: float) -> str:
    return f"{format_seconds(max(1, round(seconds)))} left"


def _measured(state: LiveState) -> list[str]:
    if not state.step:
        return []
    rate = "-" if state.units_per_s is None else format_count(state.units_per_s)
    return [f"loss {loss_in_words(state)}", f"{rate} {state.unit}/s"]


def _head(state: LiveState, width: int, *, is_ascii: bool) -> Iterator[Text]:
    yield Text(state.run, style="bold")
    if state.is_over:
        yield Text(state.status, style=_STATUS_STYLES.get(state.status, ""))
    if state.steps:
        cells = max(8, min(32, width // 3))
        done = min(cells, cells * state.step // state.steps)
        full, empty = ("#", "-") if is_ascii else ("━", "─")
        yield Text.assemble((full * done, "green"), (empty * (cells - done), "bright_black"))
    yield Text(f"step {state.step:,}" + (f" of {state.steps:,}" if state.steps else ""))
    if state.left_s is not None:
        yield Text(_left(state.left_s) if state.left_s > 0 else "at its end")


def _numbers(state: LiveState, width: int, *, is_ascii: bool) -> Iterator[Text]:
    for chunk in _measured(state):
        yield Text(chunk, style="bold")
    if state.step_s is not None:
        yield Text(f"{format_seconds(state.step_s)} a step")
    yield from _memory(state)
    losses = [loss for _, loss in state.losses if loss is not None]
    if len(losses) > 1 and not is_ascii:
        yield Text(f"loss so far {_sparkline(losses, max(8, min(32, width // 3)))}", style="cyan")


def _memory(state: LiveState) -> Iterator[Text]:
    """Yield the memory of the worker that is fullest; before any is known, the most that is predicted."""
    fullest = state.fullest
    if fullest is not None and fullest.peak_bytes is not None:
        of = f" of {format_bytes(fullest.predicted_bytes)} predicted" if fullest.predicted_bytes else ""
        who = f" (worker {fullest.rank})" if len(state.workers) > 1 else ""
        style = "yellow" if is_over_prediction(fullest) else ""
        yield Text(f"memory {format_bytes(fullest.peak_bytes)}{of}{who}", style=style)
    elif predicted := max((worker.predicted_bytes or 0 for worker in state.workers), default=0):
        yield Text(f"memory {format_bytes(predicted)} predicted")


def _sparkline(values: Sequence[float], cells: int) -> str:
    """Return the means of as many stretches of `values` as there are cells, each as a block of its height."""
    count = min(cells, len(values))
    bounds = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    least, most = min(means), max(means)
    scale = (len(_HEIGHTS) - 1) / (most - least) if most > least else 0.0
    return "".join(_HEIGHTS[round((mean - least) * scale)] for mean in means)


def _split(state: LiveState, width: int, *, is_ascii: bool) -> list[Text]:
    """Return the bar of what a step is made of, and its legend, the largest part first."""
    if not state.split:
        return []
    signs = _LETTERS if is_ascii else _BLOCKS
    cells = min(_BAR_CELLS, width - 8)
    bar, edge = Text.assemble(("a step  ", "dim")), 0.0
    for name, fraction in state.split.items():
        count = round((edge + fraction) * cells) - round(edge * cells)
        edge += fraction
        bar.append(signs[name] * count, style=_COLOURS[name])
    parts = _largest_parts(state)
    legend = [Text.assemble((signs[name], _COLOURS[name]), f" {name} {percent(part)}") for name, part in parts]
    indent = " " * 8 if width > 60 else ""
    return [bar, *(Text(indent).append_text(line) for line in flow(legend, width - len(indent)))]


def _largest_parts(state: LiveState) -> list[tuple[str, float]]:
    parts = [(name, fraction) for name, fraction in state.split.items() if fraction >= _LEAST_PART]
    return sorted(parts, key=lambda part: -round(part[1], 2))  # rounded: equals do not change places all the time


def _remarks(state: LiveState, width: int) -> Iterator[Text]:
    if state.hang:
        yield from _paragraph(f"waiting: {state.hang}", width, "yellow")
    elif state.silent_s is not None:
        yield from _paragraph(f"nothing written for {format_seconds(state.silent_s)}", width, "yellow")
    if state.message:
        yield from _paragraph(state.message, width, _STATUS_STYLES.get(state.status, ""))


def _paragraph(words: str, width: int, style: str) -> Iterator[Text]:
    """Yield the words in as many lines as they need, and few at most: who reads the view must still see the workers."""
    for line in textwrap.wrap(words, width, max_lines=_MOST_REMARK_LINES, placeholder=" ..."):
        yield Text(line, style=style)
