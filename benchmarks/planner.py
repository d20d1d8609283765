"""The figures of docs/accuracy.md about step times, held out: `python benchmarks/planner.py --truth FOLDER`.

FOLDER has a100_single_node.csv and a100_multi_node.csv, the public measurements published with the vTrain simulator
(MIT licence, VIA Research Group, KAIST; MICRO 2024). They are not part of shoal. About a minute on two cores.
"""

import argparse
import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from shoal.planner.calibration.calibrate import fit
from shoal.planner.calibration.calibration import constants_of
from shoal.planner.calibration.measured import Measured, read_rows
from shoal.planner.calibration.report import FOLDS, a100_nodes, errors_by_file, held_out_machines, rankings
from shoal.planner.machine import Machine

SETS = {"single node": "a100_single_node.csv", "multi node": "a100_multi_node.csv"}
PUBLISHED = {"single node": ("8.37%", "59%", "5%"), "multi node": ("14.73%", "17.5%", "8%")}
"""The simulator's error and that of a constant-efficiency model, both on the whole sets; and what shoal promises."""
HALVES = 8


def main() -> None:
    """Print every section as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, required=True, metavar="FOLDER", help="where the two CSVs lie")
    truth = parser.parse_args().truth
    sets = {name: read_rows(truth / file) for name, file in SETS.items()}
    for section in (held_out_section, halves_section, ranking_section, constants_section):
        for line in section(sets):
            print(line, flush=True)
        print()


def held_out_section(sets: dict[str, list[Measured]]) -> Iterator[str]:
    """Yield the errors of predictions by a fit to the other four fifths of a set, or of both sets together."""
    yield f"## Step time, each row predicted by a fit to the others ({FOLDS}-fold)"
    yield ""
    yield (
        "| set | rows | mean error | worst | constants alone | fitted to both sets | catalog "
        "| vTrain | constant efficiency | promised |"
    )
    yield "|---" * 10 + "|"
    together = [row for rows in sets.values() for row in rows]
    joint = dict(zip(map(id, together), held_out_machines(together, a100_nodes()), strict=True))
    for name, rows in sets.items():
        machines = held_out_machines(rows, a100_nodes())
        errors, _ = errors_by_file(rows, machines)
        assert errors is not None
        cells = [
            f"{errors.mean_abs_error:.1%}",
            f"{errors.worst_abs_error:.0%}",
            mean_error(rows, [without_anchors(machine) for machine in machines]),
            mean_error(rows, [joint[id(row)] for row in rows]),
            mean_error(rows, [a100_nodes()] * len(rows)),
            *PUBLISHED[name],
        ]
        yield f"| {name} | {len(rows)} | " + " | ".join(cells) + " |"


def halves_section(sets: dict[str, list[Measured]]) -> Iterator[str]:
    """Yield the errors on a random half by a fit to the other, and by a fit to the other set."""
    yield "## Fitted to less, or to something else"
    yield ""
    yield "| tested on | fitted to | mean error, least to most |"
    yield "|---|---|---|"
    for name, rows in sets.items():
        found = sorted(_half_error(rows, seed) for seed in range(HALVES))
        yield f"| a random half of {name} | the other half, {HALVES} times | {found[0]:.1%} to {found[-1]:.1%} |"
    for name, rows in sets.items():
        (other, others) = next((key, value) for key, value in sets.items() if key != name)
        yield f"| {name} | {other} | {mean_error(rows, [fit(others, a100_nodes())] * len(rows))} |"


def ranking_section(sets: dict[str, list[Measured]]) -> Iterator[str]:
    """Yield whether the configuration ranked first is among the three fastest measured."""
    rows = sets["multi node"]
    yield "## The measured configuration that is ranked first"
    yield ""
    yield "| model | configurations | fitted to the other models | fitted to all | catalog |"
    yield "|---|---|---|---|---|"
    held_out = _places(rows, held_out_machines(rows, a100_nodes(), by_model=True))
    fitted = _places(rows, [fit(rows, a100_nodes())] * len(rows))
    catalog = _places(rows, [a100_nodes()] * len(rows))
    for model in held_out:
        count = sum(row.model == model for row in rows)
        yield f"| {model} | {count} | {held_out[model]} | {fitted[model]} | {catalog[model]} |"
    single = rankings(sets["single node"], held_out_machines(sets["single node"], a100_nodes(), by_model=True))
    good = sum(ranking.among_three for ranking in single)
    yield ""
    yield f"Single node: of {len(single)} models with 4 or more rows, {good} have it among the three fastest."


def constants_section(sets: dict[str, list[Measured]]) -> Iterator[str]:
    """Yield what was fitted, beside the catalog."""
    yield "## Constants"
    yield ""
    names = ["catalog", *sets, "both"]
    machines = [a100_nodes(), *(fit(rows, a100_nodes()) for rows in sets.values())]
    machines.append(fit([row for rows in sets.values() for row in rows], a100_nodes()))
    found = [dataclasses.asdict(constants_of(machine)) for machine in machines]
    yield "| | " + " | ".join(names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for key in found[0]:
        yield f"| {key} | " + " | ".join(f"{constants[key]:.3g}" for constants in found) + " |"


def without_anchors(machine: Machine) -> Machine:
    """Return `machine` with its fitted constants alone."""
    return dataclasses.replace(machine, nearby=None)


def mean_error(rows: Sequence[Measured], machines: Sequence[Machine]) -> str:
    """Return the mean error of `rows`, as a percentage."""
    errors, _ = errors_by_file(rows, machines)
    assert errors is not None
    return f"{errors.mean_abs_error:.1%}"


def _half_error(rows: list[Measured], seed: int) -> float:
    order = random.Random(seed).sample(rows, len(rows))  # noqa: S311
    half = len(rows) // 2
    errors, _ = errors_by_file(order[half:], [fit(order[:half], a100_nodes())] * (len(rows) - half))
    assert errors is not None
    return errors.mean_abs_error


def _places(rows: Sequence[Measured], machines: Sequence[Machine]) -> dict[str, str]:
    return {
        ranking.model: f"number {ranking.place}, {ranking.behind:.1%} behind the fastest"
        for ranking in rankings(rows, machines)
    }


if __name__ == "__main__":
    main()
