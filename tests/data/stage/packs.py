"""Packs whose parts are random bytes: staging never looks into a part."""

import random
from pathlib import Path

from shoal.data.pack.checksum import file_checksum
from shoal.data.pack.manifest import Manifest, Part, PartFile, write_manifest
from shoal.data.pack.schema import Column


def make_pack(folder: Path, *, num_parts: int = 4, part_bytes: int = 100_000, seed: int = 0) -> Manifest:
    """Write a pack to `folder`, and return its manifest. Parts have about `part_bytes`, no two the same size."""
    (folder / "parts").mkdir(parents=True)
    numbers = random.Random(seed)
    parts = []
    for number in range(num_parts):
        file = folder / "parts" / f"{number:05d}.arrow"
        file.write_bytes(numbers.randbytes(part_bytes + 7 * number + 1))
        held = PartFile(f"parts/{file.name}", file.stat().st_size, file_checksum(file))
        parts.append(Part(name=file.stem, num_rows=10, num_values={}, files=(held,)))
    manifest = Manifest(columns=(Column(name="x", kind="scalar", dtype="uint8"),), parts=tuple(parts))
    write_manifest(folder, manifest)
    return manifest


def differing(copy: Path, original: Path) -> list[str]:
    """Return the names of those parts that are not the same in both."""
    names = [path.name for path in sorted((original / "parts").iterdir())]
    return [
        name
        for name in names
        if not (copy / "parts" / name).exists()
        or (copy / "parts" / name).read_bytes() != (original / "parts" / name).read_bytes()
    ]
