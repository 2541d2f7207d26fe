"""The one training loop: grounding and fine-tuning differ in what is trainable and what is read.

Resumable: the batch of a step depends on seed and step alone, and a checkpoint holds the
trainable parameters, the optimizer's moments and the step in one safetensors file.
"""

from __future__ import annotations

import json
import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from gti_core.errors import PipelineError
from gti_core.files import write_safetensors
from gti_core.grounding.corpus import Example
from gti_core.lm import SidLM
from gti_core.tuning.config import LoopConfig
from gti_core.tuning.interrupt import StoppedError, StopSignal

log = logging.getLogger(__name__)

IGNORE = -100
CHECKPOINT = "checkpoint.safetensors"

Progress = Callable[[int, int, float], None]
"""Called with (step, steps, running loss)."""


@dataclass(frozen=True)
class Batch:
    """Right-padded examples.

    Args:
        ids: shape [B, T], int64. Padding is on the right, where a causal model can't see it.
        labels: shape [B, T], int64; IGNORE where nothing is learned.
    """

    ids: Tensor
    labels: Tensor


def collate(examples: Sequence[Example]) -> Batch:
    """Pad examples to the longest one."""
    width = max(len(e.prompt) + len(e.answer) for e in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.int64)
    labels = torch.full((len(examples), width), IGNORE, dtype=torch.int64)
    for row, example in enumerate(examples):
        start, end = len(example.prompt), len(example.prompt) + len(example.answer)
        ids[row, :end] = torch.tensor([*example.prompt, *example.answer])
        labels[row, start:end] = torch.tensor(example.answer)
    return Batch(ids, labels)


def answer_loss(lm: SidLM, batch: Batch) -> Tensor:
    """Mean negative log-likelihood of the answer tokens, nats.

    A SID target is normalized over the active SID rows (as it is decoded, see
    `gti_core.decoding.beam`), a text target over text and active SID rows.
    """
    hidden = lm.hidden(batch.ids)[:, :-1]
    labels = batch.labels[:, 1:]
    first = lm.vocabulary.first_token_id
    is_sid = labels >= first
    is_text = (labels >= 0) & ~is_sid
    total = hidden.new_zeros((), dtype=torch.float32)
    if bool(is_sid.any()):
        logits = lm.sid_logits(hidden[is_sid])
        total = total + nn.functional.cross_entropy(logits, labels[is_sid] - first, reduction="sum")
    if bool(is_text.any()):
        logits = lm.all_logits(hidden[is_text])
        total = total + nn.functional.cross_entropy(logits, labels[is_text], reduction="sum")
    return total / (is_sid | is_text).sum().clamp_min(1)


def bucketed(
    examples: Sequence[Example], batch_size: int, rng: random.Random, batches: int = 32
) -> list[Example]:
    """Reorder shuffled examples so that a batch holds similar lengths: less padding, same epoch.

    Lengths are sorted inside blocks of ``batches`` batches, and the full batches of a block are
    shuffled again. A smaller last batch stays last.
    """
    ordered: list[Example] = []
    block = batch_size * batches
    for start in range(0, len(examples), block):
        part = sorted(examples[start : start + block], key=lambda e: len(e.prompt) + len(e.answer))
        groups = [part[i : i + batch_size] for i in range(0, len(part), batch_size)]
        short = [groups.pop()] if len(groups[-1]) < batch_size else []
        rng.shuffle(groups)
        ordered.extend(example for group in groups + short for example in group)
    return ordered


