"""The commands with their options, and their completion in shells. Imports a handler only to run it."""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

from quarantune._version import __version__
from quarantune.cli.output import DONE, ERROR_STYLE, Output, complain, styled
from quarantune.values.texts import did_you_mean

_EPILOG = """\
exit codes:
  0  done
  1  the work failed, or the answer is no: nothing could be tuned, two caches
     differ, ...
  2  the command is wrong; the message names the remedy
  130  interrupted; 141 if the reader of the output left

environment variables: QUARANTUNE_CACHE_DIR and others; see the page
"Environment" of the documentation"""
_OPTION = re.compile(r"--?[A-Za-z][\w-]*")
_REMOVED = {"--force": "--again", "--retune": "--again", "--jobs": "--num-workers"}
"""Options that do not exist any more, and the option to use in place of each."""


class Parser(argparse.ArgumentParser):
    """The parser of one command; prints an error as one line."""

    def __init__(self, **options: Any) -> None:
        """Makes a parser without options, from the arguments of `argparse.ArgumentParser`."""
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(**options, allow_abbrev=False, add_help=False, formatter_class=formatter)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Reads the words of this command. Refuses unknown words here, so that the error names this command's help."""
        self._given = list(sys.argv[1:] if args is None else args)
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Ends the program with exit code 2 and a message that names the nearest choice."""
        given = self._given
        if found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            known = [name.strip(" '") for name in found[2].split(",")]
            hint = did_you_mean(found[1], known) or f" Choose from {', '.join(known)}."
            message = f"there is no {found[1]!r}.{hint}"
            given = given[: given.index(found[1])] if found[1] in given else []
        elif found := re.fullmatch(r"the following arguments are required: ([^,]+).*", message):
            message = f"{found[1]} is missing: {self._about(found[1])}"
        elif found := re.fullmatch(r"argument (?:-o/)?(\S+): expected .*", message):
            message, given = f"{found[1]} needs a value: {self._about(found[1])}", []
        elif "required" not in message and "unrecognized" not in message:
            given = []
        known_options = self._option_string_actions.keys()
        for option in [word.partition("=")[0] for word in itertools.takewhile(lambda word: word != "--", given)]:
            if _OPTION.fullmatch(option) and not {option, option[:2]} & known_options:
                # Without the dashes: they would make all options similar.
                near = did_you_mean(option.lstrip("-"), [known.lstrip("-") for known in known_options])
                own = "" if self.get_default("run") else " Options of a command follow it."
                hint = near.replace("'", "'--", 1) or own
                if (instead := _REMOVED.get(option)) in known_options:
                    hint = f" Use {instead}."
                message = f"there is no option {option!r}.{hint}"
                break
        name = styled(self.prog, ERROR_STYLE, sys.stderr)
        complain(f"{name}: {message.rstrip('.')} (see {self.prog} --help)")
        raise SystemExit(2)

    def _about(self, name: str) -> str:
        """Returns the help of an option or argument."""
        named = (
            it for it in self._actions if name in it.option_strings or (not it.option_strings and it.metavar == name)
        )
        return next((it.help for it in named if it.help), "give it")


class _Once(argparse.Action):
    """Keeps the value of an option. Refuses a second value, which would silently replace the first."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if getattr(namespace, self.dest) is not None:
            raise argparse.ArgumentError(
                self, "given twice: write several calls into a file for --shapes, or leave one out"
            )
        setattr(namespace, self.dest, values)


def _number(kind: Callable[[str], Any], what: str) -> Callable[[str], Any]:
    """Returns a parser of numbers above 0."""

    def parse(text: str) -> Any:
        try:
            number = kind(text)
        except ValueError:
            number = 0
        if not 0 < number < 1e9:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {what}")
        return number

    return parse


_COUNT = _number(int, "whole number of at least 1")
_SECONDS = _number(float, "number of seconds above 0")
_PERCENT = _number(float, "number of percent above 0")


_Option: TypeAlias = tuple[str, Mapping[str, Any]]
"""The names of an option or argument, and the keywords of `add_argument`."""


class Command(NamedTuple):
    """A command.

    Attributes:
        about: its help in one line.
        options: its options. A list in it holds alternatives: a command line must have exactly one of them.
        details: further sentences of its help.
        examples: example command lines.
    """

    about: str
    options: Sequence[_Option | list[_Option]] = ()
    details: str = ""
    examples: Sequence[str] = ()


