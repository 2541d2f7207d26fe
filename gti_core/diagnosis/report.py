"""``gti diagnose``: figures of all arms as JSON, PNG and one HTML page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from gti_core.data.files import write_atomic
from gti_core.diagnosis.collect import Arm, Diagnosis, collect
from gti_core.diagnosis.page import html_page
from gti_core.diagnosis.plots import cosine_figure, map_figure, rsa_figure, spectrum_figure
from gti_core.files import write_json

PAGE = "index.html"
NUMBERS = "diagnose.json"
FIGURES: dict[str, Callable[[Diagnosis], bytes]] = {
    "cosine": cosine_figure,
    "cosine-centred": partial(cosine_figure, centred=True),
    "spectrum": spectrum_figure,
    "rsa": rsa_figure,
    "map": map_figure,
}
"""What is drawn; each goes into a file of that name."""


def diagnose(
    arms: Sequence[Arm],
    output: Path,
    *,
    cache_dir: Path,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> Diagnosis:
    """Compute, draw and write everything; files of an earlier call are replaced.

    Args:
        arms: as in `collect`, which also names the errors.
        output: folder to write: diagnose.json, five PNG files, index.html.
        cache_dir: where the demo backbone is converted to.
        seed: seed of the samples of tokens.
        progress: called with (phase, done, total).
    """
    diagnosis = collect(arms, cache_dir=cache_dir, seed=seed, progress=progress)
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / NUMBERS, diagnosis.to_json(), indent=None)
    images = {}
    for number, (name, draw) in enumerate(FIGURES.items()):
        if progress is not None:
            progress("plots", number, len(FIGURES))
        images[name] = draw(diagnosis)
        write_atomic(output / f"{name}.png", images[name])
    if progress is not None:
        progress("plots", len(FIGURES), len(FIGURES))
    write_atomic(output / PAGE, html_page(diagnosis, images).encode())
    return diagnosis
