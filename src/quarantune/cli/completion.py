"""`quarantune completion`: completes commands and options in bash, zsh and fish, without starting Python for it."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from quarantune.cli.output import DONE, Output
from quarantune.cli.parser import COMMANDS, commands_within, options_of

_BASH = """\
_quarantune() {{
  local current=$2 command="" word
  for word in "${{COMP_WORDS[@]:1:$((COMP_CWORD-1))}}"; do
    case "$command $word" in
{moves}
    esac
  done
  local words=""
  case "$command" in
{choices}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  if [ "${{#COMPREPLY[@]}}" -eq 0 ]; then COMPREPLY=($(compgen -f -- "$current")); fi
}}
complete -o filenames -F _quarantune quarantune
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def completion(options: argparse.Namespace, out: Output) -> int:
    """Prints the script for a shell."""
    text = "\n".join(_fish()) if options.shell == "fish" else _bash()
    out.line((_ZSH if options.shell == "zsh" else "") + text.rstrip("\n"))
    return DONE


def _bash() -> str:
    moves, choices = [], []
    for path in COMMANDS:
        within = commands_within(path)
        moves += [f'      "{path} {name}") command="{f"{path} {name}".strip()}" ;;' for name in within]
        words = [*within, *(word for names, about in options_of(path) for word in _words(names, about))]
        choices.append(f'    "{path}") words="{" ".join(words)}" ;;')
    return _BASH.format(moves="\n".join(moves), choices="\n".join(choices))


def _fish() -> Iterator[str]:
    for path in COMMANDS:
        within = commands_within(path)
        seen = " && ".join(f"__fish_seen_subcommand_from {word}" for word in path.split()) or "__fish_use_subcommand"
        first = f"{seen} && not __fish_seen_subcommand_from {' '.join(within)}" if path and within else seen
        for name, command in within.items():
            yield f"complete -c quarantune -f -n {shlex.quote(first)} -a {name} -d {shlex.quote(command.about)}"
        for names, about in options_of(path):
            for word in _words(names, about):
                flag = f"-l {word[2:]}" if word.startswith("--") else f"-s {word[1:]}" if word[0] == "-" else ""
                how = f"{flag}{' -r' if 'metavar' in about else ''} -d {shlex.quote(about['help'])}" if flag else ""
                yield f"complete -c quarantune -n {shlex.quote(seen)} {how or f'-f -a {word}'}"


def _words(names: list[str], about: Mapping[str, Any]) -> list[str]:
    """Returns the words that may be typed for an option, or for an argument such as the name of a shell."""
    return names if names[0].startswith("-") else list(about.get("choices", ()))
