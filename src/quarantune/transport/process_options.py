"""The state of the caller's process that a worker shares: its import path, JAX's options and JAX's contexts."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import jax

from quarantune import jax_internals
from quarantune.host import origins
from quarantune.jax_internals import state
from quarantune.transport.pickling import dumps, loads
from quarantune.values import naming


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """What a worker takes over from the caller's process.

    Attributes:
        import_path: `sys.path`.
        jax_options: the values of JAX's options.
        contexts: the contexts of JAX that are set, pickled, as their values may be of the user's own classes.
        devices: how many devices the call needs.
        program: the name of its program, for keys.
    """

    import_path: list[str]
    jax_options: Mapping[str, Any]
    contexts: bytes
    devices: int
    program: str

    @classmethod
    def current(cls, *, devices: int) -> ProcessOptions:
        """Returns the options of this process and thread.

        Args:
            devices: how many devices the call needs.
        """
        return cls(
            import_path=origins.import_path(),
            jax_options=state.options_to_travel(),
            contexts=dumps(jax_internals.contexts()),
            devices=devices,
            program=naming.program(),
        )

    def adopt_before_imports(self) -> Mapping[str, Any]:
        """Sets the import path and JAX's options in this process, before any of the user's modules is imported.

        Returns:
            The options that JAX does not know yet, for `adopt_after_imports`: a module of the user's registers them.
        """
        sys.path[:] = self.import_path + [entry for entry in sys.path if entry not in self.import_path]
        naming.adopt(self.program)
        importlib.invalidate_caches()  # the user may have written a module since this process last looked
        unknown = state.adopt_options(self.jax_options)
        _provide_cpu_devices(self.devices)
        return unknown

    def adopt_after_imports(self, unknown: Mapping[str, Any]) -> None:
        """Sets the rest of JAX's options, and its contexts.

        Args:
            unknown: what `adopt_before_imports` returned.
        """
        state.adopt_late_options(unknown)
        jax_internals.set_contexts(loads(self.contexts))


def _provide_cpu_devices(count: int) -> None:
    """Configures JAX to make at least so many CPU devices, for a call whose arrays are spread over several devices."""
    forced = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    option = jax.config.values["jax_num_cpu_devices"]
    if count > (option if option >= 0 else int(forced[-1]) if forced else 1):
        jax.config.update("jax_num_cpu_devices", count)
