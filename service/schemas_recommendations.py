"""Bodies of requests for recommendations, and of their answers."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gti_core.prompts import MAX_QUERY_CHARS
from gti_core.text import clean_text, has_text
from service.attribute_filter import Condition
from service.schemas import VISIBLE, ItemIdField, Problem, Schema, given

_MAX_VALUE = 1_000


def _clean_query(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    # Counted as sent, which also bounds the time that cleaning takes.
    if len(value) > MAX_QUERY_CHARS:
        raise PydanticCustomError("query_too_long", f"at most {MAX_QUERY_CHARS} characters")
    text = clean_text(value, MAX_QUERY_CHARS)
    if not has_text(text):
        raise PydanticCustomError(
            "query_blank", "no text in it: only blank, control or invisible characters"
        )
    return text


QueryField = Annotated[
    str,
    StringConstraints(min_length=1, max_length=MAX_QUERY_CHARS),
    BeforeValidator(_clean_query),
    Field(json_schema_extra={"pattern": VISIBLE}),
]


def _scalar(value: Any) -> Any:
    # One check instead of a union, whose complaints come once per type and name its branches.
    if isinstance(value, str):
        if len(value) > _MAX_VALUE:
            raise PydanticCustomError("value", f"at most {_MAX_VALUE} characters")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise PydanticCustomError("value", "half a surrogate pair is no text") from None
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise PydanticCustomError("value", "must be a finite number")
    elif value is not None and not isinstance(value, int):
        raise PydanticCustomError("value", "must be text, a number, true, false or null")
    return value


def _number(value: Any) -> Any:
    # Not pydantic's float, which would round large integers.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PydanticCustomError("bound", "must be a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise PydanticCustomError("bound", "must be a finite number")
    return value


Value = Annotated[
    Any,
    AfterValidator(_scalar),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "maxLength": _MAX_VALUE},
                {"type": "number"},
                {"type": "boolean"},
                {"type": "null"},
            ]
        }
    ),
]
Values = Annotated[list[Value], Field(min_length=1, max_length=1000)]
AttributeName = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Bound = Annotated[Any, AfterValidator(_number), WithJsonSchema({"type": "number"})]


class AttributeFilter(Schema):
    """A condition on one attribute. Every part that is given must hold.

    An attribute that is a list has several values; `any_of` asks for one of them, `none_of`
    forbids each, the bounds ask for a number between them.
    """

    model_config = ConfigDict(json_schema_extra={"minProperties": 2})

    attribute: AttributeName
    any_of: Values | None = None
    none_of: Values | None = None
    at_least: Bound | None = Field(None, description="Compared exactly, however large.")
    at_most: Bound | None = Field(None, description="Compared exactly, however large.")

    @model_validator(mode="after")
    def _says_something(self) -> AttributeFilter:
        if not self.model_fields_set - {"attribute"}:
            raise PydanticCustomError(
                "filter_empty", "send any_of, none_of, at_least or at_most with the attribute"
            )
        return self

    def condition(self) -> Condition:
        """As the filter reads it."""
        return Condition(
            self.attribute,
            None if self.any_of is None else tuple(self.any_of),
            None if self.none_of is None else tuple(self.none_of),
            self.at_least,
            self.at_most,
        )


class Diversity(Schema):
    """At most so many items with one value of an attribute.

    An item with several values counts for each; one without the attribute is never held back.
    """

    attribute: AttributeName
    most: int = Field(ge=1, description="Most items per value.")


class RecommendationRequest(Schema):
    """What to recommend for: exactly one of `history` and `query`."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                given("history", {"type": "array"}, without="query"),
                given("query", {"type": "string"}, without="history"),
            ],
            "examples": [
                {"history": ["50", "258", "100"], "k": 5},
                {"query": "a space adventure with robots", "k": 5},
                {
                    "history": ["50", "258"],
                    "filters": [
                        {"attribute": "genres", "any_of": ["Comedy"]},
                        {"attribute": "year", "at_least": 1990},
                    ],
                    "diversity": {"attribute": "genres", "most": 3},
                    "explain": True,
                },
            ],
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
    include_items: list[ItemIdField] | None = Field(
        None,
        description="Only these items may come back: candidates to be ranked. Ids outside the "
        "catalogue are skipped. At most `limits.max_listed` of /v1/info.",
    )
    exclude_items: list[ItemIdField] = Field(
        default_factory=list,
        description="These items do not come back, whatever the history holds. Ids outside the "
        "catalogue are skipped. At most `limits.max_listed`.",
    )
    filters: list[AttributeFilter] = Field(
        default_factory=list,
        max_length=16,
        description="Conditions on the items' attributes; an item must meet every one.",
    )
    diversity: Diversity | None = Field(
        None,
        description="A cap on items that share an attribute's value. The list is taken from the "
        "search's `beam_width` best items, so a wider beam gives the cap more to choose from.",
    )
    explain: bool = Field(
        False, description="Say of each item which item of the history is nearest to it."
    )
    strict: bool = Field(
        False,
        description="Refuse the request when an id of the history, of `include_items` or of "
        "`exclude_items` is not in the catalogue, instead of skipping it.",
    )
    timeout_ms: int | None = Field(
        None,
        ge=1,
        le=600_000,
        description="Milliseconds that the answer is worth waiting for; after that 504, and the "
        "work is given up.",
    )
    min_version: int | None = Field(
        None,
        ge=1,
        description="Least version number that may answer: the `version` of an onboarding job or "
        "of a change, to read one's own writes. Waited for until `timeout_ms` is over (504), or, "
        "without it, for a short time (2 s by default), then refused (409).",
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> RecommendationRequest:
        if self.history is None and self.query is None:
            raise PydanticCustomError("nothing_asked", "send a history or a query")
        if self.history is not None and self.query is not None:
            raise PydanticCustomError("two_asked", "send a history or a query, not both")
        return self


class Explanation(Schema):
    """The item of the history that a recommended item is nearest to, by semantic ID."""

    nearest_item: str | None = Field(
        description="Its id: the one that shares most codes from the first level on, the latest "
        "of equals. Null when the history shares no first code."
    )
    shared_levels: int = Field(ge=0, description="First codes that both have in common.")


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
    explanation: Explanation | None = Field(None, description="With `explain`; null for a query.")


class Timings(Schema):
    """Where the time of an answer went, milliseconds; docs/operations.md says where one ends."""

    queue_ms: float | None = Field(
        description="Until the engine began. Null in a fallback, and where an engine can't tell."
    )
    prefill_ms: float | None = Field(description="The prompt through the model. Null likewise.")
    beams_ms: float | None = Field(
        description="The codes of the items, level by level. Null likewise."
    )
    render_ms: float = Field(
        ge=0, description="From the engine's answer to this one; in a fallback, the popular items."
    )
    total_ms: float = Field(
        ge=0, description="All of it, with what is in no stage: a filter, a wait for a version."
    )


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
                    "timings": {
                        "queue_ms": 1.9,
                        "prefill_ms": 12.4,
                        "beams_ms": 26.1,
                        "render_ms": 0.2,
                        "total_ms": 41.8,
                    },
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
    timings: Timings


class BatchRequest(Schema):
    """Requests that are answered together."""

    requests: list[RecommendationRequest] = Field(
        min_length=1, description="At most `limits.max_batch` of /v1/info."
    )


class BatchResult(Schema):
    """What became of one request of a batch: exactly one of `answer` and `problem`."""

    status: int = Field(description="The status the request would have had alone.")
    answer: RecommendationResponse | None = None
    problem: Problem | None = None


class BatchResponse(Schema):
    """One result per request, in their order."""

    results: list[BatchResult]
    request_id: str
    took_ms: float = Field(ge=0, description="Time for all of them, milliseconds.")
