"""shoal's writer beside FFCV's and MosaicML's, on the same samples: `python benchmarks/packing.py`.

1. The datasets of benchmarks/loaders.py: 4,000 JPEGs of about 450x350, 200M uint16 tokens, rows of 128 float32 (of the
   last two, the first --most-bytes). They lie in the page cache as plain files, from which every writer reads.
2. Rounds: each writer writes everything once in each, in an order that is turned round every time, in a process of its
   own. What was written before has reached the disk when a turn begins; imports are not counted; no writer waits for
   the disk. MosaicML's stops after --write-seconds.
3. A figure is the median over rounds: samples a second, and bytes on the disk a sample. The bar is to be
   at least as fast as FFCV's writer and MosaicML's.

shoal cuts JPEGs into segments and checksums every byte; FFCV encodes JPEGs anew; MosaicML's copies bytes. `plain` is
shoal with --restart-blocks 0: it copies and checksums the bytes.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path

from loaders import make

from shoal.bench.loaders.export import export_sample, task_of
from shoal.bench.loaders.peers.sample import Sample
from shoal.bench.loaders.peers.shoal_loader import WRITE_MODULES, Named
from shoal.bench.loaders.peers.task import Task
from shoal.bench.loaders.side import ask, this_python
from shoal.core.errors import WorkerFailed
from shoal.core.files import write_whole
from shoal.core.host import processor_name
from shoal.data.pack.progress import Quiet
from shoal.data.pack.reader import open_pack
from shoal.data.pack.writer import pack

WRITERS = {"shoal": "shoal_loader", "plain": "", "mosaic": "mosaic_loader", "ffcv": "ffcv_loader"}
PATIENCE_S = 600.0


@dataclass
class Writer:
    """One writer, and what it took in each round."""

    name: str
    module: str
    python: Path
    rates: list[float] = field(default_factory=list)
    sample_bytes: float = 0.0

    @property
    def samples_per_s(self) -> float:
        """The median."""
        return statistics.median(self.rates)

    def as_json(self) -> dict[str, object]:
        """Return the figures."""
        return {"name": self.name, "samples_per_s": self.rates, "bytes_per_sample": self.sample_bytes}


def installed(what: str, names: Sequence[str], pythons: Mapping[str, Path]) -> list[Writer]:
    """Return the writers that are there, and say which are not."""
    found = []
    for name in names:
        module, python = WRITERS[name], pythons.get(name, this_python())
        if name == "plain":
            if what == "images":
                found.append(Writer("shoal, JPEGs as they are", "", this_python()))
            continue
        peer = import_module(f"shoal.bench.loaders.peers.{module}")
        answer = ask(python, "look", module)
        if "missing" in answer:
            print(f"{peer.NAME} is left out: {python} has no {answer['missing']}. Give --python {name}=PYTHON.")
        else:
            found.append(Writer(f"{peer.NAME} {answer['version']}".strip(), module, python))
    return found


def turn(writer: Writer, task: Task, sample: Path, folder: Path) -> None:
    """Let one writer write everything, and take down what that took."""
    os.sync()
    folder.mkdir()
    try:
        if writer.module:
            arguments = [writer.module, json.dumps(asdict(task)), str(sample), str(folder)]
            answer = ask(writer.python, "write", *arguments, timeout_s=task.write_s + PATIENCE_S)
        else:
            command = [sys.executable, __file__, "--turn", json.dumps(asdict(task)), str(sample), str(folder)]
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
            answer = json.loads(done.stdout)
        written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    finally:
        shutil.rmtree(folder)
    writer.rates.append(answer["samples"] / answer["seconds"])
    writer.sample_bytes = written / answer["samples"]


def write_plain(text: str, sample: str, folder: str) -> None:
    """Write JPEGs as they are, in a process of its own; print what that took."""
    task = Task(**json.loads(text))
    samples = Named(Sample(Path(sample), kind="images", window=task.window), task.column)
    for module in WRITE_MODULES:
        import_module(module)
    begin_s = time.perf_counter()
    pack(
        samples,
        Path(folder) / "data.pack",
        columns={task.column: "image"},
        restart_blocks=0,
        compression="none",
        sync=False,
        workers=task.threads,
        report=Quiet(),
    )
    print(json.dumps({"samples": len(samples), "seconds": time.perf_counter() - begin_s}))


def in_turns(writers: Sequence[Writer], task: Task, sample: Path, folder: Path, *, rounds: int) -> None:
    """Measure all writers, in rounds."""
    for number in range(rounds):
        for writer in writers if number % 2 == 0 else writers[::-1]:
            try:
                turn(writer, task, sample, folder / "turn")
            except WorkerFailed as error:
                print(f"{writer.name} failed: {error}")
            else:
                print(
                    f"  round {number + 1}: {writer.name:28} {writer.rates[-1]:12,.0f}/s", file=sys.stderr, flush=True
                )


def say(what: str, writers: Sequence[Writer], source_bytes: float) -> bool:
    """Print the figures and whether the bars are met; return whether they all are."""
    print(f"{what}: {source_bytes:,.0f} bytes a sample in the source")
    print(f"  {'writer':28} {'samples/s':>12} {'slowest':>12} {'fastest':>12} {'bytes/sample':>13}")
    done = [writer for writer in writers if writer.rates]
    for writer in done:
        rates = f"{writer.samples_per_s:12,.0f} {min(writer.rates):12,.0f} {max(writer.rates):12,.0f}"
        print(f"  {writer.name:28} {rates} {writer.sample_bytes:13,.0f}")
    ours = next((writer for writer in done if writer.module == "shoal_loader"), None)
    others = [writer for writer in done if writer.module not in ("shoal_loader", "")]
    if ours is None or not others:
        print("  nothing to compare")
        return False
    ratios = {writer.name: ours.samples_per_s / writer.samples_per_s for writer in others}
    for name, ratio in ratios.items():
        print(f"  {ratio:6.2f}x {name} (bar 1x): {'yes' if ratio >= 1 else 'NO'}", flush=True)
    return min(ratios.values()) >= 1


def main() -> int:
    """Measure what was asked for; return 0 if shoal is at least as fast as the others everywhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["images", "tokens", "rows"], help="images, tokens, rows")
    parser.add_argument("--folder", type=Path, default=Path("bench-data"), help="where the datasets are, or are made")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most-bytes", type=float, default=200e6)
    parser.add_argument("--write-seconds", type=float, default=10.0)
    parser.add_argument("--writers", default=",".join(WRITERS))
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures into this file")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    pythons = {name: Path(path).absolute() for name, _, path in (text.partition("=") for text in asked.python)}
    print(f"{processor_name()}, {asked.threads} threads or workers, {asked.rounds} rounds")
    are_met, found = True, {}
    for what in asked.what:
        data = open_pack(make(what, asked.folder))
        writers = installed(what, asked.writers.split(","), pythons)
        task = task_of(data, column=None, batch_size=None, threads=asked.threads, write_s=asked.write_seconds)
        with tempfile.TemporaryDirectory(prefix="shoal-packing-", dir=asked.folder) as name:
            sample = Path(name) / "sample"
            sample.mkdir()
            source_bytes = export_sample(data, task, sample, most_bytes=int(asked.most_bytes))
            in_turns(writers, task, sample, Path(name), rounds=asked.rounds)
            num_samples = len(Sample(sample, kind=task.kind, window=task.window))
        are_met = say(what, writers, source_bytes / num_samples) and are_met
        found[what] = [writer.as_json() for writer in writers]
    if asked.json:
        write_whole(asked.json, json.dumps(found, indent=1))
    return 0 if are_met else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--turn"]:
        write_plain(*sys.argv[2:])
    else:
        sys.exit(main())
