"""Plain words for what the validator says of a value.

Its own texts speak of its types and rules ("Input should be a valid dictionary or object to
extract fields from"); a caller knows JSON. Texts of this project's own checks pass as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic_core.core_schema import ErrorType

_OBJECT = "must be an object"
_WORDS: Mapping[str, str] = {
    "missing": "is missing",
    "extra_forbidden": "no such field",
    "string_type": "must be text",
    "string_unicode": "half a surrogate pair is no text",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "int_parsing_size": "must be an integer of fewer digits",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "list_type": "must be a list",
    "dict_type": _OBJECT,
    "model_type": _OBJECT,
    "model_attributes_type": _OBJECT,
    "too_short": "at least {min_length} entries",
    "too_long": "at most {max_length} entries",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "must be {expected}",
}
_BUILT_IN = frozenset(get_args(ErrorType))


def plain_words(fault: Mapping[str, Any]) -> str:
    """What is wrong, in words of JSON.

    Args:
        fault: an entry of a validation error: ``type``, ``msg``, and ``ctx`` where it has one.
    """
    words = _WORDS.get(fault["type"])
    if words is None:
        return "not a valid value" if fault["type"] in _BUILT_IN else str(fault["msg"])
    limits = {
        name: int(limit) if isinstance(limit, float) and limit.is_integer() else limit
        for name, limit in (fault.get("ctx") or {}).items()
    }
    text = words.format_map(limits)
    return text.replace("at least 1 characters", "at least 1 character").replace(
        "at least 1 entries", "at least 1 entry"
    )
