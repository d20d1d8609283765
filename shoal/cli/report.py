"""`shoal report`: one page about a run, or about two beside each other."""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from shoal.core.errors import ConfigError
from shoal.core.run_folder import RunFolder

ABOUT = (
    "Write a run's report.html and show its summary: where the time went, predicted beside measured, what to change. "
    "With two runs: what was different about them, and what came of it."
)
EXAMPLE = """\
example:
  shoal report runs/gpt-1
  shoal report runs/gpt-1 runs/gpt-2      compare them
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder, such as runs/gpt-1")
    parser.add_argument("other", type=Path, metavar="RUN_B", nargs="?", help="a second run, to compare with the first")
    parser.add_argument("--open", action="store_true", help="show the page in the browser")


def run(arguments: argparse.Namespace) -> int:
    """Write the page, and show the summary, also where the page cannot be written."""
    page, why = _compare(arguments) if arguments.other else _report(arguments)
    if why:
        mend = "Mend that, or copy the run to where you may write, and report on the copy."
        print(f"The page {page} could not be written: {why}. {mend}", file=sys.stderr)
        return ConfigError.exit_code
    if arguments.open:
        import webbrowser

        if not webbrowser.open(page.resolve().as_uri()):
            raise ConfigError(f"no browser could be started. Open {page} yourself.")
    return 0


def _report(arguments: argparse.Namespace) -> tuple[Path, str]:
    """Return the page, and why it could not be written, if so."""
    from shoal.report.page.write import write_page
    from shoal.report.summary import summarize

    folder = RunFolder.open(arguments.run_folder)
    summary = summarize(folder)
    why = _why_not(lambda: write_page(folder, summary))
    if arguments.json:
        print(json.dumps(summary.as_json(), allow_nan=False))
    else:
        from rich.console import Console

        from shoal.report.table import render

        Console().print(render(summary), crop=False)  # the path of the page may be longer than a line
    return folder.report_html, why


def _why_not(write: Callable[[], object]) -> str:
    """Write a page; return why that was not possible, as where the run is another's or the disk is full."""
    try:
        write()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _compare(arguments: argparse.Namespace) -> tuple[Path, str]:
    """Write the comparison into the second run's folder, and return the same."""
    from shoal.report.compare_runs import beside, differences, told_apart, verdict_on
    from shoal.report.page.compare_page import render_comparison, write_comparison
    from shoal.report.summary import summarize

    folders = [RunFolder.open(path) for path in (arguments.run_folder, arguments.other)]
    first, second = told_apart(*(summarize(folder) for folder in folders))
    name = re.sub(r"[^\w.-]", "_", folders[0].name)
    page = folders[1].path / f"compared-with-{name}.html"
    why = _why_not(lambda: write_comparison(first, second, page))
    if arguments.json:
        plain = {
            "runs": [str(folder.path) for folder in folders],
            "verdict": verdict_on(first, second),
            "numbers": [
                {"name": row.name, "values": list(row.values), "ratio": row.ratio} for row in beside(first, second)
            ],
            "differences": [list(row) for row in differences(first, second)],
            "page": None if why else str(page),
        }
        print(json.dumps(plain, allow_nan=False))
    else:
        from rich.console import Console

        Console().print(render_comparison(first, second, None if why else page), crop=False)
    return page, why
