"""Which devices there are is asked of a worker, within a deadline."""

from __future__ import annotations

from pathlib import Path

import pytest
from aftermath import nothing_is_left

from quarantune.devices import discovery
from quarantune.sandbox import template
from quarantune.values.trial import SandboxError

HANGING_PLUGIN = """
import time

def initialize():
    while True:
        time.sleep(60)
"""


def test_a_plugin_that_hangs_ends_the_probe_with_advice_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = tmp_path / "jax_plugins" / "hanging"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(HANGING_PLUGIN)
    monkeypatch.setattr(discovery, "_PROBE_DEADLINE_S", 1.0)
    template.close_shared()
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        template.shared()
    with nothing_is_left(), pytest.raises(SandboxError, match=r"did not end within 1 s.*JAX_PLATFORMS=cpu"):
        discovery._probe.__wrapped__((None,))
    template.close_shared()
    monkeypatch.setattr(discovery, "_PROBE_DEADLINE_S", 120.0)
    assert discovery._probe.__wrapped__(("cpu",)).devices[0].platform == "cpu"
