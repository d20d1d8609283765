"""`shoal bench loaders`: shoal's loader beside others, on the user's own data."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.cli import flags
from shoal.core.errors import ConfigError
from shoal.core.host import usable_cores
from shoal.core.units import parse_bytes

ABOUT = "shoal's loader beside torch's DataLoader, FFCV, DALI and others, on your own data."
EXAMPLE = """\
example:
  shoal bench loaders --data photos.pack
  shoal bench loaders --data corpus.pack --peers shoal,torch,huggingface --seconds 10
  shoal bench loaders --data photos.pack --python mosaic=/opt/mosaic/bin/python --python ffcv=/opt/ffcv/bin/python

A sample of the pack is written in each loader's own format into a temporary folder, and every loader that is installed
loads it, in turns. The pack's columns decide what: random-resized crops of images (once with each resize filter),
windows of tokens, or rows. Loaders: shoal, torch, torch-batched, ffcv, dali, webdataset, mosaic, litdata, huggingface,
grain, lmdb, and c-gather, which is no loader but the limit. A loader can live in another Python than shoal's.
"""
_FILTERS = {"bilinear": False, "antialiased": True}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this kind."""
    parser.add_argument("--data", type=Path, required=True, metavar="PACK", help="a pack")
    parser.add_argument(
        "--column", metavar="NAME", help="which of its columns (default: images, else tokens, else the largest)"
    )
    parser.add_argument("--batch-size", type=int, metavar="B", help="samples a batch (default: 64, of rows 1,024)")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads or workers a loader (default: 2, if there are)"
    )
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="measured for each loader (default: 5)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="in so many turns (default: 5)")
    parser.add_argument("--peers", metavar="NAME,NAME", help="only these loaders (default: all that are installed)")
    parser.add_argument(
        "--python", action="append", default=[], metavar="NAME=PATH", help="the Python that has a loader"
    )
    parser.add_argument("--window", type=int, default=1025, metavar="N", help="tokens a sample (default: 1025)")
    parser.add_argument("--size", type=int, default=224, metavar="N", help="height and width of crops (default: 224)")
    parser.add_argument(
        "--filters", default="bilinear,antialiased", metavar="NAME,NAME", help="of crops (default: both)"
    )
    parser.add_argument("--sample", default="1.1GB", metavar="SIZE", help="how much of the pack (default: 1.1GB)")
    parser.add_argument("--write-seconds", type=float, default=60.0, metavar="S", help="a writer's time (default: 60)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where to write (default: the system's)")


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure; show the tables unless JSON is asked for; return the figures."""
    pythons = _pythons(arguments.python)
    filters = [_filter(name.strip()) for name in arguments.filters.split(",")]
    options: dict[str, Any] = {
        "seconds": flags.above_0("--seconds", arguments.seconds),
        "rounds": flags.whole("--rounds", arguments.rounds),
        "most_bytes": int(flags.read("--sample", parse_bytes, arguments.sample)),
    }
    if arguments.folder is not None and not arguments.folder.is_dir():
        raise ConfigError(f"--folder {arguments.folder}: there is no such folder.")
    for name in ("batch_size", "threads", "window", "size"):
        if getattr(arguments, name) is not None:
            flags.whole(f"--{name.replace('_', '-')}", getattr(arguments, name))
    from rich.console import Console

    from shoal.bench.loaders.export import task_of
    from shoal.bench.loaders.measure import PEERS, bench_loaders, check_names
    from shoal.cli.loaders_table import draw_loaders
    from shoal.data.pack.reader import open_pack

    names = check_names([name.strip() for name in arguments.peers.split(",")] if arguments.peers else list(PEERS))
    check_names(list(pythons))
    pack = open_pack(arguments.data)
    task = task_of(
        pack,
        column=arguments.column,
        batch_size=arguments.batch_size,
        threads=arguments.threads or min(2, usable_cores()),
        window=arguments.window,
        size=arguments.size,
        write_s=flags.above_0("--write-seconds", arguments.write_seconds),
    )
    tasks = [replace(task, antialias=is_on) for is_on in filters] if task.kind == "images" else [task]
    with Console(stderr=True).status("looking for loaders") as status:
        found = bench_loaders(
            pack, tasks, peers=names, pythons=pythons, folder=arguments.folder, say=status.update, **options
        )
    if not arguments.json:
        console = Console()
        if not console.is_terminal:
            console = Console(width=140)  # a file has no width, and the table must not be cut to rich's default
        for figures in found:
            console.print(draw_loaders(figures), "")
    return [figures.as_json() for figures in found]


def _filter(name: str) -> bool:
    if name not in _FILTERS:
        raise ConfigError(
            f"--filters {name!r} is not known. Write bilinear, antialiased or both: {','.join(_FILTERS)}."
        )
    return _FILTERS[name]


def _pythons(texts: list[str]) -> dict[str, Path]:
    """Return the Python of each peer that `--python NAME=PATH` names."""
    found = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise ConfigError(
                f"--python {text!r} says no loader and path. Write it like --python ffcv=/opt/ffcv/bin/python."
            )
        if not Path(path).is_file():
            raise ConfigError(f"--python {text}: there is no {path}.")
        found[name] = Path(path).absolute()  # not resolved: a link into a venv is what makes it that venv's Python
    return found
