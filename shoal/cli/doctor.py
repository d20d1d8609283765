"""`shoal doctor`: check this installation, and say what to mend."""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import shoal

if TYPE_CHECKING:
    from shoal.doctor.finding import Finding

ABOUT = (
    "Check this installation (torch, process groups, Slurm, ports, shared memory, storage, clock); say what to mend."
)
EXAMPLE = """\
example:
  shoal doctor                               this machine, and runs/ in this folder
  shoal doctor --runs /scratch/me/runs       where run folders will go
  srun --ntasks-per-node 1 shoal doctor      each node of an allocation
  shoal doctor --json | jq .problems

Exits with 0 if training can work (warnings do not count), with 1 if something would break it.
"""
_MARKS = {"ok": ("green", "ok"), "warning": ("yellow", "warning"), "problem": ("bold red", "PROBLEM")}
_WIDTHS = (7, 15)
"""Of the columns before the text."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="DIR", help="where run folders go (default: runs)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run all checks, and show what they find as they come."""
    from shoal.doctor.examine import all_checks, examine

    found = examine(all_checks(arguments.runs, os.environ))
    findings = list(found) if arguments.json else list(_shown(found))
    problems = sum(each.level == "problem" for each in findings)
    warnings = sum(each.level == "warning" for each in findings)
    if arguments.json:
        print(json.dumps(_as_json(findings, problems, warnings)))
    else:
        print(_verdict(problems, warnings))
    return 1 if problems else 0


def _as_json(findings: "list[Finding]", problems: int, warnings: int) -> dict[str, object]:
    import dataclasses
    import socket

    return {
        "shoal": shoal.__version__,
        "host": socket.gethostname(),
        "problems": problems,
        "warnings": warnings,
        "findings": [dataclasses.asdict(each) for each in findings],
    }


def _shown(findings: "Iterator[Finding]") -> "Iterator[Finding]":
    """Print each finding when it is there, and pass it on."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:  # rich may be what is missing
        yield from _shown_plainly(findings)
        return
    console = Console()
    for each in findings:
        style, mark = _MARKS[each.level]
        text = Text(each.fact)
        text.append("".join(f"\n{line}" for line in each.details), style="dim")
        text.append(f"\n{each.remedy}" if each.remedy else "", style="bold")
        row = Table.grid(padding=(0, 1))
        for width in _WIDTHS:
            row.add_column(width=width)
        row.add_column(overflow="fold")
        row.add_row(Text(mark, style=style), Text(each.subject), text)
        console.print(row)
        yield each


def _shown_plainly(findings: "Iterator[Finding]") -> "Iterator[Finding]":
    for each in findings:
        print(f"{_MARKS[each.level][1]:<8}{each.subject}: {each.fact}")
        for line in [*([each.remedy] if each.remedy else []), *each.details]:
            print(f"{'':<8}{line}")
        yield each


def _verdict(problems: int, warnings: int) -> str:
    if problems:
        what = "1 problem that breaks" if problems == 1 else f"{problems} problems that break"
        return f"There {'is' if problems == 1 else 'are'} {what} training; the lines under each say what to do."
    said = {0: "nothing is amiss", 1: "1 warning"}.get(warnings, f"{warnings} warnings")
    return f"shoal {shoal.__version__} can train here: {said}."
