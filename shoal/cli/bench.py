"""`shoal bench`: shoal measured beside its peers."""

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli import bench_engines, bench_loaders, flags
from shoal.core.errors import ConfigError
from shoal.core.host import memory_bytes
from shoal.core.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from typing import TypeAlias

    from shoal.bench.collectives import Measured

    _Kinds: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]  # its only name

ABOUT = "Measure shoal beside its peers, in one run."
EXAMPLE = """\
example:
  shoal bench step examples/gpt.py              a step through shoal beside a bare PyTorch loop and beside bare DDP
  shoal bench step examples/gpt.py --workers 4 --rounds 40
  shoal bench start runs/gpt-1                  how long the instant verbs take
  shoal bench collectives                       every all-reduce beside Gloo's, MPI's, and what was predicted
  shoal bench collectives --workers 2 --sizes 4KB,1MB,64MB --seconds 20 --plot collectives.svg
  shoal bench engines examples/gpt.py           ZeRO as shoal runs it beside ZeRO by DeepSpeed
  shoal bench loaders --data photos.pack        shoal beside torch's DataLoader, FFCV, DALI and others
"""

_SIZES = "4KB,16KB,64KB,256KB,1MB,4MB,16MB,64MB"
_MOST_WORKERS = 64

_STEP_EXAMPLE = """\
example:
  shoal bench step examples/gpt.py                     with one worker beside a bare loop, with two beside bare DDP
  shoal bench step examples/gpt.py --workers 4 --rounds 40

The two sides take turns in the same processes; what is printed is how much longer a step takes through shoal.
"""

_START_EXAMPLE = """\
example:
  shoal bench start runs/gpt-1                         --help, a wrong config, and shoal report of this run
"""

_COLLECTIVES_EXAMPLE = """\
example:
  shoal bench collectives
  shoal bench collectives --workers 2 --sizes 4KB,1MB,64MB --seconds 20 --plot collectives.svg

Workers of this machine sum tensors of 32-bit numbers by every algorithm over messages, through shared memory, by Gloo
and, where mpirun and mpi4py are installed, by Open MPI. Every sum is checked. What is predicted comes from the link
that is measured first; workers that send at the same time share it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    step = _add_kind(
        kinds, "step", "A step through shoal beside a bare PyTorch loop and beside bare DDP.", _STEP_EXAMPLE
    )
    step.add_argument("path", type=Path, metavar="FILE", help="the Python file that defines `job`")
    step.add_argument("--workers", default="1,2", metavar="N,N", help="the numbers of workers (default: 1,2)")
    step.add_argument(
        "--rounds", type=int, default=61, metavar="N", help="how often the two sides take turns (default: 61)"
    )
    step.add_argument("--steps", type=int, default=1, metavar="S", help="how many steps a turn (default: 1)")
    start = _add_kind(kinds, "start", "How long the instant verbs take.", _START_EXAMPLE)
    start.add_argument("path", type=Path, metavar="RUN", help="the run's folder, such as runs/gpt-1")
    about = "Every all-reduce beside Gloo's own, MPI's, and what was predicted."
    collectives = _add_kind(kinds, "collectives", about, _COLLECTIVES_EXAMPLE)
    collectives.add_argument("--workers", default="2,4", metavar="N,N", help="the numbers of workers (default: 2,4)")
    collectives.add_argument(
        "--sizes", default=_SIZES, metavar="SIZE,SIZE", help="what is summed (default: 4KB to 64MB, times 4)"
    )
    collectives.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="how long to measure, about (default: 60)"
    )
    collectives.add_argument("--plot", type=Path, metavar="SVG", help="also draw measured and predicted into this file")
    bench_engines.add_arguments(_add_kind(kinds, "engines", bench_engines.ABOUT, bench_engines.EXAMPLE))
    bench_loaders.add_arguments(_add_kind(kinds, "loaders", bench_loaders.ABOUT, bench_loaders.EXAMPLE))


def _add_kind(kinds: "_Kinds", name: str, about: str, example: str) -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    kind = kinds.add_parser(name, help=about, description=about, epilog=example, formatter_class=form)
    # No default: what is not said here is what was said, or not, before the kind.
    kind.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=flags.JSON_HELP)
    return kind


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark and show its figures."""
    kinds = {
        "step": _step,
        "start": _start,
        "collectives": _collectives,
        "engines": bench_engines.measure,
        "loaders": bench_loaders.measure,
    }
    figures = kinds[arguments.what](arguments)
    if arguments.json:
        print(json.dumps(figures, allow_nan=False))
    return 0


