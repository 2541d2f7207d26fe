"""One self-contained HTML page: figures inline, no script, nothing fetched."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from gti_core.diagnosis.collect import Diagnosis
from gti_core.diagnosis.figures import AFTER, BEFORE, INPUT, OUTPUT, TIED
from gti_core.diagnosis.table import Row, table_rows

if TYPE_CHECKING:
    from jinja2 import Template

_SIDES = {
    TIED: "input and output (tied)",
    INPUT: "input",
    OUTPUT: "output",
}

_FIGURES = {
    "cosine": (
        "Cosine matrices",
        "Each cell is the cosine of two rows: red points the same way, white is unrelated, blue "
        "points the opposite way. Text tokens come first, then SID tokens, level after level. "
        "One flat dark square over all levels means that the new rows lie on one point, as after "
        "mean initialization, and the model cannot tell codes apart. Squares along the diagonal "
        "that are darker than their surroundings mean that codes of one level belong together. "
        "All panels share one colour scale.",
    ),
    "cosine-centred": (
        "Cosine matrices, group means removed",
        "The same rows after subtracting from the text tokens their mean, and from the SID tokens "
        "the mean of all SID rows. What all rows share is gone, so the differences show: squares "
        "are levels or families of codes, and an even speckle is noise. Where SID rows lie on one "
        "point nothing is left of them, and their part is white outside the diagonal.",
    ),
    "spectrum": (
        "Singular values",
        "How many independent directions the SID rows use. Values are shares of the largest one; "
        "the scale is logarithmic. A line that falls at once means that one direction holds "
        "everything; a line that stays high means many directions are in use. The effective rank "
        "says the same in one number, from 1 to the number of rows. Dashed lines are before "
        "fine-tuning, solid lines after.",
    ),
    "rsa": (
        "Agreement with the codebooks (RSA)",
        "Codes whose codebook vectors are alike should have rows that are alike. The bar is the "
        "correlation of the two sets of cosines, averaged over levels: 1 is the same geometry, 0 "
        "is none. The numbers in circles are the single levels. Hatched bars are before "
        "fine-tuning, full bars after. Where all rows point the same way there is no "
        "geometry to compare: the figure is undefined, which is worse than a low one. Codewords "
        "of later levels encode remainders that mean different things under different prefixes, "
        "so expect less from them than from level 1.",
    ),
    "map": (
        "Map of rows",
        "Frequent words of the item titles (grey) and the SID rows (coloured by level) on the two "
        "directions in which an arm's rows differ most, by principal component analysis; rows "
        "are scaled to one length. The axes of an arm are the same before and after, so that "
        "movement is real; those of two arms are not the same. Distances are only as good as the "
        "shares of the variance on the axes; not every word finds room for its label.",
    ),
}

_TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>SID rows of {{ names }}</title>
<style>
:root { color-scheme: light dark; --text: #1f2328; --soft: #59636e; --line: #d1d9e0;
  --page: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e9ed; --soft: #a3adb8; --line: #3d444d; --page: #16191d; }
}
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 68rem; background: var(--page);
  color: var(--text); font: 1rem/1.55 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.75rem 0 .5rem; }
p { max-width: 46rem; margin: .5rem 0; }
.soft { color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding-bottom: .4rem; }
th, td { padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th { font-weight: 600; }
th[scope=row], .left { text-align: left; }
tbody th { font-weight: 400; max-width: 20rem; white-space: normal; overflow-wrap: anywhere; }
figure { margin: 1rem 0 0; }
img { display: block; max-width: 100%; height: auto; background: #ffffff; padding: .75rem;
  box-sizing: border-box; border: 1px solid var(--line); border-radius: 6px; }
ul { padding-left: 1.2rem; }
</style>
</head>
<body>
<main>
<h1>SID rows of {{ names }}</h1>
<p>Rows of the semantic-ID (SID) tokens, before and after supervised fine-tuning (SFT). Good rows
use many directions (high effective rank), do not all point the same way (mean cosine below 1) and
keep the order of the codebooks (RSA well above 0).</p>
{% if not one_sample %}
<p>These arms differ in data, levels or backbone, so the tokens they show are not the same:
compare their figures with care.</p>
{% endif %}
<h2 id="figures">Figures</h2>
<div class="wide">
<table>
<caption>Of all active SID rows. RSA is the mean over levels; {{ dash }} is undefined.</caption>
<thead><tr><th scope="col" class="left">arm</th><th scope="col" class="left">rows</th>
<th scope="col" class="left">state</th><th scope="col">effective rank</th>
<th scope="col">mean cosine</th><th scope="col">RSA Pearson</th><th scope="col">RSA Spearman</th>
</tr></thead>
<tbody>
{% for row in rows %}
<tr><th scope="row">{{ row.name }}</th><td class="left">{{ sides[row.side] }}</td>
<td class="left">{{ row.state }}</td><td>{{ row.effective_rank }}</td><td>{{ row.mean_cosine }}</td>
<td>{{ row.pearson }}</td><td>{{ row.spearman }}</td></tr>
{% endfor %}
</tbody>
</table>
</div>
<div class="wide">
<table>
<caption>RSA by level, Pearson / Spearman. "All" compares pairs across levels too: the distance of
the levels from each other decides it.</caption>
<thead><tr><th scope="col" class="left">arm</th><th scope="col" class="left">rows</th>
<th scope="col" class="left">state</th>
{% for level in range(levels) %}<th scope="col">level {{ level + 1 }}</th>{% endfor %}
<th scope="col">all</th></tr></thead>
<tbody>
{% for row in rows %}
<tr><th scope="row">{{ row.name }}</th><td class="left">{{ sides[row.side] }}</td>
<td class="left">{{ row.state }}</td>
{% for level in range(levels) %}<td>{{ row.levels[level] if level < row.levels|length }}</td>
{% endfor %}<td>{{ row.all }}</td></tr>
{% endfor %}
</tbody>
</table>
</div>
{% for figure in figures %}
<h2 id="{{ figure.name }}">{{ figure.title }}</h2>
<p>{{ figure.text }}</p>
<figure><img alt="{{ figure.alt }}" src="data:image/png;base64,{{ figure.data }}"></figure>
{% endfor %}
<h2 id="about">About these figures</h2>
<ul class="soft">
{% for arm in arms %}
<li>{{ arm.name }}: folder of gti {{ arm.stage }}, backbone {{ arm.backbone }},
active codes per level {{ arm.levels|join(", ") }}, identity {{ arm.identity[:12] }}.</li>
{% endfor %}
<li>Tokens shown: up to 50 of the item titles' tokens and 50 SID tokens, drawn with seed
{{ seed }}. All numbers are in diagnose.json beside this page.</li>
</ul>
</main>
</body>
</html>
"""


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_TEMPLATE)


