"""The commands with their options; handlers are named, and imported only if they run."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import textwrap
from collections.abc import Callable
from typing import Any, NoReturn

from quarantune._version import __version__
from quarantune.cli.output import ERROR_STYLE, styled
from quarantune.values.texts import did_you_mean

_FUNCTION = "the function: MODULE:FUNCTION, as in kernels:matmul, or path/kernels.py:matmul"
_EPILOG = """\
exit codes:
  0  done
  1  the work failed, or the answer is no: nothing could be tuned, two caches differ, ...
  2  the command cannot be carried out; the message names the remedy
  130  interrupted; 141 if the reader of the output left

environment variables: QUARANTUNE_CACHE_DIR and others, which the page "Environment" of the
documentation lists"""
_OPTION = re.compile(r"--?[A-Za-z][\w-]*")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Reads the words of this command, and refuses what it does not take, so that its own help is named."""
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
        elif "required" not in message and "unrecognized" not in message:
            given = []
        known_options = self._option_string_actions.keys()
        for option in [word.partition("=")[0] for word in itertools.takewhile(lambda word: word != "--", given)]:
            if _OPTION.fullmatch(option) and not {option, option[:2]} & known_options:
                # Without the dashes, which all options have in common.
                near = did_you_mean(option.lstrip("-"), [known.lstrip("-") for known in known_options])
                own = "" if self.get_default("run") else " Options of a command follow it."
                hint = near.replace("'", "'--", 1) or own
                message = f"there is no option {option!r}.{hint}"
                break
        name = styled(self.prog, ERROR_STYLE, sys.stderr)
        print(f"{name}: {message.rstrip('.')} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


class _Once(argparse.Action):
    """Keeps the value of an option, of which a second one would silently replace the first."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if getattr(namespace, self.dest) is not None:
            raise argparse.ArgumentError(
                self, "given twice: write several calls into a file for --shapes, or leave one out"
            )
        setattr(namespace, self.dest, values)


def make_parser() -> Parser:
    """Returns the parser of all commands; `run` names the function that handles one, as `module:function`."""
    parser = Parser(
        prog="quarantune",
        description="Tune JAX and Pallas kernels, and look at what is tuned.",
        epilog=_EPILOG,
    )
    parser.set_defaults(run="", parser=parser)
    parser.add_argument("-V", "--version", action="version", version=f"quarantune {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    _add_tune(commands)
    _add_run(commands)
    _add_check(commands)
    _add_cache(commands)
    _add_report(commands)
    _add_replay(commands)
    command = _add(commands, "targets", "targets:show", "list the devices that `check` can compile for")
    _json(command)
    command = _add(
        commands,
        "doctor",
        "doctor:run",
        "look at this machine: what it gives to tuning, and what is in the way",
        details="Takes some 10 s, most of it for real sweeps in the sandbox. The exit code is 1 if something essential "
        "fails.",
    )
    _cache_dir(command)
    _json(command)
    command = _add(
        commands,
        "completion",
        "completion:show",
        "print a script that completes commands and options in a shell",
        examples=(
            "source <(quarantune completion bash)            # in ~/.bashrc",
            "source <(quarantune completion zsh)             # in ~/.zshrc",
            "quarantune completion fish | source             # in config.fish",
        ),
    )
    command.add_argument("shell", choices=("bash", "zsh", "fish"))
    command = _add(commands, "help", "program:show_help", "show the help of a command")
    command.add_argument("words", metavar="COMMAND", nargs="*", help="the command, as in: quarantune help cache prune")
    return parser


def _add(
    commands: Any, name: str, run: str, about: str, *, details: str = "", examples: tuple[str, ...] = ()
) -> Parser:
    """Adds a command and returns its parser."""
    shown = "\n".join(["examples:", *(f"  {example}" for example in examples)]) if examples else None
    about_it = textwrap.fill(f"{about[0].upper()}{about[1:]}. {details}".strip(), 79)
    command: Parser = commands.add_parser(name, help=about, description=about_it, epilog=shown)
    command.set_defaults(run=run, command=command.prog.removeprefix("quarantune "))
    return command


def _json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help='print JSON, which the page "The command line" describes')


def _cache_dir(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--cache-dir", metavar="DIR", help="the cache directory (default: QUARANTUNE_CACHE_DIR, or the user's cache)"
    )


def _calls(command: Parser) -> None:
    """Adds the options that say which calls of a function are meant."""
    command.add_argument("function", metavar="MODULE:FUNCTION", help=_FUNCTION)
    given = command.add_mutually_exclusive_group(required=True)
    given.add_argument(
        "--args",
        action=_Once,
        metavar="ARGUMENTS",
        help="the arguments of one call: arrays as dtype[sizes], numbers, and name=value, "
        "as in 'bf16[4096,4096] bf16[4096,4096] causal=true'",
    )
    given.add_argument(
        "--shapes",
        action=_Once,
        metavar="FILE",
        help="a file with the arguments of one call on each line, as in --args; - for stdin",
    )
    given.add_argument(
        "--inputs",
        action=_Once,
        metavar="MODULE:FUNCTION",
        help="a function without parameters that returns the arguments: a tuple, or a dict of keyword arguments; "
        "or that yields such for one call after another",
    )
    command.add_argument(
        "--static",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="the value of a static parameter in all calls; may be repeated",
    )


def _number(kind: Callable[[str], Any], what: str) -> Callable[[str], Any]:
    """Returns a parser of numbers above 0."""

    def parse(text: str) -> Any:
        try:
            number = kind(text)
        except ValueError:
            number = 0
        if not 0 < number < 1e9:
            raise argparse.ArgumentTypeError(f"{text!r} is no {what}")
        return number

    return parse


_COUNT = _number(int, "whole number of at least 1")
_SECONDS = _number(float, "number of seconds above 0")


def _add_tune(commands: Any) -> None:
    command = _add(
        commands,
        "tune",
        "tune:tune",
        "tune a function ahead of time, and save the winners in the cache",
        details="Calls that are tuned already are left alone, unless --force is given.",
        examples=(
            "quarantune tune kernels:matmul --args 'bf16[4096,4096] bf16[4096,4096]'",
            "quarantune tune kernels.py:attention --shapes shapes.txt --static causal=true",
            "quarantune tune kernels:matmul --inputs kernels:real_inputs --max-trials 200",
        ),
    )
    _calls(command)
    command.add_argument("--force", action="store_true", help="tune calls again that are tuned already")
    command.add_argument(
        "--search",
        metavar="NAME",
        help='auto, exhaustive, random, surrogate or optuna:<sampler>: see the page "Searching large spaces"',
    )
    command.add_argument("--max-trials", metavar="N", type=_COUNT, help="try at most N configs for each call")
    command.add_argument("--time-budget", metavar="S", type=_SECONDS, help="try configs for at most S seconds per call")
    command.add_argument(
        "--executor",
        metavar="ADDRESS",
        help='tune on a cluster: dask://HOST:PORT, ray://HOST:PORT, or ray://auto (see the page "Beyond one machine")',
    )
    _cache_dir(command)
    _json(command)


def _add_run(commands: Any) -> None:
    command = _add(
        commands,
        "run",
        "run:run",
        "run one config alone in the sandbox, and show everything that it prints",
        details="Nothing is saved. The exit code is 1 unless the config works.",
        examples=("""quarantune run kernels:matmul --config '{"bm": 64}' --args 'bf16[4096,4096] bf16[4096,4096]'""",),
    )
    _calls(command)
    command.add_argument(
        "--config", metavar="JSON", required=True, help="the config; what it leaves out has the function's defaults"
    )
    _json(command)


def _add_check(commands: Any) -> None:
    command = _add(
        commands,
        "check",
        "check:check",
        "compile all configs of a function for a device that need not be here",
        details="Nothing runs. The exit code is 1 if no config compiles, or with --all if one does not.",
        examples=(
            "quarantune check kernels:matmul --target 'TPU v5e' --args 'bf16[4096,4096] bf16[4096,4096]'",
            "quarantune check kernels.py:matmul --target h100 --all --shapes shapes.txt",
        ),
    )
    _calls(command)
    command.add_argument("--target", metavar="NAME", required=True, help="the device; `quarantune targets` lists them")
    command.add_argument("--all", action="store_true", help="exit with 1 unless every config compiles")
    command.add_argument("--again", action="store_true", help="compile what earlier checks have compiled, too")
    command.add_argument("--compile-timeout", metavar="S", type=_SECONDS, help="seconds for compiling one config")
    command.add_argument("--memory-limit", metavar="SIZE", help="host memory for compiling one config, as 8GB")
    command.add_argument("--jobs", metavar="N", type=_COUNT, help="how many configs compile at a time")
    _cache_dir(command)
    _json(command)


def _chosen(command: Parser, *, names: str) -> None:
    """Adds the options that choose entries of a cache."""
    command.add_argument("names", metavar="NAME", nargs="*", help=names)
    command.add_argument("--device", metavar="KIND", help="only results for this kind of device")


def _add_cache(commands: Any) -> None:
    cache = commands.add_parser(
        "cache",
        help="look at saved results, compare, copy and remove them",
        description="Look at saved results, compare, copy and remove them.",
    )
    cache.set_defaults(run="", command="cache", parser=cache)
    known = cache.add_subparsers(title="commands", metavar="COMMAND", dest="action")
    any_names = "functions by their names in the cache, in which * stands for any text (default: all)"

    command = _add(known, "list", "cache:list_entries", "list the results, one line for each call")
    _chosen(command, names=any_names)
    command = _add(
        known,
        "show",
        "cache:show",
        "show all that is saved about the results of a function",
        examples=("quarantune cache show kernels.matmul --device 'NVIDIA H200'",),
    )
    _chosen(command, names=any_names)
    _add(known, "path", "cache:path", "print the cache directory")
    command = _add(
        known,
        "diff",
        "cache:diff",
        "compare the configs of this cache with another; the exit code is 1 if they differ",
    )
    command.add_argument("other", metavar="DIR", help="the other cache directory")
    command = _add(
        known,
        "verify",
        "cache:verify",
        "check every file of the cache, and measure winners again",
        details="The winners of the functions that are named are measured again, each against its function's own "
        "defaults. The exit code is 1 if a file is damaged or a winner is stale.",
        examples=("quarantune cache verify", "quarantune cache verify kernels:matmul"),
    )
    command.add_argument(
        "functions", metavar="MODULE:FUNCTION", nargs="*", help="measure the winners of these functions again"
    )
    _add_changes(known, any_names)
    for name, command in known.choices.items():
        _cache_dir(command)
        if name != "path":
            _json(command)


def _add_changes(known: Any, any_names: str) -> None:
    """Adds the commands that change this cache or write another directory."""
    command = _add(
        known,
        "merge",
        "cache:merge",
        "copy the results of other caches into this one",
        details="Of two configs for one call the newer one is kept, and the conflict is listed.",
    )
    command.add_argument("others", metavar="DIR", nargs="+", help="the other cache directories, which are only read")
    command = _add(
        known,
        "export",
        "cache:export",
        "write results into a directory that a package can ship",
        examples=("quarantune cache export src/mykernels/tables 'mykernels.*'",),
    )
    command.add_argument("directory", metavar="DIR", help="the directory, which is made if necessary")
    _chosen(command, names=any_names)
    command = _add(
        known,
        "prune",
        "cache:prune",
        "remove what is of no use any more",
        details="Damaged files that were set aside and drafts of dead processes are always removed; results and trials "
        "only if --older-than is given.",
        examples=(
            "quarantune cache prune --older-than 90d --dry-run",
            "quarantune cache prune --older-than 90d 'kernels.*' --device 'NVIDIA H200'",
        ),
    )
    _chosen(command, names=any_names)
    command.add_argument(
        "--older-than", metavar="AGE", help="remove results and unfinished sweeps of this age, as 90d, 12h or 30m"
    )
    command.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def _add_report(commands: Any) -> None:
    command = _add(
        commands,
        "report",
        "report:write",
        "write a page about the cached results of a function: one HTML file, to be opened in a browser",
        examples=("quarantune report kernels.matmul -o matmul.html",),
    )
    command.add_argument(
        "name", metavar="NAME", help="the function's name in the cache, as `quarantune cache list` shows"
    )
    command.add_argument("-o", "--output", metavar="FILE", help="the file (default: NAME.html)")
    command.add_argument("--device", metavar="KIND", help="only results for this kind of device")
    command.add_argument("--open", action="store_true", help="open the page in a browser")
    _cache_dir(command)
    _json(command)


def _add_replay(commands: Any) -> None:
    command = _add(
        commands,
        "replay",
        "replay:replay",
        "compare searches on recorded trials, without a device",
        examples=(
            "quarantune replay ~/.cache/quarantune/kernels.matmul.trials",
            "quarantune replay gemm.json.gz --search surrogate random optuna:tpe --seeds 10",
        ),
    )
    command.add_argument(
        "recorded",
        metavar="PATH",
        help="the journals of a function (NAME.trials in the cache), a saved result, or a file of T4 JSON, of Kernel "
        "Tuner or of KTT",
    )
    command.add_argument(
        "--search", metavar="NAME", nargs="+", default=["surrogate", "random"], help="(default: surrogate random)"
    )
    command.add_argument("--seeds", metavar="N", type=_COUNT, default=20, help="runs of each search (default: 20)")
    command.add_argument("--max-trials", metavar="N", type=_COUNT, default=400, help="the most trials (default: 400)")
    command.add_argument("--batch", metavar="N", type=_COUNT, default=8, help="configs asked at a time (default: 8)")
    _json(command)
