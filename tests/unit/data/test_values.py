from __future__ import annotations

import datetime as dt
import doctest
import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gti_core.data import values
from gti_core.data.values import as_attribute, as_id, as_long_text, as_text, as_timestamp


def test_doctests() -> None:
    assert doctest.testmod(values).failed == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "7"),
        ("7", "7"),
        (7.0, "7"),
        (Decimal("7"), "7"),
        (" 7\r", "7"),
        (-0.0, "0"),
        (2**60, "1152921504606846976"),
        ("7.0", "7.0"),
        ("007", "007"),
        ("ключ", "ключ"),
    ],
)
def test_ids(value: object, text: str) -> None:
    assert as_id(value) == text


@pytest.mark.parametrize(
    "value",
    [None, "", "  ", True, 7.5, math.nan, math.inf, 1e300, b"7", [7], "a\x00b", "a\tb", "\ud800"],
)
def test_no_ids(value: object) -> None:
    with pytest.raises(ValueError, match=r"id|Unicode"):
        as_id(value)


@given(st.integers(-(2**53), 2**53))
def test_whole_numbers_are_one_id_however_stored(number: int) -> None:
    assert as_id(number) == as_id(str(number)) == as_id(float(number))


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("12", 12.0),
        ("1.5e3", 1500.0),
        (12, 12.0),
        (0.5, 0.5),
        ("1970-01-01", 0.0),
        ("1970-01-01T01:00:00+01:00", 0.0),
        ("1970-01-01 00:01:00", 60.0),
        (dt.datetime(1970, 1, 1, 0, 0, 1), 1.0),
        (dt.datetime(1970, 1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1))), 0.0),
        (dt.date(1970, 1, 3), 172_800.0),
    ],
)
def test_timestamps(value: object, seconds: float) -> None:
    assert as_timestamp(value) == seconds


@pytest.mark.parametrize("value", [None, "", "soon", "nan", "inf", "1_000", math.nan, True, [1]])
def test_no_timestamps(value: object) -> None:
    with pytest.raises(ValueError, match=r"missing|neither|no time|finite"):
        as_timestamp(value)


def test_text_is_one_line() -> None:
    assert as_text("\u00a0A \r\n\tB  C ") == "A B C"
    assert as_text(math.nan) == ""
    for value in (["a"], {"a": 1}, True, b"a"):
        with pytest.raises(ValueError, match="is not text"):
            as_text(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        ("[]", ""),
        ([], ""),
        (["A", None, " ", "B"], "A B"),
        ("['Owner\\'s manual', \"6\\\" pipe\"]", "Owner's manual 6\" pipe"),
        ("['TAZ's printer', '6' pipe\\nnew']", "TAZ's printer 6' pipe new"),
        ('["18" X 12-1/4""]', '18" X 12-1/4"'),
        ("[1995] A year", "[1995] A year"),
        ("['half", "['half"),
        ("['a'] and ['b']", "'] and ['".join("ab")),
    ],
)
def test_long_text(value: object, text: str) -> None:
    assert as_long_text(value) == text


def test_attributes_are_json_values() -> None:
    assert as_attribute(" x ") == "x"
    assert as_attribute("  ") is None
    assert as_attribute(math.nan) is None
    assert as_attribute(True) is True
    assert as_attribute([1, {"a": dt.date(2020, 1, 2)}]) == [1, {"a": "2020-01-02"}]
    assert as_attribute(Decimal("2.5")) == 2.5
    for value in (b"x", {1, 2}):
        with pytest.raises(ValueError, match="can't be an attribute"):
            as_attribute(value)
    with pytest.raises(ValueError, match="finite"):
        as_attribute(math.inf)
