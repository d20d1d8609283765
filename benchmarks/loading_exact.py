"""The samples of every global batch are the same, however they are loaded: shown, not promised.

    python benchmarks/loading_exact.py [--small] [--json FILE]

Rows, rows in shuffled blocks, windows of tokens, and images with random crops and flips are loaded for two epochs by 1,
2, 3, 5 and 8 workers, with equal and unequal shares, by 1, 2 and 4 threads, after a resume at every position (each time
by another number of workers), from a copy that is whole, and from one whose parts come only when they are waited for;
by the loader of a training run, and by shoal.Loader, also with processes. Each global batch is hashed: the numbers of
its samples (shoal.Loader does not tell these), and their bytes, in order. One worker of a run with one thread, reading
in place, is what the others are held against; its samples, against the plain order. It prints one table, and exits with
1 if a single batch differs. About a minute on 2 cores.
"""

import argparse
import hashlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: tests/ is beside benchmarks/

import numpy as np
import torch

from benchmarks.loading_exact_data import Dataset, Hashes, make_datasets
from shoal.data.loader import Loader
from shoal.data.order import order
from shoal.data.partition import global_batch
from shoal.data.stage.staged import Staged, in_place
from shoal.data.stage.staging import stage
from shoal.data.steps import StepLoader
from tests.data.stage.late import late_parts

EPOCHS = 2
UNEQUAL = {1: (1.0,), 2: (0.7, 0.3), 3: (0.2, 0.5, 0.3), 5: (0.1, 0.4, 0.05, 0.25, 0.2)}
UNEQUAL[8] = (0.02, 0.3, 0.08, 0.1, 0.2, 0.05, 0.15, 0.1)
WORKERS, THREADS = (1, 2, 3, 5, 8), (1, 2, 4)


def main(arguments: Sequence[str] | None = None) -> int:
    """Load everything in every way, print the table, and return 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="less data, and 1 and 3 workers only")
    parser.add_argument("--json", type=Path, help="write the counts there")
    options = parser.parse_args(arguments)
    workers = (1, 3) if options.small else WORKERS
    threads = (1, 2) if options.small else THREADS
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        datasets = make_datasets(Path(folder), small=options.small)
        for dataset in datasets:
            dataset.expected = [*hashes(dataset, (1.0,), threads=1)]
            check_order(dataset)
        rows = [
            (name, {dataset.name: _differing(case(dataset), dataset) for dataset in datasets})
            for name, case in cases(workers, threads, Path(folder)).items()
        ]
    show(rows, [dataset.name for dataset in datasets])
    count = sum(total for _, cells in rows for _, total in cells.values())
    wrong = sum(differing for _, cells in rows for differing, _ in cells.values())
    print(f"{wrong} of {count:,} global batches differ; {time.monotonic() - begin_s:.0f} s.")
    if options.json:
        options.json.write_text(json.dumps(dict(rows), indent=1) + "\n")
    return 1 if wrong or not count else 0


Found = Iterator[tuple[int, list[Hashes]]]
"""For each time that something was loaded: from which step on, and each global batch."""


def cases(workers: Sequence[int], threads: Sequence[int], folder: Path) -> dict[str, Callable[[Dataset], Found]]:
    """Return by its name what is tried."""
    found: dict[str, Callable[[Dataset], Found]] = {}
    for count in workers:
        for kind, shares in (("equal", (1 / count,) * count), ("unequal", UNEQUAL[count])):
            if count > 1 or kind == "equal":
                found[f"{count} workers, {kind} shares"] = _by_threads(shares, threads)
    found["resumed at every position"] = _resumed(workers, lambda _: nullcontext())
    found[f"Loader, {_listed(workers)} workers"] = _by_loaders(workers, threads)
    found["Loader, 2 processes"] = lambda dataset: iter([(0, [*loader_hashes(dataset, (1.0,), workers=2)])])
    found["Loader, resumed at every position"] = _loaders_resumed(workers)
    for name, copying in (("whole", _whole), ("arriving", _arriving)):
        at = _copies(copying, folder)
        found[f"copy {name}, {_listed(workers)} workers"] = _staged(workers, at)
        found[f"copy {name}, resumed at every position"] = _resumed(workers, at)
    return found


def _by_threads(shares: tuple[float, ...], threads: Sequence[int]) -> Callable[[Dataset], Found]:
    return lambda dataset: ((0, [*hashes(dataset, shares, threads=count)]) for count in threads)


def _by_loaders(workers: Sequence[int], threads: Sequence[int]) -> Callable[[Dataset], Found]:
    def found(dataset: Dataset) -> Found:
        for count, number in itertools.product(workers, threads):
            for shares in {(1 / count,) * count, UNEQUAL[count]}:
                yield 0, [*loader_hashes(dataset, shares, threads=number)]

    return found


def _loaders_resumed(workers: Sequence[int]) -> Callable[[Dataset], Found]:
    def found(dataset: Dataset) -> Found:
        whole = Loader(dataset.view(), epochs=EPOCHS, **dataset.order)
        states = [whole.state_dict() for _ in whole]
        for step, count in zip(range(1, len(states)), itertools.cycle(workers)):
            shares, state = UNEQUAL[count] if step % 2 else (1 / count,) * count, states[step - 1]
            yield step, [*loader_hashes(dataset, shares, state=state, threads=1 + step % 2)]

    return found


Copying = Callable[[Dataset], Any]
"""A context that has the copy of a dataset's pack, or None: read in place."""


