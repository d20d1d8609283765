"""`shoal cost`: the textbook made executable."""

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shoal.cli import flags
from shoal.core.errors import ConfigError, did_you_mean
from shoal.core.units import parse_bytes, parse_rate, parse_seconds
from shoal.planner.collectives.allreduce import ALLREDUCE, Algorithm
from shoal.planner.collectives.codecs import CODECS, Codec
from shoal.planner.collectives.compression import Setting, weigh
from shoal.planner.collectives.contest import allreduce_contest, broadcast_contest
from shoal.spec.device import Link

if TYPE_CHECKING:
    from rich.console import RenderableType

ABOUT = "Say what each algorithm of a collective costs at this size on this link, or whether to compress gradients."
_EXCHANGES = {"all-reduce": "summed", "all-gather": "gathered", "slices": "sliced"}
"""How what is encoded travels."""

EXAMPLE = """\
example:
  shoal cost allreduce --bytes 100MB --workers 64 --link 10Gbps --latency 20us
  shoal cost allreduce --bytes 1GB --workers 64 --link ib-ndr --per-node 8 --inside-link nvlink-4
  shoal cost broadcast --bytes 5MB --workers 8 --link 1MB/s
  shoal cost compression --bytes 400MB --workers 16 --link 10Gbps --step 300ms \\
                         --codec topk --encode-rate 2GB/s --iterations 1.1

Sizes: 1000, 5MB, 1GiB. Rates: 10Gbps (bits), 1.25GB/s (bytes). Times: 20us, 1.5ms, 3s, 4h.
A message takes latency + bytes / rate; a worker sends one and receives one at a time. docs/cost.md has the formulas.
"""

