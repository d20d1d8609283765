"""`shoal map`: a function for each of many items, here or in a few jobs of a cluster."""

import argparse
import glob
import json
import math
import sys
from pathlib import Path
from typing import Any

from shoal.cli import flags
from shoal.cli.stopping import stopped_in_order
from shoal.core.errors import ConfigError
from shoal.core.notice import parse_limit
from shoal.core.units import parse_bytes, parse_seconds

ABOUT = "Run a function for each of many items, by warm workers here or in a few Slurm jobs; done tasks stay done."
EXAMPLE = """\
example:
  shoal map prepare.py:resize photos.txt                 a line an item; results go to resize-map/results.jsonl
  shoal map prepare.py:resize 'photos/*.jpg' --workers 8
  shoal map simulate.py:run range:0:5000 --slurm --cores 1 --memory 2GB --workers 64
  shoal map score.py:score cases.jsonl --out scores --retries 2

ITEMS is a text file (a line an item), a .jsonl or .json file (a list), a pattern, or range:START:STOP[:STEP].
After a crash of anything, the same command goes on where it was. With --slurm, a few tasks are measured, and the rest
is packed into jobs of several minutes that run as many tasks at once as a node has room for.
"""


RESULTS = "results.jsonl"
_ON_CLUSTER = (
    *("time", "cores", "memory", "gpus", "gpu_memory", "node_gpu_memory", "tasks_per_job", "task_time"),
    *("partition", "account", "site"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("function", metavar="FILE:FUNCTION", help="called with one item")
    parser.add_argument("items", metavar="ITEMS", help="a file, a pattern, or range:0:5000")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results are kept (default: FUNCTION-map)")
    parser.add_argument("--workers", type=int, metavar="N", help="tasks at once (default: here a core each)")
    parser.add_argument("--retries", type=int, default=0, metavar="N", help="how often a failed task is tried again")
    parser.add_argument(
        "--reads-at-once", metavar="N", help="how many may be in `reading()` at once, or auto: measured"
    )
    cluster = parser.add_argument_group("on a cluster")
    cluster.add_argument("--slurm", action="store_true", help="in jobs of a Slurm cluster")
    cluster.add_argument("--time", metavar="TIME", help="time limit of a job, as 30m (default: by what tasks take)")
    cluster.add_argument("--cores", type=int, metavar="N", help="cores a task (default: 1)")
    cluster.add_argument("--memory", metavar="SIZE", help="memory a task, such as 2GB")
    cluster.add_argument("--gpus", type=int, metavar="N", help="GPUs a job, dealt out to its tasks")
    cluster.add_argument("--gpu-memory", metavar="SIZE", help="GPU memory a task")
    cluster.add_argument("--node-gpu-memory", metavar="SIZE", help="GPU memory of a job's GPUs, together")
    cluster.add_argument("--tasks-per-job", type=int, metavar="N", help="instead of measuring")
    cluster.add_argument("--task-time", metavar="TIME", help="what a task takes, as 20ms, instead of measuring")
    cluster.add_argument("--partition", metavar="P", help="the partition (default: the site's)")
    cluster.add_argument("--account", metavar="A", help="the account (default: the site's)")
    cluster.add_argument(
        "--site", type=Path, metavar="TOML", help="what is special about the cluster (docs/cluster.md)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the tasks, and write their results."""
    from shoal.tasks.call import load_file, parse_function

    flags.only_with_slurm(arguments, _ON_CLUSTER)
    file, name = parse_function(arguments.function)
    items = read_items(arguments.items)
    out: Path = arguments.out or Path(f"{name}-map")
    function = getattr(load_file(str(file)), name, None)
    if not callable(function):
        raise ConfigError(f"{file.name} has no function {name!r}.")
    from shoal.data.stage.lifetime import copied_out
    from shoal.tasks.map import map as run_map

    with (
        stopped_in_order(f"{out} has what is done. The same command goes on from there."),
        copied_out(out, say=lambda line: print(line, file=sys.stderr, flush=True)) as kept,
    ):
        results = run_map(
            function,
            items,
            folder=out,
            workers=None if arguments.workers is None else flags.whole("--workers", arguments.workers),
            retries=arguments.retries,
            on_error="return",
            slurm=_slurm(arguments) if arguments.slurm else False,
            reads_at_once=_reads(arguments.reads_at_once),
            progress=True,
        )
        _write(out / RESULTS, items, results)
    failures = {index: result for index, result in enumerate(results) if isinstance(result, BaseException)}
    _tell(arguments, kept / RESULTS, results, failures)
    return 1 if failures else 0


def read_items(text: str) -> list[Any]:
    """Return the items that the command line names."""
    if text.startswith("range:"):
        try:
            numbers = [int(part) for part in text.removeprefix("range:").split(":")]
            return list(range(*numbers))
        except (ValueError, TypeError):
            raise ConfigError(f"{text!r} is not a range. Write it like range:0:5000 or range:0:5000:2.") from None
    path = Path(text)
    if not path.is_file():
        found = sorted(glob.glob(text, recursive=True))  # noqa: PTH207  # absolute patterns too
        if not found:
            raise ConfigError(f"there is no file {text}, nor any that matches it.")
        return found
    content = _content(path)
    lines = content.split("\n")  # splitlines cuts at U+2028 and others, too, which may stand inside an item
    try:
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in lines if line.strip()]
        if path.suffix == ".json":
            items = json.loads(content)
            if not isinstance(items, list):
                raise ConfigError(f"{text} holds a {type(items).__name__}, not a list of items.")
            return items
    except ValueError as error:
        raise ConfigError(f"{text} is not JSON: {error}.") from None
    return [line for line in lines if line]


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]
        raise ConfigError(f"{path} is not UTF-8: byte {error.start} is {wrong:#x}. Write it as UTF-8.") from None


def _slurm(arguments: argparse.Namespace) -> Any:
    from shoal.tasks.bunch import Room
    from shoal.tasks.submitting import SlurmOptions

    def size(flag: str, given: str | None) -> float:
        return 0.0 if given is None else flags.read(flag, parse_bytes, given)

    task = Room(
        flags.whole("--cores", 1 if arguments.cores is None else arguments.cores),
        size("--memory", arguments.memory),
        size("--gpu-memory", arguments.gpu_memory),
    )
    task_time = arguments.task_time
    return SlurmOptions(
        time_s=None if arguments.time is None else int(flags.read("--time", parse_limit, arguments.time)),
        partition=arguments.partition,
        account=arguments.account,
        task=task,
        gpus_per_job=arguments.gpus or 0,
        node_gpu_memory_bytes=size("--node-gpu-memory", arguments.node_gpu_memory),
        tasks_per_job=arguments.tasks_per_job,
        task_time_s=None if task_time is None else flags.read("--task-time", parse_seconds, task_time),
        site=arguments.site,
    )


def _reads(given: str | None) -> int | str | None:
    return int(given) if given is not None and given.isdigit() else given


def _write(path: Path, items: list[Any], results: list[Any]) -> None:
    """Write a line an item, in their order."""
    from shoal.core.files import write_whole

    lines = []
    for item, result in zip(items, results, strict=True):
        is_error = isinstance(result, BaseException)
        said = {"error": f"{type(result).__name__}: {result}"} if is_error else {"result": result}
        lines.append(as_json({"item": item, **said}))
    write_whole(path, "".join(f"{line}\n" for line in lines))


def as_json(fields: dict[str, Any]) -> str:
    """Return a line of JSON; what that does not know is as Python shows it, and a number that is none is null."""
    try:
        return json.dumps(fields, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return json.dumps({name: _plain(value) for name, value in fields.items()}, allow_nan=False)


def _plain(value: Any) -> Any:
    """Return `value` as JSON can have it."""
    try:
        return _plain_parts(value)
    except RecursionError:  # it is a part of itself
        return _shown(value)


def _plain_parts(value: Any) -> Any:
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {_key(key): _plain_parts(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_parts(each) for each in value]
    return _shown(value)


def _key(key: Any) -> Any:
    return key if key is None or isinstance(key, str | int) else _shown(key)


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # of the user's own
        return f"a {type(value).__name__}"


def _tell(arguments: argparse.Namespace, path: Path, results: list[Any], failures: dict[int, BaseException]) -> None:
    if arguments.json:
        errors = {index: f"{type(error).__name__}: {error}" for index, error in failures.items()}
        print(json.dumps({"results": str(path), "tasks": len(results), "failed": len(failures), "errors": errors}))
        return
    print(f"{len(results) - len(failures):,} of {len(results):,} tasks are done: {path}")
    if failures:
        first, error = next(iter(failures.items()))
        cause = f"{error.__cause__}".strip() if error.__cause__ else f"{type(error).__name__}: {error}"
        print(f"{len(failures):,} failed; the same command tries only those again. The first, task {first}:\n{cause}")
