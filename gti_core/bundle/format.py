"""The bundle: one immutable base version of a recommender, as a folder.

::

    manifest.json            format, name, backbone, vocabulary, prompt, search, quantizer,
                             encoder, tuning, texts, figures, and the sha256 of every other file
    items.json               [{"item_id", "sid", "popularity"}], in catalogue order
    quantizer.safetensors    codebooks (and the RQ-VAE's MLPs)
    rows.safetensors         "rows_in" [S, D], and "rows_out" [S, D] for untied backbones; float32
    adapter.safetensors      LoRA matrices, or every tuned weight in mode "full"
    histories.jsonl          histories of a sample of users, without their ids; may be absent
    texts.jsonl              titles, descriptions, attributes; absent where the manifest says that
                             they are joined from an installed data set

The backbone itself is not part of it: the manifest names it by digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from gti_core.backbone import sha256_file
from gti_core.catalog import Item, ItemCatalog
from gti_core.data.dataset import text_record
from gti_core.data.files import json_lines
from gti_core.errors import BundleCorruptError, BundleError, GtiError
from gti_core.prompts import AppendOnlyPrompt, SearchPrompt
from gti_core.types import ItemId, JsonDict
from gti_core.vocabulary import SidVocabulary

if TYPE_CHECKING:
    from torch import Tensor

    from gti_core.quantizer.base import Quantizer

FORMAT = "gti-bundle/1"
MANIFEST = "manifest.json"
ITEMS = "items.json"
QUANTIZER = "quantizer.safetensors"
ROWS = "rows.safetensors"
ADAPTER = "adapter.safetensors"
TEXTS = "texts.jsonl"
REQUIRED = (ITEMS, QUANTIZER, ROWS, ADAPTER)

DEMO_BUNDLE = Path(__file__).resolve().parents[2] / "examples" / "demo-bundle"
"""The bundle that comes with the project: MovieLens-100K on SmolLM2-135M."""


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files match their digests.

    Args:
        path: its folder.
        digest: sha256 of the manifest, and so of everything it names; hex.
        manifest: the parsed manifest.
        catalog: items with SIDs, texts joined.
        vocabulary: the SID vocabulary.
        prompt: the template it was trained with.
        search: the template for a natural-language query; None when the model was not trained for
            search.
    """

    path: Path
    digest: str
    manifest: JsonDict
    catalog: ItemCatalog
    vocabulary: SidVocabulary
    prompt: AppendOnlyPrompt
    search: SearchPrompt | None = None

    @property
    def name(self) -> str:
        """Name for people."""
        return str(self.manifest["name"])

    @property
    def max_tokens(self) -> int:
        """Longest prompt plus one SID, tokens."""
        return max_tokens(self.prompt, self.search, self.vocabulary.levels)

    @cached_property
    def quantizer(self) -> Quantizer:
        """The fitted codebooks."""
        from safetensors.numpy import load_file

        from gti_core.quantizer.base import from_tensors

        entry = self.manifest["quantizer"]
        return from_tensors(entry["kind"], load_file(self.path / QUANTIZER), entry["config"])

    def rows(self) -> dict[str, Tensor]:
        """The SID rows. Raises BundleError when their shape contradicts the vocabulary."""
        from safetensors.torch import load_file

        rows: dict[str, Tensor] = load_file(self.path / ROWS)
        for name in rows:
            if rows[name].shape[0] != self.vocabulary.rows:
                raise BundleError(
                    f"{ROWS}: {name} has {rows[name].shape[0]} rows, "
                    f"the vocabulary {self.vocabulary.rows}"
                )
        if "rows_in" not in rows:
            raise BundleError(f"{ROWS} holds no rows_in")
        return rows

    def adapter(self) -> dict[str, Tensor]:
        """The tuned weights."""
        from safetensors.torch import load_file

        adapter: dict[str, Tensor] = load_file(self.path / ADAPTER)
        return adapter


