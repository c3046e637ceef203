"""A worker's main: takes tasks from the scheduler, runs them, and says what happened, phase by phase.

It ends with its first failure, because a process in which something went wrong is not to be trusted with another
config.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any, NoReturn, cast

from quarantune.sandbox import spool, wire
from quarantune.sandbox.wire import Connection, Message
from quarantune.sandbox.worker_program import Shared

if TYPE_CHECKING:
    from quarantune.transport import payload
    from quarantune.values.trial import Config
    from quarantune.worker.bench import Bench, Program

_MESSAGE_CHARS = 4000
_TRACEBACK_LINES = 12


def main(connection: Connection, shared: Shared, task: Message, fds: list[int]) -> NoReturn:
    """Runs `task` and those that follow it, and never returns."""
    code = 0
    try:
        Worker(connection, shared).run(task, fds)
    except wire.WireClosedError:
        pass  # the scheduler closed the connection: there is no more to do
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # Not sys.exit: neither atexit handlers nor threads of a config may hold up the end.
        os._exit(code)


class Worker:
    """One worker's conversation with its scheduler."""

    def __init__(self, connection: Connection, shared: Shared) -> None:
        self._connection = connection
        self._shared = shared
        self._bench: Any = None
        self._program: Any = None
        self._phase = "load"
        self._has_spoken = False
        self._trial: int | None = None
        self._modules = set(sys.modules)

    def run(self, task: Message, fds: list[int]) -> None:
        """Runs tasks until one fails, one says it is the last, or the scheduler closes the connection."""
        pending = [(task, fds)]
        while True:
            for message, received in pending:
                if not self._run_one(message, received):
                    return
            pending = self._connection.receive()

    def _run_one(self, task: Message, fds: list[int]) -> bool:
        self._trial = task.get("trial")
        try:
            reply = self._do(task, fds)
        except BaseException as error:  # a config may raise anything, SystemExit and KeyboardInterrupt too
            from quarantune.worker.failures import WrongResultError, outcome_of

            about = describe_error(error)
            if isinstance(error, WrongResultError):
                about |= {"traceback": "", "group": error.group}  # where we raise it is nobody's business
            self._send({"type": "failed", "outcome": outcome_of(error, self._phase), **about})
            return False
        finally:
            wire.close_all(fds)
        if reply is not None:
            self._send(reply)
        return not task.get("last", False)

    def _do(self, task: Message, fds: list[int]) -> Message | None:
        from quarantune.measure import sampling
        from quarantune.worker.bench import Bench
        from quarantune.worker.failures import NeedsDeviceError
        from quarantune.worker.probe import probe

        if task["do"] == "probe":
            return {"type": "probed", **probe(task["platforms"])}
        if self._bench is None:
            call = cast("payload.Call | None", self._shared.call)
            if call is None:
                self._enter("load")
                call = load_call(self._shared.payload_fd, self._shared.cwd)
            self._bench = Bench(call, arrays_fd=self._shared.arrays_fd, options=task["options"])
        bench: Bench = self._bench
        match task["do"]:
            case "prepare":
                bench.prepare(fds)
                return {"type": "ready", "modules": self._new_modules()}
            case "warm":
                with contextlib.suppress(Exception):  # the config that comes will meet it again, and tell
                    bench.prepare()
                return None
            case "compile":
                return self._compile(bench, task, fds)
            case "measure":
                program = self._load(bench, task["config"], fds[0]) if task["load"] else self._program
                found: Message = {}
                if not task["checked"]:
                    self._phase = "check"  # since it was told to: nobody needs to hear of it
                    end = 1 + task["references"]
                    found["group"] = bench.check(
                        program,
                        references=fds[1:end],
                        standard=task["standard"],
                        output_fd=fds[end] if task["keeps"] else None,
                    )
                    if task["pause"] and (run := bench.informative_first_run(program)) is not None:
                        # It may be out of the race already, which the scheduler knows.
                        return {
                            "type": "checked",
                            "run_ms": run.whole,
                            "own_ms": run.least,
                            "is_disturbed": run.is_disturbed,
                            **found,
                        }
                self._enter("measure")
                noise = sampling.Noise(*task["noise"])
                measured = bench.measure(program, bar_ms=task["bar_ms"], noise=noise)
                if not task["load"] and (not measured["is_slow"] or bench.is_plain):
                    # A finalist, perhaps; one that cannot be saved is compiled anew for the final. What a plain
                    # function leaves, if anything, is no more than what it has called.
                    try:
                        bench.save(program, fds[0])
                    except NeedsDeviceError:
                        pass
                    except OSError:  # there is no room for it, or it would be too large a file
                        os.ftruncate(fds[0], 0)
                return {"type": "measured", **measured, **found}
            case "shapes":
                self._enter("check")
                return {"type": "done", "differs": bench.judge.shapes_differ(fds[0])}
            case "refer":
                self._enter("check")
                bench.judge.compute_reference(fds[0])
                return {"type": "done"}
            case "compare":
                return self._compare(bench, task, fds)
        raise ValueError(f"no such task: {task['do']!r}")

    def _compile(self, bench: Bench, task: Message, fds: list[int]) -> Message:
        from quarantune.worker.failures import NeedsDeviceError

        self._enter("compile")
        self._program = bench.compile(
            task["config"],
            target=task["target"],
            away=bool(fds),
            announce=lambda program: self._send({"type": "lowered", "program": program}),
        )
        if fds:
            with contextlib.suppress(*() if task["must_save"] else (NeedsDeviceError,)):
                bench.save(self._program, fds[0], as_data=task["as_data"])
        return {"type": "compiled", "compile_s": self._program.compile_s, "modules": self._new_modules()}

    def _load(self, bench: Bench, config: Config, fd: int) -> Program:
        """Loads a program; one that calls what only tracing it makes known must be compiled where it runs."""
        from quarantune.worker.failures import NeedsDeviceError, outcome_of

        self._phase = "load"
        try:
            return bench.load(config, fd)
        except Exception as error:
            if outcome_of(error, self._phase) != "error":
                raise
            raise NeedsDeviceError(f"its executable cannot be loaded: {error}") from error

    def _compare(self, bench: Bench, task: Message, fds: list[int]) -> Message:
        from quarantune.worker.failures import NeedsDeviceError

        self._enter("compile")
        saved, programs = iter(fds), []
        for entry in task["entries"]:
            program = None
            if entry["saved"]:
                with contextlib.suppress(NeedsDeviceError):
                    program = self._load(bench, entry["config"], next(saved))
            programs.append(program or bench.compile(entry["config"], target=None))
        self._enter("check")
        for program in programs:
            bench.run(program)
        self._enter("measure")
        rounds_ms, warm_ms = bench.compare(programs)
        return {"type": "done", "rounds_ms": rounds_ms, "warm_ms": warm_ms}

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._send({"type": "phase"})

    def _send(self, message: Message) -> None:
        about = {**message, "trial": self._trial, "phase": self._phase}
        if not self._has_spoken:
            about["pid"] = os.getpid()
            self._has_spoken = True
        self._connection.send(about)

    def _new_modules(self) -> list[str]:
        """Names the modules imported here that the template lacked, so that it can import them for those to come."""
        names = sorted(sys.modules.keys() - self._modules)
        self._modules = set(sys.modules)
        return names


def load_call(payload_fd: int, cwd: str | None) -> payload.Call:
    """Loads a sweep's payload: imports the modules of the caller's function, or unpickles it."""
    from quarantune.transport import payload

    if cwd is not None:
        os.chdir(cwd)
    return payload.unpack_call(spool.read(payload_fd))


def describe_error(error: BaseException) -> Message:
    """Returns what to tell of an exception; never raises, whatever its `__str__` does."""
    try:
        text = str(error)
    except BaseException as broken:
        text = f"(its message cannot be had: {type(broken).__name__})"
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        trace = "".join(lines)
    except BaseException:
        trace = ""
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return {
        "error": f"{module}{kind.__qualname__}"[:_MESSAGE_CHARS],
        "message": _shorten(text),
        "traceback": "\n".join(trace.splitlines()[-_TRACEBACK_LINES:])[-_MESSAGE_CHARS:],
    }


def _shorten(text: str) -> str:
    """Returns a long text without its middle: a callback's error begins with where it was and ends with what it was."""
    if len(text) <= _MESSAGE_CHARS:
        return text
    half = _MESSAGE_CHARS // 2
    return f"{text[:half]} [...] {text[-half:]}"
