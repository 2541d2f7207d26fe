"""Bodies of requests and answers. Strict: no coercion, no unknown field."""

from __future__ import annotations

import unicodedata
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gti_core.prompts import MAX_QUERY_CHARS
from gti_core.text import clean_text

_MAX_RAW_QUERY = 2 * MAX_QUERY_CHARS
"""Most characters of a query before cleaning: bounds the time that cleaning takes."""


class Schema(BaseModel):
    """Base of every body."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def _is_text(value: Any) -> Any:
    if not isinstance(value, str):
        raise PydanticCustomError("item_id_type", 'item ids are strings: send "50", not 50')
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise PydanticCustomError("item_id_text", "half a surrogate pair is no text") from None
    return value


ItemIdField = Annotated[
    str, StringConstraints(min_length=1, max_length=256), BeforeValidator(_is_text)
]


def _clean_query(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = clean_text(value[:_MAX_RAW_QUERY], _MAX_RAW_QUERY)
    if len(value) > _MAX_RAW_QUERY or len(text) > MAX_QUERY_CHARS:
        raise PydanticCustomError("query_too_long", f"at most {MAX_QUERY_CHARS} characters")
    # Letters, digits, punctuation, symbols; marks and invisible characters alone say nothing.
    if not any(unicodedata.category(character)[0] in "LNPS" for character in text):
        raise PydanticCustomError(
            "query_blank", "no text in it: only blank, control or invisible characters"
        )
    return text


QueryField = Annotated[
    str,
    StringConstraints(min_length=1, max_length=MAX_QUERY_CHARS),
    BeforeValidator(_clean_query),
]


class RecommendationRequest(Schema):
    """What to recommend for: exactly one of `history` and `query`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"history": ["50", "258", "100"], "k": 5},
                {"query": "a space adventure with robots", "k": 5},
            ]
        }
    )

    history: list[ItemIdField] | None = Field(
        None,
        description="Ids of the items the user interacted with, oldest first. May repeat and may "
        "be empty. Ids outside the catalogue are skipped and reported. At most "
        "`limits.max_history` of /v1/info entries; the model reads the latest "
        "`limits.prompt_history`.",
    )
    query: QueryField | None = Field(
        None,
        description="What the user looks for, in a few words. Control characters count as white "
        "space, runs of white space as one space; a long query is read from its start. "
        "Needs a model trained for search: `search` of /v1/info.",
    )
    k: int = Field(
        10, ge=1, description="Items wanted; at most `limits.max_k` of /v1/info (200 by default)."
    )
    beam_width: int | None = Field(
        None,
        ge=1,
        description="Prefixes the search keeps per level: at least `k`, at most "
        "`limits.max_beam_width` of /v1/info (256 by default). Without it, the larger of `k` and "
        "`limits.default_beam_width`. A wider beam is slower and may find better items.",
    )
    exclude_history: bool = Field(
        True,
        description="Leave out every item that stands in the history. No effect on a query.",
    )

    min_version: int | None = Field(
        None,
        ge=1,
        description="Least version number that may answer: the `version` of an onboarding job or "
        "of a change, to read one's own writes. Waited for shortly, then refused.",
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> RecommendationRequest:
        if self.history is None and self.query is None:
            raise PydanticCustomError("nothing_asked", "send a history or a query")
        if self.history is not None and self.query is not None:
            raise PydanticCustomError("two_asked", "send a history or a query, not both")
        return self


class RecommendedItem(Schema):
    """One item of the answer."""

    item_id: str
    title: str = Field(description="Title; empty when the bundle has no texts.")
    score: float | None = Field(
        description="Log-probability of the item's semantic ID in nats: the sum over its codes of "
        "the log-softmax among the active codes' tokens. Null in a fallback, which has no score."
    )
    rank: int = Field(ge=1, description="Place in the list, from 1.")
    semantic_id: list[int] = Field(description="One code per level.")


class RecommendationResponse(Schema):
    """Items, best first."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "items": [
                        {
                            "item_id": "181",
                            "title": "Return of the Jedi",
                            "score": -3.21,
                            "rank": 1,
                            "semantic_id": [12, 7, 0],
                        }
                    ],
                    "version": 1,
                    "request_id": "3f2a0c9e1b7d4c55a1e0b2f6d9c8e7a4",
                    "fallback": False,
                    "fallback_reason": None,
                    "unknown_items": [],
                    "unknown_count": 0,
                    "shortfall": 0,
                    "beam_width": 20,
                    "took_ms": 41.7,
                }
            ]
        }
    )

    items: list[RecommendedItem]
    version: int = Field(description="Version of model and catalogue that served the request.")
    request_id: str = Field(description="The X-Request-ID of the request; also in the log.")
    fallback: bool = Field(
        description="True when the model was not asked: the items are the most popular ones."
    )
    fallback_reason: Literal["empty_history", "no_known_item"] | None = Field(
        description="Why: the history was empty, or none of its ids is in the catalogue. "
        "A query never falls back."
    )
    unknown_items: list[str] = Field(
        description="Ids of the history that are not in the catalogue, each once, in order."
    )
    unknown_count: int = Field(
        ge=0, description="History entries skipped for that reason, repeats counted."
    )
    shortfall: int = Field(
        ge=0, description="`k` less the number of items: above 0 only when no more are admissible."
    )
    beam_width: int | None = Field(description="Beam width used; null in a fallback.")
    took_ms: float = Field(ge=0, description="Time from history or query to items, milliseconds.")


class ItemResponse(Schema):
    """One item of the catalogue."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "item_id": "50",
                    "title": "Star Wars",
                    "description": "",
                    "attributes": {"year": 1977, "genres": ["Action", "Sci-Fi"]},
                    "semantic_id": [12, 7, 3],
                    "popularity": 583,
                    "available": True,
                }
            ]
        }
    )

    item_id: str
    title: str
    description: str
    attributes: dict[str, Any]
    semantic_id: list[int] = Field(description="One code per level.")
    popularity: int = Field(description="Interactions in the training data.")
    available: bool = Field(description="False for an item that is out of service.")


