"""What a pack holds, for people and for --json."""

from typing import TYPE_CHECKING, Any

from shoal.core.units import format_bytes
from shoal.data.pack.reader import Pack
from shoal.data.pack.schema import Column, stored_dtype

if TYPE_CHECKING:
    from rich.console import RenderableType


def summary(pack: Pack) -> dict[str, Any]:
    """Return what `shoal pack --show --json` prints."""
    manifest = pack.manifest
    return {
        "path": str(pack.path),
        "num_rows": manifest.num_rows,
        "num_bytes": manifest.num_bytes,
        "parts": len(manifest.parts),
        "skipped": manifest.skipped,
        "columns": [_column(pack, column) for column in manifest.columns],
        "block_rows": manifest.block_rows,
        "made": manifest.made,
    }


def _column(pack: Pack, column: Column) -> dict[str, Any]:
    return {
        "name": column.name,
        "kind": column.kind,
        "dtype": column.dtype,
        "shape": list(column.shape),
        "compression": column.compression,
        "num_bytes": column_bytes(pack, column),
        **{key: value for key, value in column.extra.items() if key in ("restart_blocks", "ndim")},
    }


def column_bytes(pack: Pack, column: Column) -> int:
    """Return the bytes that a column's values take before compression."""
    size = stored_dtype(column.dtype).itemsize
    if not column.is_fixed:
        return size * sum(part.num_values.get(column.name, 0) for part in pack.manifest.parts)
    elements = 1
    for length in column.shape:
        elements *= length
    return size * elements * pack.num_rows


def render(pack: Pack) -> "RenderableType":
    """Return the page that `shoal pack --show` prints."""
    from rich.console import Group
    from rich.table import Table

    manifest = pack.manifest
    parts = f"{len(manifest.parts):,} part{'s' * (len(manifest.parts) != 1)}"
    head = f"{pack.path}: {manifest.num_rows:,} rows in {parts}, {format_bytes(manifest.num_bytes)} on disk."
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("column", "kind", "dtype", "shape", "a row", "compression"):
        table.add_column(title, justify="right" if title == "a row" else "left")
    for column in manifest.columns:
        dtype = "" if column.kind in ("image", "text", "bytes") else column.dtype
        shape = " x ".join(map(str, column.shape))
        row = format_bytes(column_bytes(pack, column) / max(1, pack.num_rows))
        table.add_row(column.name, column.kind, dtype, shape, row, _compression(pack, column))
    return Group(head, table, *_notes(pack))


def _compression(pack: Pack, column: Column) -> str:
    if column.compression == "none":
        return "none"
    return f"{column.compression}, {pack.manifest.block_rows[column.compression]:,} rows a block"


def _notes(pack: Pack) -> list[str]:
    manifest, notes = pack.manifest, []
    source = manifest.made.get("source")
    if isinstance(source, dict):
        notes.append(
            "made from: " + ", ".join(f"{name} {value}" for name, value in source.items() if value is not None)
        )
    for column in manifest.columns:
        if column.extra.get("index"):
            notes.append(f"{column.name}: JPEGs have a restart marker every {column.extra['restart_blocks']} blocks.")
    if manifest.skipped:
        first = manifest.made.get("skipped", [])
        notes.append(f"skipped: {manifest.skipped:,} samples, the first: {'; '.join(first)}")
    return notes
