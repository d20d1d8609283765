"""What can follow on the command line, read off the parsers: the same for every shell.

What a flag or an argument takes is told by its choices, else by its name (`--device`: the catalog's), else by what its
help calls it (TOML: a file *.toml; RUN: a run's folder).
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shoal.cli.cost import WHATS
from shoal.planner.catalog import device_names, link_names
from shoal.spec.plan import PRECISIONS, RECOMPUTE, SCHEDULES
from shoal.tasks.sweep_study import PRUNERS, SAMPLERS

FILE, FOLDER, RUN, WORDS, ANY = "file", "folder", "run", "words", "any"
"""Kinds of values. ANY is one that nothing is known about, as a number."""

_BY_NAME: dict[str, Callable[[], Sequence[str]]] = {
    "compression": lambda: ("auto", "none", "lz4", "zstd"),
    "device": lambda: [name.upper() for name in device_names()],
    "inside": link_names,
    "inside_link": link_names,
    "link": link_names,
    "on_error": lambda: ("raise", "skip"),
    "precision": lambda: PRECISIONS,
    "pruner": lambda: PRUNERS,
    "recompute": lambda: RECOMPUTE,
    "sampler": lambda: SAMPLERS,
    "schedule": lambda: SCHEDULES,
    "what": lambda: WHATS,
    "zero": lambda: ("1", "2", "3"),
}
_BY_METAVAR = {
    "CSV": (FILE, ()),
    "DIR": (FOLDER, ()),
    "DST": (FOLDER, ()),
    "FILE": (FILE, (".py", ".json")),
    "FILE:FUNCTION": (FILE, (".py",)),
    "ITEMS": (FILE, ()),
    "PACK": (FOLDER, ()),
    "RUN": (RUN, ()),
    "RUN_B": (RUN, ()),
    "SRC": (FILE, ()),
    "SVG": (FILE, (".svg",)),
    "TOML": (FILE, (".toml",)),
    "WHERE": (FOLDER, ()),
}


@dataclass(frozen=True)
class Value:
    """What a flag or an argument takes."""

    name: str
    """What its help calls it."""
    kind: str
    words: tuple[str, ...] = ()
    """Of WORDS: all there are; of FILE: how their names end, any if empty."""


@dataclass(frozen=True)
class Flag:
    """A flag of a command."""

    names: tuple[str, ...]
    about: str
    value: Value | None
    """None: it takes none."""
    is_optional: bool = False
    """Whether its value can be left out."""


@dataclass(frozen=True)
class Command:
    """The program, or one of its verbs, or one of a verb's own."""

    path: tuple[str, ...]
    about: str
    flags: tuple[Flag, ...]
    arguments: tuple[Value, ...]
    """What is given without a flag, in this order."""
    commands: tuple["Command", ...]

    def everything(self) -> Iterator["Command"]:
        """Yield this command and all below it."""
        yield self
        for each in self.commands:
            yield from each.everything()


def read_command(parser: argparse.ArgumentParser, path: tuple[str, ...] = (), about: str = "") -> Command:
    """Return what a parser understands; verbs without a description are not for people, and are left out."""
    flags, arguments, commands = [], [], list[Command]()
    for action in parser._actions:  # argparse has no other way to ask
        if isinstance(action, argparse._SubParsersAction):
            abouts = {choice.dest: choice.help or "" for choice in action._choices_actions}
            chosen = [(name, sub) for name, sub in action.choices.items() if name in abouts]
            commands += [read_command(sub, (*path, name), _first(abouts[name])) for name, sub in chosen]
        elif action.help == argparse.SUPPRESS:
            continue
        elif action.option_strings:
            value = None if action.nargs == 0 else _value(action)
            flags.append(Flag(tuple(action.option_strings), _first(action.help or ""), value, action.nargs == "?"))
        else:
            arguments.append(_value(action))
    return Command(path, about, tuple(flags), tuple(arguments), tuple(commands))


def _value(action: argparse.Action) -> Value:
    name = str(action.metavar or action.dest)
    if action.choices:
        return Value(name, WORDS, tuple(map(str, action.choices)))
    if action.dest in _BY_NAME:
        return Value(name, WORDS, tuple(_BY_NAME[action.dest]()))
    kind, words = _BY_METAVAR.get(name, (ANY, ()))
    return Value(name, kind, words)


def _first(text: str) -> str:
    """Return the beginning of a help: up to a bracket, a colon or a semicolon after three words or more."""
    text = text.replace("%%", "%")
    for end in (" (", ": ", "; ", ". "):
        head = text.partition(end)[0]
        text = head if len(head.split()) >= 3 else text
    return text.rstrip(".:;")
