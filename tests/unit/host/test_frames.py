"""Frames in logs: those of the user stay, and a line stands for the others."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from quarantune.host import frames


def test_frames_of_this_package_of_jax_and_of_python_are_folded() -> None:
    own = frames.__file__
    log = textwrap.dedent(f"""\
        Fatal Python error: Segmentation fault

        Current thread 0x1 (most recent call first):
          File "/home/me/kernel.py", line 3 in kernel
          File "/env/lib/site-packages/jax/_src/api.py", line 9 in wrapped
          File "/env/lib/site-packages/jax/_src/pjit.py", line 10 in call
          File "{own}", line 12 in work
          File "/env/lib/site-packages/flax/core.py", line 4 in apply
          File "<frozen runpy>", line 88 in _run_code

        Extension modules: numpy
        """)
    assert frames.folded(log) == textwrap.dedent("""\
        Fatal Python error: Segmentation fault

        Current thread 0x1 (most recent call first):
          File "/home/me/kernel.py", line 3 in kernel
          ... 3 frames of quarantune, JAX and Python
          File "/env/lib/site-packages/flax/core.py", line 4 in apply
          File "<frozen runpy>", line 88 in _run_code

        Extension modules: numpy
        """)
    assert frames.folded("") == ""
    assert frames.folded('no frame: File "x", line 3\n') == 'no frame: File "x", line 3\n'


def test_a_real_traceback_keeps_the_frames_of_the_user(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text("import json\n\n\ndef mine():\n    json.loads('{')\n\n\nmine()\n")
    told = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False).stderr
    shown = frames.folded(told)
    assert told.count("  File ") > shown.count("  File ") == 2
    assert (shown.count("in mine"), shown.count("json.loads")) == (1, 1)
    assert "frames of quarantune, JAX and Python\njson.decoder.JSONDecodeError" in shown
