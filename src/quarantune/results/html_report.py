"""Writes reports: one HTML file with the data, the styles and the program that draws the charts, and nothing else."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import importlib.resources
import json
import os
import re
from collections.abc import Sequence

from quarantune.results.report_data import page_data
from quarantune.results.result import ResultData
from quarantune.values.json_object import JsonObject

_PAGE = "quarantune.results.page"
_SCRIPTS = (
    "base.js",
    "model.js",
    "summary.js",
    "finals.js",
    "progress.js",
    "map.js",
    "effects.js",
    "parallel.js",
    "table.js",
    "shapes.js",
    "main.js",
)
_SLOT = re.compile(r"\{\{(\w+)\}\}")


def render(results: Sequence[ResultData]) -> str:
    """Returns the report on some problems of one function as one self-contained HTML page.

    The page needs no network, and its policy allows none. Texts of configs, messages and logs reach it as JSON, and it
    inserts them as text.

    Args:
        results: at least one problem.

    Raises:
        ValueError: there is no problem.
    """
    if not results:
        raise ValueError("there is no result to report on: give at least one")
    data = page_data(results)
    script = _script()
    slots = {
        "title": html.escape(f"{data['title']} · tuning report"),
        "summary": html.escape(_in_words(data)),
        "style": _read("page.css"),
        "script": script,
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "data": _embedded(data),
    }
    return _SLOT.sub(lambda match: slots[match[1]], _read("page.html"))


def write(path: str | os.PathLike[str], results: Sequence[ResultData]) -> None:
    """Writes the report on some problems of one function into a file.

    Raises:
        ValueError: there is no problem.
        OSError: the file cannot be written.
    """
    text = render(results)
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)


def _embedded(data: JsonObject) -> str:
    """Returns JSON that cannot end the script element around it, nor begin a comment in it."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _in_words(data: JsonObject) -> str:
    """Returns the choices in words, for browsers that run no scripts."""
    parts = []
    for problem in data["problems"]:
        time = "" if problem["bestMs"] is None else f", {problem['bestMs']:g} ms"
        parts.append(f"{problem['label']}: {problem['bestText']}{time}")
    return "; ".join(parts)


@functools.cache
def _script() -> str:
    parts = "".join(_read(name) for name in _SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}}})();\n'


@functools.cache
def _read(name: str) -> str:
    return importlib.resources.files(_PAGE).joinpath(name).read_text(encoding="utf-8")
