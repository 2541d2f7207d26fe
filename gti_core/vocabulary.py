"""The SID vocabulary: (level, code) <-> token text <-> token id <-> row.

The vocabulary is a block of S new token ids behind the backbone's V own ones, level after
level. Each level has ``sizes[l]`` rows, of which the first ``active[l]`` mean something; the
rest are reserved for items that arrive later, never reachable until they are activated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gti_core.errors import VocabularyError
from gti_core.types import BoolArray, JsonDict, Sid

_TOKEN = re.compile(r"<\|sid_(\d+)_(\d+)\|>")


@dataclass(frozen=True)
class SidVocabulary:
    """Immutable description of the new tokens.

    Args:
        sizes: rows per level, active and reserved, length L.
        active: active codes per level, ``0 < active[l] <= sizes[l]``.
        first_token_id: token id of (level 0, code 0); the backbone's number of embedding rows.
        skipped: (level, code) below ``active`` that are not active: codes that a version which
            this one does not descend from has used, and whose rows hold that version's values.

    Raises:
        VocabularyError: sizes and active disagree, or a skipped code is not below ``active``.
    """

    sizes: tuple[int, ...]
    active: tuple[int, ...]
    first_token_id: int
    skipped: frozenset[tuple[int, int]] = frozenset()

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.active):
            raise VocabularyError(
                f"sizes {self.sizes} and active {self.active} must have one entry per level"
            )
        for level, (size, active) in enumerate(zip(self.sizes, self.active, strict=True)):
            if not 0 < active <= size:
                raise VocabularyError(f"level {level}: {active} active codes of {size} rows")
        if self.first_token_id < 0:
            raise VocabularyError(f"first_token_id is {self.first_token_id}")
        for level, code in self.skipped:
            if not 0 <= level < self.levels or not 0 <= code < self.active[level]:
                raise VocabularyError(f"code {code} of level {level} is not among the active ones")

    @property
    def levels(self) -> int:
        """L, the number of codes in a semantic ID."""
        return len(self.sizes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First row of each level inside the block, length L."""
        return tuple(int(x) for x in np.concatenate([[0], np.cumsum(self.sizes)[:-1]]))

    @cached_property
    def rows(self) -> int:
        """S, the number of new rows, active and reserved."""
        return int(sum(self.sizes))

    @cached_property
    def active_mask(self) -> BoolArray:
        """Active rows, shape [S], bool. A row outside it takes no part in any softmax."""
        mask = np.zeros(self.rows, dtype=np.bool_)
        for offset, active in zip(self.offsets, self.active, strict=True):
            mask[offset : offset + active] = True
        for level, code in self.skipped:
            mask[self.offsets[level] + code] = False
        mask.flags.writeable = False
        return mask

    def row(self, level: int, code: int) -> int:
        """Row of a code inside the block, 0 <= row < S."""
        if not 0 <= level < self.levels or not 0 <= code < self.sizes[level]:
            raise VocabularyError(f"no code {code} at level {level} in levels of {self.sizes}")
        return self.offsets[level] + code

    def token_id(self, level: int, code: int) -> int:
        """Token id of a code."""
        return self.first_token_id + self.row(level, code)

    def token_ids(self, sid: Sid) -> list[int]:
        """Token ids of a semantic ID or of a prefix of one."""
        return [self.token_id(level, code) for level, code in enumerate(sid)]

    def code(self, token_id: int) -> tuple[int, int]:
        """(level, code) of a token id. Raises VocabularyError for any other token."""
        row = token_id - self.first_token_id
        if not 0 <= row < self.rows:
            raise VocabularyError(f"token id {token_id} is not a SID token")
        level = int(np.searchsorted(self.offsets, row, side="right")) - 1
        return level, row - self.offsets[level]

    @staticmethod
    def token_text(level: int, code: int) -> str:
        """Text of a code's token, as an exported tokenizer spells it."""
        return f"<|sid_{level}_{code}|>"

    def parse_token_text(self, text: str) -> tuple[int, int]:
        """(level, code) of a token text. Raises VocabularyError for any other text."""
        match = _TOKEN.fullmatch(text)
        if match is None:
            raise VocabularyError(f"{text!r} is not the text of a SID token")
        level, code = int(match[1]), int(match[2])
        self.row(level, code)
        return level, code

    def token_texts(self) -> list[str]:
        """All S token texts in row order."""
        return [
            self.token_text(level, code)
            for level, size in enumerate(self.sizes)
            for code in range(size)
        ]

    def activate(self, level: int, count: int = 1) -> SidVocabulary:
        """A vocabulary in which ``count`` more reserved codes of a level are active.

        Raises:
            VocabularyError: fewer than ``count`` reserved codes are left.
        """
        left = self.reserved(level)
        if not 0 <= count <= left:
            raise VocabularyError(f"level {level} has {left} reserved codes left, {count} asked")
        active = tuple(a + count if index == level else a for index, a in enumerate(self.active))
        return replace(self, active=active)

    def skip_to(self, level: int, code: int) -> SidVocabulary:
        """A vocabulary whose next reserved code of a level is ``code``; those before are skipped.

        Raises:
            VocabularyError: the code is active already, or the level has no such code.
        """
        first = self.active[level]
        if not first <= code <= self.sizes[level]:
            raise VocabularyError(f"code {code} of level {level} is no reserved code")
        passed = {(level, number) for number in range(first, code)}
        return replace(self.activate(level, code - first), skipped=self.skipped | passed)

    def reserved(self, level: int) -> int:
        """Reserved codes left at a level."""
        return self.sizes[level] - self.active[level]

    def is_active(self, sid: Sid) -> bool:
        """True when a SID has one code per level and all of them are active."""
        return len(sid) == self.levels and all(
            0 <= code < self.active[level] and (level, code) not in self.skipped
            for level, code in enumerate(sid)
        )

    def to_json(self) -> JsonDict:
        """JSON form, as it stands in a bundle's manifest."""
        data: JsonDict = {
            "sizes": list(self.sizes),
            "active": list(self.active),
            "first_token_id": self.first_token_id,
        }
        if self.skipped:
            data["skipped"] = [list(pair) for pair in sorted(self.skipped)]
        return data

    @classmethod
    def from_json(cls, data: JsonDict) -> SidVocabulary:
        """Inverse of `to_json`. Raises VocabularyError on a missing or ill-typed field."""
        try:
            return cls(
                tuple(int(x) for x in data["sizes"]),
                tuple(int(x) for x in data["active"]),
                int(data["first_token_id"]),
                frozenset((int(level), int(code)) for level, code in data.get("skipped", ())),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise VocabularyError(f"not a vocabulary: {error!r}") from error
