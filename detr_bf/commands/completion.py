"""Print a script that completes commands, options, recipes and settings of detr-bf in a shell.

No library is used: argcomplete starts Python at every Tab, and shtab needs hand-written functions of each shell for
recipes and settings and cannot leave out the blank after ``key=``.
"""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress

from detr_bf.config import SCHEMAS, known_keys, packaged_configs, schema_of

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


def main(options: argparse.Namespace) -> int:
    """Print the script."""
    from detr_bf.commands import COMMANDS  # it imports this module by name

    print(completion_script(options.shell, {name: command.read for name, command in COMMANDS.items()}), end="")
    return 0


def completion_script(shell: str, readers: Mapping[str, Callable[[Sequence[str]], object]]) -> str:
    """Return the script for ``bash`` or ``zsh``; ``readers`` are those of the commands, which print usages."""
    keys = sorted({f"{key}=" for task in SCHEMAS for key in known_keys(schema_of(task))})
    cases = []
    for name, function in readers.items():
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
        commands=" ".join(readers),
        cases="\n".join(cases),
    )


def usage_of(function: Callable[[Sequence[str]], object]) -> str:
    """Return the usage that a command's function prints for ``--help``."""
    printed = io.StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        function(["--help"])
    return printed.getvalue().partition("\n\n")[0]
