"""`quarantune cache` and `replay`: work on saved results. Most `cache` commands need no JAX."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from quarantune.api.tuning_cache import TuningCache
from quarantune.buckets import exchange
from quarantune.cache import entries, sweeps
from quarantune.cache.entries import CacheKey, CacheRecord, EntryPair, MergeReport
from quarantune.cache.entry_file import Contents, Entry
from quarantune.cache.file_names import safe_name
from quarantune.cache.store import Store
from quarantune.cache.sweeps import SweepState
from quarantune.cli.output import DONE, FAILED, InputError, Output, counted, input_errors, printable_lines, wrapped
from quarantune.results import unfinished
from quarantune.values import blocks
from quarantune.values.codec import JsonObject, as_json
from quarantune.values.configs import format_config
from quarantune.values.store_url import StoreURL
from quarantune.values.texts import call_text, columns, printable, shown
from quarantune.values.trial import Findings, ratio_text

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_REPLAYED = ["surrogate", "random"]
_HIDDEN = ("schema", "config", "key_values", "kernels", "time_ms", "default_time_ms", "speedup_interval")


def cache_path(options: argparse.Namespace, out: Output) -> int:
    """Prints the cache directory."""
    out.line(str(_directory()))
    return DONE


def cache_list(options: argparse.Namespace, out: Output) -> int:
    """Prints a line for each result, or each sweep without one, grouped by function and device."""
    store = opened()
    if options.running:
        return _list_sweeps(store, options, out)
    chosen = _chosen(store, options)
    blocks = (
        (f"{printable(name)} on {printable(device)}", _rows(list(map(_row, of_device.values())), out))
        for name, contents in chosen
        for device, of_device in contents.items()
    )
    _print(out, store, blocks)
    out.json([_record(key, entry) for key, entry in _entries(chosen)])
    return DONE


def _list_sweeps(store: Store, options: argparse.Namespace, out: Output) -> int:
    """Prints a line for each sweep without a result, those that run first."""
    wanted = [*map(safe_name, options.names), *options.names]
    found = [
        sweep
        for sweep in sweeps.latest(store.directory)
        if sweep.state is not SweepState.DONE
        if options.device in (None, sweep.beginning.device)
        if not wanted or any(fnmatch.fnmatchcase(sweep.beginning.name, each) for each in wanted)
    ]
    found.sort(key=lambda sweep: sweep.state is not SweepState.RUNNING)
    rows = dict[str, list[Sequence[str]]]()
    records = []
    for sweep in found:
        about, trials = sweep.beginning, sweep.trials()
        best = unfinished.best_of(trials, about.default)
        row = (
            call_text(about.call) or "all calls",
            sweep.state.value,
            unfinished.progress_text(sweep, trials),
            "" if best is None else f"best {format_config(best[0].config)}, {best[0].time_ms:.4g} ms",
            f"for {unfinished.duration_of(sweep)}, {sweep.holder}" if sweep.holder else "",
            sweep.now,
        )
        rows.setdefault(f"{printable(about.name)} on {printable(about.device)}", []).append(row)
        records.append(
            {"function": about.name, "device": about.device, "key": about.key, "call": row[0], "state": row[1]}
            | {"done": sweep.done(trials), "total": about.total, "is_bound": about.is_bound, "began_s": about.began_s}
            | {"config": None if best is None else as_json(best[0].config)}
            | {"time_ms": None if best is None else best[0].time_ms}
            | {"now": sweep.now}
            | {"pid": sweep.holder and sweep.holder.owner.pid, "host": sweep.holder and sweep.holder.host_name}
        )
    for number, (title, lines) in enumerate(rows.items()):
        out.line("\n".join([*([""] if number else []), out.styled(title, "1"), *_rows(lines, out)]))
    if not found:
        out.line(f"no sweep runs in {str(store.directory)!r}, and none was interrupted or failed")
    out.json(records)
    return DONE


def cache_show(options: argparse.Namespace, out: Output) -> int:
    """Prints the entries of a function's results in full."""
    store = opened()
    found = list(_entries(_chosen(store, options)))
    _print(out, store, (_details(key, entry, out.width) for key, entry in found))
    out.json([_record(key, entry) | {"entry": entry} for key, entry in found])
    return DONE


