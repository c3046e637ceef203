"""Drives headless Chromium through chromedriver, using only the standard library."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMEDRIVER = shutil.which("chromedriver")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "needs chromium and chromedriver (on Debian: apt-get install chromium chromium-driver)"
AXE = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"
NO_AXE = "needs axe-core (npm install axe-core)"

_FLAGS = [
    "--headless",
    "--no-sandbox",  # root may not use the sandbox; only our pages are loaded
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--force-prefers-reduced-motion",
]
_KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Escape": "\ue00c", "Right": "\ue014", "Down": "\ue015", "Space": " "}
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """One window of a browser."""

    def __init__(self, address: str, session: str) -> None:
        self._session = f"{address}/session/{session}"

    def open(self, page: Path) -> None:
        """Loads a page from disk, and waits for it to be drawn."""
        self._ask("url", url=page.as_uri())
        self.run("return document.readyState")

    def run(self, script: str, *arguments: Any) -> Any:
        """Runs a script and returns its result."""
        return self._ask("execute/sync", script=script, args=list(arguments))

    def barriers(self) -> list[list[str]]:
        """Returns what axe finds that keeps people from reading the page: each rule with the first element."""
        self.run(f"{AXE.read_text(encoding='utf-8')}; window.axe = axe;")
        found = "return axe.run().then(({ violations }) => violations.map((it) => [it.id, it.nodes[0].html]))"
        return list(self.run(found))

    def click(self, selector: str) -> None:
        """Clicks on an element, which must be visible, as for a person."""
        self._ask(f"element/{self._find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        """Replaces an element's text by typing."""
        element = self._find(selector)
        self._ask(f"element/{element}/clear")
        self._ask(f"element/{element}/value", text=text)

    def press(self, *keys: str) -> None:
        """Presses keys one after another, at the focus."""
        steps = [{"type": kind, "value": _KEYS[key]} for key in keys for kind in ("keyDown", "keyUp")]
        self._ask("actions", actions=[{"type": "key", "id": "keyboard", "actions": steps}])

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Moves the mouse from one place of the window to another with its button down."""

        def move(place: tuple[float, float]) -> dict[str, Any]:
            return {"type": "pointerMove", "duration": 20, "x": round(place[0]), "y": round(place[1])}

        steps = [move(start), {"type": "pointerDown", "button": 0}, move(end), {"type": "pointerUp", "button": 0}]
        mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": steps}
        self._ask("actions", actions=[mouse])

    def size(self, width: int, height: int) -> None:
        """Sets the size of the window."""
        self._ask("window/rect", width=width, height=height)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Saves a picture of the window or of the whole page."""
        shot = self._ask("goog/cdp/execute", cmd="Page.captureScreenshot", params={"captureBeyondViewport": whole})
        path.write_bytes(base64.b64decode(shot["data"]))

    def accessible(self) -> list[tuple[str, str]]:
        """Returns the role and the name of each element that a screen reader finds."""
        self._ask("goog/cdp/execute", cmd="Accessibility.enable", params={})
        tree = self._ask("goog/cdp/execute", cmd="Accessibility.getFullAXTree", params={})
        found = [node for node in tree["nodes"] if not node.get("ignored")]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in found if "role" in node]

    def complaints(self) -> list[str]:
        """Returns the errors and warnings on the console since the last time."""
        return [entry["message"] for entry in self._ask("se/log", type="browser")]

    def close(self) -> None:
        """Ends the browser."""
        _request(self._session, "DELETE")

    def _find(self, selector: str) -> str:
        return str(self._ask("element", using="css selector", value=selector)[_ELEMENT])

    def _ask(self, command: str, **parameters: Any) -> Any:
        return _request(f"{self._session}/{command}", "POST", parameters)


@contextlib.contextmanager
def browser(directory: Path) -> Iterator[Browser]:
    """Starts a browser with a new profile, and ends it and its driver."""
    # A browser may leave temporary files. Their paths must be short, because some are sockets.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place, _driver(place) as address:
        options = {"binary": CHROMIUM, "args": [*_FLAGS, f"--user-data-dir={directory / 'profile'}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        answer = _request(f"{address}/session", "POST", {"capabilities": {"alwaysMatch": wanted}})
        window = Browser(address, answer["sessionId"])
        try:
            yield window
        finally:
            window.close()


@contextlib.contextmanager
def _driver(place: str) -> Iterator[str]:
    """Runs a driver with a new directory for temporary files, and yields its address."""
    assert CHROMEDRIVER is not None
    driver = subprocess.Popen(
        [CHROMEDRIVER, "--port=0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": place},
    )
    try:
        assert driver.stdout is not None
        ports = (re.search(r"successfully on port (\d+)", line) for line in driver.stdout)
        yield f"http://127.0.0.1:{next(port[1] for port in ports if port)}"
    finally:
        driver.terminate()
        driver.communicate()


def _request(address: str, method: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"}, method=method)
    # The driver is on this machine, so ignore proxies of the environment.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=280) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{method} {address}: {json.load(error)['value']['message']}") from None
