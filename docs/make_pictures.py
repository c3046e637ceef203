"""Makes the pictures of these pages: `python docs/make_pictures.py`.

It tunes a kernel on this machine, in a terminal of each width, and draws its report in headless Chromium. It needs
chromium, chromium-driver and the extra `clients`.
"""

from __future__ import annotations

import base64
import html
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PICTURES = HERE / "pictures"
sys.path.insert(0, str(HERE.parent / "tests" / "support"))

import pyte  # noqa: E402
from browser import Browser, browser  # noqa: E402
from document_blocks import blocks_of  # noqa: E402
from terminals import Recording, record  # noqa: E402

SECTIONS = ("winner", "finals", "scatter", "progress", "map", "effects", "parallel", "trials")
TERMINALS = (80, 120)
STYLE = """
body { margin: 0; display: inline-block; background: #14181c; }
pre { margin: 0; padding: 16px 20px; color: #d8dee4; font: 14px/1.35 'DejaVu Sans Mono', monospace; }
"""


def program() -> str:
    """Returns the program of the tutorial, with a third tunable and with nothing said at its end but the table."""
    page = (HERE / "tutorial.md").read_text(encoding="utf-8")
    code = next(block.code for block in blocks_of(page) if block.language == "python")
    for old, new in (
        ('"columns": [256, 1024]}', '"columns": [256, 1024], "unroll": [1, 2, 4]}'),
        ('static_argnames=["rows", "columns"]', 'static_argnames=["rows", "columns", "unroll"]'),
        ("columns: int = 256):", "columns: int = 256, unroll: int = 1):"),
        ("jnp.zeros((rows, 1), jnp.float32))", "jnp.zeros((rows, 1), jnp.float32), unroll=unroll)"),
        ('    result.report("rmsnorm.html")', ""),
    ):
        assert old in code
        code = code.replace(old, new)
    return code


def live(recording: Recording, columns: int) -> pyte.Screen:
    """Returns the first screen of the sweep with the most lines."""
    best: tuple[int, bytes] = (0, b"")
    screen, whole = pyte.Screen(columns, 24), b""
    stream = pyte.ByteStream(screen)
    for _, piece in recording.pieces:
        stream.feed(piece)
        whole += piece
        lines = [line for line in screen.display if line.strip()]
        if any("best" in line for line in lines) and any("now:" in line for line in lines) and len(lines) > best[0]:
            best = (len(lines), whole)
    screen = pyte.Screen(columns, 24)
    pyte.ByteStream(screen).feed(best[1])
    return screen


def _cell(cell: pyte.screens.Char) -> str:
    names = {"green": "#7ec699", "red": "#f2777a", "magenta": "#c39ac9", "blue": "#6fb3d2"}
    colour = f"#{cell.fg}" if re.fullmatch("[0-9a-f]{6}", cell.fg) else names.get(cell.fg, "#d8dee4")
    weight = ";font-weight:700" if cell.bold else ""
    return f'<span style="color:{colour}{weight}">{html.escape(cell.data)}</span>'


def terminal_page(screen: pyte.Screen) -> str:
    """Returns a screen as HTML, with its colours."""
    lines = [
        "".join(map(_cell, (screen.buffer[row][at] for at in range(screen.columns)))) for row in range(screen.lines)
    ]
    while lines and not re.sub("<[^>]*>", "", lines[-1]).strip():
        lines.pop()
    return "\n".join(lines)


def picture(window: Browser, name: str, selector: str, *, scale: float = 1.0) -> None:
    """Saves the part of the page that an element takes."""
    left, top, width, height = window.run(
        """const box = document.querySelector(arguments[0]).getBoundingClientRect();
        return [box.left + scrollX, box.top + scrollY, box.width, box.height];""",
        selector,
    )
    left, top = max(0, left - 12), max(0, top - 12)
    clip = {"x": left, "y": top, "width": width + 24, "height": height + 24, "scale": scale}
    shot = window._ask(
        "goog/cdp/execute",
        cmd="Page.captureScreenshot",
        params={"captureBeyondViewport": True, "clip": clip},
    )
    (PICTURES / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))


def draw_text(window: Browser, place: Path, name: str, text: str) -> None:
    """Saves a terminal's text, which is HTML."""
    page = place / "terminal.html"
    page.write_text(f'<meta charset="utf-8"><style>{STYLE}</style><pre>{text}</pre>', encoding="utf-8")
    window.open(page)
    picture(window, name, "pre")


def draw_report(window: Browser, page: Path) -> None:
    """Saves each part of a report at two widths, in light and dark, and as it is printed."""
    window._ask("goog/cdp/execute", cmd="Emulation.setScrollbarsHidden", params={"hidden": True})
    for width in (1440, 390):
        for theme in ("light", "dark"):
            window.size(width, 900)
            window.open(page)
            if theme == "dark":
                window.click("#theme")
            window.type("#filter", "rows=64")
            for section in SECTIONS if theme == "light" else ("winner", "progress", "map"):
                picture(window, f"report-{section}-{width}-{theme}", f"#{section}", scale=0.7 if width == 1440 else 1.0)
    window.size(900, 900)
    window.open(page)
    window._ask("goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params={"media": "print"})
    window.run("dispatchEvent(new Event('beforeprint'))")
    picture(window, "report-print", "main", scale=0.6)


def main() -> None:
    """Makes all pictures."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        file = place / "rmsnorm.py"
        file.write_text(program(), encoding="utf-8")
        screens = {}
        for columns in TERMINALS:
            environ = {**os.environ, "TERM": "xterm-256color", "QUARANTUNE_CACHE_DIR": str(place / str(columns))}
            command = [sys.executable, str(file)]
            screens[columns] = live(record(command, columns=columns, lines=24, environ=environ), columns)
        report = place / "rmsnorm.html"
        command = [sys.executable, "-m", "quarantune", "report", "rmsnorm", "-o", str(report)]
        subprocess.run(command, check=True, env={**os.environ, "QUARANTUNE_CACHE_DIR": str(place / "120")})
        table = (
            "from rmsnorm import rmsnorm, jax, jnp; import quarantune\n"
            "result = rmsnorm.tune(jax.random.normal(jax.random.key(0), (512, 1024)), jnp.ones(1024))\n"
            "for width in (80, 120): print(result.table(width=width), end='\\f')"
        )
        environ = {**os.environ, "QUARANTUNE_CACHE_DIR": str(place / "table"), "PYTHONPATH": str(place)}
        tables = subprocess.run(
            [sys.executable, "-c", table], check=True, env=environ, cwd=place, stdout=subprocess.PIPE, text=True
        )
        with browser(place) as window:
            window.size(1440, 900)
            for columns, text in zip(TERMINALS, tables.stdout.split("\f"), strict=False):
                draw_text(window, place, f"live-{columns}", terminal_page(screens[columns]))
                draw_text(window, place, f"table-{columns}", html.escape(text))
            draw_report(window, report)


if __name__ == "__main__":
    main()
