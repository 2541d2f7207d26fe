"""``gti tokenize``: item texts -> vectors -> codebooks -> one distinct SID per item."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from gti_core.backbone import backbone_digest, sha256_file
from gti_core.catalog import Item, ItemCatalog
from gti_core.data.prepared import PreparedData
from gti_core.errors import PipelineError
from gti_core.files import read_json, write_json
from gti_core.pipeline.stage import Stage, begin_stage, finish_stage, read_stage
from gti_core.quantizer.base import Quantizer, from_tensors
from gti_core.types import JsonDict
from gti_core.vocabulary import SidVocabulary

KIND = "tokenize"
QUANTIZERS = ("kmeans", "rqvae")


@dataclass(frozen=True)
class TokenizeOptions:
    """Options of the stage.

    Args:
        sizes: codes per level, K_1..K_L.
        quantizer: "kmeans" (residual k-means) or "rqvae".
        reserve: rows kept free per level for items that arrive later; the last level's by default.
        seed: seed of the fit.
    """

    sizes: tuple[int, ...] = (64, 64, 64)
    quantizer: str = "kmeans"
    reserve: tuple[int, ...] = (0, 0, 256)
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise PipelineError(f"sizes {self.sizes} must have one positive number per level")
        if self.quantizer not in QUANTIZERS:
            raise PipelineError(f"quantizer must be one of {', '.join(QUANTIZERS)}")
        if len(self.reserve) != len(self.sizes) or min(self.reserve) < 0:
            raise PipelineError(f"reserve {self.reserve} must have one entry >= 0 per level")


@dataclass(frozen=True)
class Tokens:
    """What the stage wrote.

    Args:
        stage: the stage.
        prepared: the data it was made from.
        catalog: items with SIDs, texts and training popularity.
        quantizer: fitted codebooks.
    """

    stage: Stage
    prepared: PreparedData
    catalog: ItemCatalog
    quantizer: Quantizer

    def vocabulary(self, first_token_id: int) -> SidVocabulary:
        """SID vocabulary behind a backbone of ``first_token_id`` rows."""
        active = tuple(int(size) for size in self.stage.options["sizes"])
        reserve = tuple(int(size) for size in self.stage.options["reserve"])
        sizes = tuple(a + r for a, r in zip(active, reserve, strict=True))
        return SidVocabulary(sizes, active, first_token_id)


def tokenize(
    prepared_folder: Path,
    output: Path,
    options: TokenizeOptions,
    *,
    encoder: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Stage:
    """Run the stage.

    Args:
        prepared_folder: folder of ``gti prepare``.
        output: folder to write: quantizer.safetensors, items.json, stage.json.
        options: options.
        encoder: sentence-transformers folder; None for the demo encoder.
        progress: called with (phase, done, total).
    """
    import torch

    from gti_core.files import write_safetensors
    from gti_core.quantizer.assign import assign_unique, quantization_report
    from gti_core.quantizer.encoder import encode_texts, find_demo_encoder, item_text
    from gti_core.quantizer.kmeans import fit_residual_kmeans
    from gti_core.quantizer.rqvae_training import fit_rqvae

    prepared = PreparedData.load(prepared_folder)
    input_identity = sha256_file(prepared_folder / "meta.json")
    folder = encoder or find_demo_encoder()
    recorded = {
        **asdict(options),
        "encoder": folder.parent.name if encoder is None else folder.name,
    }
    recorded["encoder_sha256"] = backbone_digest(folder)
    identity, finished = begin_stage(output, KIND, recorded, input_identity)
    if finished is not None:
        return finished

    def report(phase: str) -> Callable[[int, int], None] | None:
        if progress is None:
            return None
        return lambda done, total: progress(phase, done, total)

    capacity = math.prod(options.sizes)
    if capacity < len(prepared.items):
        raise PipelineError(
            f"sizes {options.sizes} make {capacity} SIDs, too few for {len(prepared.items)} items"
        )
    texts = [item_text(item.title, item.description, item.attributes) for item in prepared.items]
    vectors = encode_texts(texts, folder, progress=report("encode texts"))
    fit = fit_residual_kmeans if options.quantizer == "kmeans" else fit_rqvae
    quantizer = fit(vectors, options.sizes, seed=options.seed, progress=report("fit codebooks"))
    codes = assign_unique(quantizer, vectors)
    popularity = prepared.popularity
    items = [
        {
            "item_id": item.item_id,
            "sid": [int(code) for code in row],
            "popularity": popularity[item.item_id],
        }
        for item, row in zip(prepared.items, codes, strict=True)
    ]
    write_json(output / "items.json", items, indent=None)
    tensors = {name: torch.from_numpy(array) for name, array in quantizer.to_tensors().items()}
    write_safetensors(output / "quantizer.safetensors", tensors)
    figures: JsonDict = {
        "quantizer": {"kind": quantizer.kind, "config": quantizer.config()},
        "report": quantization_report(quantizer, vectors, codes),
    }
    return finish_stage(
        output,
        KIND,
        identity=identity,
        options=recorded,
        input_folder=prepared_folder,
        input_identity=input_identity,
        files=["items.json", "quantizer.safetensors"],
        figures=figures,
    )


def load_tokens(folder: Path) -> Tokens:
    """Load a finished stage with the data behind it. Raises PipelineError or DataError."""
    from safetensors.numpy import load_file

    stage = read_stage(folder, KIND)
    prepared = PreparedData.load(stage.input_folder)
    texts = {item.item_id: item for item in prepared.items}
    items = []
    for record in read_json(folder / "items.json"):
        text = texts[record["item_id"]]
        items.append(
            Item(
                record["item_id"],
                tuple(record["sid"]),
                text.title,
                text.description,
                dict(text.attributes),
                int(record["popularity"]),
            )
        )
    description = stage.figures["quantizer"]
    quantizer = from_tensors(
        description["kind"], load_file(folder / "quantizer.safetensors"), description["config"]
    )
    return Tokens(stage, prepared, ItemCatalog(items), quantizer)
