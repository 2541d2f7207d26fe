"""Cleaning of text that comes from outside, before any model reads it."""

from __future__ import annotations

import unicodedata

_BIDI_AND_BOM = frozenset(
    "\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff"
)
# The longest canonical composition turns four characters into one (Greek with three marks).
_COMPOSITION = 4


def _is_control(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs") or character in _BIDI_AND_BOM


def has_text(text: str) -> bool:
    """Whether a string holds a letter, a digit, a punctuation mark or a symbol.

    Blank, control and invisible characters and combining marks alone say nothing.
    """
    return any(unicodedata.category(character)[0] in "LNPS" for character in text)


def clean_text(text: str, max_chars: int) -> str:
    """Text that is safe to tokenize, log and show: NFC, one line, bounded length.

    Control characters, lone surrogates, direction overrides and byte-order marks become spaces;
    runs of white space become one space; both ends are stripped. Applying it twice changes
    nothing.

    Args:
        text: any string.
        max_chars: most characters (code points) of the result, at least 1.

    Returns:
        The cleaned text, possibly empty.

    Raises:
        ValueError: ``max_chars`` is below 1.
    """
    if max_chars < 1:
        raise ValueError(f"max_chars is {max_chars}")
    text = "".join(" " if _is_control(character) else character for character in text)
    # Cut before normalizing: NFC takes quadratic time on long runs of combining marks.
    text = " ".join(text.split())[: _COMPOSITION * max_chars]
    return unicodedata.normalize("NFC", text)[:max_chars].strip()
