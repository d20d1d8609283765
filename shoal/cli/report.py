"""`shoal report`: one page about a run."""

import argparse
import json
from pathlib import Path

from shoal.core.run_folder import RunFolder

ABOUT = "Write a run's report.html and show its summary: where the time went, predicted beside measured."
EXAMPLE = """\
example:
  shoal report runs/gpt-1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder, such as runs/gpt-1")


def run(arguments: argparse.Namespace) -> int:
    """Write the page, and show the summary."""
    from shoal.report.page import write_page
    from shoal.report.summary import summarize

    folder = RunFolder.open(arguments.run_folder)
    summary = summarize(folder)
    write_page(folder, summary)
    if arguments.json:
        print(json.dumps(summary.as_json(), allow_nan=False))
    else:
        from rich.console import Console

        from shoal.report.table import render

        Console().print(render(summary))
    return 0
