"""Keys: form, hash, expiry."""

from __future__ import annotations

import contextlib
import hashlib
import string
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.access.keys import (
    KeysError,
    Scope,
    hash_key,
    key_id,
    make_key,
    parse_expiry,
    redact,
)

NOW = datetime(2026, 12, 1, 12, tzinfo=UTC)


def test_a_key_has_its_form_and_its_record_no_secret() -> None:
    key, record = make_key("Import job", "admin", NOW)
    prefix, kept, secret = key.split("_", 2)
    assert (prefix, kept) == ("gti", record.id)
    assert len(secret) >= 43  # 32 bytes in base64url
    assert record.sha256 == hashlib.sha256(key.encode()).hexdigest()
    assert secret not in record.model_dump_json()
    assert (record.allows, record.created, record.expires) == (Scope.ADMIN, NOW, None)


def test_keys_differ() -> None:
    keys = {make_key("k", "read", NOW)[0] for _ in range(100)}
    assert len({key.split("_", 2)[2] for key in keys}) == 100


@given(st.integers(0, 60), st.sampled_from(string.ascii_letters + string.digits + "_-"))
def test_a_key_with_one_other_character_does_not_match(place: int, letter: str) -> None:
    key, record = make_key("k", "read", NOW)
    place %= len(key)
    other = key[:place] + letter + key[place + 1 :]
    assert (record.sha256 == hash_key(other)) == (other == key)


@given(st.text())
def test_no_text_is_taken_for_a_key_by_chance(text: str) -> None:
    assert key_id(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gti_",
        "gti_0123abcd_",
        "gti_0123abcd_" + "x" * 42,
        "gti_0123abcd_" + "x" * 129,
        "gti_0123ABCD_" + "x" * 43,
        "gti_0123abcd_" + "x" * 42 + "é",
        "gti_\uff10123abcd_" + "x" * 43,
        "gti_0123abcd_" + "x" * 43 + "\n",
        " gti_0123abcd_" + "x" * 43,
        "GTI_0123abcd_" + "x" * 43,
        "gti_0123abcd_" + "x" * 10_000,
    ],
)
def test_what_is_no_key(text: str) -> None:
    assert key_id(text) is None


def test_the_id_is_read() -> None:
    assert key_id("gti_0123abcd_" + "_-" * 22) == "0123abcd"


@given(st.text(max_size=20), st.text(max_size=20))
def test_redaction_leaves_no_secret_and_all_else(before: str, after: str) -> None:
    key, record = make_key("k", "read", NOW)
    # What follows a key directly may be taken for a part of it.
    text = f"{before}{key} {after}"
    assert redact(text) == f"{before}gti_{record.id}_*** {after}"
    assert redact(before) == before


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "\x1b[31m", "x" * 101, "\u202e"])
def test_names_can_be_printed(name: str) -> None:
    with pytest.raises(KeysError, match="printable"):
        make_key(name, "read", NOW)


def test_states() -> None:
    _, record = make_key("k", "read", NOW, NOW + timedelta(days=1))
    assert record.state(NOW) == "valid"
    assert record.state(NOW + timedelta(days=1) - timedelta(seconds=1)) == "valid"
    assert record.state(NOW + timedelta(days=1)) == "expired"
    revoked = record.model_copy(update={"revoked": NOW})
    assert revoked.state(NOW) == "revoked"
    assert record.allows is Scope.READ


@given(st.integers(1, 99_999))
def test_days_count_from_now(days: int) -> None:
    assert parse_expiry(f"{days}d", NOW) == NOW + timedelta(days=days)


@given(st.dates(min_value=NOW.date(), max_value=datetime(9999, 12, 30).date()))
def test_a_date_lasts_to_its_end(day: object) -> None:
    moment = parse_expiry(str(day), NOW)
    assert str((moment - timedelta(microseconds=1)).date()) == str(day)
    assert (moment.hour, moment.minute, moment.utcoffset()) == (0, 0, timedelta(0))


@pytest.mark.parametrize(
    "text",
    ["", "90", "d", "-1d", "1.5d", "90D", "٩d", "999999d", "2027-02-30", "20270131", "2027-W05-1",
     "31.1.2027", "9999-12-31", "tomorrow", "90d "],
)  # fmt: skip
def test_what_is_no_expiry(text: str) -> None:
    with pytest.raises(KeysError, match="--expires takes days such as 90d or a date"):
        parse_expiry(text, NOW)


@pytest.mark.parametrize("text", ["0d", "2026-11-30", "1999-01-01"])
def test_expiry_in_the_past(text: str) -> None:
    with pytest.raises(KeysError, match="not in the future"):
        parse_expiry(text, NOW)


@given(st.text())
def test_any_text_is_an_expiry_or_an_error(text: str) -> None:
    with contextlib.suppress(KeysError):
        assert parse_expiry(text, NOW) > NOW
