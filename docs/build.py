"""Builds the site from docs/ into site/: python docs/build.py [--serve] (make docs, make docs-serve).

1. The pages are gathered in build/docs: docs/, README.md as the first page, CONTRIBUTING.md and CHANGELOG.md.
2. Pages that nobody writes are added: the command line, from `--help` of every verb; the API, from the docstrings of
   what `shoal.__all__` and ELSEWHERE name; and the source of every file of the repository that a page links to.
3. Zensical turns build/docs into site/, as mkdocs.yml says. A link to nothing is an error. Nothing on the site is
   fetched from elsewhere, and its search works from the file system too.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
BUILD_S = 300.0

MADE = {"docs/reference.md", "docs/command-line.md"}
MOVED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LANGUAGES = {".py": "python", ".toml": "toml", ".c": "c", ".sh": "bash", ".yml": "yaml"}

# Where a public name stands in the reference; what is in no group is under the last.
GROUPS = {
    "Training": ("Job", "train", "start", "Run", "verify", "Verdict", "Summary", "export", "Stopped", "ShoalError"),
    "Planning": ("fit", "Estimate", "plan", "Ranking", "Plan", "Mesh", "Batch", "Sync", "Loading", "Checkpoints"),
    "Hardware": ("Cluster", "Node", "Device", "Link"),
    "Data": ("pack", "Loader", "View", "ImageOptions"),
    "Tasks and more": ("map",),
}

ELSEWHERE = (
    "shoal.comm.algorithms.broadcast",
    "shoal.comm.algorithms.Wire",
    "shoal.lightning.ShoalStrategy",
    "shoal.tasks.executor.Executor",
    "shoal.tasks.slurm_executor.SlurmExecutor",
    "shoal.tasks.submitting.SlurmOptions",
    "shoal.data.dali.dali_source",
    "shoal.data.pack.reader.open_pack",
    "shoal.data.pack.reader.Pack",
    "shoal.data.sources.find.open_source",
    "shoal.data.stage.staging.stage",
    "shoal.fault.inject",
    "shoal.planner.collectives.allreduce",
)
"""What pages tell people to use that is no name of `shoal` itself: few need it, and some of it needs an extra."""

WITHOUT_MEMBERS = ("shoal.lightning.ShoalStrategy",)
"""Classes whose methods are for others to call."""

WIDE = ("---", "hide: [toc]", "---", "")
"""The head of a page that has code side by side."""

_FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})\s*(\S*)[ \t]*(.*)$")
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)


def gather(target: Path) -> None:
    """Write every page of the site to the folder `target`, which is made anew."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "docs", target, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    linked: set[str] = set()
    pages = {page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")} | MOVED.keys()
    for page in sorted(pages):
        lines = _lines((ROOT / page).read_text(), page, linked)
        _write(target / _place(page), "\n".join([*WIDE * page.startswith("docs/coming-from/"), *lines]) + "\n")
    for path in sorted(linked):
        _write(target / _place(path), _source_page(path))
    _write(target / "command-line.md", command_line())
    _write(target / "reference.md", reference())


def command_line() -> str:
    """Return the page of the command line: what `--help` of each verb says."""
    from shoal.cli.main import VERBS, build_parser

    os.environ["COLUMNS"] = "100"
    verbs = _choices(build_parser())
    page = ["# The command line", "", "What `shoal VERB --help` says, of every verb.", ""]
    for name in (name for name, verb in VERBS.items() if verb.ABOUT):
        page += [f"## shoal {name}", "", "```text", verbs[name].format_help().rstrip(), "```", ""]
        for inner, parser in _choices(verbs[name]).items():
            page += [f"### shoal {name} {inner}", "", "```text", parser.format_help().rstrip(), "```", ""]
    return "\n".join(page)


def reference() -> str:
    """Return the page of the API: a directive for each public name, which mkdocstrings turns into its docstrings."""
    import shoal

    page = [
        "# API reference",
        "",
        "From the docstrings. [The Python API](api.md) has the same on one page, in short.",
        "",
    ]
    grouped = {name for names in GROUPS.values() for name in names}
    rest = tuple(name for name in shoal.__all__ if name not in grouped)
    for group, names in GROUPS.items():
        page += [f"## {group}", ""]
        for name in names + (rest if group == list(GROUPS)[-1] else ()):
            page += [f"### `shoal.{name}`", "", f"::: {shoal._HOMES[name]}.{name}", ""]
    page += ["## In rooms of their own", ""]
    for name in ELSEWHERE:
        options = ["    options:", "      members: []"] * (name in WITHOUT_MEMBERS)
        page += [f"### `{name}`", "", f"::: {name}", *options, ""]
    return "\n".join(page)


def _lines(text: str, page: str, linked: set[str]) -> Iterator[str]:
    """Yield the lines of a page for the site: without what is for the tests, with links to where things are here."""
    closing = ""
    for line in _COMMENT.sub("", text).splitlines():
        fence = _FENCE.match(line)
        if closing:
            closing = "" if line.strip() == closing else closing
            yield line
        elif fence:
            closing = fence[2]
            yield f"{fence[1]}{fence[2]}{_info(fence[3], fence[4])}"
        else:
            yield _LINK.sub(lambda match: match[1] + _relinked(match[2], page, linked) + match[3], line)


def _info(language: str, attributes: str) -> str:
    """Return how a code block begins: with the name of its file as a title, or why the tests do not run it."""
    if "=" in language:
        language, attributes = "", f"{language} {attributes}"
    found = dict(re.findall(r'([\w-]+)="([^"]*)"', attributes))
    title = found.get("file") or ("not run by the tests: " + found["not-run"] if "not-run" in found else "")
    return (language or "text") + (f' title="{title}"' if title else "")


def _relinked(link: str, page: str, linked: set[str]) -> str:
    """Return `link`, as it stands on `page` of the repository, for the page's place on the site."""
    path, _, anchor = link.partition("#")
    if not path or "://" in path or path.startswith("mailto:"):
        return link
    there = os.path.normpath(PurePosixPath(page).parent / path)
    if (ROOT / there).is_file() and not there.startswith("docs/images") and not there.endswith(".md"):
        linked.add(there)
    elif not (ROOT / there).is_file() and there not in MADE:
        return link  # the build will say that it leads nowhere
    relative = os.path.relpath(_place(there), PurePosixPath(_place(page)).parent)
    return relative + (f"#{anchor}" if anchor else "")


def _place(path: str) -> str:
    """Return where a file of the repository is on the site."""
    if path in MOVED:
        return MOVED[path]
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    return f"source/{path}.md"


def _source_page(path: str) -> str:
    language = LANGUAGES.get(PurePosixPath(path).suffix, "text")
    name = PurePosixPath(path).name
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n`{path}`\n\n"
    return f"{head}````{language}\n{(ROOT / path).read_text()}````\n"


def _choices(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the verbs of a parser."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(inner[0].choices) if inner else {}


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def main() -> int:
    """Gather the pages and build the site, or serve it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--serve", action="store_true", help="show the site at 127.0.0.1:8000 instead, and build it again"
    )
    arguments = parser.parse_args()
    gather(ROOT / "build" / "docs")
    program = [str(Path(sys.executable).parent / "zensical")]
    if arguments.serve:
        return subprocess.run([*program, "serve"], cwd=ROOT, check=False).returncode
    done = subprocess.run([*program, "build", "--strict", "--clean"], cwd=ROOT, check=False, timeout=BUILD_S)
    if done.returncode == 0:
        print(f"The site is in {ROOT / 'site'}: open index.html there.")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
