"""URLs of results on servers. Their texts in messages never contain credentials."""

from __future__ import annotations

import dataclasses
import re
from typing import Self
from urllib.parse import SplitResult, urlsplit

from quarantune.values.texts import STORE_URL, without_secrets

_WEB, _BUCKETS = ("https", "http"), ("s3", "gs")
_PLACE = re.compile(
    r"[a-z][a-z0-9+.-]*://(?:[^/?#@]*@)?(?:\[[^]/]*\]|[^/:?]*)(?::\d+)?[^:?]*"  # as `https://user:word@host:80/path`
    r"(?:\?.*?(?=:[./~]|:[a-z][a-z0-9+.-]*://|$))?"  # a signature may contain a colon
    r"|[^:]+",
    re.IGNORECASE,
)


def split_places(text: str) -> list[str]:
    """Returns the directories and URLs of a list that colons separate. The colons of a URL separate nothing."""
    return [place.strip() for place in _PLACE.findall(text)]


@dataclasses.dataclass(frozen=True)
class StoreURL:
    """The URL of a place with an object of results, `NAME.json`, for each function.

    `str` and `repr` leave out credentials.

    Attributes:
        parts: the parts of the URL, which may contain credentials.
    """

    parts: SplitResult

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads a URL.

        Raises:
            ValueError: the text is not a `STORE_URL`.
        """
        parts = urlsplit(text.strip())
        parts = parts._replace(path=parts.path.rstrip("/"))
        is_bucket = parts.scheme in _BUCKETS and not parts.query and not {*"@:"} & {*parts.netloc}
        is_web = parts.scheme in _WEB and parts.port != 0
        if not parts.hostname or not (is_web or is_bucket) or parts.fragment or re.search(r"[^!-~]", text.strip()):
            raise ValueError(f"{without_secrets(text)!r} is not a URL of results: give {STORE_URL}")
        return cls(parts)

    @property
    def is_bucket(self) -> bool:
        """Whether results can be written there."""
        return self.parts.scheme in _BUCKETS

    def __str__(self) -> str:
        return without_secrets(self.parts.geturl())

    __repr__ = __str__
