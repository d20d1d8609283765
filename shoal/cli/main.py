"""The command `shoal`: finds the verb, runs it, and turns what went wrong into one sentence and an exit code."""

import argparse
import gc
import json
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import shoal
from shoal.cli import (
    attach,
    bench,
    cancel,
    completion,
    conduct,
    cost,
    doctor,
    export,
    fit,
    flags,
    host,
    log,
    nursery,
    pack,
    plan,
    probe,
    report,
    scale,
    stage,
    sweep,
    train,
    verify,
    watch,
    worker,
)
from shoal.cli import map as map_verb
from shoal.core.errors import ShoalError, WorkerFailed

VERBS = {
    "fit": fit,
    "plan": plan,
    "train": train,
    "watch": watch,
    "attach": attach,
    "cancel": cancel,
    "scale": scale,
    "verify": verify,
    "report": report,
    "log": log,
    "export": export,
    "probe": probe,
    "pack": pack,
    "stage": stage,
    "map": map_verb,
    "sweep": sweep,
    "cost": cost,
    "bench": bench,
    "doctor": doctor,
    "completion": completion,
    "worker": worker,
    "conduct": conduct,
    "host": host,
    "nursery": nursery,
}

_ABOUT = """\
Takes an ordinary PyTorch model from one process to many machines.
The number of workers changes how fast you train, never what you train.
"""

_EXAMPLE = """\
example:
  shoal fit examples/gpt.py --device H200      does it fit, and what would make it fit
  shoal plan examples/gpt.py --nodes 2 --device H100 --link ib-ndr       the five best plans
  shoal train examples/gpt.py --workers 2      train with two workers on this machine
  shoal verify examples/gpt.py --mesh shard=2,tensor=2     prove that a plan trains the same model
  shoal watch runs/gpt-1                       see how it goes, from another terminal
  shoal report runs/gpt-1                      see where the time went
  shoal pack photos/ photos.pack               write a dataset so that it loads fast
"""


def command() -> NoReturn:
    """Be the command `shoal`: `main`, and out."""
    code = main()
    if sys.argv[1:2] != ["worker"]:  # whose user's objects are freed as ever
        gc.freeze()  # Python's last collections would go through all that was imported: with torch, most of a second
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 2 a user's mistake, 1 ours, 75 stopped on request."""
    arguments = build_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except ShoalError as error:
        return _fail(error, as_json=arguments.json)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone: `shoal ... | head`
        return 0
    except Exception as error:
        traceback.print_exc()
        return _fail(WorkerFailed(f"{type(error).__name__}: {error}"), as_json=arguments.json)
    return code


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every verb; building it imports no torch."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="shoal", description=_ABOUT, epilog=_EXAMPLE, formatter_class=form)
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show the versions of shoal, torch and Python, and exit"
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for name, verb in VERBS.items():
        about = {"help": verb.ABOUT} if verb.ABOUT else {}  # a verb without a description is not for people
        sub = verbs.add_parser(name, description=verb.ABOUT, epilog=verb.EXAMPLE, formatter_class=form, **about)
        sub.add_argument("--json", action="store_true", help=flags.JSON_HELP)
        sub.set_defaults(run=verb.run)
        verb.add_arguments(sub)
    return parser


class _Version(argparse.Action):
    """Says the versions by what is installed; importing torch to ask it would take seconds."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import platform
        from importlib.metadata import PackageNotFoundError, version

        try:
            torch = version("torch")
        except PackageNotFoundError:
            torch = "is not installed"
        print(f"shoal {shoal.__version__} (torch {torch}, Python {platform.python_version()})")
        parser.exit()


def _fail(error: ShoalError, *, as_json: bool) -> int:
    if isinstance(error, WorkerFailed) and error.details:
        print(error.details.rstrip(), file=sys.stderr)
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": {"type": type(error).__name__, "message": str(error)}}))
    return error.exit_code