def _value(form: str, about: str, **keywords: Any) -> _Option:
    """Returns an option with a value, or an argument, from its form in the help, such as `-o --output FILE`."""
    names, _, metavar = form.rpartition(" ")
    return names, {"metavar": metavar, "help": about, **keywords}


def _flag(names: str, about: str, **keywords: Any) -> _Option:
    return names, {"action": "store_true", "help": about, **keywords}


def _again(about: str) -> _Option:
    """Returns the option of every command that can do its work again."""
    return _flag("--again", about)


_JSON = _flag("--json", 'print JSON, which the page "The command line" describes')
_CACHE_DIR = _value("--cache-dir DIR", "the cache directory (default: QUARANTUNE_CACHE_DIR, or the user's cache)")
_COMMON = (_CACHE_DIR, _JSON)
_KIND = _value("--device KIND", "only results for this kind of device")
_ANY_NAMES = "functions by their names in the cache, with * for any text (default: all)"
_ENTRIES = (_value("names NAME", _ANY_NAMES, nargs="*"), _KIND)
"""The options that choose entries of a cache."""
_DRY_RUN = _flag("--dry-run", "list the results and files without removing them")
_CHOSEN = (*_ENTRIES, *_COMMON)
_TRANSFER = (
    _value("--only NAME", "this function, with * for any text; repeat it for others (default: all)", action="append"),
    _flag("--dry-run", "list the differences, and write nothing"),
    *_COMMON,
)
_FUNCTION = _value(
    "function MODULE:FUNCTION", "the function: MODULE:FUNCTION, as in kernels:matmul, or path/kernels.py:matmul"
)
_CALLS = [
    _value(
        "--args ARGS",
        "the arguments of one call: arrays as dtype[sizes], numbers, and name=value, "
        "as in 'bf16[4096,4096] bf16[4096,4096] causal=true'",
        action=_Once,
    ),
    _value(
        "--shapes FILE",
        "a file with the arguments of one call on each line, as in --args; - for stdin",
        action=_Once,
    ),
    _value(
        "--inputs MODULE:FUNCTION",
        "a function without parameters that returns the arguments: a tuple, or a dict of keyword arguments; "
        "or that yields the arguments of one call after another",
        action=_Once,
    ),
]
_STATIC = _value(
    "--static NAME=VALUE",
    "the value of a static parameter in all calls; repeat it for others",
    action="append",
    default=[],
)
_COMPILE_TIMEOUT = _value("--compile-timeout S", "seconds for compiling one config", type=_SECONDS)
_TIMEOUT = _value("--timeout S", "seconds for checking and measuring one config", type=_SECONDS)
_MEMORY_LIMIT = _value("--memory-limit SIZE", "host memory of one config's worker, as 8GB")
_NUM_WORKERS = _value("--num-workers N", "how many configs compile at a time; as QUARANTUNE_NUM_WORKERS")


def _of_calls(
    *own: _Option, instead: Sequence[_Option] = (), measures: bool = True
) -> tuple[_Option | list[_Option], ...]:
    """Returns the options of a command about calls of a function.

    Args:
        *own: the command's own options.
        instead: options that give calls in place of `--args` and its like; then the function may be missing.
        measures: whether the command runs configs.
    """
    function = (_FUNCTION[0], {**_FUNCTION[1], "nargs": "?"}) if instead else _FUNCTION
    limits = (_COMPILE_TIMEOUT, *([_TIMEOUT] if measures else []), _MEMORY_LIMIT, _NUM_WORKERS)
    return (function, [*_CALLS, *instead], _STATIC, *own, *limits, *_COMMON)


