"""`quarantune completion`: completes commands and options in bash, zsh and fish, without starting Python for it."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator

from quarantune.cli.output import DONE, Output
from quarantune.cli.parser import make_parser

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


def show(options: argparse.Namespace, out: Output) -> int:
    """Prints the script for a shell."""
    parser = make_parser()
    if options.shell == "fish":
        text = "\n".join(_fish(parser))
    else:
        text = (_ZSH if options.shell == "zsh" else "") + _bash(parser)
    out.line(text.rstrip("\n"))
    return DONE


def _bash(parser: argparse.ArgumentParser) -> str:
    moves, choices = [], []
    for path, node in _nodes(parser):
        subcommands = _subcommands(node)
        moves += [f'      "{path} {name}") command="{f"{path} {name}".strip()}" ;;' for name in subcommands]
        words = [*subcommands, *_options(node), *_words(node)]
        choices.append(f'    "{path}") words="{" ".join(words)}" ;;')
    return _BASH.format(moves="\n".join(moves), choices="\n".join(choices))


def _fish(parser: argparse.ArgumentParser) -> Iterator[str]:
    for path, node in _nodes(parser):
        words = path.split()
        subcommands = _subcommands(node)
        seen = " && ".join(f"__fish_seen_subcommand_from {word}" for word in words) or "__fish_use_subcommand"
        first = seen
        if words and subcommands:
            first += f" && not __fish_seen_subcommand_from {' '.join(subcommands)}"
        for name, about in subcommands.items():
            yield f"complete -c quarantune -f -n {shlex.quote(first)} -a {name} -d {shlex.quote(about)}"
        for action in node._actions:
            for name in action.option_strings:
                flag = f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                takes = "" if action.nargs == 0 else " -r"
                about = shlex.quote(action.help or "")
                yield f"complete -c quarantune -n {shlex.quote(seen)} {flag}{takes} -d {about}"
        for word in _words(node):
            yield f"complete -c quarantune -f -n {shlex.quote(seen)} -a {word}"


def _nodes(parser: argparse.ArgumentParser, path: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yields every command with its parser; the names of a command within another follow one another."""
    yield path, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, node in action.choices.items():
                yield from _nodes(node, f"{path} {name}".strip())


def _subcommands(node: argparse.ArgumentParser) -> dict[str, str]:
    for action in node._actions:
        if isinstance(action, argparse._SubParsersAction):
            return {choice.dest: choice.help or "" for choice in action._choices_actions}
    return {}


def _options(node: argparse.ArgumentParser) -> list[str]:
    return [name for action in node._actions for name in action.option_strings]


def _words(node: argparse.ArgumentParser) -> list[str]:
    """Returns the words that a positional argument may be, such as the names of shells."""
    is_sub = argparse._SubParsersAction
    found = [action for action in node._actions if action.choices and not isinstance(action, is_sub)]
    return [str(word) for action in found for word in (action.choices or ())]
