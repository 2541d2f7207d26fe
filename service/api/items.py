"""The catalogue."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query

from gti_core.text import clean_text
from service.api.deps import CursorQuery, LimitQuery, RuntimeDep, problems
from service.context import ServingContext
from service.engine.base import ServingModel
from service.errors import ItemNotFoundError
from service.schemas import ItemPage, ItemResponse

_MAX_SEARCH = 200

router = APIRouter(prefix="/v1/items", tags=["items"])


@router.get("", summary="Items of the catalogue", responses=problems("validation_failed"))
async def list_items(
    runtime: RuntimeDep,
    q: Annotated[
        str | None,
        Query(
            max_length=_MAX_SEARCH,
            description="Words that the title holds, in any order and case; parts of words count.",
        ),
    ] = None,
    available: Annotated[
        bool | None, Query(description="Only items in service, or only those out of it.")
    ] = None,
    cursor: CursorQuery = None,
    limit: LimitQuery = 50,
) -> ItemPage:
    """Items in catalogue order, page by page, in the version served.

    Pages of one walk fit together when versions come in between: new items stand at the end.
    Answers while the engine is loading, from the base.
    """
    served = runtime.served
    words = clean_text(q or "", _MAX_SEARCH).casefold().split()
    start = 0 if cursor is None else int(cursor)
    # A search may look through the whole catalogue.
    rows = await asyncio.to_thread(_found, served, words, available, start, limit + 1)
    return ItemPage(
        items=[_response(served, row) for row in rows[:limit]],
        next_cursor=str(rows[limit]) if len(rows) > limit else None,
        version=served.version,
    )


def _found(
    served: ServingModel | ServingContext,
    words: list[str],
    available: bool | None,
    start: int,
    most: int,
) -> list[int]:
    """Catalogue rows from ``start`` on that match."""
    catalog = served.catalog
    in_service = served.index.available
    rows = []
    for row in range(start, len(catalog)):
        if row in catalog.superseded or available not in (None, bool(in_service[row])):
            continue
        title = catalog.items[row].title.casefold() if words else ""
        if all(word in title for word in words):
            rows.append(row)
            if len(rows) == most:
                break
    return rows


# `:path`, since an id may hold a slash.
@router.get(
    "/{item_id:path}",
    summary="One item",
    responses=problems("item_not_found", "validation_failed"),
)
async def get_item(
    runtime: RuntimeDep,
    item_id: Annotated[str, Path(min_length=1, max_length=256, description="The item's id.")],
) -> ItemResponse:
    """Title, attributes and semantic ID of an item, in the version served.

    An item out of service is found too. Answers while the engine is loading, from the base.
    """
    served = runtime.served
    if item_id not in served.catalog:
        raise ItemNotFoundError(f"no item {item_id!r} in the catalogue")
    return _response(served, served.catalog.row(item_id))


def _response(served: ServingModel | ServingContext, row: int) -> ItemResponse:
    item = served.catalog.items[row]
    return ItemResponse(
        item_id=item.item_id,
        title=item.title,
        description=item.description,
        attributes=dict(item.attributes),
        semantic_id=list(item.sid),
        popularity=item.popularity,
        available=served.index.in_service(row),
    )