_HELP = _flag("-h --help", "show this help message and exit", action="help")
COMMANDS: Mapping[str, Command] = {
    "": Command(
        "tune JAX and Pallas kernels, and look at results",
        (_flag("-V --version", "show the version and exit", action="version", version=f"quarantune {__version__}"),),
    ),
    "tune": Command(
        "tune a function ahead of time, and save the winners in the cache",
        _of_calls(
            _flag("--dry-run", "with --profile: print the device time of each call, and tune nothing"),
            _again("tune calls that have results again"),
            _value("--estimate-for TPU", "save the compiler's best estimate for a TPU, here or not"),
            _value(
                "--search NAME",
                'auto, exhaustive, random, surrogate or optuna:<sampler>: see the page "Searching large spaces"',
            ),
            _value("--max-trials N", "try at most N configs for each call", type=_COUNT),
            _value(
                "--time-budget S",
                "try configs for at most S seconds per call (--recorded, --profile: total)",
                type=_SECONDS,
            ),
            _value(
                "--executor ADDRESS",
                "tune on a cluster: dask://HOST:PORT, ray://HOST:PORT, or ray://auto "
                '(see the page "Beyond one machine")',
            ),
            instead=(
                _value("--recorded DIR", "calls recorded in QUARANTUNE_RECORD=DIR, most frequent first"),
                _value(
                    "--profile PATH",
                    "calls in a profile of jax.profiler (a file, or its directory) that QUARANTUNE_RECORD has "
                    "recorded, most device time first",
                ),
            ),
        ),
        "Skips calls that have results, except with --again. With --estimate-for nothing runs, and "
        "the saved estimates serve until measured results replace them.",
        (
            "quarantune tune kernels:matmul --args 'bf16[4096,4096] bf16[4096,4096]'",
            "quarantune tune kernels.py:attention --shapes shapes.txt --static causal=true",
            "quarantune tune kernels:matmul --inputs kernels:real_inputs --max-trials 200",
            "quarantune tune --recorded recorded --time-budget 3600",
            "QUARANTUNE_RECORD=recorded quarantune tune --profile profile --time-budget 3600",
        ),
    ),
    "fit": Command(
        "fit a rule on some calls, which answers for calls that nobody tuned",
        _of_calls(
            _value("--max-configs N", "choose between at most N configs (default: 8)", type=_COUNT, default=8),
            _value("--max-loss PERCENT", "a call may take this much longer (default: 3)", type=_PERCENT, default=3.0),
            _value("--time-budget S", "measure for at most S seconds in total", type=_SECONDS),
            instead=(_value("--recorded DIR", "calls recorded in QUARANTUNE_RECORD=DIR, weighted by their counts"),),
        ),
        "Tunes the calls as far as the rule needs it, and saves their results and the rule. Programs use the rule with "
        "QUARANTUNE_ON_MISS=rule.",
        (
            "quarantune fit kernels:matmul --shapes shapes.txt --max-configs 4",
            "quarantune fit --recorded recorded --time-budget 3600",
        ),
    ),
    "run": Command(
        "run one config alone in the sandbox, and show everything that it prints",
        _of_calls(
            _value("--config JSON", "the config; tunables that it omits have the function's defaults", required=True),
        ),
        "Saves nothing. The exit code is 1 unless the config works.",
        ("""quarantune run kernels:matmul --config '{"bm": 64}' --args 'bf16[4096,4096] bf16[4096,4096]'""",),
    ),
    "check": Command(
        "compile all configs of a function for a device that need not be here",
        _of_calls(
            _value("--target NAME", "the device; `quarantune targets` lists them", required=True),
            _flag("--all", "exit with 1 unless every config compiles"),
            _again("compile the configs of earlier checks again"),
            _flag("--estimate", "ask the compiler for TPUs how many cycles each config takes, and sort by that"),
            measures=False,
        ),
        "Nothing runs. The exit code is 1 if no config compiles, or with --all if one does not.",
        (
            "quarantune check kernels:matmul --target 'TPU v5e' --args 'bf16[4096,4096] bf16[4096,4096]'",
            "quarantune check kernels.py:matmul --target h100 --all --shapes shapes.txt",
        ),
    ),
    "cache": Command("look at saved results, compare, copy and remove them"),
    "cache list": Command(
        "list the results, one line for each call",
        (
            *_ENTRIES,
            _flag("--running", "list the sweeps without a result instead: those that run, were interrupted, or failed"),
            *_COMMON,
        ),
    ),
    "cache show": Command(
        "show everything about the saved results of a function",
        _CHOSEN,
        examples=("quarantune cache show kernels.matmul --device 'NVIDIA H200'",),
    ),
    "cache path": Command("print the cache directory", (_CACHE_DIR,)),
    "cache diff": Command(
        "compare the configs of this cache with another; the exit code is 1 if they differ",
        (_value("other DIR", "the other cache directory"), *_COMMON),
    ),
    "cache verify": Command(
        "check every file of the cache, and measure winners again",
        (
            _value("functions MODULE:FUNCTION", "measure the winners of these functions again", nargs="*"),
            _value(
                "--max-loss PERCENT",
                "a winner that takes this much longer than its saved time is stale",
                type=_PERCENT,
            ),
            _value("--profile PATH", "compare winners in a job's profile with their sweeps"),
            _again("tune calls whose winner is stale or only estimated again"),
            _value("--sample N", "tune N calls that rules answered, and show the rules' true losses", type=_COUNT),
            *_COMMON,
        ),
        "Measures the winners of the named functions again, each against its function's own defaults. "
        "Measures a winner several times before it calls it stale. "
        "The exit code is 1 if a file is damaged, or if a winner is stale and not tuned again, or with --profile "
        "slower in the job than the defaults.",
        (
            "quarantune cache verify",
            "quarantune cache verify kernels:matmul --max-loss 10 --again",
            "quarantune cache verify kernels:matmul --sample 5",
        ),
    ),
    "cache merge": Command(
        "copy the results of other caches into this one",
        (_value("others DIR", "the other cache directories; nothing writes to them", nargs="+"), *_COMMON),
        "Of two configs for one call this keeps the newer, and lists the conflict.",
    ),
    "cache export": Command(
        "write results into a directory that a package can ship",
        (_value("directory DIR", "the directory; made if necessary"), *_CHOSEN),
        examples=("quarantune cache export src/mykernels/tables 'mykernels.*'",),
    ),
    "cache rm": Command(
        "remove results, so that their calls tune again",
        (
            _value("names NAME", "functions by their names in the cache, with * for any text", nargs="+"),
            _KIND,
            _value("--call TEXT", "only calls that `quarantune cache list` shows so, with * for any text"),
            _DRY_RUN,
            *_COMMON,
        ),
        "Removes with each result the saved trials of its call. Without --device and --call it removes everything "
        "about a function: also its rules, and its sweeps that have no result. The exit code is 1 if nothing matches.",
        (
            "quarantune cache rm kernels.matmul",
            "quarantune cache rm kernels.matmul --device 'NVIDIA H200' --call '*bf16[4096,4096]*'",
        ),
    ),
    "cache push": Command(
        "copy the results of this cache into a bucket",
        (_value("url URL", "the bucket: s3://BUCKET/PREFIX or gs://BUCKET/PREFIX"), *_TRANSFER),
        "Of two configs for one call the bucket keeps the newer, as `cache merge` does. Any number of jobs may push at "
        "once: none loses a result.",
        ("quarantune cache push s3://results/tuned --only 'kernels.*'",),
    ),
    "cache pull": Command(
        "copy results at a URL into this cache",
        (_value("url URL", "https://HOST/PATH, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX"), *_TRANSFER),
        "Of two configs for one call this keeps the newer, as `cache merge` does.",
        ("quarantune cache pull gs://results/tuned --dry-run",),
    ),
    "cache prune": Command(
        "remove useless files and old results",
        (
            *_ENTRIES,
            _value("--older-than AGE", "remove results and unfinished sweeps of this age, as 90d, 12h or 30m"),
            _DRY_RUN,
            *_COMMON,
        ),
        "Always removes set-aside damaged files and drafts of dead processes; removes results and trials only "
        "with --older-than.",
        (
            "quarantune cache prune --older-than 90d --dry-run",
            "quarantune cache prune --older-than 90d 'kernels.*' --device 'NVIDIA H200'",
        ),
    ),
    "report": Command(
        "write a page about the sweeps of a function: one HTML file for a browser",
        (
            _value("name NAME", "the function's name in the cache, as `quarantune cache list` shows"),
            _value("after AFTER", "compare NAME with this: each a NAME, or DIR/NAME of another cache", nargs="?"),
            _value("-o --output FILE", "the file (default: NAME.html)"),
            _KIND,
            _flag("--running", "only the sweeps that run now, as far as they have come"),
            _flag("--watch", "write the page every second until these sweeps have ended; it loads itself again"),
            _flag("--open", "open the page in a browser"),
            *_COMMON,
        ),
        "The page has the cached results, and the sweeps that have none because they run, were interrupted, or failed.",
        examples=(
            "quarantune report kernels.matmul -o matmul.html",
            "quarantune report kernels.matmul --watch --open",
            "quarantune report last-week/kernels.matmul kernels.matmul -o gain.html",
        ),
    ),
    "replay": Command(
        "compare searches on recorded trials, without a device",
        (
            _value(
                "recorded PATH", "the journals of a function (NAME.trials in the cache), one of them, or a saved result"
            ),
            _value("--search NAME", "a search; repeat it for others (default: surrogate and random)", action="append"),
            _value("--seeds N", "runs of each search (default: 20)", type=_COUNT, default=20),
            _value("--max-trials N", "the most trials (default: 400)", type=_COUNT, default=400),
            _JSON,
        ),
        examples=(
            "quarantune replay ~/.cache/quarantune/kernels.matmul.trials",
            "quarantune replay saved/matmul --search random --search optuna:tpe --seeds 10",
        ),
    ),
    "targets": Command("list the devices that `check` can compile for", (_JSON,)),
    "doctor": Command(
        "check this machine for tuning, and list its obstacles with remedies",
        _COMMON,
        "Takes some 10 s, most of it for real sweeps in the sandbox. The exit code is 1 if something essential fails.",
    ),
    "completion": Command(
        "print a script that completes commands and options in a shell",
        (("shell", {"choices": ("bash", "zsh", "fish"), "help": "bash, zsh or fish"}),),
        examples=(
            "source <(quarantune completion bash)            # in ~/.bashrc",
            "source <(quarantune completion zsh)             # in ~/.zshrc",
            "quarantune completion fish | source             # in config.fish",
        ),
    ),
    "help": Command(
        "show the help of a command",
        (_value("words COMMAND", "the command, as in: quarantune help cache prune", nargs="*"),),
    ),
}
_MODULES = {
    **dict.fromkeys(("tune", "run", "check"), "functions"),
    **dict.fromkeys(("cache", "replay"), "saved"),
    "report": "pages",
    "fit": "fitting",
    **dict.fromkeys(("targets", "doctor"), "capabilities"),
    "completion": "parser",
}
"""The module of each command's handler. Handler and command have one name; `help` has no handler."""


