"""What is read from headers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from service.access.credentials import is_own_host, is_own_origin, own_hosts, sent_keys


def headers(*pairs: tuple[str, str]) -> Headers:
    return Headers(raw=[(name.lower().encode(), value.encode("latin-1")) for name, value in pairs])


@pytest.mark.parametrize(
    ("pairs", "keys"),
    [
        ([], []),
        ([("Authorization", "Bearer k")], ["k"]),
        ([("Authorization", "bEARER   k ")], ["k"]),
        ([("X-API-Key", "k")], ["k"]),
        ([("X-API-Key", "")], [""]),
        ([("Authorization", "Bearer ")], [""]),
        ([("Authorization", "Bearer")], []),
        ([("Authorization", "Basic k")], []),
        ([("Authorization", "Basic k"), ("X-API-Key", "j")], ["j"]),
        ([("Authorization", "Bearer k"), ("Authorization", "Bearer j")], ["k", "j"]),
        ([("Authorization", "Bearer k"), ("X-API-Key", "k")], ["k", "k"]),
        ([("Authorization", "Bearer k, Bearer j")], ["k, Bearer j"]),
        ([("Authorization", "Bearer ké")], ["ké"]),
    ],
)
def test_keys_in_headers(pairs: list[tuple[str, str]], keys: list[str]) -> None:
    assert sent_keys(headers(*pairs)) == keys


OWN = own_hosts("127.0.0.5")


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:8000",
     "127.0.0.5:1", "localhost:"],
)  # fmt: skip
def test_own_hosts(host: str) -> None:
    assert is_own_host(headers(("Host", host)), OWN)


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "localhost.evil.example", "evil.example:8000", "127.0.0.1.nip.io",
     "localhost@evil.example", "evil.example#localhost", "::1", "127.0.0.2", "localhost:80:80",
     "localhost:x", "localhost/", " localhost", "[::1]x", "[::2]", "localhost.", "localhöst",
     "localhost\n", "0.0.0.0", "localhost:123456"],
)  # fmt: skip
def test_foreign_hosts(host: str) -> None:
    assert not is_own_host(headers(("Host", host)), OWN)


def test_one_host_and_no_other() -> None:
    assert not is_own_host(headers(), OWN)
    twice = headers(("Host", "localhost"), ("Host", "evil.example"))
    assert not is_own_host(twice, OWN)


def test_an_ipv6_address_is_asked_in_brackets() -> None:
    assert is_own_host(headers(("Host", "[::1]:8000")), own_hosts("::1"))


@given(st.text(alphabet=st.characters(max_codepoint=255), max_size=30))
def test_no_other_host_is_own(host: str) -> None:
    names = {"localhost", "127.0.0.1", "[::1]", "127.0.0.5"}
    if is_own_host(headers(("Host", host)), OWN):
        assert host.lower().rsplit(":", 1)[0] in names or host.lower() in names


@pytest.mark.parametrize(
    ("origin", "own"),
    [
        (None, True),
        ("http://localhost:8000", True),
        ("https://localhost:8000", True),
        ("http://localhost", False),
        ("https://shop.example", True),
        ("http://shop.example", False),
        ("https://shop.example.evil.example", False),
        ("null", False),
        ("", False),
    ],
)
def test_origins(origin: str | None, own: bool) -> None:
    pairs = [("Host", "localhost:8000")] + ([("Origin", origin)] if origin is not None else [])
    assert is_own_origin(headers(*pairs), ("https://shop.example",)) is own
