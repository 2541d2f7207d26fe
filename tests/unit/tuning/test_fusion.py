"""Fused training computes what plain training computes."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from gti_core.fusion import SWITCH, fuse, prepare_training
from gti_core.grounding.corpus import Example
from gti_core.lm import SidLM
from gti_core.testing import VOCABULARY, WIDTH, tiny_model
from gti_core.tuning.loop import answer_loss, collate
from gti_core.tuning.lora import LoraOptions, attach
from gti_core.vocabulary import SidVocabulary

EXAMPLES = [
    Example((1, 2, 3), tuple(VOCABULARY + i for i in range(length)))
    for length in (4, 6, 5)  # padded, and two widths below
]
compiler = pytest.mark.skipif(
    os.environ.get("TORCH_COMPILE_DISABLE") == "1" or shutil.which("g++") is None,
    reason="no C++ compiler",
)


def gradients(family: str, prepared: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of LoRA and rows after two batches of different widths."""
    model = tiny_model(family)
    model.requires_grad_(False)
    vocabulary = SidVocabulary((8,), (8,), VOCABULARY)
    torch.manual_seed(1)
    lm = SidLM(model, vocabulary, 0.1 * torch.randn(8, WIDTH))
    attach(model, LoraOptions(r=2, alpha=4, dropout=0.0), seed=0)
    if prepared:
        prepare_training(model)
    lm.train()
    torch.manual_seed(2)
    loss = answer_loss(lm, collate(EXAMPLES)) + answer_loss(lm, collate(EXAMPLES[:1]))
    loss.backward()  # type: ignore[no-untyped-call]
    found = {n: p.grad for n, p in lm.named_parameters() if p.grad is not None}
    return float(loss.detach()), found


@compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler looks at it
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_prepared_training_has_the_same_gradients(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_loss, plain = gradients(family, prepared=False)
    monkeypatch.setenv(SWITCH, "1")
    loss, fused = gradients(family, prepared=True)
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    assert fused.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(fused[name], gradient, rtol=1e-3, atol=1e-6, msg=name)


def test_what_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    monkeypatch.setenv(SWITCH, "0")
    assert fuse(tiny_model("llama")) == 0
    monkeypatch.delenv(SWITCH)
    assert fuse(tiny_model("llama")) == 0, "done before the compiler is"
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setenv(SWITCH, "1")
    assert fuse(tiny_model("llama")) == 0, "no compiler"
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    model = tiny_model("llama")
    names = list(model.state_dict())
    # Two norms and an MLP in each of two layers, and the final norm.
    assert fuse(model) == 7
    assert list(model.state_dict()) == names
