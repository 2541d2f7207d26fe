"""Dashboard and alerts: well formed, and about metrics and labels that the service has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[4]
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboard.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
OPERATIONS = ROOT / "docs" / "operations.md"

NAME = re.compile(r"\b((?:gti|process|python)_[a-z0-9_]+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'([a-z_]+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|without)\s*\(([^)]*)\)")
# Added by Prometheus when it scrapes, or the bound of a bucket.
OUTSIDE = {"job", "instance", "le"}


def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return document


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    panels = dashboard()["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]] + [
        rule["expr"] for rule in rules()
    ]


@pytest.fixture
def series(client: Any) -> dict[str, list[dict[str, str]]]:
    """Name -> labels of each series, from a scrape of an application that has served a little."""
    client.recommend(history=["a1"])
    client.recommend(history=[])
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


@pytest.mark.parametrize("expression", expressions())
def test_every_name_and_label_exists(
    expression: str, series: dict[str, list[dict[str, str]]]
) -> None:
    names = NAME.findall(expression)
    assert names or "up{" in expression
    known = set(OUTSIDE)
    for name, matchers in names:
        assert name in series, name
        for label, operator, wanted in MATCHER.findall(matchers or ""):
            if label in OUTSIDE:
                continue
            values = {labels.get(label) for labels in series[name]}
            assert None not in values, (name, label)
            # Statuses come with their requests; all other values are there from the start.
            if label != "status":
                parts = wanted.split("|") if operator == "=~" else [wanted]
                assert set(parts) <= values, (name, label)
        known |= set(series[name][0])
    for grouped in GROUPING.findall(expression):
        assert {label.strip() for label in grouped.split(",")} <= known


def test_the_dashboard_is_one_that_grafana_loads() -> None:
    document = dashboard()
    assert document["uid"]
    assert document["title"]
    assert isinstance(document["schemaVersion"], int)
    panels = document["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["type"] in ("timeseries", "stat")
        assert panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        place = panel["gridPos"]
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["targets"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    variables = {variable["name"] for variable in document["templating"]["list"]}
    assert variables == {"datasource", "job"}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) - {"__rate_interval"}
    assert used == variables


def test_the_alerts_are_rules_that_prometheus_loads() -> None:
    document = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))
    assert set(document) == {"groups"}
    for group in document["groups"]:
        assert set(group) <= {"name", "interval", "rules"}
    found = rules()
    assert len({rule["alert"] for rule in found}) == len(found)
    for rule in found:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"[A-Z][A-Za-z]+", rule["alert"])
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        for opening, closing in ("()", "{}", "[]"):
            assert rule["expr"].count(opening) == rule["expr"].count(closing)


def test_every_metric_is_documented(series: dict[str, list[dict[str, str]]]) -> None:
    text = OPERATIONS.read_text(encoding="utf-8")
    documented = set(re.findall(r"`(gti_[a-z_]+)", text))
    suffix = re.compile(r"_(bucket|sum|count)$")
    served = {suffix.sub("", name) for name in series if name.startswith("gti_")}
    assert documented == served


def test_every_alert_is_documented() -> None:
    text = OPERATIONS.read_text(encoding="utf-8")
    for rule in rules():
        assert f"`{rule['alert']}`" in text
