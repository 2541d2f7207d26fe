"""Training speed on the demo backbone: what is trained, and in which precision.

    python -m bench.training [--json PATH] [--quick]

Steps of 32 sequences of 24 tokens, 3 x 256 random SID rows, all in one process, one after the
other. "products" is the type of the matrix products; what is trained is float32 always.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.output import load_average, publish
from gti_core.backbone import demo_backbone
from gti_core.fusion import prepare_training
from gti_core.grounding.corpus import Example
from gti_core.lm import SidLM, load_backbone
from gti_core.quiet import quiet_libraries
from gti_core.tuning.loop import answer_loss, collate
from gti_core.tuning.lora import LoraOptions, attach
from gti_core.tuning.precision import mixed
from gti_core.types import JsonDict
from gti_core.vocabulary import SidVocabulary

SEQUENCES, LENGTH = 32, 24


class Cell(NamedTuple):
    """One way to train. ``prepared``: as the pipeline does it (`gti_core.fusion`)."""

    trained: str
    products: str
    dropout: float
    autocast: bool
    prepared: bool


CELLS = (
    Cell("everything", "float32", 0.0, autocast=False, prepared=False),
    Cell("everything", "bfloat16", 0.0, autocast=True, prepared=False),
    Cell("everything", "bfloat16", 0.0, autocast=True, prepared=True),
    Cell("lora", "bfloat16, casts to float32", 0.05, autocast=False, prepared=False),
    Cell("lora", "bfloat16", 0.05, autocast=True, prepared=False),
    Cell("lora", "bfloat16", 0.0, autocast=True, prepared=False),
    Cell("lora", "bfloat16", 0.0, autocast=True, prepared=True),
    Cell("rows", "bfloat16", 0.0, autocast=False, prepared=False),
    Cell("rows", "bfloat16", 0.0, autocast=False, prepared=True),
)


def measure(folder: Path, cell: Cell, steps: int) -> JsonDict:
    """Tokens per second of one way to train, median over steps but the first two."""
    everything = cell.trained == "everything"
    model = load_backbone(folder, torch.float32 if everything else torch.bfloat16)
    model.requires_grad_(everything)
    size = int(model.get_input_embeddings().weight.shape[0])
    vocabulary = SidVocabulary((256, 256, 256), (256, 256, 256), size)
    width = int(model.get_input_embeddings().weight.shape[1])
    lm = SidLM(model, vocabulary, 0.1 * torch.randn(vocabulary.rows, width))
    if cell.trained == "lora":
        attach(model, LoraOptions(r=16, alpha=32, dropout=cell.dropout), seed=0)
    if cell.prepared:
        prepare_training(model)
    lm.train()
    optimizer = torch.optim.AdamW([p for p in lm.parameters() if p.requires_grad], lr=1e-4)
    forward: Any = partial(mixed, model) if cell.autocast else nullcontext
    rng = random.Random(0)
    seconds = []
    for _ in range(steps):
        examples = [
            Example((1, 2, 3), tuple(size + rng.randrange(768) for _ in range(LENGTH - 3)))
            for _ in range(SEQUENCES)
        ]
        began = time.perf_counter()
        with forward():
            loss = answer_loss(lm, collate(examples))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - began)
    return {
        **cell._asdict(),
        "tokens_per_s": round(SEQUENCES * LENGTH / statistics.median(seconds[2:])),
    }


def main(arguments: list[str] | None = None) -> None:
    """Entry point; prints the result and writes it to ``--json``."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--cache-dir", type=Path, default=Path(".gti/cache"))
    options = parser.parse_args(arguments)
    quiet_libraries()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    load = load_average()
    folder = demo_backbone(options.cache_dir)
    rows = [measure(folder, cell, 5 if options.quick else 12) for cell in CELLS]
    publish("training", arguments, options.json, load, rows=rows)


if __name__ == "__main__":
    main()
