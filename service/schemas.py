"""Bodies of answers, and what all bodies share. Strict: no coercion, no unknown field."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError

from gti_core.types import JsonDict

VISIBLE = r"[\p{L}\p{N}\p{P}\p{S}]"
"""ECMA-262 pattern of `gti_core.text.has_text`, for the OpenAPI document."""


def given(name: str, schema: JsonDict, without: str | None = None) -> JsonDict:
    """JSON Schema of an object that has a field, for the OpenAPI document.

    Args:
        name: the field.
        schema: what it must be; by itself a field may be null, which counts as left out.
        without: a field that must be left out.
    """
    properties = {name: schema}
    if without is not None:
        properties[without] = {"type": "null"}
    return {"required": [name], "properties": properties}


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


class ItemPage(Schema):
    """Items in catalogue order, oldest first."""

    items: list[ItemResponse]
    next_cursor: str | None = Field(description="`cursor` of the next page; null at the end.")
    version: int = Field(description="Version whose catalogue was read.")


class LiveResponse(Schema):
    """The process runs."""

    status: Literal["ok"]


class ReadyResponse(Schema):
    """The service answers requests."""

    status: Literal["ok"]
    state: Literal["ready"]
    version: int


class StartedResponse(Schema):
    """The service has started."""

    status: Literal["ok"]


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


class WorkersInfo(Schema):
    """Processes that ground new items. Without a ready one, jobs wait as `queued`."""

    ready: int = Field(description="Take jobs.")
    starting: int = Field(description="Load the model: after a first start about a minute.")


class LimitsInfo(Schema):
    """What a request may ask for."""

    max_k: int
    default_beam_width: int
    max_beam_width: int
    max_history: int
    max_listed: int = Field(description="Most ids of `include_items` and of `exclude_items`.")
    max_batch: int = Field(description="Most requests of a batch.")
    prompt_history: int = Field(description="Latest history items that the model reads.")
    max_body_bytes: int
    max_queued_beams: int = Field(description="Most beams of requests under way, of all callers.")
    max_queued_tokens: int = Field(description="Most prompt tokens of requests under way.")
    timeout_ms: int = Field(description="Deadline of a request that names none; 0: there is none.")


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
    workers: WorkersInfo | None = Field(
        description="Grounding workers heard of lately; null while the store can't be read."
    )
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
    retry_after_s: int | None = Field(
        None, description="With `overloaded`: seconds after which there should be room."
    )
    unknown_items: list[str] | None = Field(
        None, description="With `unknown_items`: the first 100 of them."
    )