def load_bundle(path: Path) -> Bundle:
    """Load a bundle and check every file against the manifest's digests.

    Raises:
        BundleCorruptError: a file differs from its digest; names the file.
        BundleError: no bundle there, an unknown format, missing files or contradicting contents.
    """
    manifest_path = path / MANIFEST
    try:
        raw = manifest_path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path} is not a bundle: no readable {MANIFEST} in it") from error
    try:
        manifest = json.loads(raw)
    except ValueError as error:
        raise BundleError(f"{manifest_path} is not JSON: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise BundleError(f"{manifest_path}: format is {found!r}, this version reads {FORMAT!r}")
    files = manifest.get("files")
    if not isinstance(files, dict) or not set(REQUIRED) <= set(files):
        raise BundleError(f"{manifest_path}: names not all of {', '.join(REQUIRED)}")
    for name, expected in files.items():
        file = path / name
        if Path(name).name != name or not file.is_file():
            raise BundleError(f"{file} is missing")
        actual = sha256_file(file)
        if actual != expected:
            raise BundleCorruptError(str(file), str(expected), actual)
    try:
        vocabulary = SidVocabulary.from_json(manifest["vocabulary"])
        prompt = AppendOnlyPrompt.from_json(manifest["prompt"])
        search = _search_of(manifest, vocabulary)
        records = json.loads((path / ITEMS).read_text(encoding="utf-8"))
        catalog = ItemCatalog(
            [Item(r["item_id"], tuple(r["sid"]), popularity=int(r["popularity"])) for r in records]
        )
        check_sids(catalog, vocabulary)
        catalog = catalog.with_texts(texts_of(path, manifest["texts"]))
        for key in ("name", "backbone", "quantizer", "tuning"):
            manifest[key]
    except BundleError:
        raise
    except GtiError as error:
        raise BundleError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise BundleError(f"{path}: malformed bundle: {error!r}") from error
    digest = hashlib.sha256(raw).hexdigest()
    return Bundle(path, digest, manifest, catalog, vocabulary, prompt, search)


def write_items(folder: Path, items: Iterable[Item]) -> None:
    """Write ids, SIDs and popularity of a bundle's items."""
    records = [
        {"item_id": item.item_id, "sid": list(item.sid), "popularity": item.popularity}
        for item in items
    ]
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    (folder / ITEMS).write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def write_texts(folder: Path, items: Iterable[Item]) -> None:
    """Write titles, descriptions and attributes of a bundle's items."""
    (folder / TEXTS).write_bytes(json_lines([text_record(item) for item in items]))


def max_tokens(prompt: AppendOnlyPrompt, search: SearchPrompt | None, levels: int) -> int:
    """Longest prompt of either template plus one SID, tokens."""
    longest = prompt.max_tokens(levels)
    if search is not None:
        fixed = len(search.before_token_ids) + len(search.after_token_ids)
        longest = max(longest, fixed + search.max_query_tokens + levels)
    return longest


def _search_of(manifest: JsonDict, vocabulary: SidVocabulary) -> SearchPrompt | None:
    data = manifest.get("search")
    if data is None:
        return None
    if not isinstance(data, dict):
        raise BundleError(f"search is no template but {type(data).__name__}")
    search = SearchPrompt.from_json(data)
    if search.max_query_tokens < 1:
        raise BundleError(f"search: max_query_tokens is {search.max_query_tokens}")
    for token_id in (*search.before_token_ids, *search.after_token_ids):
        if not 0 <= token_id < vocabulary.first_token_id:
            raise BundleError(f"search: {token_id} is no token id of the backbone")
    return search


def check_sids(catalog: ItemCatalog, vocabulary: SidVocabulary) -> None:
    """Raises BundleError when an item's SID is not made of active codes."""
    if catalog.levels != vocabulary.levels:
        raise BundleError(f"SIDs have {catalog.levels} levels, the vocabulary {vocabulary.levels}")
    for item in catalog:
        if not vocabulary.is_active(item.sid):
            raise BundleError(f"item {item.item_id!r}: SID {item.sid} uses a code not active")


def texts_of(path: Path, entry: JsonDict) -> Mapping[ItemId, JsonDict]:
    """Texts by item id, from the bundle or from the installed data set that it names."""
    kind = entry.get("kind")
    if kind == "file":
        texts: dict[ItemId, JsonDict] = {}
        for line in (path / TEXTS).read_bytes().split(b"\n"):
            # Not splitlines: JSON leaves U+2028 and its like as they are.
            if not line:
                continue
            record = json.loads(line)
            texts[record["item_id"]] = record
        return texts
    if kind == "movielens-100k":
        from gti_core.data.demo import movielens_100k

        return {item.item_id: text_record(item) for item in movielens_100k().items}
    raise BundleError(f"unknown kind of texts {kind!r}")
