"""The loader and a GPU: batches arrive whole while the GPU computes, and copying them costs a step nothing.

    python benchmarks/gpu/loader.py [--device cuda --mb 512 --rounds 5 --json FILE]

Rows of 128 float32, windows of 1,025 tokens and, where Pillow is installed, crops of JPEGs:

1. exact: every batch is used on the device right after a product of large matrices, so that the copy, the use and the
   filling of the next batch's memory are under way at once. Its checksum is that of the same batch on the processor.
2. speed: samples/s that arrive on the device, beside torch's DataLoader with pinned memory, in turns.
3. exposed: what a step with loading costs above the same step on a batch that is there already.

With --device cpu the same is done without copies.
"""

import argparse
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import shoal

MB = 1_000_000
THREADS = 4


def make_packs(folder: Path, num_bytes: int) -> dict[str, dict[str, Any]]:
    """Write a pack of each kind, and return for each what a Loader needs."""
    random = np.random.default_rng(0)
    rows = random.random((max(2048, num_bytes // 512), 128), dtype=np.float32)
    shoal.pack(({"x": row} for row in rows), folder / "rows.pack", workers=1)
    documents = (random.integers(0, 50_000, 100_000, dtype=np.uint16) for _ in range(max(2, num_bytes // 200_000)))
    shoal.pack(({"ids": ids} for ids in documents), folder / "tokens.pack", columns={"ids": "tokens"}, workers=1)
    cases: dict[str, dict[str, Any]] = {
        "rows": {"data": folder / "rows.pack", "batch_size": 1024},
        "tokens": {"data": folder / "tokens.pack", "batch_size": 64, "window": 1025},
    }
    if jpegs := make_jpegs(random, 256):
        shoal.pack(({"image": jpeg} for jpeg in jpegs), folder / "images.pack", columns={"image": "image"}, workers=1)
        cases["images"] = {
            "data": folder / "images.pack",
            "batch_size": 64,
            "image": shoal.ImageOptions(size=224),
        }
    return cases


def make_jpegs(random: np.random.Generator, count: int) -> list[bytes]:
    """Return JPEGs of smooth noise; none where Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        return []
    found = []
    for _ in range(count):
        small = Image.fromarray(random.integers(0, 255, (28, 36, 3), dtype=np.uint8))
        stream = io.BytesIO()
        small.resize((450, 350)).save(stream, "jpeg", quality=90)
        found.append(stream.getvalue())
    return found


def tensor_of(batch: Any) -> Tensor:
    """Return the one tensor of a batch."""
    return batch if isinstance(batch, Tensor) else next(iter(batch.values()))


def checksums(loader: Any, busy: Callable[[], object], batches: int) -> list[int]:
    """Return the checksum of each batch, computed where the batch is, behind `busy`."""
    found = []
    for _, batch in zip(range(batches), loader, strict=False):
        busy()
        bits = tensor_of(batch).flatten()
        bits = bits.view(torch.int32) if bits.dtype == torch.float32 else bits
        places = torch.arange(1, bits.numel() + 1, device=bits.device) % 8191
        found.append((bits.long() * places).sum())
    return [int(one) for one in found]


def shoal_side(case: dict[str, Any], device: torch.device, *, threads: int = THREADS) -> Iterator[Tensor]:
    """Yield batches for ever, by shoal."""
    for batch in shoal.Loader(**case, seed=1, epochs=1_000_000, threads=threads or 1, device=device):
        yield tensor_of(batch)


def torch_side(case: dict[str, Any], device: torch.device, *, threads: int = THREADS) -> Iterator[Tensor]:
    """Yield batches for ever, by torch's DataLoader: the same samples, taken a batch at a time, with pinned memory."""
    options = {name: value for name, value in case.items() if name not in ("data", "batch_size")}
    dataset = shoal.View(case["data"], **options)
    loader = torch.utils.data.DataLoader(
        dataset,  # type: ignore[arg-type]
        batch_size=case["batch_size"],
        shuffle=True,
        drop_last=True,
        num_workers=threads,
        pin_memory=device.type == "cuda",
        persistent_workers=threads > 0,
    )
    while True:
        for batch in loader:
            yield tensor_of(batch).to(device, non_blocking=True)


def rate(batches: Iterator[Tensor], synchronize: Callable[[], object], seconds: float) -> float:
    """Return the samples/s that arrive."""
    synchronize()
    begin_s, samples = time.perf_counter(), 0
    while time.perf_counter() - begin_s < seconds:
        samples += len(next(batches))
    synchronize()
    return samples / (time.perf_counter() - begin_s)


def step_s(batches: Iterator[Tensor], busy: Callable[[], object], synchronize: Callable[[], object]) -> float:
    """Return the seconds of a step that computes and uses a batch."""
    synchronize()
    begin_s = time.perf_counter()
    for _ in range(20):
        batch = next(batches)
        busy()
        batch.flatten()[0].add(1)
    synchronize()
    return (time.perf_counter() - begin_s) / 20


def measure(case: dict[str, Any], device: torch.device, rounds: int, seconds: float) -> dict[str, Any]:
    """Return the figures of one kind."""
    is_gpu = device.type == "cuda"
    side = 4096 if is_gpu else 256
    matrix = torch.ones(side, side, device=device)
    synchronize: Callable[[], object] = torch.cuda.synchronize if is_gpu else lambda: None

    def busy() -> object:
        return [matrix @ matrix for _ in range(4)]

    on_device = checksums(shoal.Loader(**case, seed=1, threads=THREADS, device=device), busy, 200)
    on_host = checksums(shoal.Loader(**case, seed=1, threads=THREADS), lambda: None, 200)
    sides = {"shoal": shoal_side(case, device), "torch": torch_side(case, device)}
    held = next(sides["shoal"]).clone()
    rates: dict[str, list[float]] = {name: [] for name in sides}
    bare, loading = [], []
    for _ in range(rounds):
        for name, batches in sides.items():
            next(batches)
            rates[name].append(rate(batches, synchronize, seconds))
        bare.append(step_s(iter(lambda: held, None), busy, synchronize))
        loading.append(step_s(sides["shoal"], busy, synchronize))
    for batches in sides.values():
        batches.close()  # type: ignore[attr-defined]
    return {
        "exact": on_device == on_host,
        "batches": len(on_device),
        **{f"{name}_per_s": statistics.median(found) for name, found in rates.items()},
        "bare_step_ms": statistics.median(bare) * 1e3,
        "loading_step_ms": statistics.median(loading) * 1e3,
    }


def main() -> None:
    """Measure every kind; exit with 1 where a batch was not what it is on the processor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a side in a round")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device, found = torch.device(arguments.device), {}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in make_packs(Path(folder), arguments.mb * MB).items():
            found[name] = one = measure(case, device, arguments.rounds, arguments.seconds)
            print(f"{name}: {one['batches']} batches on {device} as on the processor: {one['exact']}; ", end="")
            print(f"{one['shoal_per_s']:,.0f} samples/s, torch's DataLoader {one['torch_per_s']:,.0f}; ", end="")
            print(f"a step {one['loading_step_ms']:.2f} ms, without loading {one['bare_step_ms']:.2f} ms", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    sys.exit(0 if all(one["exact"] for one in found.values()) else 1)


if __name__ == "__main__":
    main()