def _there(path: Path) -> Path:
    if not path.exists():
        raise ConfigError(f"there is no {path}.")
    return path


def _step(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from shoal.bench.step import bench_step

    file = _there(arguments.path)
    rounds, steps = flags.whole("--rounds", arguments.rounds), flags.whole("--steps", arguments.steps)
    figures = []
    for workers in _workers(arguments.workers, least=1):
        figure = bench_step(file, workers=workers, rounds=rounds, steps=steps)
        figures.append(figure)
        if not arguments.json:
            print(_in_words(figure), flush=True)
    return figures


def _in_words(figure: dict[str, Any]) -> str:
    return (
        f"{figure['job']}, {figure['workers']} worker{'s' if figure['workers'] > 1 else ''}: "
        f"{figure['peer']} {format_seconds(figure['bare_step_s'])}, shoal {format_seconds(figure['shoal_step_s'])} "
        f"a step; ratio {figure['ratio']:.3f} ({figure['ratio_low']:.3f} to {figure['ratio_high']:.3f}, "
        f"{figure['rounds']} rounds)"
    )


def _start(arguments: argparse.Namespace) -> dict[str, float]:
    from shoal.bench.start import bench_start

    figures = bench_start(_there(arguments.path))
    if not arguments.json:
        for name, seconds in figures.items():
            print(f"{name}: {format_seconds(seconds)}")
    return figures


def _collectives(arguments: argparse.Namespace) -> dict[str, Any]:
    counts = _workers(arguments.workers, least=2)
    sizes = _sizes(arguments.sizes, most_workers=max(counts))
    seconds = flags.above_0("--seconds", arguments.seconds)
    plot: Path | None = arguments.plot
    if plot is not None and not plot.parent.is_dir():
        raise ConfigError(f"--plot {plot}: there is no folder {plot.parent}.")
    found = []
    for count in counts:
        found.append(_measure(count, sizes, seconds / len(counts)))
        if not arguments.json:
            _show(found[-1])
    if plot is not None:
        from shoal.bench.collectives_plot import draw_plot
        from shoal.core.files import write_whole

        write_whole(plot, draw_plot(found))
        if not arguments.json:
            print(f"Drawn to {plot}.")
    return {"collective": "all-reduce", "dtype": "float32", "measured": [measured.as_json() for measured in found]}


def _measure(workers: int, sizes: list[int], seconds: float) -> "Measured":
    from rich.console import Console

    from shoal.bench.collectives import bench_collectives

    with Console(stderr=True).status(f"{workers} workers") as status:
        return bench_collectives(
            workers=workers,
            sizes=sizes,
            seconds=seconds,
            say=lambda what: status.update(f"measuring with {workers} workers: {what}"),
        )


def _show(measured: "Measured") -> None:
    from rich.console import Console

    from shoal.cli.collectives_table import draw_collectives

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a file has no width, and the table must not be cut to rich's default
    console.print(draw_collectives(measured), "")


def _workers(text: str, *, least: int) -> list[int]:
    """Return the numbers of workers that `text` lists."""
    found = []
    for part in text.split(","):
        if not re.fullmatch(r"\s*\d{1,9}\s*", part, re.ASCII):
            raise ConfigError(f"--workers {text!r} is not a list of numbers. Write it like --workers 2,4.")
        count = int(part)
        if not least <= count <= _MOST_WORKERS:
            why = f"at least {least} and at most {_MOST_WORKERS}"
            raise ConfigError(f"--workers {count}: this needs {why} workers on this machine.")
        found.append(count)
    return list(dict.fromkeys(found))


def _sizes(text: str, *, most_workers: int) -> list[int]:
    """Return the sizes that `text` lists, in bytes, the smallest first."""
    found = set()
    for part in text.split(","):
        size = flags.read("--sizes", parse_bytes, part)
        if size < 4 or size % 4:
            raise ConfigError(
                f"--sizes {part}: 32-bit numbers are summed, so a size is a multiple of 4 bytes, like 4KB."
            )
        # A tensor, its sum as it should be, two buffers for what arrives, the shared memory and what the engine holds.
        if 6 * most_workers * size > memory_bytes():
            needed = f"{most_workers} workers need about {format_bytes(6 * most_workers * size)}"
            raise ConfigError(f"--sizes {part}: {needed}, but there are {format_bytes(memory_bytes())}. Ask for less.")
        found.add(int(size))
    return sorted(found)
