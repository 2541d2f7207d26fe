"""A model with the data it is evaluated on, from a fine-tuning's folder or from a bundle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gti_core.bundle import load_bundle
from gti_core.bundle.format import MANIFEST, Bundle
from gti_core.catalog import ItemCatalog
from gti_core.data.demo import movielens_100k
from gti_core.data.prepared import PreparedData
from gti_core.data.splits import LEAVE_ONE_OUT, leave_one_out
from gti_core.errors import PipelineError
from gti_core.pipeline.finetune import load_finetuned, model_of
from gti_core.pipeline.ground import DTYPES
from gti_core.prompts import AppendOnlyPrompt

if TYPE_CHECKING:
    from gti_core.lm import SidLM


@dataclass(frozen=True)
class EvaluationModel:
    """What `gti_core.pipeline.evaluate.evaluate` takes."""

    lm: SidLM
    catalog: ItemCatalog
    prompt: AppendOnlyPrompt
    prepared: PreparedData


def load_for_evaluation(
    folder: Path, data: Path | None, *, cache_dir: Path, dtype: str = "float32"
) -> EvaluationModel:
    """Load a model and prepared data.

    Args:
        folder: folder of ``gti finetune``, or a bundle.
        data: prepared data; None for the data that the model was trained on.
        cache_dir: where converted backbones are kept.
        dtype: of the weights.

    Raises:
        PipelineError: a bundle trained on files, and no data given.
    """
    from gti_core.fusion import fuse

    if dtype not in DTYPES:
        raise PipelineError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    if not (folder / MANIFEST).is_file():
        tuned = load_finetuned(folder)
        prepared = PreparedData.load(data) if data else tuned.grounded.tokens.prepared
        lm = model_of(tuned, cache_dir=cache_dir, dtype=dtype)
        fuse(lm.backbone)
        return EvaluationModel(lm, tuned.grounded.tokens.catalog, tuned.prompt, prepared)
    bundle = load_bundle(folder)
    lm = bundle_model(bundle, cache_dir=cache_dir, dtype=dtype)
    fuse(lm.backbone)
    prepared = PreparedData.load(data) if data else _data_of(bundle)
    return EvaluationModel(lm, bundle.catalog, bundle.prompt, prepared)


def bundle_model(bundle: Bundle, *, cache_dir: Path, dtype: str = "float32") -> SidLM:
    """The bundle's model, adapter merged, ready to decode with."""
    import torch

    from gti_core.backbone import resolve_backbone
    from gti_core.lm import SidLM, load_backbone
    from gti_core.pipeline.finetune import apply_adapter
    from gti_core.tuning.lora import LoraOptions

    tuning = bundle.manifest["tuning"]
    model = load_backbone(resolve_backbone(bundle.manifest["backbone"], cache_dir), torch.float32)
    apply_adapter(model, tuning["mode"], bundle.adapter(), LoraOptions(**tuning["lora"]))
    model.to(getattr(torch, dtype))
    rows = bundle.rows()
    return SidLM(model, bundle.vocabulary, rows["rows_in"], rows.get("rows_out")).eval()


def _data_of(bundle: Bundle) -> PreparedData:
    trained_on = bundle.manifest.get("trained_on", {})
    dataset = movielens_100k()
    if trained_on.get("dataset") != dataset.name or trained_on.get("split") != LEAVE_ONE_OUT:
        raise PipelineError(f"bundle {bundle.name!r} carries no data; name it with --data")
    return PreparedData(dataset.name, dataset.items, leave_one_out(dataset.histories))
