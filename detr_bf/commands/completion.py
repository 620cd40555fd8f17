"""Print a script that completes commands, options, recipes and settings of detr-bf in a shell.

detr-bf completion bash > ~/.local/share/bash-completion/completions/detr-bf
detr-bf completion zsh > ~/.detr-bf-completion.zsh    # then: source ~/.detr-bf-completion.zsh in ~/.zshrc

The script holds all names, so completing starts no program; write it again after an update. Settings are offered after
their first letter.
"""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress

from detr_bf.cli import run_tool
from detr_bf.config import SCHEMAS, known_keys, packaged_configs

_SCRIPT = """\
# Completion of detr-bf for {shell}, written by: detr-bf completion {shell}
{start}_detr_bf() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words="" settings="{keys}" recipes="{recipes}"
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    elif [ "$word" = "=" ] || [ "${{COMP_WORDS[COMP_CWORD-1]}}" = "=" ]; then
        return
    else
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    case "${{COMPREPLY[0]}}" in
        *=) compopt -o nospace 2> /dev/null ;;
    esac
}}
complete -o default{options} -F _detr_bf detr-bf
"""
_STARTS = {"bash": "", "zsh": "autoload -U +X compinit && compinit -u\nautoload -U +X bashcompinit && bashcompinit\n"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the script and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shell", choices=_STARTS, metavar="SHELL", help="bash or zsh")
    shell = parser.parse_args(arguments).shell

    def run() -> int:
        from detr_bf.commands import COMMANDS, command_main  # it imports this module by name

        print(completion_script(shell, {name: command_main(name) for name in COMMANDS}), end="")
        return 0

    return run_tool(run)


def completion_script(shell: str, mains: Mapping[str, Callable[[Sequence[str]], int]]) -> str:
    """Return the script for ``bash`` or ``zsh``; ``mains`` are the functions of the commands, which print usages."""
    keys = sorted({f"{key}=" for schema in SCHEMAS.values() for key in known_keys(schema)})
    cases = []
    for name, function in mains.items():
        usage = usage_of(function)
        words = " ".join(["--help", *dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][a-z-]*", usage))])
        words += " $recipes" if "CONFIG" in usage else ""
        more = '; [ -n "$word" ] && words="$words $settings"' if "key=value" in usage else ""
        cases.append(f'            {name}) words="{words}"{more} ;;')
    return _SCRIPT.format(
        shell=shell,
        start=_STARTS[shell],
        options=" -o nospace" if shell == "zsh" else "",  # its bashcompinit has no compopt
        keys=" ".join(keys),
        recipes=" ".join(packaged_configs()),
        commands=" ".join(mains),
        cases="\n".join(cases),
    )


def usage_of(function: Callable[[Sequence[str]], int]) -> str:
    """Return the usage that a command's function prints for ``--help``."""
    printed = io.StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        function(["--help"])
    return printed.getvalue().partition("\n\n")[0]