def _print(out: Output, store: Store, blocks: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Prints blocks of lines, each below its title; without blocks, a line about the empty cache."""
    number = 0
    for number, (title, lines) in enumerate(blocks, start=1):
        if number > 1:
            out.line()
        out.line("\n".join([out.styled(title, "1"), *lines]))
    if not number:
        out.line(f"nothing is cached in {str(store.directory)!r}")


def cache_diff(options: argparse.Namespace, out: Output) -> int:
    """Compares the configs of two caches."""
    found = entries.compare(entries.records(opened()), entries.records(another(options.other)))
    out.line(printable_lines(str(found)))
    only = {name: _keys(getattr(found, name)) for name in ("only_here", "only_there")}
    out.json({**only, "different": _pairs(found.different, "here", "there"), "same": _keys(found.same)})
    return FAILED if found.only_here or found.only_there or found.different else DONE


def cache_verify(options: argparse.Namespace, out: Output) -> int:
    """Checks every file of the cache; with functions, also measures their winners again."""
    directory, tuned = opened().directory, []
    if not options.functions and (options.max_loss or options.again or options.sample):
        raise InputError("--max-loss, --again and --sample need functions: name them, as MODULE:FUNCTION")
    if options.functions:  # only these need JAX
        from quarantune.cli import calls

        tuned = [calls.load_kernel(name, to_do="give") for name in options.functions]
    problems = TuningCache(directory).problems()
    for problem in problems:
        out.line(printable(problem))
    if problems:
        out.line(f"{counted(len(problems), 'problem')} found in {str(directory)!r}")
    else:
        out.line(f"every file in {str(directory)!r} is whole")
    document: JsonObject = {"directory": str(directory), "problems": problems}
    is_right = not problems
    if options.sample:
        from quarantune.cli import fitting

        document["sampled"] = fitting.sample(tuned, options.sample, out, saves=options.again)
        most = options.max_loss or math.inf
        is_right &= all(100 * (each["loss"] or 0.0) <= most for each in document["sampled"])
    elif tuned:
        names = {safe_name(function.function.name) for function in tuned}
        report = TuningCache(directory).verify(*tuned, max_loss_percent=options.max_loss, again=options.again)
        verified = [entry for entry in report.entries if entry.key.kernel_type in names]
        for entry in verified:
            out.line(printable(str(entry)))
        lost = [
            (
                it.key.kernel_type,
                it.call,
                _config(it.to_dict()),
                f"{it.saved_time_ms:.4g}",
                f"{it.time_ms:.4g}",
                f"{loss:.3g}%",
            )
            for it in verified
            if options.max_loss and (loss := it.loss_percent or 0.0) > options.max_loss
        ]
        if lost:
            out.line("\n".join(columns([("function", "call", "config", "saved ms", "now ms", "loss"), *lost])))
        verdicts = Counter(str(entry.verdict) for entry in verified)
        summary = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        out.line(f"{counted(len(verified), 'result')} looked at" + (f": {summary}" if summary else ""))
        document["entries"] = [_key(entry.key) | _without_key(entry.to_dict()) for entry in verified]
        is_right &= "stale" not in verdicts
    if options.profile is not None:  # JAX is not needed otherwise
        from quarantune.cli import profiled

        wins, document["in_place"] = profiled.verify(options.profile, blocks.current(), out)
        is_right &= wins
    out.json(document)
    return DONE if is_right else FAILED


def cache_merge(options: argparse.Namespace, out: Output) -> int:
    """Copies the results of other caches into this one."""
    others = [another(name).directory for name in options.others]
    cache = TuningCache(opened().directory)
    records = []
    for other in others:
        report = cache.merge(other)
        out.line(printable_lines(f"{other}: {report}"))
        records.append({"directory": str(other), **_merged(report)})
    out.json(records)
    return DONE


def cache_push(options: argparse.Namespace, out: Output) -> int:
    """Copies the results of this cache into a bucket."""
    return _transfer(options, out, exchange.push)


def cache_pull(options: argparse.Namespace, out: Output) -> int:
    """Copies results at a URL into this cache."""
    return _transfer(options, out, exchange.pull)


def _transfer(options: argparse.Namespace, out: Output, move: Callable[..., MergeReport]) -> int:
    with input_errors(ValueError):
        url = StoreURL.parse(options.url)
        store = Store(opened().directory, lock_timeout_s=blocks.current().lock_timeout)
        report = move(url, store, names=options.only, dry_run=options.dry_run)
    out.line(printable_lines(f"{url}: {report}") + ("\nnothing was written (--dry-run)" if options.dry_run else ""))
    out.json({"url": str(url), "dry_run": options.dry_run, **_merged(report)})
    return DONE


def cache_export(options: argparse.Namespace, out: Output) -> int:
    """Writes results into a directory that a package can ship."""
    cache = TuningCache(opened().directory)
    with input_errors(ValueError):
        keys = cache.export(options.directory, names=options.names or None, devices=options.device)
    if not keys:
        raise InputError(f"nothing is cached in {str(cache.directory)!r}, so there is nothing to export")
    out.line(f"{counted(len(keys), 'result')} written to {options.directory}")
    out.json({"directory": str(Path(options.directory).absolute()), "written": _keys(keys)})
    return DONE


def cache_rm(options: argparse.Namespace, out: Output) -> int:
    """Removes results with the saved trials of their calls, or everything about a function."""
    store, cache = opened(), TuningCache(_directory())
    functions = list[str]()
    if options.device is None and options.call is None:
        with input_errors(ValueError):
            functions = entries.named(store, options.names)
        keys = [key for name in functions for key, _ in entries.entries_of(name, store.read(name))]
    else:
        shown_so = re.compile(".*".join(map(re.escape, (options.call or "*").split("*"))))
        keys = [key for key, it in _entries(_chosen(store, options)) if shown_so.fullmatch(_row(it)[0])]
    if not options.dry_run:
        for name in functions:
            cache.clear(name)
        for key in [] if functions else keys:
            cache.delete(*key)
    for text in [*map(str, keys), *(f"the sweeps of {name}" for name in {*functions} - {key[0] for key in keys})]:
        out.line(printable(text))
    verb = "would be removed" if options.dry_run else "removed"
    out.line(f"{counted(len(keys), 'result')} {verb}")
    out.json({"dry_run": options.dry_run, "results": _keys(keys), "functions": functions})
    return DONE if keys or functions else FAILED


def cache_prune(options: argparse.Namespace, out: Output) -> int:
    """Removes remains; with an age, also old results."""
    age_s = None if options.older_than is None else _seconds(options.older_than)
    store = opened()
    names = frozenset(name for name, _ in _chosen(store, options)) if options.names or options.device else None

    def is_chosen(name: str, device: str | None) -> bool:
        # Other files may be about any device. So they stay if the command names a device.
        return (names is None or name in names) and options.device in (None, device)

    results, files = entries.prune(
        Store(store.directory, lock_timeout_s=blocks.current().lock_timeout),
        older_than_s=age_s,
        is_chosen=is_chosen,
        dry_run=options.dry_run,
    )
    for item in (*results, *files):
        out.line(printable(str(item)))
    numbers = ((len(results), "result"), (len(files), "other file"))
    removed = " and ".join(counted(number, noun) for number, noun in numbers if number)
    verb = "would be removed" if options.dry_run else "removed"
    kept = "" if age_s is not None else "; results of any age stay without --older-than"
    out.line(f"{removed or 'nothing'} {verb}{kept}")
    out.json({"dry_run": options.dry_run, "results": _keys(results), "files": list(map(str, files))})
    return DONE


def replay(options: argparse.Namespace, out: Output) -> int:
    """Runs the searches against the recorded trials."""
    from quarantune.results.replay import replay as run

    with input_errors(ValueError, TypeError, ImportError, OSError):
        names = options.search or _REPLAYED
        result = run(options.recorded, names, seeds=range(options.seeds), max_trials=options.max_trials)
    out.line(result.table())
    searches = {
        name: [
            {each: getattr(run, each) for each in ("seed", "evaluations", "failures", "cpu_ms")}
            | {"best_ms": run.best_ms[-1] if run.best_ms else None, "trials": len(run.best_ms)}
            for run in runs
        ]
        for name, runs in result.runs.items()
    }
    about = {each: getattr(result, each) for each in ("size", "invalid", "optimum_ms", "within", "max_trials")}
    out.json({**about, "searches": searches})
    return DONE


# --- caches -------------------------------------------------------------------------------------------------


def _directory() -> Path:
    with input_errors(ValueError):
        return blocks.current().cache_dir


def opened() -> Store:
    """Opens the cache for reading. Its directory need not exist yet."""
    directory = _directory()
    if not os.path.lexists(directory):
        return Store(directory, read_only=True)
    return _readable(directory, remedy="give another one with --cache-dir or QUARANTUNE_CACHE_DIR")


def another(directory: str) -> Store:
    """Opens another cache for reading. Its directory must exist."""
    with input_errors(ValueError):
        blocks.settings(cache_dir=directory)  # it refuses URLs
    return _readable(Path(directory).expanduser(), remedy="give the directory of a cache")


def _readable(directory: Path, *, remedy: str) -> Store:
    if not os.path.lexists(directory):
        raise InputError(f"there is no directory {str(directory)!r}: {remedy}")
    if not directory.is_dir():
        raise InputError(f"{str(directory)!r} is not a directory: {remedy}")
    try:
        with os.scandir(directory) as found:
            next(found, None)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError(f"{str(directory)!r} cannot be read ({reason}): make it readable, or {remedy}") from error
    return Store(directory, read_only=True)


def _entries(contents: Iterable[tuple[str, Contents]]) -> Iterator[CacheRecord]:
    for name, of_name in contents:
        yield from entries.entries_of(name, of_name)


def _chosen(store: Store, options: argparse.Namespace) -> list[tuple[str, Contents]]:
    """Returns the entries for the names and the device of a command, function by function."""
    devices = None if options.device is None else [options.device]
    with input_errors(ValueError):
        return entries.chosen(store, names=options.names or None, devices=devices)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)\s*([smhdw])", text.strip().lower())
    if found is None:
        raise InputError(f"--older-than {shown(text)} is not an age: write a number with a unit, as 90d, 12h or 30m")
    return float(found[1]) * _SECONDS[found[2]]


# --- entries ------------------------------------------------------------------------------------------------


def _rows(rows: Sequence[Sequence[str]], out: Output) -> list[str]:
    """Returns a line for each result, or two if one line does not fit the terminal: the call, then the rest."""
    lines = list(columns(rows, indent="  "))
    if out.fits(lines):
        return lines
    rest = columns((row[1:] for row in rows), indent="    ")
    return [line for row, below in zip(rows, rest, strict=True) for line in (f"  {row[0]}", below)]


def _row(entry: Entry) -> Sequence[str]:
    found = Findings.from_json(entry)
    if "rule" in entry:
        return "a rule", [*_rule_lines(entry)][-1], "", "", printable(str(entry.get("created", ""))[:10])
    return (
        call_text(entry.get("key_values")),
        _config(entry),
        f"{found.time_ms:.4g} ms" if found.time_ms > 0 else found.search.stopped if found.is_estimate else "",
        "" if found.speedup is None else ratio_text(found.speedup),
        printable(str(entry.get("created", ""))[:10]),
    )


def _record(key: CacheKey, entry: Entry) -> JsonObject:
    found = Findings.from_json(entry)
    return {
        **_key(key),
        "call": call_text(entry.get("key_values")),
        **{name: entry.get(name) for name in ("config", "time_ms", "default_time_ms", "created")},
        "speedup": found.speedup,
        "speedup_interval": found.speedup_interval,
    }


def _key(key: CacheKey) -> JsonObject:
    return {"function": key.kernel_type, "device": key.device, "key": key.problem_size}


def _without_key(record: JsonObject) -> JsonObject:
    return {name: value for name, value in record.items() if name not in CacheKey._fields}


def _keys(keys: Iterable[CacheKey]) -> list[JsonObject]:
    return [_key(key) for key in keys]


def _merged(report: MergeReport) -> JsonObject:
    """Returns the effects of a merge as JSON."""
    keys = {name: _keys(getattr(report, name)) for name in ("added", "updated", "unchanged")}
    return {**keys, "conflicts": _pairs(report.conflicts, "kept", "other")}


def _pairs(pairs: Iterable[EntryPair], first: str, second: str) -> list[JsonObject]:
    return [_key(it.key) | {first: it.kept.get("config"), second: it.other.get("config")} for it in pairs]


def _details(key: CacheKey, entry: Entry, width: int) -> tuple[str, Iterable[str]]:
    """Returns the title and the lines about one result."""
    if "rule" in entry:
        return f"{printable(key.kernel_type)}: a rule for {printable(key.device)}", (
            f"  {it}" for it in _rule_lines(entry)
        )
    rows = [("device", printable(key.device)), ("config", _config(entry))]
    if (found := Findings.from_json(entry)).time_ms > 0 or found.is_estimate:
        rows.append(("time", found.text()))
    rows += [(printable(name), _text(value)) for name, value in entry.items() if name not in _HIDDEN and value]
    rows.append(("key", printable(key.problem_size)))
    lines = columns(wrapped(rows, width - 2), indent="  ")
    return f"{printable(key.kernel_type)}({call_text(entry.get('key_values'))})", lines


def _rule_lines(entry: Entry) -> Iterator[str]:
    """Yields the rule of an entry as indented conditions, or why it cannot be read."""
    from quarantune.rules.rule import FIELD, Rule  # few entries are rules

    try:
        yield from Rule.from_json(entry[FIELD]).lines()
    except ValueError as error:
        yield printable(f"it is damaged ({error}): fit it again")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{printable(str(name))} {_text(item)}" for name, item in value.items() if item is not None)
    if isinstance(value, list):
        return "; ".join(map(_text, value))
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))


def _config(entry: Entry) -> str:
    """Returns the config of an entry as text; with several kernels, each config follows its kernel's name."""
    with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError):
        if kernels := entry.get("kernels"):
            return ", ".join(
                f"{printable(it['name'].rpartition('.')[2])}: {format_config(it['config'])}" for it in kernels
            )
        return format_config(entry["config"])
    return printable(str(entry.get("config")))