def html_page(diagnosis: Diagnosis, images: Mapping[str, bytes]) -> str:
    """The page.

    Args:
        diagnosis: the figures; names and words in it are escaped.
        images: PNG files by name, as `gti_core.diagnosis.report` draws them.
    """
    rows = table_rows(diagnosis)
    figures = [
        {
            "name": name,
            "title": title,
            "text": text,
            "alt": _alt(name, title, rows),
            "data": base64.b64encode(images[name]).decode(),
        }
        for name, (title, text) in _FIGURES.items()
    ]
    context: dict[str, Any] = {
        "names": ", ".join(arm.name for arm in diagnosis.arms),
        "one_sample": diagnosis.one_sample,
        "rows": rows,
        "sides": _SIDES,
        "levels": max(len(arm.levels) for arm in diagnosis.arms),
        "figures": figures,
        "arms": diagnosis.arms,
        "seed": diagnosis.seed,
        "dash": "\N{EN DASH}",
    }
    return _template().render(context)


def _alt(name: str, title: str, rows: list[Row]) -> str:
    """What a picture shows, for those who do not see it: the figures behind it where it has any."""
    figures = {
        "spectrum": lambda row: f"effective rank {row.effective_rank}",
        "rsa": lambda row: f"Pearson {row.pearson}, Spearman {row.spearman}",
        "cosine": lambda row: f"mean cosine of SID rows {row.mean_cosine}",
    }
    states = " and ".join(s for s in (BEFORE, AFTER) if any(row.state == s for row in rows))
    if name not in figures:
        arms = ", ".join(dict.fromkeys(row.label for row in rows))
        return f"{title}, {states}, of {arms}."
    parts = "; ".join(f"{row.label} {row.state}: {figures[name](row)}" for row in rows)
    return f"{title}. {parts}."
