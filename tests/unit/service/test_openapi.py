"""The OpenAPI document: the file in the repository is the running application's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from service.app import openapi_document
from service.problems import BY_CODE, MEDIA_TYPE
from service.schemas import Problem

FILE = Path(__file__).parents[3] / "openapi.yaml"


def test_file_equals_running_application(client: Any) -> None:
    served = client.get("/openapi.json").json()
    assert yaml.safe_load(FILE.read_text(encoding="utf-8")) == served
    assert served == openapi_document()


def test_paths() -> None:
    paths = openapi_document()["paths"]
    assert {(path, method) for path, item in paths.items() for method in item} == {
        ("/v1/recommendations", "post"),
        ("/v1/recommendations:batch", "post"),
        ("/v1/items", "get"),
        ("/v1/items/{item_id}", "get"),
        ("/v1/admin/items", "post"),
        ("/v1/admin/items/{item_id}", "patch"),
        ("/v1/admin/items/{item_id}", "delete"),
        ("/v1/admin/jobs", "get"),
        ("/v1/admin/jobs/{job_id}", "get"),
        ("/v1/admin/jobs/{job_id}:cancel", "post"),
        ("/v1/admin/versions", "get"),
        ("/v1/admin/versions/{number}/activate", "post"),
        ("/v1/info", "get"),
        ("/livez", "get"),
        ("/readyz", "get"),
        ("/startupz", "get"),
        ("/metrics", "get"),
    }


def test_errors_are_problems_with_true_examples() -> None:
    seen = set()
    for path in openapi_document()["paths"].values():
        for operation in path.values():
            for status, response in operation["responses"].items():
                if status.startswith("2"):
                    continue
                [(media_type, content)] = response["content"].items()
                assert media_type == MEDIA_TYPE
                assert content["schema"] == {"$ref": "#/components/schemas/Problem"}
                for code, example in content["examples"].items():
                    value = example["value"]
                    Problem.model_validate(value)
                    assert value["code"] == code
                    assert str(value["status"]) == status == str(BY_CODE[code].status)
                    seen.add(code)
    anywhere = {"not_found", "method_not_allowed", "client_closed", "foreign_host"}
    assert seen == set(BY_CODE) - anywhere


def test_every_reference_resolves() -> None:
    document = openapi_document()
    schemas = document["components"]["schemas"]
    assert "HTTPValidationError" not in schemas

    def references(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                yield node["$ref"]
            for value in node.values():
                yield from references(value)
        elif isinstance(node, list):
            for value in node:
                yield from references(value)

    found = set(references(document))
    assert found == {f"#/components/schemas/{name}" for name in schemas}


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
def test_docs_are_served(client: Any, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    assert "GTI Serve" in response.text