def make_parser() -> Parser:
    """Returns the parser of all commands. It sets `run` to the command's handler, as `module:function`."""
    parser = Parser(prog="quarantune", **_texts(COMMANDS[""]))
    parser.epilog = _EPILOG
    _complete(parser, "")
    return parser


def _complete(parser: Parser, words: str) -> None:
    """Adds the options and subcommands of a command to its parser."""
    for option in [_HELP, *COMMANDS[words].options]:
        is_choice = isinstance(option, list)
        holder: Any = parser.add_mutually_exclusive_group(required=True) if is_choice else parser
        for names, keywords in option if isinstance(option, list) else [option]:
            holder.add_argument(*names.split(), **keywords)
    first = words.partition(" ")[0]
    parser.set_defaults(run=f"{_MODULES.get(first, first)}:{words.replace(' ', '_')}", command=words)
    if within := _commands_within(words):
        parser.set_defaults(run="", parser=parser)
        commands: Any = parser.add_subparsers(title="commands", metavar="COMMAND")
        for name, command in within.items():
            _complete(commands.add_parser(name, help=command.about, **_texts(command)), f"{words} {name}".strip())


def _commands_within(words: str) -> dict[str, Command]:
    """Returns the subcommands of a command, by their last word."""
    parts = ((path.rpartition(" "), command) for path, command in COMMANDS.items() if path)
    return {name: command for (before, _, name), command in parts if before == words}


