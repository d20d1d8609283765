"""What `shoal bench loaders` shows in a terminal, readable without colour."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.bench.loaders.figures import LIMIT, OURS, Figures, Loaded
from shoal.core.units import format_bytes, format_seconds


def draw_loaders(figures: Figures) -> RenderableType:
    """Return a table with the fastest loader first, how shoal compares, and who was left out."""
    words = [Text(sentence) for sentence in _sentences(figures)]
    return Group(Text(_heading(figures)), _table(figures), *words)


def _heading(figures: Figures) -> str:
    task = figures.task
    what = {
        "images": f"random-resized crops to {task.size}x{task.size}, {task.filter}",
        "tokens": f"windows of {task.window:,} tokens, as int64",
        "rows": f"rows of {format_bytes(figures.sample_bytes / figures.num_samples)}, in random order",
    }[task.kind]
    of = f"{figures.num_samples:,} samples ({format_bytes(figures.sample_bytes)} of column {task.column})"
    return f"{what}; batches of {task.batch_size:,} from {of}; {task.threads} threads or workers"


def _table(figures: Figures) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, padding=(0, 1))
    table.add_column("")
    for name in ("samples/s", "(slowest to fastest)", "shoal is", "first batch", "memory", "written in", "on disk"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("how", overflow="fold")
    for loaded in sorted(figures.loaded, key=lambda loaded: -loaded.samples_per_s):
        table.add_row(*_cells(figures, loaded), style="bold" if loaded.name == OURS else None)
    return table


def _cells(figures: Figures, loaded: Loaded) -> list[str]:
    times = figures.times(loaded)
    is_short = loaded.num_samples < figures.num_samples * 0.95
    part = f"the first {loaded.num_samples:,} samples" if is_short else ""
    return [
        _name(loaded),
        f"{loaded.samples_per_s:,.0f}",
        f"({loaded.slowest:,.0f} to {loaded.fastest:,.0f})",
        "" if times is None or loaded.name == OURS else f"{times:.2f}x",
        format_seconds(loaded.first_batch_s),
        format_bytes(loaded.memory_bytes) if loaded.memory_bytes else "?",
        format_seconds(loaded.write_s) if loaded.write_s else "-",
        format_bytes(loaded.disk_bytes) if loaded.disk_bytes else "-",
        "; ".join(filter(None, [loaded.how, part])),
    ]


def _name(loaded: Loaded) -> str:
    version = f" {loaded.version}" if loaded.version and loaded.name not in (OURS, LIMIT) else ""
    workers = "" if loaded.workers is None else f", {loaded.workers} workers"
    return f"{loaded.name}{version}{workers}"


def _sentences(figures: Figures) -> Iterator[str]:
    yield (
        f"Medians of {figures.rounds} turns of {format_seconds(figures.turn_s)}. Where a loader works with and without "
        f"worker processes, its faster way is shown. Memory is the most held, without pages of files."
    )
    best = figures.best_peer()
    if figures.ours is not None and best is not None:
        yield f"shoal is {figures.times(best):.2f} times as fast as the fastest of the others, {_name(best)}."
    yield from figures.left_out
