"""From a cell of any format to an id, a time, a text or an attribute.

Each function returns the value or raises ValueError with a message that completes "file, row,
column: ...".
"""

from __future__ import annotations

import ast
import datetime as dt
import math
import re
from decimal import Decimal

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SPELLED_LIST = re.compile(r"""\[(['"]).*['"]\]""", re.DOTALL)
_BETWEEN_QUOTES = re.compile(r"""(?<=['"]), (?=['"])""")
# Beyond this, neighbouring integers are one and the same float64.
_EXACT_FLOAT = 2**53


def as_id(value: object) -> str:
    """An id as a string: 7, "7", " 7 " and 7.0 (a nullable integer column) are all "7".

    Text is taken as it stands but for white space around it, so the text "7.0" stays "7.0".

    >>> as_id(7.0), as_id(" B00-7 ")
    ('7', 'B00-7')
    """
    if value is None:
        raise ValueError("the id is missing")
    if isinstance(value, str):
        text = value.strip()
        if not text:
            raise ValueError("the id is empty")
        if _CONTROL.search(text):
            raise ValueError(f"the id {text!r} has a control character in it")
        return _encodable(text)
    if isinstance(value, bool):
        raise ValueError(f"{value} is not an id")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float | Decimal):
        if not math.isfinite(value):
            raise ValueError("the id is missing")
        if value != int(value) or (isinstance(value, float) and abs(value) > _EXACT_FLOAT):
            raise ValueError(f"{value!r} is not a whole number, so not an id")
        return str(int(value))
    raise ValueError(f"{_shown(value)} is not an id")


def as_timestamp(value: object) -> float:
    """A time as a number; dates and ISO 8601 text become seconds since 1970, UTC if unmarked.

    >>> as_timestamp("881250949"), as_timestamp("1970-01-02"), as_timestamp("1970-01-01T00:00:07Z")
    (881250949.0, 86400.0, 7.0)
    """
    if isinstance(value, str):
        return _parse_time(value.strip())
    if isinstance(value, dt.datetime):
        return _seconds(value)
    if isinstance(value, dt.date):
        return _seconds(dt.datetime(value.year, value.month, value.day))
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return _finite(float(value))
    raise ValueError("the timestamp is missing" if value is None else f"{_shown(value)} is no time")


def as_text(value: object) -> str:
    """Text on one line: runs of white space become one blank, a missing value is "".

    >>> as_text("  Relay\\n kit "), as_text(1917), as_text(None)
    ('Relay kit', '1917', '')
    """
    if value is None:
        return ""
    if isinstance(value, float) and math.isnan(value):
        return ""
    if isinstance(value, str):
        return " ".join(_encodable(value).split())
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"{_shown(value)} is not text")


def as_long_text(value: object) -> str:
    """Like `as_text`, but a list of texts, even one spelled out as text, is joined with blanks.

    >>> as_long_text(["One.", "Two."]), as_long_text("['One.', 'Two.']"), as_long_text("[sic] One")
    ('One. Two.', 'One. Two.', '[sic] One')
    """
    if isinstance(value, str):
        text = value.strip()
        if text == "[]" or _SPELLED_LIST.fullmatch(text):
            value = _parse_list(text)
    if isinstance(value, list):
        return " ".join(part for part in (as_text(x) for x in value) if part)
    return as_text(value)


def _parse_list(text: str) -> list[object]:
    try:
        parsed = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        # Spelled by hand, with an apostrophe or an inch sign inside its own kind of quotes.
        parts = _BETWEEN_QUOTES.split(text[1:-1])
        return [part[1:-1].replace("\\n", " ") for part in parts]
    return parsed if isinstance(parsed, list) else [text]


def as_attribute(value: object) -> object:
    """An attribute as a JSON value; None where there is none.

    Dates become ISO text. Text keeps its white space but for the ends.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return _encodable(value.strip()) or None
    if isinstance(value, float):
        return None if math.isnan(value) else _finite(value)
    if isinstance(value, Decimal):
        return as_attribute(float(value))
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, list):
        return [as_attribute(x) for x in value]
    if isinstance(value, dict):
        return {str(key): as_attribute(x) for key, x in value.items()}
    raise ValueError(f"{_shown(value)} can't be an attribute")


def as_number(text: str) -> float:
    """A finite number from text.

    >>> as_number("3.5")
    3.5
    """
    try:
        # float() also takes "1_000", which no data file means as a number.
        number = float(text) if "_" not in text else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{_shown(text)} is not a number")
    return number


def _parse_time(text: str) -> float:
    if not text:
        raise ValueError("the timestamp is missing")
    try:
        return as_number(text)
    except ValueError:
        pass
    try:
        return _seconds(dt.datetime.fromisoformat(text))
    except ValueError:
        raise ValueError(f"{_shown(text)} is neither a number nor an ISO 8601 time") from None


def _seconds(time: dt.datetime) -> float:
    return (time if time.tzinfo else time.replace(tzinfo=dt.UTC)).timestamp()


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a finite number")
    return number


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{_shown(text)} is not valid Unicode") from None
    return text


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
