"""`shoal watch`: see how a run goes, from anywhere that has its folder."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core.errors import ConfigError
from shoal.core.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.console import Console

ABOUT = "Show how a run goes, or went, from its folder alone, in the terminal or a browser; Ctrl-C leaves it running."
EXAMPLE = """\
example:
  shoal watch runs/gpt-1             the live view, from another terminal, or another machine that shares the disk
  shoal watch runs/gpt-1 --once      how it stands now
  shoal watch runs/gpt-1 --web       as a page at a local address, which is printed and has a secret token in it
  ssh -L 8000:127.0.0.1:8000 login shoal watch runs/gpt-1 --web --port 8000       the same of a run far away
"""
_LAST_PORT = 65535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder, such as runs/gpt-1")
    parser.add_argument("--once", action="store_true", help="show how it stands now, and end; so does --json")
    parser.add_argument(
        "--web", action="store_true", help="serve a page on 127.0.0.1 that updates itself, until Ctrl-C"
    )
    parser.add_argument("--port", type=int, metavar="P", help="with --web: its port (default: a free one)")


def run(arguments: argparse.Namespace) -> int:
    """Show the run until it ends, or until Ctrl-C, which is no failure here."""
    if arguments.port is not None and not arguments.web:
        raise ConfigError(f"--port {arguments.port} is the port of a page. Add --web.")
    if arguments.port is not None and not 0 <= arguments.port <= _LAST_PORT:
        raise ConfigError(f"--port {arguments.port}: a port is 0 (a free one) to {_LAST_PORT}.")
    if arguments.web and (arguments.json or arguments.once):
        raise ConfigError("--web goes on showing the run; --once and --json show it once. Give one of them.")
    folder = RunFolder.open(arguments.run_folder)
    if arguments.json:
        from shoal.report.live.watch import look_once

        print(json.dumps(look_once(folder).as_json(), allow_nan=False))
        return 0
    from rich.console import Console

    console = Console()
    try:
        if arguments.web:
            _serve(folder, arguments.port or 0, console)
        else:
            _show(folder, console, is_once=arguments.once)
    except KeyboardInterrupt:
        console.print(f"{folder.name} is left as it is.", markup=False, highlight=False)
    return 0


def _show(folder: RunFolder, console: "Console", *, is_once: bool) -> None:
    if is_once:
        from shoal.report.live.draw import Drawing
        from shoal.report.live.watch import look_once

        console.print(Drawing(look_once(folder), most_lines=None if console.is_terminal else 1000))
        return
    from shoal.report.live.watch import watch

    watch(folder, console)


def _serve(folder: RunFolder, port: int, console: "Console") -> None:
    from shoal.report.live.web import WatchServer

    with WatchServer(folder, port=port) as server:
        said = f"{server.address}\nOpen it in a browser on this machine; Ctrl-C ends it."
        console.print(said, soft_wrap=True, markup=False, highlight=False)
        server.serve_forever(poll_interval=0.2)
