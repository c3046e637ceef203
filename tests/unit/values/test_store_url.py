"""URLs of stores are read strictly, and no message shows their credentials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import quarantune
from quarantune.values import blocks
from quarantune.values.store_url import StoreURL, split_places
from quarantune.values.texts import without_secrets

SIGNED = "https://account.host/results?se=2026-01-01T00:00:00Z&sig=a/b+c%3D"


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("/a:/b", ["/a", "/b"]),
        ("/a:https://host/x:/b", ["/a", "https://host/x", "/b"]),
        ("https://host:8443/x:relative", ["https://host:8443/x", "relative"]),
        (
            "https://user:word@host:80/x:s3://bucket/y:gs://bucket",
            ["https://user:word@host:80/x", "s3://bucket/y", "gs://bucket"],
        ),
        ("http://[::1]:9000/x:~/tables", ["http://[::1]:9000/x", "~/tables"]),
        ("https://host:/b", ["https://host", "/b"]),
        ("s3://bucket:/b", ["s3://bucket", "/b"]),
        (f"{SIGNED}:/b", [SIGNED, "/b"]),
        (f"{SIGNED}:gs://bucket/x", [SIGNED, "gs://bucket/x"]),
        ("/a::/b:", ["/a", "/b"]),
    ],
)
def test_colons_of_urls_do_not_separate(text: str, places: list[str]) -> None:
    assert split_places(text) == places
    with quarantune.settings(cache_path=text):
        found = blocks.current().cache_path
    assert [isinstance(place, StoreURL) for place in found] == ["://" in place for place in places]
    assert blocks.settings(cache_path=places).values["cache_path"] == found, "a list means the same"


@pytest.mark.parametrize(
    "text",
    [
        "file:///etc/passwd",
        "ftp://host/x",
        "memory://x",
        "https://",
        "https:///x",
        "s3://",
        "s3://key:secret@bucket/x",
        "s3://bucket/x?versionId=3",
        "gs://bucket:80/x",
        "https://host:0/x",
        "https://host:99999/x",
        "https://host:port/x",
        "https://host/x#part",
        "https://host/a b",
        "https://host/\x1b[2J",
        "https://[::1/x",
        "host/x",
        "",
    ],
)
def test_other_urls_are_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of `urlsplit` also; settings give the message
        StoreURL.parse(text)
    if "://" in text:
        with pytest.raises(
            ValueError, match=r"cache_path=.* is not valid: it must be directories or URLs separated by"
        ):
            quarantune.settings(cache_path=[text])


def test_only_a_bucket_takes_pushed_results() -> None:
    assert str(blocks.settings(push="s3://bucket/tuned/").values["push"]) == "s3://bucket/tuned"
    assert blocks.settings(push=None).values["push"] is None
    for text in ("https://host/tuned", "/directory", "s3://key:secret@bucket"):
        with pytest.raises(ValueError, match=r"push=.*the URL of a bucket: s3://BUCKET/PREFIX or gs://.*A web server"):
            quarantune.settings(push=text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:secret@host/x", "https://***@host/x"),
        ("https://user:sec@ret@host/x", "https://***@host/x"),
        ("https://user:sec/ret@host/x", "https://***@host/x"),
        ("https://user:sec?ret@host/x", "https://***@host/x"),
        ("https://user:sec'ret@host/x", "https://***@host/x"),
        ("https://host/x?sig=secret", "https://host/x?***"),
        ("cannot open 'https://host/x?sig=secret': no", "cannot open 'https://host/x?***': no"),
        ("<see https://user:secret@host/x?sig=secret>", "<see https://***@host/x?***"),
        ("https://host/x, /a@b", "https://host/x, /a@b"),
        ("s3://bucket/x", "s3://bucket/x"),
    ],
)
def test_a_text_shows_no_credentials(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


@pytest.mark.parametrize("name", ["cache_dir", "cache_path", "push", "record", "log_dir"])
@pytest.mark.parametrize("as_list", [False, True])
def test_a_refused_setting_shows_no_credentials(name: str, as_list: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "hidden" * 20  # the value is cut where it is shown
    text = f"ftp://user:{secret}@host/x?sig={secret}"
    value: Any = [text] if as_list else text
    with pytest.raises(ValueError, match=f"{name}=") as caught:
        quarantune.settings(**{name: value})
    assert "hidden" not in str(caught.value)
    monkeypatch.setenv(f"QUARANTUNE_{name.upper()}", text)
    with pytest.raises(ValueError, match=f"QUARANTUNE_{name.upper()}=") as caught:
        blocks.current()
    assert "hidden" not in str(caught.value)


def test_a_url_shows_no_credentials_as_text() -> None:
    url = StoreURL.parse("https://user:secret@Host/x/?sig=secret")
    assert f"{url} {url!r} {(url,)}" == "https://***@Host/x?*** https://***@Host/x?*** (https://***@Host/x?***,)"
    assert "secret" in url.parts.geturl()


def test_settings_name_their_directories_apart() -> None:
    with quarantune.settings(cache_path="/a:https://host/x:/b"):
        assert blocks.current().read_directories == [Path("/a"), Path("/b")]
