"""Completion in fish: a line for each flag and argument."""

from shoal.cli.completion_words import FILE, FOLDER, RUN, WORDS, Command, Flag, Value

_HEAD = """\
# shoal's completion for fish, made by: shoal completion fish
# For this shell:     shoal completion fish | source
# For every new one:  shoal completion fish > ~/.config/fish/completions/shoal.fish

function __shoal_is --description 'Whether the words so far are this command, and not one of its own'
    set -l words (commandline -opc)
    set -l given (string match --invert -- '-*' $words[2..])
    set -l length (count $argv)
    test (count $given) -ge $length; and test "$given[1..$length]" = "$argv"
end

function __shoal_runs
    for run in runs/*/plan.toml
        string replace /plan.toml '' $run
    end
    __fish_complete_directories (commandline -ct)
end

complete -c shoal -f
"""


def fish_script(program: Command) -> str:
    """Return the script that completes `program` in fish."""
    return _HEAD + "\n".join(line for command in program.everything() for line in _lines(command)) + "\n"


def _lines(command: Command) -> list[str]:
    path = " ".join(command.path)
    here = f"__shoal_is {path}" if path else "test (count (commandline -opc)) -eq 1"
    own = [each.path[-1] for each in command.commands]
    before = f"{here}; and not __fish_seen_subcommand_from {' '.join(own)}" if path and own else here
    lines = [
        f"complete -c shoal -n {_quoted(before)} -a {each.path[-1]} -d {_quoted(each.about)}"
        for each in command.commands
    ]
    lines += [f"complete -c shoal -n {_quoted(before)} {_flag(flag)}" for flag in command.flags]
    for value in dict.fromkeys(command.arguments):
        if told := _told(value):
            lines.append(f"complete -c shoal -n {_quoted(here)} {told}")
    return lines


def _flag(flag: Flag) -> str:
    names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
    value = ""
    if flag.value is not None:
        value = f" -r {_told(flag.value)}".rstrip() if not flag.is_optional else f" {_told(flag.value)}"
        value = value if flag.value.kind == FILE else value.replace(" -r", " -x", 1)
    return f"{names}{value} -d {_quoted(flag.about)}"


def _told(value: Value) -> str:
    """Return how fish is told what a value can be; empty: nothing is known."""
    if value.kind == WORDS:
        return f"-a {_quoted(' '.join(value.words))}"
    if value.kind == FILE:
        return f"-k -a '(__fish_complete_suffix {' '.join(value.words)})'" if value.words else "-F"
    return {FOLDER: "-a '(__fish_complete_directories (commandline -ct))'", RUN: "-a '(__shoal_runs)'"}.get(
        value.kind, ""
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
