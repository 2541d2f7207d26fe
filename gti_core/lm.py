"""SidLM: a frozen or tunable causal LM with its own block of SID rows.

The backbone's embedding matrix is never resized while training: the S new rows live in their
own parameters, so "everything else frozen" holds by construction. Only an export writes both
into one matrix (`gti_core.bundle.merge`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gti_core.errors import UnsupportedModelError
from gti_core.vocabulary import SidVocabulary


class SidLM(nn.Module):
    """A causal LM whose token ids go on past V with the S SID rows.

    Args:
        backbone: a transformers causal LM. Its parameters keep their own ``requires_grad``.
        vocabulary: S rows behind the backbone's V; ``first_token_id`` must equal V.
        rows_in: input rows, shape [S, D], float32.
        rows_out: output rows, shape [S, D], for untied backbones; None when tied, where one
            parameter serves both sides.

    Raises:
        UnsupportedModelError: the head has a bias, or the backbone scales embeddings or logits, so
            that rows of our own would not act as rows of its matrix.
    """

    def __init__(
        self,
        backbone: nn.Module,
        vocabulary: SidVocabulary,
        rows_in: Tensor,
        rows_out: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.backbone: Any = backbone
        self.vocabulary = vocabulary
        self.tied = is_tied(backbone)
        if self.tied != (rows_out is None):
            raise UnsupportedModelError(
                f"backbone is {'tied' if self.tied else 'untied'}, "
                f"output rows are {'absent' if rows_out is None else 'given'}"
            )
        self.rows_in = nn.Parameter(rows_in.float().clone())
        if rows_out is not None:
            self.rows_out = nn.Parameter(rows_out.float().clone())
        size = int(self.embedding.shape[0])
        if vocabulary.first_token_id != size:
            raise UnsupportedModelError(
                f"SID tokens start at {vocabulary.first_token_id}, the backbone has {size} rows"
            )
        self.register_buffer(
            "_active", torch.from_numpy(vocabulary.active_mask.copy()), persistent=False
        )
        self._active: Tensor
        check_rows_act_as_rows(backbone)

    @property
    def embedding(self) -> Tensor:
        """The backbone's input matrix, shape [V, D]."""
        weight: Tensor = self.backbone.get_input_embeddings().weight
        return weight

    @property
    def head(self) -> Tensor:
        """The backbone's output matrix, shape [V, D]."""
        weight: Tensor = self.backbone.get_output_embeddings().weight
        return weight

    @property
    def output_rows(self) -> Tensor:
        """Output side of the SID rows, shape [S, D]; the input rows themselves when tied."""
        return self.rows_in if self.tied else self.rows_out

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings of token ids below V + S, shape [..., D], in the backbone's dtype."""
        size = self.vocabulary.first_token_id
        is_sid = ids >= size
        text = nn.functional.embedding(ids.masked_fill(is_sid, 0), self.embedding)
        sid = nn.functional.embedding((ids - size).clamp_min(0), self.rows_in)
        return torch.where(is_sid.unsqueeze(-1), sid.to(text.dtype), text)

    def hidden(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Last hidden states (after the final norm), shape [B, T, D].

        Args:
            ids: shape [B, T], int64.
            attention_mask: shape [B, T], 1 for tokens; None for no padding.
        """
        out = self.backbone.base_model(
            inputs_embeds=self.embed(ids), attention_mask=attention_mask, use_cache=False
        )
        hidden: Tensor = out.last_hidden_state
        return hidden

    def sid_logits(self, hidden: Tensor) -> Tensor:
        """Logits over the SID rows, shape [..., S], float32; -inf for reserved rows."""
        logits = (hidden @ self.output_rows.to(hidden.dtype).T).float()
        return logits.masked_fill(~self._active, float("-inf"))

    def all_logits(self, hidden: Tensor) -> Tensor:
        """Logits over text and SID rows, shape [..., V + S], float32."""
        return torch.cat([(hidden @ self.head.T).float(), self.sid_logits(hidden)], dim=-1)


def is_tied(backbone: Any) -> bool:
    """True when input and output matrix are one tensor."""
    output = backbone.get_output_embeddings()
    if output is None:
        raise UnsupportedModelError(f"{type(backbone).__name__} has no output head")
    return bool(output.weight is backbone.get_input_embeddings().weight)


@torch.no_grad()
def check_rows_act_as_rows(backbone: Any) -> None:
    """Check that logits are ``hidden @ head.T`` and that embeddings enter unscaled.

    Raises:
        UnsupportedModelError: they are not, on a few probe tokens.
    """
    if getattr(backbone.get_output_embeddings(), "bias", None) is not None:
        raise UnsupportedModelError(f"{type(backbone).__name__} has a bias on its head")
    training = backbone.training
    backbone.eval()
    weight = backbone.get_input_embeddings().weight
    ids = torch.arange(min(4, weight.shape[0]), device=weight.device)[None]
    expected = backbone(input_ids=ids, use_cache=False).logits.float()
    hidden = backbone.base_model(
        inputs_embeds=nn.functional.embedding(ids, weight), use_cache=False
    ).last_hidden_state
    actual = (hidden @ backbone.get_output_embeddings().weight.T).float()
    backbone.train(training)
    scale = expected.abs().max().clamp_min(1e-6)
    if not bool(((actual - expected).abs().max() / scale) < 0.05):
        raise UnsupportedModelError(
            f"{type(backbone).__name__} scales its embeddings or logits; "
            "added rows would not act as rows of its matrix"
        )


def load_backbone(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a causal LM from a local Hugging Face folder. Never reaches for the network."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a local Hugging Face folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of hostile text: no special token can come out of it.

    The spelling of a chat marker or of a SID token inside an item's text becomes ordinary pieces.
    """
    ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True)[
        "input_ids"
    ]
    return ids
