"""Completion in bash: one function, and two tables of what follows what. Works from bash 3.2, which macOS has."""

import shlex

from shoal.cli.completion_words import ANY, FILE, WORDS, Command, Value

_SCRIPT = """\
# shoal's completion for bash, made by: shoal completion bash
# For this shell:     source <(shoal completion bash)
# For every new one:  shoal completion bash > ~/.local/share/bash-completion/completions/shoal

_shoal_words() {  # the commands and flags of command $1
    commands= flags=
    case $1 in
%(words)s
    esac
}

_shoal_kind() {  # what follows flag $2 of command $1, or is its argument number $2; nothing: none
    kind=
    case "$1 $2" in
%(kinds)s
    esac
}

_shoal_runs() {  # run folders, and all other folders that begin like $1
    local run
    for run in runs/*/; do
        [[ -e ${run}plan.toml && $run == "$1"* ]] && printf '%%s\\n' "${run%%/}"
    done
    compgen -d -- "$1"
}

_shoal_offer() {  # candidates of kind $1 that begin like $2
    case $1 in
    words\\ *) compgen -W "${1#words }" -- "$2" ;;
    file) compgen -f -- "$2" ;;
    file\\ *)
        local end
        for end in ${1#file }; do compgen -f -X "!*$end" -- "$2"; done
        compgen -d -- "$2"
        ;;
    folder) compgen -d -- "$2" ;;
    run) _shoal_runs "$2" ;;
    esac
}

_shoal() {
    local current=${COMP_WORDS[COMP_CWORD]} command= commands= flags= kind= wanted= place=1 i word
    _shoal_words ''
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if [[ $word == '=' ]]; then  # bash cuts --flag=value in three
            continue
        elif [[ $word == -* ]]; then
            _shoal_kind "$command" "$word"
            wanted=$kind
        elif [[ -n $wanted ]]; then
            wanted=
        elif [[ " $commands " == *" $word "* ]]; then
            command=${command:+$command }$word
            _shoal_words "$command"
        else
            place=$((place + 1))
        fi
    done
    [[ $current == '=' ]] && current=
    if [[ $current == -* ]]; then
        wanted="words $flags"
    elif [[ -z $wanted && -n $commands ]]; then
        wanted="words $commands"
    elif [[ -z $wanted ]]; then
        _shoal_kind "$command" "$place"
        wanted=${kind:-words $flags}
    fi
    [[ $wanted == words* ]] || compopt -o filenames 2> /dev/null
    COMPREPLY=()
    while IFS= read -r word; do
        COMPREPLY+=("$word")
    done < <(_shoal_offer "$wanted" "$current" | sort -u)
}

complete -F _shoal shoal
"""


def bash_script(program: Command) -> str:
    """Return the script that completes `program` in bash."""
    words, kinds = [], dict[str, list[str]]()
    for command in program.everything():
        path = " ".join(command.path)
        names = " ".join(each.path[-1] for each in command.commands)
        flags = " ".join(name for flag in command.flags for name in flag.names if name.startswith("--"))
        words.append(f"    {shlex.quote(path)}) commands={shlex.quote(names)} flags={shlex.quote(flags)} ;;")
        for flag in command.flags:
            if flag.value is not None:
                kinds.setdefault(_kind(flag.value), []).extend(f"{path} {name}" for name in flag.names)
        for place, value in enumerate(command.arguments, start=1):
            if value.kind != ANY:
                kinds.setdefault(_kind(value), []).append(f"{path} {place}")
    rows = [f"    {' | '.join(map(shlex.quote, keys))}) kind={shlex.quote(kind)} ;;" for kind, keys in kinds.items()]
    return _SCRIPT % {"words": "\n".join(words), "kinds": "\n".join(rows)}


def _kind(value: Value) -> str:
    return f"{value.kind} {' '.join(value.words)}" if value.kind in (WORDS, FILE) and value.words else value.kind
