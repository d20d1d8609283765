"""Loaders beside each other on three datasets, and how shoal stands against its bars: `python benchmarks/loaders.py`.

1. Made once, in --folder: 4,000 JPEGs of about 450x350, 200M uint16 tokens, 1 GB of rows of 128 float32; each packed.
2. `shoal bench loaders` on each, with every loader that is installed; --python NAME=PATH says where others are.
3. The tables, and each ratio beside its bar.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from native_loading import photographs
from rich.console import Console

from shoal.bench.loaders.export import task_of
from shoal.bench.loaders.figures import LIMIT, Figures, Loaded
from shoal.bench.loaders.measure import PEERS, bench_loaders
from shoal.cli.loaders_table import draw_loaders
from shoal.core.files import write_whole
from shoal.core.host import processor_name
from shoal.data.pack.progress import Quiet
from shoal.data.pack.reader import open_pack
from shoal.data.pack.writer import pack

BARS = {
    "images": {"FFCV": 2.5, "DALI (CPU)": 2.8, "the best of the others": 1.5},
    "tokens": {"torch DataLoader": 10.0, "Hugging Face datasets": 10.0, "FFCV": 2.0},
    "rows": {"torch DataLoader": 20.0, "FFCV": 5.0, LIMIT: 0.75},
}
FIRST_BATCH_S = 0.5


def make(what: str, folder: Path) -> Path:
    """Return the pack of one dataset, made if it is not there."""
    path = folder / f"{what}.pack"
    if (path / "manifest.json").exists():
        return path
    print(f"making {path}", file=sys.stderr)
    random = np.random.default_rng(0)
    if what == "images":
        samples = [{"image": image} for image in photographs(4000)]
        pack(samples, path, columns={"image": "image"}, compression="none", report=Quiet())
    elif what == "tokens":
        source = folder / "tokens.bin"
        random.integers(0, 50_000, 200_000_000, dtype=np.uint16).tofile(source)
        pack(source, path, kind="tokens", compression="none", report=Quiet())
        source.unlink()
    else:
        source = folder / "rows.npy"
        np.save(source, random.standard_normal((2_000_000, 128), dtype=np.float32))
        pack(source, path, compression="none", report=Quiet())
        source.unlink()
    return path


def against_bars(figures: Figures) -> Iterator[str]:
    """Yield a sentence for each bar."""
    ours = figures.ours
    assert ours is not None
    for name, bar in BARS[figures.task.kind].items():
        peer = _best(figures, name)
        if peer is None:
            yield f"  {name}: not measured (bar {bar}x)"
        else:
            ratio = ours.samples_per_s / peer.samples_per_s
            yield f"  {ratio:6.2f}x {peer.name} (bar {bar}x): {'yes' if ratio >= bar else 'NO'}"
    quick = ours.first_batch_s < FIRST_BATCH_S
    yield f"  first batch {ours.first_batch_s:.3f} s (bar {FIRST_BATCH_S} s): {'yes' if quick else 'NO'}"
    least = min(figures.peers(), key=lambda peer: peer.memory_bytes, default=ours)
    is_less = ours.memory_bytes <= least.memory_bytes
    held = f"{ours.memory_bytes / 1e6:.0f} MB; the least of the others {least.memory_bytes / 1e6:.0f} MB, {least.name}"
    yield f"  memory {held}: {'yes' if is_less else 'NO'}"
    yield from _writing(figures)


def _best(figures: Figures, name: str) -> Loaded | None:
    """Return the fastest of those that a bar means."""
    every = [*figures.peers(), *(loaded for loaded in figures.loaded if loaded.name == LIMIT)]
    if name == "the best of the others":
        named = set(BARS[figures.task.kind])
        meant = [peer for peer in figures.peers() if peer.name not in named]
    else:
        meant = [peer for peer in every if peer.name == name]
    return max(meant, key=lambda peer: peer.samples_per_s, default=None)


def _writing(figures: Figures) -> Iterator[str]:
    for loaded in figures.loaded:
        if loaded.name in ("shoal", "FFCV", "MosaicML Streaming"):
            rate, size = loaded.num_samples / loaded.write_s, loaded.disk_bytes / loaded.num_samples
            yield f"  {loaded.name} writes {rate:,.0f} samples/s, {size:,.0f} bytes a sample"


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["images", "tokens", "rows"], help="images, tokens, rows")
    parser.add_argument("--folder", type=Path, default=Path("bench-data"), help="where the datasets are, or are made")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write-seconds", type=float, default=30.0)
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures into this file")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    pythons = {name: Path(path).absolute() for name, _, path in (text.partition("=") for text in asked.python)}
    console, found = Console(width=140), []
    print(f"{processor_name()}, {asked.threads} threads or workers")
    for what in asked.what:
        data = open_pack(make(what, asked.folder))
        task = task_of(data, column=None, batch_size=None, threads=asked.threads, write_s=asked.write_seconds)
        tasks = [task, replace(task, antialias=True)] if what == "images" else [task]
        every = bench_loaders(
            data,
            tasks,
            seconds=asked.seconds,
            rounds=asked.rounds,
            peers=asked.peers.split(","),
            pythons=pythons,
            folder=asked.folder,
            say=lambda words: print(words, file=sys.stderr, flush=True),
        )
        for figures in every:
            console.print(draw_loaders(figures))
            print("\n".join(against_bars(figures)), flush=True)
            found.append(figures.as_json())
    if asked.json:
        write_whole(asked.json, json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
