"""Every verb's --help: an example that can be run, a word on each flag, the same word for the same thing."""

import argparse
import re
import shlex
from collections.abc import Iterator

import pytest

from shoal.cli.main import VERBS, build_parser

# These mean something else under another verb.
DIFFERENT = {"--check", "--codec", "--link", "--out", "--step", "--to", "--tokenizer", "--workers", "--zero"}


def parsers(parser: argparse.ArgumentParser, path: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield every parser for people with its words, as "shoal bench step"."""
    yield path, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                if name not in VERBS or VERBS[name].ABOUT:
                    yield from parsers(sub, f"{path} {name}")


ALL = dict(parsers(build_parser(), "shoal"))


def shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.help != argparse.SUPPRESS]


def examples(parser: argparse.ArgumentParser) -> list[list[str]]:
    """Return the words of each command line among the examples, without what is said beside it."""
    text = (parser.epilog or "").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.startswith("  ")]
    commands = [re.split(r"\s{3,}", line)[0] for line in lines]
    return [shlex.split(command.split("shoal ", 1)[1], comments=True) for command in commands if "shoal " in command]


@pytest.mark.parametrize("path", ALL)
def test_there_is_an_example_of_the_command_itself(path: str) -> None:
    assert (ALL[path].epilog or "").startswith("example:\n")
    verb = path.split()[1:]
    assert any(words[: len(verb)] == verb for words in examples(ALL[path]))


@pytest.mark.parametrize("path", ALL)
def test_every_example_is_understood_by_the_parser(path: str) -> None:
    for words in examples(ALL[path]):
        end = next((at for at, word in enumerate(words) if word in ("&", "|", ">") or word.startswith(")")), len(words))
        if words[:2] != ["train", "-m"]:
            build_parser().parse_args([word.rstrip(")") for word in words[:end]])


@pytest.mark.parametrize("path", ALL)
def test_every_flag_and_argument_is_explained(path: str) -> None:
    for action in shown(ALL[path]):
        assert action.help or isinstance(action, argparse._SubParsersAction), f"{path} {action.dest}"
        assert not (action.help or "").endswith("."), f"{path} {action.dest}: no full stop, as everywhere"


def test_the_same_flag_takes_the_same_under_every_verb() -> None:
    called: dict[str, dict[str, list[str]]] = {}
    for path, parser in ALL.items():
        for action in shown(parser):
            for name in action.option_strings:
                if action.nargs != 0 and name not in DIFFERENT and not action.choices:
                    called.setdefault(name, {}).setdefault(str(action.metavar), []).append(path)
    assert {name: words for name, words in called.items() if len(words) > 1 or "None" in words} == {}


@pytest.mark.parametrize("path", ALL)
def test_lines_of_the_examples_fit_the_page(path: str) -> None:
    assert [line for line in (ALL[path].epilog or "").splitlines() if len(line) > 120] == []


def test_json_is_explained_alike() -> None:
    helps = {action.help for parser in ALL.values() for action in shown(parser) if "--json" in action.option_strings}
    assert len(helps) == 1
