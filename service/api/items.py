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
    """Title, attributes and semantic ID of an item. Answers while the engine is loading too."""
    item = runtime.context.catalog.get(item_id)
    if item is None:
        raise ItemNotFoundError(f"no item {item_id!r} in the catalogue")
    return ItemResponse(
        item_id=item.item_id,
        title=item.title,
        description=item.description,
        attributes=dict(item.attributes),
        semantic_id=list(item.sid),
        popularity=item.popularity,
    )
