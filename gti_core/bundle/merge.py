"""From a bundle to one Hugging Face folder that stock transformers and vLLM load."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gti_core.backbone import new_folder, resolve_backbone
from gti_core.bundle.format import Bundle
from gti_core.errors import BundleError
from gti_core.quiet import quiet_libraries
from gti_core.vocabulary import SidVocabulary

log = logging.getLogger(__name__)


def materialize(
    bundle: Bundle, cache_dir: Path, progress: Callable[[str], None] | None = None
) -> Path:
    """Merge backbone, adapter and rows into ``cache_dir``, once; returns the folder.

    Args:
        bundle: the bundle.
        cache_dir: where merged models live; the folder's name is the bundle's digest.
        progress: told in words what takes time.

    Raises:
        BundleError: backbone and bundle do not fit.
    """
    target = _merged_folder(bundle, cache_dir)
    if target.is_dir():
        return target
    quiet_libraries()
    say = progress or (lambda message: log.info("%s", message))
    say("preparing the backbone (once, half a minute)")
    backbone = resolve_backbone(bundle.manifest["backbone"], cache_dir)
    say("merging backbone, adapter and SID rows (once)")
    with new_folder(target) as folder:
        write_merged(bundle, backbone, folder)
    return target


def tokenizer_folder(bundle: Bundle, cache_dir: Path) -> Path:
    """A folder with the bundle's tokenizer: the merged model if it is there, or the backbone.

    Text without special tokens means the same ids in both.

    Raises:
        BundleError, PipelineError: there is no merged model and the backbone can't be found.
    """
    merged = _merged_folder(bundle, cache_dir)
    return merged if merged.is_dir() else resolve_backbone(bundle.manifest["backbone"], cache_dir)


def _merged_folder(bundle: Bundle, cache_dir: Path) -> Path:
    return cache_dir / f"merged-{bundle.digest[:16]}"


def merged_model(bundle: Bundle, backbone: Path) -> Any:
    """The tuned model with V + S embedding rows, bfloat16, as a transformers model."""
    import torch

    from gti_core.lm import is_tied, load_backbone
    from gti_core.pipeline.finetune import apply_adapter
    from gti_core.tuning.lora import LoraOptions

    tuning = bundle.manifest["tuning"]
    model = load_backbone(backbone, torch.float32)
    size = int(model.get_input_embeddings().weight.shape[0])
    if size != bundle.vocabulary.first_token_id:
        raise BundleError(
            f"the backbone has {size} rows, the bundle's SID tokens start at "
            f"{bundle.vocabulary.first_token_id}"
        )
    lora = LoraOptions(**tuning["lora"]) if tuning["mode"] == "lora" else LoraOptions()
    apply_adapter(model, tuning["mode"], bundle.adapter(), lora)
    rows = bundle.rows()
    tied = is_tied(model)
    if tied == ("rows_out" in rows):
        raise BundleError("the bundle's rows and the backbone disagree on tied embeddings")
    total = size + bundle.vocabulary.rows
    model.resize_token_embeddings(total, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[size:] = rows["rows_in"]
        if not tied:
            model.get_output_embeddings().weight[size:] = rows["rows_out"]
    model.config.dtype = torch.bfloat16
    return model.to(torch.bfloat16)


def write_merged(bundle: Bundle, backbone: Path, folder: Path) -> None:
    """Write the merged model and a tokenizer that spells SID tokens into a folder."""
    merged_model(bundle, backbone).save_pretrained(folder)
    tokenizer_with_sids(backbone, bundle.vocabulary).save_pretrained(folder)


def tokenizer_with_sids(backbone: Path, vocabulary: SidVocabulary) -> Any:
    """The backbone's tokenizer with all S SID tokens at their ids.

    Raises:
        BundleError: the tokenizer has more tokens than the backbone has rows.
    """
    from transformers import AddedToken

    from gti_core.lm import load_tokenizer

    tokenizer = load_tokenizer(backbone)
    missing = vocabulary.first_token_id - len(tokenizer)
    if missing < 0:
        raise BundleError(
            f"the tokenizer has {len(tokenizer)} tokens, "
            f"the backbone {vocabulary.first_token_id} rows"
        )
    # Some backbones have more rows than tokens: fill up, so that ids stay in step.
    texts = [f"<|unused_{i}|>" for i in range(missing)] + vocabulary.token_texts()
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=True) for text in texts])
    return tokenizer
