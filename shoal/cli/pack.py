"""`shoal pack`: any dataset -> a pack; and whether a pack is whole, and what is in it."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli import flags
from shoal.core.errors import ConfigError
from shoal.core.units import format_bytes, format_seconds, parse_bytes, parse_rate

if TYPE_CHECKING:
    from shoal.data.pack.manifest import Manifest

ABOUT = "Write any dataset as a pack: a few big files that are mapped into memory and read at random."
EXAMPLE = """\
example:
  shoal pack photos/ photos.pack                 a folder of images; folders inside are classes
  shoal pack corpus.txt corpus.pack --tokenizer gpt2
  shoal pack 'shards/*.tar' web.pack --on-error skip --workers 8
  shoal pack table.parquet table.pack --columns features,label --compression features=zstd
  shoal pack --show photos.pack                  what is in it, and how it was made
  shoal pack --check photos.pack                 whether every byte is still as it was written

SRC may be a folder, a file, a pattern or a URL: images, WebDataset tar, HDF5, Zarr, LMDB, NumPy, CSV, Parquet, Arrow,
Hugging Face datasets, squashfs, text, FFCV .beton. After a crash, the same command goes on where it stopped.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("src", metavar="SRC", help="what to pack; with --check and --show, a pack")
    parser.add_argument("dst", metavar="DST", type=Path, nargs="?", help="the pack to write, usually NAME.pack")
    parser.add_argument("--check", action="store_true", help="read a whole pack, and say what is wrong with it")
    parser.add_argument("--show", action="store_true", help="say what a pack holds")
    parser.add_argument("--kind", metavar="NAME", help="the format of SRC (default: found out)")
    parser.add_argument(
        "--columns", metavar="A,B", help="only these columns, in this order; B:tokens also says the kind"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one a core)")
    parser.add_argument(
        "--part-size", default="256MB", metavar="SIZE", help="about how large a part is (default: 256MB)"
    )
    parser.add_argument(
        "--compression", default="auto", metavar="HOW", help="auto (measured), none, lz4, zstd, or A=zstd,B=none"
    )
    parser.add_argument("--storage-speed", metavar="RATE", help="what it will be read from (default: DST's, measured)")
    parser.add_argument(
        "--on-error", default="raise", metavar="WHAT", help="raise (default) or skip: samples that fail"
    )
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="for text: a tokenizers file, a Hugging Face name, or bytes"
    )
    parser.add_argument(
        "--restart-blocks", type=int, default=2, metavar="K", help="of JPEGs: a restart marker every K blocks; 0: none"
    )
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the format; again for more"
    )
    parser.add_argument("--no-sync", action="store_true", help="do not wait until all is on the disk")
    parser.add_argument("--restart", action="store_true", help="begin anew, also where an earlier attempt left parts")


def run(arguments: argparse.Namespace) -> int:
    """Pack, check or show."""
    if arguments.check or arguments.show:
        if arguments.dst is not None or (arguments.check and arguments.show):
            raise ConfigError("--check and --show each take one pack: shoal pack --check NAME.pack")
        return _check(arguments) if arguments.check else _show(arguments)
    if arguments.dst is None:
        raise ConfigError(f"say what to write: shoal pack {arguments.src} NAME.pack")
    return _pack(arguments)


def _pack(arguments: argparse.Namespace) -> int:
    asked = {
        "columns": _columns(arguments.columns),
        "workers": None if arguments.workers is None else flags.whole("--workers", arguments.workers),
        "part_bytes": flags.read("--part-size", parse_bytes, arguments.part_size),
        "compression": _compression(arguments.compression),
        "storage_bytes_per_s": arguments.storage_speed
        and flags.read("--storage-speed", parse_rate, arguments.storage_speed),
        "on_error": arguments.on_error,
        "restart_blocks": arguments.restart_blocks,
        "resume": not arguments.restart,
        "sync": not arguments.no_sync,
        **_options(arguments),
    }
    import time

    from shoal.data.pack.writer import pack

    begun_s = time.monotonic()
    manifest = pack(arguments.src, arguments.dst, **asked)
    seconds = time.monotonic() - begun_s
    if arguments.json:
        from shoal.data.pack.reader import Pack
        from shoal.data.pack.show import summary

        print(json.dumps({**summary(Pack(arguments.dst)), "seconds": seconds}, allow_nan=False))
    else:
        print(_said(manifest, arguments.dst, seconds))
    return 0


def _said(manifest: "Manifest", path: Path, seconds: float) -> str:
    parts = f"{len(manifest.parts):,} part{'s' * (len(manifest.parts) != 1)}"
    rate = f"{manifest.num_rows / max(seconds, 1e-9):,.0f} rows/s"
    lines = [
        f"Packed {manifest.num_rows:,} rows into {path}: {parts}, {format_bytes(manifest.num_bytes)}, "
        f"in {format_seconds(seconds)} ({rate})."
    ]
    if manifest.skipped:
        lines.append(f"Skipped {manifest.skipped:,} sample{'s' * (manifest.skipped != 1)}, the first:")
        lines += [f"  {why}" for why in manifest.made.get("skipped", [])]
    return "\n".join(lines)


def _columns(text: str | None) -> dict[str, str] | None:
    if text is None:
        return None
    pairs = [name.strip().rpartition(":") if ":" in name else (name.strip(), "", "") for name in text.split(",")]
    if any(not name for name, _, _ in pairs):
        raise ConfigError(f"--columns {text!r}: write it like --columns image,label or --columns ids:tokens")
    return {name: kind for name, _, kind in pairs}


def _compression(text: str) -> str | dict[str, str]:
    if "=" not in text:
        return text
    pairs = [pair.partition("=") for pair in text.split(",")]
    if any(not name or not word for name, _, word in pairs):
        raise ConfigError(f"--compression {text!r}: write it like --compression x=zstd,y=none")
    return {name.strip(): word.strip() for name, _, word in pairs}


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {} if arguments.kind is None else {"kind": arguments.kind}
    if arguments.tokenizer is not None:
        found["tokenizer"] = arguments.tokenizer
    for text in arguments.option:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--option {text!r}: write it like --option dtype=float32")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _check(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from shoal.data.pack.check import check_pack

    with Console(stderr=True).status("checking") as status:
        problems = check_pack(
            arguments.src, on_part=lambda done, parts: status.update(f"checking: {done:,} of {parts:,} parts")
        )
    if arguments.json:
        found = [{"part": each.part, "row": each.row, "what": each.what} for each in problems]
        print(json.dumps({"path": arguments.src, "is_whole": not problems, "problems": found}))
    elif problems:
        print("\n".join(str(problem) for problem in problems))
        print(f"{arguments.src}: {len(problems)} problem{'s' * (len(problems) != 1)}. Pack it again, or copy it again.")
    else:
        print(f"{arguments.src} is whole: every file is there, every byte as it was written.")
    return 2 if problems else 0


def _show(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from shoal.data.pack.reader import Pack
    from shoal.data.pack.show import render, summary

    pack = Pack(arguments.src)
    if arguments.json:
        print(json.dumps(summary(pack), allow_nan=False))
    else:
        Console().print(render(pack), markup=False, highlight=False, soft_wrap=True)
    return 0