def _resumed(workers: Sequence[int], copying: Copying) -> Callable[[Dataset], Found]:
    def found(dataset: Dataset) -> Found:
        for step, count in zip(range(len(dataset.expected)), itertools.cycle(workers)):
            with copying(dataset) as staged:
                shares = UNEQUAL[count] if step % 2 else (1 / count,) * count
                yield step, [*hashes(dataset, shares, threads=1 + step % 2, first=step, staged=staged)]

    return found


def _staged(workers: Sequence[int], copying: Copying) -> Callable[[Dataset], Found]:
    def found(dataset: Dataset) -> Found:
        for count, kind in itertools.product(workers, ("equal", "unequal")):
            with copying(dataset) as staged:
                shares = UNEQUAL[count] if kind == "unequal" else (1 / count,) * count
                yield 0, [*hashes(dataset, shares, threads=2, staged=staged)]

    return found


def _copies(copying: Callable[[Staged, Path], None], folder: Path) -> Copying:
    @contextmanager
    def copied(dataset: Dataset) -> Iterator[Staged]:
        with tempfile.TemporaryDirectory(dir=folder) as home, ExitStack() as opened:
            if copying is _arriving:
                opened.enter_context(late_parts(Path(home, "waited")))
            staged = opened.enter_context(stage(dataset.path, to=Path(home, "fast"), desk=Path(home, "desk")))
            copying(staged, dataset.path)
            yield staged

    return copied


def _whole(staged: Staged, source: Path) -> None:
    """Wait for all parts."""
    staged.wait(timeout_s=60)
    assert staged.have() == in_place(source).have()


def _arriving(staged: Staged, source: Path) -> None:
    """Wait for none: each comes when somebody waits for it."""
    assert staged.have() == []
    assert len(staged.manifest.parts) > 2, source


def loader_hashes(
    dataset: Dataset, shares: tuple[float, ...], *, state: dict[str, Any] | None = None, **options: int
) -> Iterator[Hashes]:
    """Yield each global batch as one shoal.Loader a worker gives it, after `state`, to the end of the last epoch."""
    loaders = [
        Loader(dataset.view(), epochs=EPOCHS, shares=shares, index=index, **dataset.order, **options)
        for index in range(len(shares))
    ]
    for loader in loaders if state is not None else []:
        loader.load_state_dict(state or {})
    for batches in zip(*loaders, strict=True):
        yield _hashed([], batches)


def hashes(
    dataset: Dataset, shares: tuple[float, ...], *, threads: int, first: int = 0, staged: Staged | None = None
) -> Iterator[Hashes]:
    """Yield each global batch from step `first` on, as a run has it, put together from the parts of all workers."""
    steps = EPOCHS * -(-len(dataset.view()) // dataset.batch_size)
    loaders = [
        StepLoader(
            dataset.view(staged),
            shares=shares,
            index=index,
            first_step=first + 1,
            last_step=steps,
            threads=threads,
            **dataset.order,
        )
        for index in range(len(shares))
    ]
    for parts in zip(*loaders, strict=True):
        held = [part for part in parts if part.samples]  # the part of a last, partial batch may be empty
        yield _hashed([sample for part in held for sample in part.samples], [part.batch for part in held])


def _hashed(samples: Sequence[int], batches: Sequence[dict[str, Any]]) -> Hashes:
    """Return what a global batch is, whatever the parts in which it comes."""
    whole = hashlib.sha256()
    for name in batches[0]:
        whole.update(name.encode())
        for batch in batches:
            whole.update(batch[name].contiguous().view(torch.uint8).numpy())
    numbers = hashlib.sha256(np.array(samples, dtype=np.int64).tobytes()).hexdigest() if samples else ""
    return Hashes(numbers, whole.hexdigest())


def check_order(dataset: Dataset) -> None:
    """Hold the samples of one worker against the plain order."""
    view = dataset.view()
    loader = StepLoader(view, shares=(1.0,), index=0, last_step=len(dataset.expected), **dataset.order)
    seen: dict[int, list[int]] = {}
    for part in loader:
        seen.setdefault(part.epoch, []).extend(part.samples)
        if dataset.block_rows is None:
            where = global_batch(part.step - 1, num_samples=len(view), batch_size=dataset.batch_size)
            positions = np.arange(where.first, where.last)
            assert [*part.samples] == order(len(view), positions, seed=dataset.seed, epoch=where.epoch).tolist(), (
                part.step
            )
    assert all(sorted(samples) == [*range(len(view))] for samples in seen.values())
    assert len({tuple(samples) for samples in seen.values()}) == EPOCHS
    assert len({*dataset.expected}) == len(dataset.expected)


def _differing(found: Found, dataset: Dataset) -> tuple[int, int]:
    """Return how many batches differ, or are missing, and how many there are."""
    differing = total = 0
    for first, batches in found:
        wanted = dataset.expected[first:]
        total += len(wanted)
        pairs = itertools.zip_longest(batches, wanted)
        differing += sum(ours is None or theirs is None or not ours.is_like(theirs) for ours, theirs in pairs)
    return differing, total


def show(rows: Sequence[tuple[str, dict[str, tuple[int, int]]]], names: Sequence[str]) -> None:
    """Print for each case and dataset how many global batches were the same."""
    width = max(len(name) for name, _ in rows)
    print(f"{'global batches that are the same':{width}}" + "".join(f"{name:>16}" for name in names))
    for name, cells in rows:
        shown = [f"{'' if not wrong else 'DIFFER: '}{total - wrong}/{total}" for wrong, total in cells.values()]
        print(f"{name:{width}}" + "".join(f"{cell:>16}" for cell in shown))


def _listed(workers: Sequence[int]) -> str:
    return ",".join(map(str, workers))


if __name__ == "__main__":
    sys.exit(main())