def _texts(command: Command) -> Mapping[str, Any]:
    about = f"{command.about[0].upper()}{command.about[1:]}. {command.details}".strip()
    examples = "\n  ".join(["examples:", *command.examples]) if command.examples else None
    return {"description": textwrap.fill(about, 79), "epilog": examples}


# --- completion in bash, zsh and fish, without starting Python for it -----------------------------------------

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
        within = _commands_within(path)
        moves += [f'      "{path} {name}") command="{f"{path} {name}".strip()}" ;;' for name in within]
        words = [*within, *(word for word, _ in _words(path))]
        choices.append(f'    "{path}") words="{" ".join(words)}" ;;')
    return _BASH.format(moves="\n".join(moves), choices="\n".join(choices))


def _fish() -> Iterator[str]:
    for path in COMMANDS:
        within = _commands_within(path)
        seen = " && ".join(f"__fish_seen_subcommand_from {word}" for word in path.split()) or "__fish_use_subcommand"
        first = f"{seen} && not __fish_seen_subcommand_from {' '.join(within)}" if path and within else seen
        for name, command in within.items():
            yield f"complete -c quarantune -f -n {shlex.quote(first)} -a {name} -d {shlex.quote(command.about)}"
        for word, about in _words(path):
            flag = f"-l {word[2:]}" if word.startswith("--") else f"-s {word[1:]}" if word[0] == "-" else ""
            how = f"{flag}{' -r' if 'metavar' in about else ''} -d {shlex.quote(about['help'])}" if flag else ""
            yield f"complete -c quarantune -n {shlex.quote(seen)} {how or f'-f -a {word}'}"


def _words(path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the words that a user may type for a command's options, or for an argument such as a shell's name."""
    for option in [_HELP, *COMMANDS[path].options]:
        for names, about in option if isinstance(option, list) else [option]:
            for word in names.split() if names.startswith("-") else about.get("choices", ()):
                yield word, about
