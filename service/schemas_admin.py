"""Bodies of the admin routes. Strict, as those in `service.schemas`."""

from __future__ import annotations

import json
import unicodedata
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gti_core.data.dataset import ItemText
from gti_core.text import clean_text, has_text
from gti_core.types import JsonDict
from service.schemas import VISIBLE, ItemIdField, Schema, given
from service.store.records import JobRecord, VersionRecord

MAX_TITLE = 1_000
MAX_DESCRIPTION = 20_000
MAX_ATTRIBUTES = 50
MAX_ATTRIBUTE_CHARS = 10_000
MAX_ITEMS = 1_000
_DOTS = (".", "..")
_COMPOSED = 4
"""Most characters that NFC makes of one, and one to spare."""

JobState: TypeAlias = Literal[
    "queued",
    "encoding",
    "assigning",
    "grounding",
    "validating",
    "publishing",
    "live",
    "rejected",
    "failed",
    "cancelled",
]


def _is_encodable(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("text", "half a surrogate pair is no text") from None
    return value


def _is_plain(value: str) -> str:
    # Ids stand in logs, in paths and in the database; PostgreSQL knows no NUL.
    if any(unicodedata.category(character) == "Cc" for character in value):
        raise PydanticCustomError("item_id_control", "an id holds no control characters")
    if not has_text(value):
        raise PydanticCustomError(
            "item_id_blank", "an id holds a letter, a digit, a punctuation mark or a symbol"
        )
    if value in _DOTS:
        # Clients and proxies take them out of /v1/items/{item_id}, written as %2E too.
        raise PydanticCustomError("item_id_dots", "an id is not . or .., which paths give meaning")
    return value


def _one_line(value: str) -> str:
    line = clean_text(value, _COMPOSED * MAX_TITLE)
    if len(line) > MAX_TITLE:
        raise PydanticCustomError("title_too_long", f"at most {MAX_TITLE} characters after NFC")
    return line


def _check_attributes(value: dict[str, Any]) -> dict[str, Any]:
    if len(value) > MAX_ATTRIBUTES:
        raise PydanticCustomError("attributes", f"at most {MAX_ATTRIBUTES} attributes")
    for name, entry in value.items():
        if not name:
            raise PydanticCustomError("attributes", "an attribute has no name")
        parts = entry if isinstance(entry, list) else [entry]
        if not all(part is None or isinstance(part, str | int | float | bool) for part in parts):
            raise PydanticCustomError(
                "attributes", "values are JSON scalars or lists of them, not objects"
            )
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError:
        raise PydanticCustomError("attributes", "values are text in UTF-8 and finite") from None
    if len(text) > MAX_ATTRIBUTE_CHARS:
        raise PydanticCustomError("attributes", f"at most {MAX_ATTRIBUTE_CHARS} characters of JSON")
    return value


NewItemId = Annotated[
    ItemIdField,
    AfterValidator(_is_plain),
    Field(
        json_schema_extra={
            "pattern": VISIBLE,
            "not": {"anyOf": [{"enum": list(_DOTS)}, {"pattern": r"\p{Cc}"}]},
        }
    ),
]
_SCALAR: JsonDict = {"type": ["string", "number", "boolean", "null"]}
Attributes = Annotated[
    dict[str, Any],
    AfterValidator(_check_attributes),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_ATTRIBUTES,
            "propertyNames": {"minLength": 1},
            "additionalProperties": {"anyOf": [_SCALAR, {"type": "array", "items": _SCALAR}]},
        }
    ),
]
Title = Annotated[str, StringConstraints(max_length=MAX_TITLE), AfterValidator(_one_line)]
Description = Annotated[
    str, StringConstraints(max_length=MAX_DESCRIPTION), AfterValidator(_is_encodable)
]


class NewItem(Schema):
    """An item to be onboarded. Its texts are data, whatever they say."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                given("title", {"pattern": VISIBLE}),
                given("description", {"pattern": VISIBLE}),
            ]
        }
    )

    item_id: NewItemId
    title: Title = Field(
        "",
        description="One line: control characters count as white space, runs of it as one space.",
    )
    description: Description = ""
    attributes: Attributes = Field(
        default_factory=dict,
        description="JSON scalars or lists of them: at most 50, 10,000 characters in all.",
    )

    @model_validator(mode="after")
    def _has_text(self) -> NewItem:
        if not has_text(self.title) and not has_text(self.description):
            raise PydanticCustomError("item_blank", "an item needs a title or a description")
        return self

    def text(self) -> ItemText:
        """As the rest of the service knows it."""
        return ItemText(self.item_id, self.title, self.description, self.attributes)


class OnboardRequest(Schema):
    """Items to be onboarded together: those that pass the gate are published in one version."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "items": [
                        {
                            "item_id": "n-1",
                            "title": "The Long Orbit (1998)",
                            "description": "A crew of three repairs a station around Saturn.",
                            "attributes": {"year": 1998, "genres": ["Sci-Fi"]},
                        }
                    ]
                }
            ]
        }
    )

    items: list[NewItem] = Field(min_length=1, max_length=MAX_ITEMS)
    replace: bool = Field(
        False,
        description="An item whose id is known with other content gets a new semantic ID and row.",
    )

    @model_validator(mode="after")
    def _distinct(self) -> OnboardRequest:
        seen: set[str] = set()
        for item in self.items:
            if item.item_id in seen:
                raise PydanticCustomError("item_twice", f"item id {item.item_id!a} stands twice")
            seen.add(item.item_id)
        return self