class LiveResponse(Schema):
    """The process runs."""

    status: Literal["ok"]


class ReadyResponse(Schema):
    """The service answers requests."""

    status: Literal["ok"]
    state: Literal["ready"]
    version: int


class BundleInfo(Schema):
    """The bundle served."""

    name: str
    digest: str


class CatalogInfo(Schema):
    """Size of what can be recommended."""

    items: int = Field(description="Items in service, in the version served.")
    levels: int = Field(description="Codes per semantic ID.")
    active_codes: list[int] = Field(description="Codes in use, per level.")
    reserved_codes: list[int] = Field(description="Codes kept for later items, per level.")
    codes_left: int | None = Field(
        description="How many more items can be onboarded; null while the store can't be read."
    )


class LimitsInfo(Schema):
    """What a request may ask for."""

    max_k: int
    default_beam_width: int
    max_beam_width: int
    max_history: int
    prompt_history: int = Field(description="Latest history items that the model reads.")
    max_body_bytes: int


class InfoResponse(Schema):
    """What runs here."""

    name: Literal["gti-serve"]
    service_version: str
    state: Literal["starting", "ready", "failed", "stopping"]
    version: int | None = Field(description="Version served; null until ready.")
    bundle: BundleInfo
    search: bool = Field(description="True when requests may send a `query`.")
    engine: dict[str, Any] | None = Field(description="Facts about the engine; null until ready.")
    catalog: CatalogInfo
    limits: LimitsInfo


class ErrorEntry(Schema):
    """One fault of a request."""

    loc: list[str | int] = Field(description="Where: body or path, then names and indices.")
    msg: str


class Problem(BaseModel):
    """Every error, as application/problem+json (RFC 9457). The codes stand in docs/errors.md."""

    type: str = Field(description="URN of the kind of error.")
    title: str = Field(description="Summary of the kind, always the same.")
    status: int
    detail: str = Field(description="What is wrong with this request.")
    code: str = Field(description="Stable name of the kind; decide on this one.")
    request_id: str
    errors: list[ErrorEntry] | None = Field(
        None, description="Single faults, the first 20, where a request has several."
    )
    state: Literal["starting", "failed", "stopping"] | None = Field(
        None, description="With `not_ready`: why."
    )
    version: int | None = Field(
        None, description="With `version_not_served`: the version that is served."
    )
