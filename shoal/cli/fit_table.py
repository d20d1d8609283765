"""An estimate as a person reads it: the verdict, what the peak is made of, and what to change."""

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from shoal.core.units import format_bytes, format_count
from shoal.planner.memory.fit import MOST_SAMPLES, Change, Estimate

_NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "transient": "transient peak",
    "inputs": "the micro-batch itself",
    "communication": "communication buffers",
    "framework": "framework's work space",
    "fragmentation": "fragmentation",
}
_BAR = 24


def render(estimate: Estimate, *, layers: bool = False) -> Group:
    """Return the verdict, the table of the peak and that of the changes; with `layers`, also one of all layers."""
    traced = [_layer_table(estimate)] if layers else []
    return Group(_verdict(estimate), _peak_table(estimate), *traced, *_changes(estimate))


def _verdict(estimate: Estimate) -> Text:
    there, margin = format_bytes(estimate.memory_bytes), format_bytes(abs(estimate.margin_bytes))
    autocast = " with bf16 autocast" if estimate.precision == "bf16" else ""
    needs = (
        f"{format_count(estimate.parameters)} parameters in {estimate.dtype}{autocast}, "
        f"micro-batch {estimate.micro_batch}: "
        f"{format_bytes(estimate.peak_bytes)} at the peak (at most {estimate.error:.0%} more)"
    )
    if estimate.fits:
        text = f"It fits {estimate.device}: {needs}; {margin} of {there} to spare."
        return Text(text, style="green")
    return Text(f"It does not fit {estimate.device}: {needs}; {margin} more than its {there}.", style="red")


def _peak_table(estimate: Estimate) -> Table:
    table = Table(title=f"The peak: {estimate.moment}", title_justify="left", box=None, pad_edge=False)
    table.add_column("part")
    table.add_column("bytes", justify="right")
    table.add_column("")
    for name, label in _NAMES.items():
        num_bytes = estimate.parts.get(name, 0)
        if num_bytes:
            note = f" ({estimate.operation})" if name == "transient" and estimate.operation else ""
            table.add_row(label + note, format_bytes(num_bytes), "█" * round(_BAR * num_bytes / estimate.peak_bytes))
    table.add_row("at the peak", format_bytes(estimate.peak_bytes), "", style="bold")
    beyond_bytes = estimate.needed_bytes - estimate.peak_bytes
    table.add_row("error, allocator's gaps, context", format_bytes(beyond_bytes), "")
    table.add_row("needed", format_bytes(estimate.needed_bytes), "", style="bold")
    return table


def _layer_table(estimate: Estimate) -> Table:
    table = Table(title="\nLayers, in the order in which they run", title_justify="left", box=None, pad_edge=False)
    table.add_column("layer")
    for column in ("parameters", "FLOPs forward", "backward", "saved", "peak forward", "backward"):
        table.add_column(column, justify="right")
    for layer in estimate.layers:
        table.add_row(
            layer.name if layer.repeats == 1 else f"{layer.name} and {layer.repeats - 1} more like it",
            format_count(layer.parameters),
            format_count(layer.forward.flops),
            format_count(layer.backward.flops),
            format_bytes(layer.saved_bytes),
            format_bytes(layer.forward.peak_bytes),
            format_bytes(layer.backward.peak_bytes),
        )
    return table


def _changes(estimate: Estimate) -> list[Any]:
    largest = estimate.largest_micro_batch
    lines: list[Any] = []
    if estimate.fits:
        lines.append(Text(f"\nThe largest micro-batch that fits is {_size(largest)}. What would make room for more:"))
    elif any(change.fits for change in estimate.changes):
        lines.append(Text("\nWhat would make it fit, cheapest in time first:"))
    else:
        lines.append(Text("\nNothing that was tried makes it fit; what helps most:"))
    table = Table(box=None, pad_edge=False)
    for column, justify in (
        ("change", "left"),
        ("peak", "right"),
        ("time a sample", "right"),
        ("micro-batch", "right"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for change in _shown(estimate):
        table.add_row(
            change.title,
            format_bytes(change.peak_bytes),
            f"x {change.time:.2f}",
            f"up to {_size(change.largest_micro_batch)}" if change.largest_micro_batch else "none fits",
        )
    return [*lines, table]


def _shown(estimate: Estimate) -> list[Change]:
    helping = [change for change in estimate.changes if change.fits]
    return helping or sorted(estimate.changes, key=lambda change: change.peak_bytes)[:5]


def _size(micro_batch: int) -> str:
    return f"{micro_batch:,}" if micro_batch < MOST_SAMPLES else f"{MOST_SAMPLES:,} and more"