class ItemChange(Schema):
    """What to change of an item; the rest stays."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                given("available", {"type": "boolean"}),
                given("attributes", {"type": "object"}),
            ],
            "examples": [{"available": False}],
        }
    )

    available: bool | None = Field(None, description="False takes the item out of service.")
    attributes: Attributes | None = Field(None, description="In place of all the item has.")

    @model_validator(mode="after")
    def _changes(self) -> ItemChange:
        if self.available is None and self.attributes is None:
            raise PydanticCustomError("nothing_asked", "send available, attributes or both")
        return self


class ItemChanged(Schema):
    """An item after a change, which is in force."""

    item_id: str
    version: int = Field(description="Version from which on the change is in force.")
    available: bool


class JobItem(Schema):
    """One item of a job."""

    item_id: str
    known: bool = Field(description="True for an item that was there already, the same content.")
    passed: bool | None = Field(description="What the gate said; null before that.")
    reasons: list[str] = Field(description="What speaks against it.")
    figures: dict[str, Any] = Field(description="What was measured of it.")


class JobProgress(Schema):
    """How far a job is."""

    stage: str
    done: int
    of: int


class JobSummary(Schema):
    """A job."""

    job_id: str
    kind: str = Field(description="onboard.")
    state: JobState = Field(
        description="queued, encoding, assigning, grounding, validating, publishing; then live, "
        "rejected (by the gate, every item), failed or cancelled."
    )
    created_at: datetime
    updated_at: datetime
    item_count: int
    progress: JobProgress | None = Field(description="Items done of the stage under way.")
    error: str | None = Field(description="Why the last attempt failed.")
    attempts: int = Field(description="Times that a worker began.")
    version: int | None = Field(description="Version that has the items; null before publishing.")

    @classmethod
    def of(cls, job: JobRecord) -> JobSummary:
        """From the store's record."""
        return cls(**_summary(job))


class JobResponse(JobSummary):
    """A job with its items."""

    items: list[JobItem]
    reasons: list[str] = Field(description="What speaks against the batch as a whole.")
    figures: dict[str, Any] = Field(description="What was measured of the batch.")

    @classmethod
    def of(cls, job: JobRecord) -> JobResponse:
        """From the store's record."""
        result = job.result or {}
        verdicts = {verdict["item_id"]: verdict for verdict in result.get("verdicts", ())}
        items = [_job_item(item.item_id, verdicts.get(item.item_id)) for item in job.items]
        items += [_job_item(name, None, known=True) for name in job.known]
        return cls(
            **_summary(job),
            items=items,
            reasons=result.get("reasons", []),
            figures=result.get("figures", {}),
        )


class JobPage(Schema):
    """Jobs, latest first."""

    jobs: list[JobSummary]
    next_cursor: str | None = Field(description="For the next page; null on the last one.")


class VersionResponse(Schema):
    """A version: the base bundle and a chain of changes."""

    number: int = Field(description="1 is the base; numbers only grow and are never reused.")
    parent: int | None = Field(description="The version it was made from.")
    kind: str = Field(description="base, onboard, retire, restore or attributes.")
    created_at: datetime
    added: int = Field(description="Items it added.")
    retired: int = Field(description="Items it took out of service.")
    job_id: str | None = Field(description="The job it came from.")
    digest: str = Field(description="sha256 of its change; of the bundle for the base.")
    refused: str | None = Field(description="Why the engine did not take it; null otherwise.")
    current: bool = Field(description="Whether it is the version to be served.")

    @classmethod
    def of(cls, record: VersionRecord) -> VersionResponse:
        """From the store's record."""
        return cls(
            number=record.number,
            parent=record.parent,
            kind=record.kind,
            created_at=_time(record.created_at),
            added=record.added,
            retired=record.retired,
            job_id=record.job_id,
            digest=record.digest,
            refused=record.refused,
            current=record.current,
        )


class VersionPage(Schema):
    """Versions, latest first."""

    versions: list[VersionResponse]
    next_cursor: str | None = Field(description="For the next page; null on the last one.")


def _job_item(item_id: str, verdict: JsonDict | None, *, known: bool = False) -> JobItem:
    verdict = verdict or {}
    return JobItem(
        item_id=item_id,
        known=known,
        passed=verdict.get("passed"),
        reasons=verdict.get("reasons", []),
        figures=verdict.get("figures", {}),
    )


def _summary(job: JobRecord) -> dict[str, Any]:
    return {
        "job_id": job.job_id,
        "kind": job.kind,
        "state": job.state,
        "created_at": _time(job.created_at),
        "updated_at": _time(job.updated_at),
        "item_count": job.todo + len(job.known),
        "progress": None if job.progress is None else JobProgress(**job.progress),
        "error": job.error,
        "attempts": job.attempts,
        "version": job.version,
    }


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
