"""Completion in zsh: one function a command, in the words of zsh's own _arguments."""

from shoal.cli.completion_words import FILE, FOLDER, RUN, WORDS, Command, Flag, Value

_SCRIPT = """\
#compdef shoal
# shoal's completion for zsh, made by: shoal completion zsh
# For this shell:     source <(shoal completion zsh)
# For every new one:  shoal completion zsh > ~/.zfunc/_shoal, and in ~/.zshrc before compinit: fpath+=~/.zfunc

_shoal_runs() {
    local -a runs=(runs/*/plan.toml(N:h))
    (( $#runs )) && compadd -f -- $runs
    _files -/
}

%(functions)s

if [[ $funcstack[1] == _shoal ]]; then
    _shoal "$@"
else
    compdef _shoal shoal
fi
"""


def zsh_script(program: Command) -> str:
    """Return the script that completes `program` in zsh."""
    return _SCRIPT % {"functions": "\n\n".join(_function(command) for command in program.everything())}


def _function(command: Command) -> str:
    specs = [spec for flag in command.flags for spec in _flag(flag)]
    specs += [f"{place}:{_safe(value.name)}:{_action(value)}" for place, value in enumerate(command.arguments, start=1)]
    if not command.commands:
        return f"{_name(command)}() {{\n    _arguments -s {_lines(specs)}\n}}"
    specs += ["1:command:->command", "*::argument:->argument"]
    described = " ".join(_quoted(f"{each.path[-1]}:{each.about}") for each in command.commands)
    cases = "\n".join(f"        {each.path[-1]}) {_name(each)} ;;" for each in command.commands)
    return f"""{_name(command)}() {{
    local context state line
    typeset -A opt_args
    local -a commands=({described})
    _arguments -C -s {_lines(specs)}
    case $state in
    command) _describe -t commands command commands ;;
    argument)
        case $line[1] in
{cases}
        esac
        ;;
    esac
}}"""


def _name(command: Command) -> str:
    return "_".join(("_shoal", *command.path))


def _flag(flag: Flag) -> list[str]:
    """Return what _arguments is told of a flag: once for each of its names."""
    again = "*" if flag.value is not None else ""
    if flag.value is None:
        return [f"{again}{name}[{_safe(flag.about)}]" for name in flag.names]
    colons = "::" if flag.is_optional else ":"
    value = f"{colons}{_safe(flag.value.name)}:{_action(flag.value)}"
    return [f"{again}{name}[{_safe(flag.about)}]{value}" for name in flag.names]


def _action(value: Value) -> str:
    if value.kind == WORDS:
        return f"({' '.join(value.words)})"
    if value.kind == FILE:
        return " ".join(["_files", *([f'-g "{_pattern(value.words)}"'] if value.words else [])])
    return {FOLDER: "_files -/", RUN: "_shoal_runs"}.get(value.kind, " ")


def _pattern(ends: tuple[str, ...]) -> str:
    """Return the files that end so. One end alone stands without brackets, which would say something else."""
    names = [end.removeprefix(".") for end in ends]
    return f"*.({'|'.join(names)})" if len(names) > 1 else f"*.{names[0]}"


def _lines(specs: list[str]) -> str:
    return " \\\n        ".join(["", *map(_quoted, specs)]).lstrip(" ")


def _safe(text: str) -> str:
    for sign in ("\\", "[", "]", ":"):
        text = text.replace(sign, f"\\{sign}")
    return text


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
