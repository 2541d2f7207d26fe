"""The training loop: deterministic, resumable, and honest about foreign checkpoints."""

from __future__ import annotations

import os
import random
import signal

import pytest
import torch

from gti_core.errors import PipelineError
from gti_core.grounding.corpus import Example
from gti_core.lm import SidLM
from gti_core.testing import VOCABULARY, tiny_model
from gti_core.tuning.config import LoopConfig
from gti_core.tuning.interrupt import StoppedError
from gti_core.tuning.loop import CHECKPOINT, IGNORE, Examples, bucketed, collate, train
from gti_core.tuning.lora import LoraOptions, adapter_state, attach, merge_into
from gti_core.vocabulary import SidVocabulary

VOCAB = SidVocabulary((4, 4), (4, 4), VOCABULARY)
EXAMPLES = [Example((n, n + 1), (VOCABULARY + n % 4, VOCABULARY + 4 + n % 3)) for n in range(5, 16)]


def model(lora: bool = True) -> SidLM:
    backbone = tiny_model("llama")
    torch.manual_seed(5)
    lm = SidLM(backbone, VOCAB, torch.randn(VOCAB.rows, 32) * 0.02)
    if lora:
        attach(backbone, LoraOptions(r=2, alpha=4), seed=1)
    else:
        backbone.requires_grad_(False)
    return lm


def shuffled(rng: random.Random) -> list[Example]:
    examples = list(EXAMPLES)
    rng.shuffle(examples)
    return examples


class InterruptError(Exception):
    pass


def test_a_run_interrupted_and_resumed_equals_one_that_was_not(tmp_path):
    config = LoopConfig(epochs=3, batch_size=4, rows_lr=0.01, lr=0.01, warmup=2,
                        checkpoint_seconds=0.0)  # fmt: skip
    whole = model()
    train(whole, Examples(shuffled, config), config, tmp_path / "whole", identity="run")

    def stop(step, steps, loss):
        if step == 4:
            raise InterruptError

    first = model()
    with pytest.raises(InterruptError):
        train(first, Examples(shuffled, config), config, tmp_path / "cut", identity="run",
              progress=stop)  # fmt: skip
    second = model()
    done = train(second, Examples(shuffled, config), config, tmp_path / "cut", identity="run")
    assert done.steps == 9
    assert len(done.losses) == 9
    for (name, a), (_, b) in zip(whole.named_parameters(), second.named_parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6), name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_told_to_stop_saves_its_step_and_goes_on(number, tmp_path):
    config = LoopConfig(epochs=3, batch_size=4, rows_lr=0.01, lr=0.01, warmup=2)
    whole = model()
    train(whole, Examples(shuffled, config), config, tmp_path / "whole", identity="run")
    before = signal.getsignal(number)

    def stop(step, steps, loss):
        if step == 2:
            os.kill(os.getpid(), number)

    with pytest.raises(StoppedError, match="step 3 of 9"):
        train(model(), Examples(shuffled, config), config, tmp_path / "cut", identity="run",
              progress=stop)  # fmt: skip
    assert signal.getsignal(number) == before
    resumed = model()
    done = train(resumed, Examples(shuffled, config), config, tmp_path / "cut", identity="run")
    assert len(done.losses) == 9
    for (name, a), (_, b) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6), name


def test_a_foreign_checkpoint_is_refused(tmp_path):
    config = LoopConfig(epochs=1, batch_size=8)
    train(model(), Examples(shuffled, config), config, tmp_path, identity="one")
    assert (tmp_path / CHECKPOINT).is_file()
    with pytest.raises(PipelineError, match="another run"):
        train(model(), Examples(shuffled, config), config, tmp_path, identity="two")


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    lm = model(lora=False)
    with torch.no_grad():
        lm.rows_in.fill_(float("nan"))
    config = LoopConfig(epochs=1, batch_size=8)
    with pytest.raises(PipelineError, match="step 0"):
        train(lm, Examples(shuffled, config), config, tmp_path, identity="x")
    assert not (tmp_path / CHECKPOINT).exists()


def test_collate_pads_on_the_right_and_learns_answers_only():
    batch = collate([Example((1, 2), (3,)), Example((4,), (5, 6, 7))])
    assert batch.ids.tolist() == [[1, 2, 3, 0], [4, 5, 6, 7]]
    assert batch.labels.tolist() == [
        [IGNORE, IGNORE, 3, IGNORE],
        [IGNORE, 5, 6, 7],
    ]


def test_buckets_keep_every_example_and_group_lengths():
    rng = random.Random(0)
    examples = [Example((1,) * rng.randint(1, 30), (2,)) for _ in range(101)]
    ordered = bucketed(examples, 8, random.Random(1), batches=4)
    assert sorted(map(str, ordered)) == sorted(map(str, examples))
    padding = sum(
        max(len(e.prompt) for e in ordered[i : i + 8]) * len(ordered[i : i + 8])
        - sum(len(e.prompt) for e in ordered[i : i + 8])
        for i in range(0, 101, 8)
    )
    unsorted = sum(
        max(len(e.prompt) for e in examples[i : i + 8]) * len(examples[i : i + 8])
        - sum(len(e.prompt) for e in examples[i : i + 8])
        for i in range(0, 101, 8)
    )
    assert padding < unsorted / 2


def test_rates_by_hand():
    config = LoopConfig(warmup=4, decay=0.5)
    rates = [config.rate(step, 20) for step in range(20)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[10] == 1.0
    assert rates[15] == 0.5
    assert rates[19] == pytest.approx(0.1)
    assert LoopConfig(epochs=2, batch_size=4).steps_for(9) == 6


def test_adapters_of_a_bfloat16_backbone_are_float32():
    backbone = tiny_model("llama").to(torch.bfloat16)
    attach(backbone, LoraOptions(r=2, alpha=4), seed=1)
    kinds = {name: p.dtype for name, p in backbone.named_parameters()}
    assert {kind for name, kind in kinds.items() if "lora_" in name} == {torch.float32}
    assert {kind for name, kind in kinds.items() if "lora_" not in name} == {torch.bfloat16}
    backbone(input_ids=torch.arange(3, 9)[None]).logits.float().sum().backward()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gpt_neo"])
def test_a_merged_adapter_equals_the_attached_one(family):
    attached = tiny_model(family)
    options = LoraOptions(r=3, alpha=6, dropout=0.0)
    attach(attached, options, seed=0)
    trainable = {name for name, p in attached.named_parameters() if p.requires_grad}
    assert trainable
    assert all("lora_" in name for name in trainable)
    with torch.no_grad():
        for name, parameter in attached.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    plain = tiny_model(family)
    ids = torch.arange(3, 20)[None]
    before = plain(input_ids=ids).logits.detach()
    merge_into(plain, adapter_state(attached), options)
    merged = plain(input_ids=ids).logits.detach()
    expected = attached.eval()(input_ids=ids).logits.detach()
    assert torch.allclose(merged, expected, atol=1e-4)
    assert not torch.allclose(merged, before, atol=1e-3)
