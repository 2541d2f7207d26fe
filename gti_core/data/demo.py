"""Demo data: MovieLens-100K, as the installed ``recbole`` package carries it.

F. Maxwell Harper and Joseph A. Konstan, "The MovieLens Datasets", ACM TiiS 5(4), 2015.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from gti_core.data.dataset import Dataset, Interaction, ItemText
from gti_core.errors import DataError

NAME = "movielens-100k"
_FOLDER = Path("dataset_example") / "ml-100k"
_ARTICLES = "The|An|A|La|Les|Le|L'|Il|Das|Der|Die|Det|O"
_TRAILING_ARTICLE = re.compile(rf"^(?P<rest>.+), (?P<article>{_ARTICLES})$")
_PARENTHESIS = re.compile(r"\(([^()]+)\)$")
_YEAR_IN_TITLE = re.compile(r"^(?P<title>.+) \((?P<year>\d{4})\)$")
_MISSPELT_UNKNOWN = "unkonwn"


def movielens_100k() -> Dataset:
    """MovieLens-100K: 943 users, 1,682 films, 100,000 ratings taken as implicit feedback.

    Every rating counts as an interaction, whatever its value. Titles read as people write them,
    with the year: "The Lion King (1994)". Attributes: ``year`` (int, absent where the source has
    none) and ``genres`` (list of str, may be empty). There are no descriptions.

    Raises:
        DataError: the package ``recbole``, or the data inside it, is not installed.
    """
    folder = _folder()
    items = [
        _item(folder / "ml-100k.item", row, fields)
        for row, fields in _rows(folder / "ml-100k.item")
    ]
    interactions = [
        Interaction(user_id, item_id, float(timestamp))
        for _, (user_id, item_id, _rating, timestamp) in _rows(folder / "ml-100k.inter")
    ]
    return Dataset.from_interactions(NAME, items, interactions)


def natural_title(title: str) -> str:
    """A library-style title with its article in front again.

    >>> natural_title("Lion King, The")
    'The Lion King'
    >>> natural_title("Horseman on the Roof, The (Hussard sur le toit, Le)")
    'The Horseman on the Roof (Le Hussard sur le toit)'
    >>> natural_title("Enfer, L'")
    "L'Enfer"
    """
    parenthesis = _PARENTHESIS.search(title)
    if parenthesis is None:
        return _article_first(title)
    main = _article_first(title[: parenthesis.start()].rstrip())
    return f"{main} ({_article_first(parenthesis[1])})".lstrip()


def _article_first(title: str) -> str:
    match = _TRAILING_ARTICLE.match(title)
    if match is None:
        return title
    joint = "" if match["article"].endswith("'") else " "
    return f"{match['article']}{joint}{match['rest']}"


def _item(file: Path, row: int, fields: list[str]) -> ItemText:
    if len(fields) != 4:
        raise DataError(f"{len(fields)} fields instead of 4", file=str(file), row=row)
    item_id, title, year_text, genre_text = fields
    # One row of the source has the year inside the title and a stray "V" in the year's place.
    inside = _YEAR_IN_TITLE.match(title)
    if inside is not None:
        title, year_text = inside["title"], inside["year"]
    # Another is a placeholder whose every field is "unknown", misspelt on the way into RecBole.
    title = "unknown" if title == _MISSPELT_UNKNOWN else natural_title(title)
    attributes: dict[str, object] = {}
    if year_text.isdecimal():
        attributes["year"] = int(year_text)
        title = f"{title} ({int(year_text)})"
    attributes["genres"] = [genre for genre in genre_text.split() if genre != "unknown"]
    return ItemText(item_id, title, "", attributes)


def _rows(file: Path) -> list[tuple[int, list[str]]]:
    lines = file.read_text(encoding="utf-8").rstrip("\n").split("\n")
    return [(row, line.split("\t")) for row, line in enumerate(lines[1:], start=2)]


def _folder() -> Path:
    # find_spec locates the package without importing it: its import pulls in torch and much else.
    spec = importlib.util.find_spec("recbole")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            "MovieLens-100K is read from the package recbole, which is not installed; "
            "run: pip install --no-deps recbole==1.2.1"
        )
    folder = Path(spec.submodule_search_locations[0]) / _FOLDER
    if not (folder / "ml-100k.inter").is_file() or not (folder / "ml-100k.item").is_file():
        raise DataError(
            "the installed package recbole carries no MovieLens-100K; "
            "run: pip install --no-deps recbole==1.2.1",
            file=str(folder),
        )
    return folder
