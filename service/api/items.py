"""The catalogue."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from service.api.deps import RuntimeDep, problems
from service.errors import ItemNotFoundError
from service.schemas import ItemResponse

router = APIRouter(prefix="/v1/items", tags=["items"])


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
    row = served.catalog.row(item_id)
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
