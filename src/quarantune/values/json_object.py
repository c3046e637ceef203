"""The type of a JSON object, as keys, entries, journals and reports hold them."""

from __future__ import annotations

from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object, as decoded or ready to be encoded."""
