"""The features of tuning with their values, the rows that let every pair of values meet, and what is refused.

A value names something that a user chooses, such as a way of asking or a setting. The first value of a feature is its
default. `crossed_calls.py` makes and runs the call that a row describes. `python tests/support/crossings.py` prints the
table of docs/limits.md.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

Row: TypeAlias = dict[str, str]
"""A value for each feature."""

FEATURES: Mapping[str, Sequence[str]] = {
    "ask": (
        "call",
        "tune",
        "lookup",
        "tune_many",
        "tune_for",
        "compile_check",
        "compile_configs",
        "contextual",
        "run",
        "recorded",
        "verify",
    ),
    "kind": ("jitted", "method", "nested", "grad", "vmap", "scan", "shard_map", "export", "plain"),
    "source": ("nothing", "cache", "layer", "table", "estimate", "near", "rule", "journal", "failure"),
    "space": ("list", "grid", "callable", "objects", "compiler_options", "over300"),
    "on_miss": ("tune", "default", "nearest", "rule", "error"),
    "check": ("defaults", "ref_fn", "check_fn", "nothing"),
    "search": ("auto", "random", "surrogate", "object"),
    "isolation": ("none", "process", "compile"),
    "gradient": ("no", "check_grad", "time_grad"),
    "numerics": ("rounding", "bitwise", "batch_invariant"),
    "origin": ("module", "closure", "cell"),
    "jax": ("usual", "x64", "precision", "no_jit", "second_device"),
    "key_fn": ("no", "yes"),
    "prune_fn": ("no", "yes"),
    "objective": ("time", "function"),
    "max_device_memory": ("no", "yes"),
    "always_tune": ("0", "1"),
    "record": ("no", "yes"),
    "executor": ("no", "threads"),
    "ranks": ("no", "two"),
    "donation": ("no", "yes"),
    "devices": ("one", "two"),
    "scopes": ("1", "0"),
}
RISKIEST = ("kind", "gradient", "numerics", "key_fn", "donation", "devices")
"""The features whose triples also meet: most faults were found between two of these."""
DEFAULTS: Row = {feature: values[0] for feature, values in FEATURES.items()}

Pair: TypeAlias = frozenset[tuple[str, str]]
"""Two values, or more, of different features."""


class Refusal(NamedTuple):
    """Values of two features that exclude each other.

    Attributes:
        left: a feature, and those of its values that exclude all values of the other feature.
        right: the other feature with its values.
        says: parts of the error: both features, and the way out.
        combination: both features in words, for docs/limits.md.
        instead: the way out in words.
    """

    left: tuple[str, Sequence[str]]
    right: tuple[str, Sequence[str]]
    says: Sequence[str]
    combination: str
    instead: str

    def pairs(self) -> Iterator[Pair]:
        """Yields the excluded pairs."""
        for one, other in itertools.product(self.left[1], self.right[1]):
            yield frozenset({(self.left[0], one), (self.right[0], other)})


REFUSALS: Sequence[Refusal] = (
    Refusal(
        ("kind", ["plain"]),
        ("ask", ["call", "tune", "lookup", "tune_for", "compile_check", "compile_configs"]),
        ["autotune wraps a function that jax.jit has wrapped", "put @jax.jit"],
        "`@autotune`, `tune_for`, `compile_check` or `compile_configs` of a function that is not jitted",
        "jit it, or use `AutoTuner(...).run`",
    ),
    Refusal(
        ("kind", ["plain"]),
        ("gradient", ["time_grad"]),
        ["time_grad", "must be jitted", "leave time_grad out"],
        "`time_grad` of a function that is not jitted",
        "jit it, or leave `time_grad` out",
    ),
    Refusal(
        ("kind", ["plain"]),
        ("max_device_memory", ["yes"]),
        ["max_device_memory", "must be jitted", "leave max_device_memory out"],
        "`max_device_memory` of a function that is not jitted",
        "jit it, or leave `max_device_memory` out",
    ),
    Refusal(
        ("kind", ["plain"]),
        ("source", ["rule"]),
        ["autotune wraps a function that jax.jit has wrapped", "put @jax.jit"],
        "`fit` of a function that is not jitted",
        "jit it",
    ),
    Refusal(
        ("kind", ["plain"]),
        ("space", ["compiler_options"]),
        ["configs have compiler_options", "is not jitted", "put jax.jit on it"],
        "`compiler_options` of a function that is not jitted",
        "jit it, or make `compiler_options` a parameter",
    ),
    Refusal(
        ("gradient", ["check_grad"]),
        ("check", ["check_fn", "nothing"]),
        ["check_grad=True needs a reference whose gradients are right", "give a function as ref_fn"],
        "`check_grad` with `check_fn`, or with `ref_fn=None`",
        "give a function as `ref_fn`",
    ),
    Refusal(
        ("ask", ["tune_for"]),
        ("objective", ["function"]),
        ["tune_for compares times", "leave out objective, or use tune"],
        "`tune_for` with an `objective`",
        "leave `objective` out, or use `tune`",
    ),
    Refusal(
        ("source", ["rule"]),
        ("objective", ["function"]),
        ["fit compares times", "leave out objective, or use tune"],
        "`fit` with an `objective`",
        "leave `objective` out, or use `tune`",
    ),
    Refusal(
        ("source", ["rule"]),
        ("numerics", ["bitwise", "batch_invariant"]),
        ["fit makes rules for other calls", "numerics=", "leave out numerics (or QUARANTUNE_NUMERICS), or use tune"],
        "`fit` with `numerics` other than `rounding`",
        "leave `numerics` out, or use `tune`",
    ),
    Refusal(
        ("executor", ["threads"]),
        ("isolation", ["none", "compile"]),
        ["QUARANTUNE_ISOLATION", "executor=", "unset one of them"],
        "an executor with `QUARANTUNE_ISOLATION` `none` or `compile`",
        "unset one of them",
    ),
    Refusal(
        ("executor", ["threads"]),
        ("objective", ["function"]),
        ["with executor=, time is the only objective", "leave out one of them"],
        "an executor with an `objective`",
        "leave out one of them",
    ),
    Refusal(
        ("executor", ["threads"]),
        ("ask", ["contextual"]),
        ["contextual_autotune tunes on this machine only", "outside of the settings block"],
        "an executor with `contextual_autotune`",
        "call it outside of the settings block that gives the executor",
    ),
    Refusal(
        ("kind", ["export"]),
        ("ask", ["tune", "tune_many", "tune_for", "compile_check", "compile_configs", "run"]),
        ["symbolic shapes have no data to measure with", "tune it with concrete shapes"],
        "tuning or compiling with symbolic shapes, inside `jax.export`",
        "tune with concrete shapes, and give a `key_fn`",
    ),
    Refusal(
        ("kind", ["method"]),
        ("ask", ["verify"]),
        ["'self' is not in its key", "verify(..., arguments=...)"],
        "`verify` of a method, whose entry only describes its object",
        "give `arguments=`",
    ),
    Refusal(
        ("kind", ["method"]),
        ("ask", ["recorded"]),
        ["'self' is not in its key", "tune it with --inputs"],
        "`tune --recorded` of a method, whose record only describes its object",
        "`tune --inputs`, or `tune_many` of a `recording` block",
    ),
    Refusal(
        ("origin", ["closure", "cell"]),
        ("ask", ["recorded"]),
        ["is not at the top of a module", "tune it in Python, with tune_many(recording)"],
        "`tune --recorded` of a function that no module has at its top",
        "`tune_many` of a `recording` block, in the program itself",
    ),
)

REFUSED: Mapping[Pair, Refusal] = {pair: refusal for refusal in REFUSALS for pair in refusal.pairs()}
_EXCLUDED = {
    value: {other for pair in REFUSED if value in pair for other in pair - {value}} for value in set().union(*REFUSED)
}
"""The values that a value excludes."""


def fits(row: Mapping[str, str], feature: str, value: str) -> bool:
    """Returns whether no value of a row excludes a further value."""
    return _EXCLUDED.get((feature, value), set()).isdisjoint(row.items())


def is_possible(row: Mapping[str, str]) -> bool:
    """Returns whether no two values of a row exclude each other."""
    return all(fits(row, *each) for each in row.items())


def groups(features: Sequence[str], strength: int) -> set[Pair]:
    """Returns every possible choice of values of `strength` different features."""
    return {
        frozenset(zip(chosen, values, strict=True))
        for chosen in itertools.combinations(features, strength)
        for values in itertools.product(*(FEATURES[feature] for feature in chosen))
        if is_possible(dict(zip(chosen, values, strict=True)))
    }


def completed(values: Mapping[str, str]) -> Row:
    """Returns a row with some values, refused or not, and otherwise with defaults that nothing else refuses."""
    row = dict(values)
    for feature, known in FEATURES.items():
        if feature not in row:
            row[feature] = next(value for value in known if fits(row, feature, value))
    return row


def rows(features: Sequence[str] = tuple(FEATURES), strength: int = 2) -> list[Row]:
    """Returns rows in which every possible group of values occurs; the same rows in every process.

    Each row begins with a group that no row has yet, and takes the values that complete most further groups. A value
    that completes none stays the default, which is usually the quickest.

    Args:
        features: the features that vary; the others have defaults.
        strength: the number of values in a group: 2 for all pairs.
    """
    left, random_, found = groups(features, strength), random.Random(0), list[Row]()
    order = sorted(left, key=sorted)
    random_.shuffle(order)
    for group in order:
        if group not in left:
            continue
        row = dict(group)
        for feature in sorted(features, key=lambda each: -len(FEATURES[each])):
            if feature not in row:
                row[feature] = max(
                    (value for value in FEATURES[feature] if fits(row, feature, value)),
                    key=lambda value: len(left & _new_groups(row, feature, value, strength)),
                )
        left -= {frozenset(each) for each in itertools.combinations(row.items(), strength)}
        found.append(completed(row))
    return found


def _new_groups(row: Row, feature: str, value: str, strength: int) -> set[Pair]:
    """Returns the groups that a further value completes."""
    return {frozenset({*rest, (feature, value)}) for rest in itertools.combinations(row.items(), strength - 1)}


def table() -> str:
    """Returns the table of docs/limits.md."""
    lines = [f"| {refusal.combination} | {refusal.instead} |" for refusal in REFUSALS]
    return "\n".join(["| refused | instead |", "|---|---|", *lines])


def label(row: Mapping[str, str]) -> str:
    """Returns the values of a row that are not defaults."""
    return " ".join(f"{name}={value}" for name, value in row.items() if value != DEFAULTS[name]) or "defaults"


if __name__ == "__main__":
    print(table())