_FLAGS: dict[str, dict[str, dict[str, Any]]] = {
    "allreduce": {
        "--servers": {"type": int, "metavar": "K", "help": "parameter servers beside the workers (default: 1)"},
        "--per-node": {"type": int, "metavar": "G", "help": "workers in a node (default: about the square root of N)"},
        "--inside-link": {"metavar": "RATE", "help": "what joins the workers of a node (default: the same as --link)"},
        "--inside-latency": {"metavar": "TIME", "help": "its latency (default: the catalog's, else as --latency)"},
    },
    "broadcast": {},
    "compression": {
        "--step": {"metavar": "TIME", "help": "what a step takes without communication"},
        "--codec": {"metavar": "NAME", "help": f"{', '.join(CODECS)}: sets ratio and exchange"},
        "--ratio": {"type": float, "metavar": "R", "help": "encoded bytes over bytes (default: the codec's)"},
        "--exchange": {"metavar": "HOW", "help": f"{', '.join(_EXCHANGES)} (default: the codec's)"},
        "--algorithm": {"metavar": "NAME", "help": f"of an all-reduce: {', '.join(ALLREDUCE)} (default: the fastest)"},
        "--encode-rate": {"metavar": "RATE", "help": "gradient encoded per second (default: it takes no time)"},
        "--decode-rate": {"metavar": "RATE", "help": "gradient decoded per second (default: as --encode-rate)"},
        "--iterations": {"type": float, "metavar": "I", "help": "steps needed, over those without (default: 1)"},
        "--overlap": {"metavar": "TIME", "help": "computing behind which the exchange can hide (default: none)"},
    },
}
WHATS = tuple(_FLAGS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("what", metavar="WHAT", help=", ".join(_FLAGS))
    parser.add_argument("--bytes", metavar="SIZE", help="what is reduced, sent or compressed")
    parser.add_argument("--workers", type=int, metavar="N", help="how many workers take part")
    parser.add_argument("--link", metavar="RATE", help="a rate, or a link of the catalog such as ethernet-10")
    parser.add_argument(
        "--latency", metavar="TIME", help="what a message costs besides (default: the catalog's, else 0)"
    )
    for what, own in _FLAGS.items():
        group = parser.add_argument_group(what) if own else parser
        for flag, options in own.items():
            group.add_argument(flag, **options)


def run(arguments: argparse.Namespace) -> int:
    """Work out the answer and show it."""
    if arguments.what not in _FLAGS:
        raise ConfigError(f"shoal cost knows no {arguments.what!r}.{did_you_mean(arguments.what, list(_FLAGS))}")
    _check_flags(arguments)
    figures, page = _ANSWERS[arguments.what](arguments)
    if arguments.json:
        print(json.dumps(figures, allow_nan=False))
    else:
        from rich.console import Console

        Console().print(page())
    return 0


Answer = tuple[dict[str, Any], Callable[[], "RenderableType"]]
"""The figures for --json, and what draws them in a terminal."""


def _allreduce(arguments: argparse.Namespace) -> Answer:
    num_bytes, workers, link = _question(arguments)
    contest = allreduce_contest(
        num_bytes,
        workers,
        link,
        servers=flags.whole("--servers", 1 if arguments.servers is None else arguments.servers),
        per_node=_per_node(arguments, workers),
        inside=_inside(arguments, link),
    )

    def page() -> "RenderableType":
        from shoal.cli.cost_table import draw_contest

        details = contest.details
        labels = {"parameter-server": f" x{details['servers']}", "two-level": f", {details['per_node']} a node"}
        return draw_contest(contest, labels, nodes=arguments.per_node is not None)

    return contest.as_json(), page


def _broadcast(arguments: argparse.Namespace) -> Answer:
    contest = broadcast_contest(*_question(arguments))

    def page() -> "RenderableType":
        from shoal.cli.cost_table import draw_contest

        return draw_contest(contest, {"chain": f", {contest.details['chain_chunks']:,} chunks"})

    return contest.as_json(), page


def _compression(arguments: argparse.Namespace) -> Answer:
    num_bytes, workers, link = _question(arguments)
    name, codec = _codec(arguments)
    setting = Setting(
        num_bytes=num_bytes,
        workers=workers,
        link_bytes_per_s=link.bytes_per_s,
        latency_s=link.latency_s,
        compute_s=flags.needed("--step", parse_seconds, arguments.step, "300ms"),
        overlap_s=flags.read("--overlap", parse_seconds, arguments.overlap or "0"),
        algorithms=_algorithms(arguments.algorithm),
    )
    encode, decode = arguments.encode_rate, arguments.decode_rate or arguments.encode_rate
    verdict = weigh(
        codec,
        setting,
        encode_bytes_per_s=flags.read("--encode-rate", parse_rate, encode) if encode else math.inf,
        decode_bytes_per_s=flags.read("--decode-rate", parse_rate, decode) if decode else math.inf,
        iterations=flags.above_0("--iterations", 1.0 if arguments.iterations is None else arguments.iterations),
    )

    def page() -> "RenderableType":
        from shoal.cli.cost_table import draw_verdict

        return draw_verdict(name, codec, setting, verdict)

    asked = {"bytes": num_bytes, "workers": workers, "link_bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s}
    return {"codec": name, "ratio": codec.ratio, **asked, **verdict.as_json()}, page


_ANSWERS = {"allreduce": _allreduce, "broadcast": _broadcast, "compression": _compression}


def _check_flags(arguments: argparse.Namespace) -> None:
    """Refuse a flag of another collective: it would be ignored in silence."""
    for what, own in _FLAGS.items():
        for flag in own:
            given = getattr(arguments, flag.strip("-").replace("-", "_"))
            if given is not None and what != arguments.what:
                raise ConfigError(f"{flag} goes with shoal cost {what}, not with {arguments.what}.")


def _question(arguments: argparse.Namespace) -> tuple[float, int, Link]:
    num_bytes = flags.needed("--bytes", parse_bytes, arguments.bytes, "100MB")
    if num_bytes == 0:
        raise ConfigError(f"--bytes {arguments.bytes}: there is nothing to send. Write it like --bytes 100MB.")
    workers = flags.whole("--workers", flags.needed("--workers", int, arguments.workers, "64"))
    link = flags.link("--link", flags.needed("--link", str, arguments.link, "10Gbps"))
    return num_bytes, workers, _with_latency(link, "--latency", arguments.latency)


def _with_latency(link: Link, flag: str, text: str | None) -> Link:
    return link if text is None else dataclasses.replace(link, latency_s=flags.read(flag, parse_seconds, text))


def _inside(arguments: argparse.Namespace, link: Link) -> Link | None:
    given = {"--inside-link": arguments.inside_link, "--inside-latency": arguments.inside_latency}
    for flag, text in given.items():
        if text is not None and arguments.per_node is None:
            raise ConfigError(f"{flag} needs --per-node: say how many workers a node has.")
    inside = (
        link if arguments.inside_link is None else flags.link("--inside-link", arguments.inside_link, link.latency_s)
    )
    return _with_latency(inside, "--inside-latency", arguments.inside_latency)


def _per_node(arguments: argparse.Namespace, workers: int) -> int | None:
    if arguments.per_node is None:
        return None
    per_node = flags.whole("--per-node", arguments.per_node)
    if per_node > workers:
        raise ConfigError(f"--per-node {per_node} is more than --workers {workers}.")
    if workers % per_node:
        low = {count for count in range(1, math.isqrt(workers) + 1) if workers % count == 0}
        divisors = low | {workers // count for count in low}
        below, above = max(d for d in divisors if d < per_node), min(d for d in divisors if d > per_node)
        raise ConfigError(f"--per-node {per_node} does not divide --workers {workers}. Use {below} or {above}.")
    return per_node


def _codec(arguments: argparse.Namespace) -> tuple[str, Codec]:
    if arguments.codec is None and arguments.ratio is None:
        raise ConfigError(f"say what compresses: --codec {', '.join(CODECS)}, or --ratio 0.1.")
    codec = CODECS["none"] if arguments.codec is None else flags.named("--codec", arguments.codec, CODECS)
    if arguments.ratio is not None:
        if not 0 < arguments.ratio <= 1:
            raise ConfigError(f"--ratio {arguments.ratio:g}: encoded bytes over bytes is above 0, and 1 at most.")
        codec = dataclasses.replace(codec, ratio=arguments.ratio)
    if arguments.exchange is not None:
        travels = flags.named("--exchange", arguments.exchange, _EXCHANGES)
        codec = dataclasses.replace(codec, travels=travels)
    return arguments.codec or f"a ratio of {codec.ratio:g}", codec


def _algorithms(name: str | None) -> Mapping[str, Algorithm] | None:
    return None if name is None else {name: flags.named("--algorithm", name, ALLREDUCE)}
