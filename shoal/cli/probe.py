"""`shoal probe`: measure this machine and write cluster.toml."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.probe_slurm import add_slurm_arguments
from shoal.core.errors import ConfigError
from shoal.core.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shoal.training.probe import Probed

ABOUT = "Measure this machine (products by size, memory, copies, links, storage), and write cluster.toml."
EXAMPLE = """\
example:
  shoal probe                                    with one worker for each GPU, or two on the processor
  shoal probe --workers 4 --seconds 20           longer, and with the workers that will train
  shoal probe --storage /scratch --storage /data --out node.toml
  shoal probe --slurm --link ib-ndr              the nodes of a cluster, as its Slurm describes them

`shoal train` and `shoal plan` use cluster.toml from the working directory for what they predict.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("cluster.toml"),
        metavar="TOML",
        help="the file to write (default: cluster.toml)",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="how many measure at once (default: one a GPU, or 2)")
    parser.add_argument("--seconds", type=float, default=4.0, metavar="S", help="how long to measure (default: 4)")
    parser.add_argument(
        "--storage", type=Path, action="append", default=[], metavar="DIR", help="a folder to read from; again for more"
    )
    add_slurm_arguments(parser)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # what the probe itself starts
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Measure, write the file, and show what was found."""
    if arguments.worker is not None:
        return _work(arguments)
    out: Path = arguments.out
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}.")
    if arguments.slurm:
        return _describe(arguments)
    given = [flag for flag in ("partition", "device", "link") if getattr(arguments, flag) is not None]
    if given:
        raise ConfigError(f"--{given[0]} is about a cluster. Give --slurm, too, or leave it out.")
    from rich.console import Console

    from shoal.core.toml import write_toml
    from shoal.training.probe import probe

    with Console(stderr=True).status("measuring") as status:
        probed = probe(
            workers=arguments.workers,
            seconds=arguments.seconds,
            storage=arguments.storage,
            say=lambda what: status.update(f"measuring: {what}"),
        )
    write_toml(out, probed.cluster)
    if arguments.json:
        import json

        print(json.dumps(_as_json(probed, out), allow_nan=False))
    else:
        Console().print(render(probed))
        Console().print(f"Written to {out}.", highlight=False, markup=False)
    return 0


def _describe(arguments: argparse.Namespace) -> int:
    """Write what Slurm says about its nodes."""
    import dataclasses
    import json

    from shoal.cli.probe_slurm import describe
    from shoal.core.toml import write_toml

    cluster, remarks = describe(arguments)
    write_toml(arguments.out, cluster)
    if arguments.json:
        found = {"file": str(arguments.out), "cluster": dataclasses.asdict(cluster), "remarks": remarks}
        print(json.dumps(found, allow_nan=False))
        return 0
    for node in cluster.nodes:
        on = f"{node.devices} x {node.device}" if node.devices else f"{node.cores} cores"
        print(f"{node.count} x {node.host}: {on}, {format_bytes(node.memory_bytes)} of memory")
    print("\n".join([*remarks, f"Written to {arguments.out}."]))
    return 0


def _work(arguments: argparse.Namespace) -> int:
    from shoal.core.run_folder import RunFolder
    from shoal.launch.parent import die_with_parent
    from shoal.training.probe_worker import probe_work

    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    code = probe_work(RunFolder(arguments.worker), seconds=arguments.seconds)
    if code != 0:  # as in worker.py: at once, so that the others learn of it
        sys.stdout.flush()
        os._exit(code)
    return code


def _as_json(probed: "Probed", out: Path) -> dict[str, Any]:
    import dataclasses

    return {"file": str(out), **dataclasses.asdict(probed)}


def render(probed: "Probed") -> "RenderableType":
    """Return the table of what was found."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name, value in rows(probed):
        table.add_row(name, value)
    return table


def rows(probed: "Probed") -> list[tuple[str, str]]:
    """Return what was found, line by line: what it is, and how much."""
    cluster = probed.cluster
    node, device = cluster.nodes[0], cluster.devices[cluster.nodes[0].device]
    on = f"{node.devices} GPU{'s' * (node.devices > 1)}" if node.devices else f"{node.cores} cores"
    lines = [("host", f"{node.host}: {device.title}, {on}, {format_bytes(node.memory_bytes)} of memory")]
    if node.devices:
        free = format_bytes(device.memory_bytes - device.reserved_bytes)
        lines.append(("device memory", f"{format_bytes(device.memory_bytes)}, {free} of it for tensors"))
    for precision, full in (("fp32", device.matmul_flops_per_s), ("bf16", device.bf16_matmul_flops_per_s)):
        lines.append((f"products, {precision}", f"{_flops(full)}/s for the largest"))
        lines += [(f"  of {_flops(flops)}", f"{_flops(rate)}/s") for flops, rate in probed.products[precision]]
    lines += [
        ("half of that rate", f"for products of {_flops(device.half_rate_flops)}"),
        ("memory", f"{format_bytes(device.memory_bytes_per_s)}/s read and written"),
        ("memory, in place", f"{format_bytes(device.update_bytes_per_s)}/s read and written"),
        ("copies to it", f"{format_bytes(device.copy_to_bytes_per_s)}/s"),
        ("copies from it", f"{format_bytes(device.copy_from_bytes_per_s)}/s"),
        ("start of an operation", format_seconds(device.operation_s)),
    ]
    return lines + _link_rows(probed) + _storage_rows(probed)


def _link_rows(probed: "Probed") -> list[tuple[str, str]]:
    link = probed.cluster.inside
    if link is None:
        return []
    shown = {
        "link between workers": link,
        "shared memory, in place": probed.cluster.in_place,
        "shared memory, copied": probed.cluster.copied,
    }
    lines = [
        (name, f"{format_bytes(each.bytes_per_s)}/s, latency {format_seconds(each.latency_s)}")
        for name, each in shown.items()
        if each is not None
    ]
    return lines + [(f"  all-reduce of {format_bytes(size)}", format_seconds(s)) for size, s in probed.messages]


def _storage_rows(probed: "Probed") -> list[tuple[str, str]]:
    return [
        (f"storage {tier.path}", f"{format_bytes(tier.read_bytes_per_s)}/s read, {format_bytes(tier.free_bytes)} free")
        for tier in probed.cluster.storage
    ]


def _flops(count: float) -> str:
    return f"{format_count(count)} FLOP".replace("  ", " ")