class Examples:
    """Batches by step, drawn epoch by epoch.

    Args:
        epoch: function from a random generator to one epoch's examples; must give the same number
            each time.
        config: batch size and seed.
    """

    def __init__(
        self, epoch: Callable[[random.Random], Sequence[Example]], config: LoopConfig
    ) -> None:
        self._epoch = epoch
        self._config = config
        self._number = -1
        self._examples: Sequence[Example] = ()
        self._load(0)
        self.per_epoch = len(self._examples)
        if self.per_epoch == 0:
            raise PipelineError("there is nothing to train on")

    def _load(self, number: int) -> None:
        if number != self._number:
            rng = random.Random(f"{self._config.seed}/{number}")
            self._examples = bucketed(self._epoch(rng), self._config.batch_size, rng)
            self._number = number

    def batch(self, step: int) -> Batch:
        """The batch of a step. The last batch of an epoch may be smaller."""
        size = self._config.batch_size
        per_epoch = math.ceil(self.per_epoch / size)
        self._load(step // per_epoch)
        start = (step % per_epoch) * size
        return collate(self._examples[start : start + size])


@dataclass
class Trained:
    """What a run reports.

    Args:
        steps: steps done in all.
        seconds: seconds spent training, over all resumptions.
        losses: loss of each step, nats.
        tokens: tokens read, padding not counted.
    """

    steps: int = 0
    seconds: float = 0.0
    losses: list[float] | None = None
    tokens: int = 0


def train(
    lm: SidLM,
    examples: Examples,
    config: LoopConfig,
    folder: Path,
    *,
    identity: str,
    progress: Progress | None = None,
    forward: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Trained:
    """Train the parameters that require gradients, with AdamW; continue from a checkpoint.

    Args:
        lm: the model; parameters with ``requires_grad`` are trained in place.
        examples: batches by step.
        config: settings. ``epochs`` and ``decay`` may differ from the checkpoint's.
        folder: where the checkpoint lies.
        identity: digest of everything else the run depends on; a checkpoint of another identity
            is refused.
        progress: called after each step.
        forward: context that the loss is computed in (`gti_core.tuning.precision`).

    Raises:
        PipelineError: a foreign checkpoint, or a loss that is not finite.
        StoppedError: SIGINT or SIGTERM came; a checkpoint of the last whole step is saved.
    """
    trainable = {name: p for name, p in lm.named_parameters() if p.requires_grad}
    rows = [p for name, p in trainable.items() if name in ("rows_in", "rows_out")]
    others = [p for name, p in trainable.items() if name not in ("rows_in", "rows_out")]
    groups = [{"params": rows, "peak": config.rows_lr, "weight_decay": 0.0}]
    if others:
        groups.append({"params": others, "peak": config.lr, "weight_decay": config.weight_decay})
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.99))
    steps = config.steps_for(examples.per_epoch)
    done = _load_checkpoint(folder / CHECKPOINT, trainable, optimizer, identity)
    losses = done.losses or []
    lm.train()
    saved = time.monotonic()
    with StopSignal() as stop:
        for step in range(done.steps, steps):
            began = time.monotonic()
            torch.manual_seed((config.seed << 32) + step)
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * config.rate(step, steps)
            batch = examples.batch(step)
            with forward():
                loss = answer_loss(lm, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(trainable.values(), config.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(round(float(loss.detach()), 4))
            if not math.isfinite(losses[-1]):
                raise PipelineError(f"the loss at step {step} is {losses[-1]}; lower the rate")
            done.steps = step + 1
            done.tokens += int((batch.ids > 0).sum())
            done.seconds += time.monotonic() - began
            due = time.monotonic() - saved > config.checkpoint_seconds
            stopping = stop.requested  # read once: what is stopped must have been saved
            if due or stopping or done.steps == steps:
                done.losses = losses
                _save_checkpoint(folder / CHECKPOINT, trainable, optimizer, identity, done)
                saved = time.monotonic()
            if progress is not None:
                recent = losses[-20:]
                progress(done.steps, steps, sum(recent) / len(recent))
            if stopping and done.steps < steps:
                raise StoppedError(
                    f"stopped at step {done.steps} of {steps}; the same command goes on from there"
                )
    done.losses = losses
    lm.eval()
    return done


def _save_checkpoint(
    path: Path,
    trainable: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    identity: str,
    done: Trained,
) -> None:
    tensors: dict[str, Tensor] = {}
    for name, parameter in trainable.items():
        tensors[f"param/{name}"] = parameter.detach()
        state = optimizer.state.get(parameter, {})
        for key in ("exp_avg", "exp_avg_sq"):
            if key in state:
                tensors[f"{key}/{name}"] = state[key]
    meta = {"identity": identity, "trained": json.dumps(asdict(done))}
    write_safetensors(path, tensors, meta)


def _load_checkpoint(
    path: Path,
    trainable: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    identity: str,
) -> Trained:
    if not path.is_file():
        return Trained()
    with safe_open(path, framework="pt") as file:
        meta: dict[str, str] = file.metadata() or {}
        if meta.get("identity") != identity:
            raise PipelineError(
                f"{path} belongs to another run (other data, options or backbone); "
                "choose another folder or remove it"
            )
        done = Trained(**json.loads(meta["trained"]))
        names: set[str] = set(file.keys())
        for name, parameter in trainable.items():
            with torch.no_grad():
                parameter.copy_(file.get_tensor(f"param/{name}"))
            if f"exp_avg/{name}" in names:
                state: dict[str, Any] = optimizer.state[parameter]
                state["step"] = torch.tensor(float(done.steps))
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = file.get_tensor(f"{key}/{name}").to(parameter.dtype)
    log.info("resuming at step %d", done.steps)
    return done
