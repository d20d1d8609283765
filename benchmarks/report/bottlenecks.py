"""Six planted bottlenecks: what the verdict says of each, the gain that it predicts, and the gain of following it.

    python benchmarks/report/bottlenecks.py [--only "slow data" ...] [--rounds 3] [--json FILE]

Each is a real training of a few seconds (tests/advice/planted.py), and the same with the advised change; they take
turns, `--rounds` times, and the medians count. The slow link needs root (network namespaces), and is left out without.
Exit 1: a verdict of any round names another bottleneck, or a gain is off the predicted one by more than 25%. Tiny
micro-batches are there twice: with sleeps, and computed, timed by what the processor computes.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script: tests/ is beside benchmarks/

from tests.advice.planted import PLANTED, TOLERANCE, Outcome, Planted, try_advice


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(PLANTED), default=list(PLANTED), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    print("| planted | the verdict names | its share of a step | change | predicted | measured | off |")
    print("|---|---|---|---|---|---|---|", flush=True)
    figures: dict[str, Any] = {}
    sentences, are_good = [], True
    for name in arguments.only:
        planted = PLANTED[name]
        if reason := planted.why_not:
            print(f"| {name} | left out: {reason} | | | | | |", flush=True)
            continue
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as folder:
            outcome = try_advice(planted, Path(folder), rounds=arguments.rounds)
        _show(name, outcome)
        sentences.append(f"- {name}: {outcome.advice.sentence}")
        figures[name] = asdict(outcome) | {"off": outcome.off, "load": load}
        are_good = are_good and _is_good(planted, outcome)
    print("\n" + "\n".join(sentences))
    loads = ", ".join(f"{each['load']:.1f}" for each in figures.values())
    print(f"\nload of the machine before each: {loads}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if are_good else 1


def _show(name: str, outcome: Outcome) -> None:
    advice = outcome.advice
    change = ", ".join(f"{field} = {_word(value)}" for field, value in (advice.change or {}).items())
    bound, named = " at least" * advice.is_bound, ", ".join(sorted(set(outcome.named)))
    print(
        f"| {name} | {named} | {advice.share:.0%} | {change} | {outcome.predicted:.2f}x{bound} | "
        f"{outcome.measured:.2f}x | {outcome.off:.0%} |",
        flush=True,
    )


def _word(value: object) -> str:
    return ", ".join(f"{each:.3g}" for each in value) if isinstance(value, tuple) else str(value)


def _is_good(planted: Planted, outcome: Outcome) -> bool:
    return set(outcome.named) == {planted.bottleneck} and outcome.off <= TOLERANCE


if __name__ == "__main__":
    raise SystemExit(main())
