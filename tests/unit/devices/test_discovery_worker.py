"""A worker finds the devices within a deadline, and plugins are loaded once for all forks."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest
from aftermath import nothing_is_left, quiet_place  # noqa: F401
from helpers import python

from quarantune.devices import discovery
from quarantune.sandbox import template
from quarantune.values.errors import SandboxError

HANGING_PLUGIN = """
import time

def initialize():
    while True:
        time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_place")
def test_a_hanging_plugin_ends_the_probe_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert discovery._probe.__wrapped__(("cpu",))[0].platform == "cpu"


@pytest.mark.skipif(bool(entry_points(group="jax_plugins")), reason="JAX has a plugin here")
@pytest.mark.parametrize("platforms", ["cuda", "nonsense"])
def test_a_platform_without_its_plugin_is_named_in_the_error(platforms: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_platforms", lambda: platforms)
    with pytest.raises(SandboxError, match=rf"probe failed: \w+Error.*JAX_PLATFORMS={platforms}: is JAX's plugin"):
        discovery._probe.__wrapped__((platforms,))


LOADS_PLUGINS = """
import os, jax
from quarantune.jax_internals import jax_backends, jax_functions
from quarantune.jax_internals.other_processes import load_plugins
threads = os.listdir("/proc/self/task")
load_plugins()
assert not jax_backends.backends_initialized()
assert os.listdir("/proc/self/task") == threads
assert "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ
if os.fork() == 0:
    os._exit(jax.devices()[0].platform != "cpu")
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
print("in", os.getpid())
"""


def test_plugins_load_once_for_all_forks_and_touch_no_device(tmp_path: Path) -> None:
    plugin = tmp_path / "jax_plugins" / "noting"
    plugin.mkdir(parents=True)
    notes = "os.getpid(), os.environ['JAX_SKIP_CUDA_CONSTRAINTS_CHECK']"
    (plugin / "__init__.py").write_text(f"import os\n\ndef initialize():\n    print({notes}, flush=True)\n")
    loaded, owner = python("-c", LOADS_PLUGINS, path=[tmp_path], JAX_PLATFORMS="cpu").splitlines()
    assert f"in {loaded}" == f"{owner} 1"
