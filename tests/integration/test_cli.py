"""The ``gti`` command in processes of its own."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from service.settings import Settings, env_name, flag

ROOT = Path(__file__).parents[2]


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GTI_")}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH", "")]))
    return kept | {"PYTHONPATH": path, "COLUMNS": "200", "OMP_NUM_THREADS": "1"} | variables


def gti(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "service", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env=environment(**variables),
        check=False,
    )


def assert_one_line(result: subprocess.CompletedProcess[str], *words: str) -> None:
    [line] = result.stderr.splitlines()
    assert line.startswith("gti: ")
    for word in words:
        assert word in line
    assert result.stdout == ""


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["version"]])
def test_help_loads_no_heavy_library(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from service.cli import main\n"
        f"sys.argv = ['gti', *{arguments!r}]\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'vllm', 'sklearn', 'fastapi', 'safetensors'}\n"
        "print('LOADED', sorted(heavy & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=environment(),
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "LOADED []" in result.stdout


def test_serve_help_names_every_setting() -> None:
    text = gti("serve", "--help").stdout
    for name, field in Settings.model_fields.items():
        assert re.search(rf"^  {flag(name)} ", text, re.MULTILINE)
        default = "" if field.default is None else f", default {field.default}"
        assert f"[{env_name(name)}{default}]" in " ".join(text.split())


def test_version() -> None:
    assert gti("version").stdout == "gti-serve 0.1.0\n"


def test_openapi(tmp_path: Path) -> None:
    assert gti("openapi", cwd=tmp_path).returncode == 0
    checked_in = (ROOT / "openapi.yaml").read_text(encoding="utf-8")
    assert (tmp_path / "openapi.yaml").read_text(encoding="utf-8") == checked_in
    assert yaml.safe_load(gti("openapi", "-o", "-").stdout) == yaml.safe_load(checked_in)


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        (["--port", "70000"], {}, ["--port", "GTI_PORT", "65535"]),
        ([], {"GTI_PORT": "http"}, ["--port", "GTI_PORT", "'http'"]),
        (["--engine", "tpu"], {}, ["--engine", "GTI_ENGINE", "'tpu'"]),
        ([], {"GTI_MAX_K": "1000"}, ["--max-k is 1000", "--max-beam-width"]),
    ],
)
def test_bad_settings(arguments: list[str], variables: dict[str, str], words: list[str]) -> None:
    result = gti("serve", *arguments, **variables)
    assert result.returncode == 2
    assert_one_line(result, *words)


def test_unknown_variable_is_named(tmp_path: Path) -> None:
    result = gti("serve", "--bundle", "nowhere", "--port", "0", cwd=tmp_path, GTI_PROT="1")
    assert "WARNING" in result.stderr
    assert "GTI_PROT" in result.stderr


def test_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = gti("serve", "--engine", "fake", "--port", port, cwd=tmp_path)
    assert result.returncode == 1
    assert_one_line(result, f"127.0.0.1:{port}", "in use", "--port")


def test_unknown_host(tmp_path: Path) -> None:
    result = gti("serve", "--engine", "fake", "--host", "256.0.0.1", cwd=tmp_path)
    assert result.returncode == 1
    assert_one_line(result, "256.0.0.1")


def test_missing_bundle(tmp_path: Path) -> None:
    missing = tmp_path / "no-bundle"
    result = gti("serve", "--port", "0", "--bundle", str(missing), cwd=tmp_path)
    assert result.returncode == 1
    assert_one_line(result, str(missing))


def test_data_dir_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    result = gti("serve", "--port", "0", "--data-dir", "data", "--engine", "fake", cwd=tmp_path)
    assert result.returncode == 1
    assert_one_line(result, "data", "--data-dir")


@pytest.mark.parametrize(
    "name",
    [
        "adapter.safetensors",
        "items.json",
        "quantizer.safetensors",
        "rows.safetensors",
        "texts.jsonl",
    ],
)
def test_corrupt_bundle(tmp_path: Path, tiny_bundle: Path, name: str) -> None:
    """One flipped bit: the file and both digests are named."""
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, bundle)
    content = bytearray((bundle / name).read_bytes())
    before = hashlib.sha256(content).hexdigest()
    content[len(content) // 2] ^= 1
    (bundle / name).write_bytes(content)
    after = hashlib.sha256(content).hexdigest()
    result = gti("serve", "--port", "0", "--engine", "fake", "--bundle", "bundle", cwd=tmp_path)
    assert result.returncode == 1
    assert_one_line(result, f"bundle/{name}", before, after)


class Served:
    """A running `gti serve` with the fake engine."""

    def __init__(self, folder: Path, bundle: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "service", "serve", "--engine", "fake", "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment(GTI_LOG_FORMAT="json", GTI_BUNDLE=str(bundle)),
        )
        watchdog = threading.Timer(60, self.process.kill)
        watchdog.start()
        assert self.process.stdout is not None
        self.welcome = ""
        for line in self.process.stdout:
            self.welcome += line
            if "curl" in line:
                break
        watchdog.cancel()

    def end(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors


@pytest.fixture
def served(tmp_path: Path, tiny_bundle: Path) -> Iterator[Served]:
    served = Served(tmp_path, tiny_bundle)
    yield served
    if served.process.poll() is None:
        served.process.kill()
        served.process.communicate()


def test_serve_answers_the_line_it_prints(served: Served, tmp_path: Path) -> None:
    [command] = [line for line in served.welcome.splitlines() if "curl" in line]
    words = shlex.split(command)
    assert words[:2] == ["curl", "-s"]
    url, header, body = words[2], words[4], words[6]
    assert header == "Content-Type: application/json"
    response = httpx.post(url, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 200
    answer = response.json()
    assert answer["unknown_items"] == []
    assert answer["fallback"] is False
    assert len(answer["items"]) == json.loads(body)["k"]
    assert f"{url.removesuffix('/v1/recommendations')}/docs" in served.welcome
    returncode, errors = served.end()
    assert returncode == 0
    access = [json.loads(line) for line in errors.splitlines()]
    [line] = [entry for entry in access if entry["logger"] == "gti.access"]
    assert line["request_id"] == answer["request_id"]
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/recommendations", 200)
    assert [path.name for path in tmp_path.iterdir()] == [".gti"]


def test_an_output_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    result = gti("prepare", "--dataset", "movielens-100k", "-o", str(tmp_path / "out"))
    assert_one_line(result, "out")
    assert result.returncode == 1
    assert (tmp_path / "out").read_text() == "mine"


def test_a_missing_column_names_file_row_and_column(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("item_id,title\n1,One\n")
    (tmp_path / "log.csv").write_text("user_id,timestamp\nu,5\n")
    result = gti(
        "prepare", "--items", str(tmp_path / "items.csv"),
        "--interactions", str(tmp_path / "log.csv"), "-o", str(tmp_path / "out"),
    )  # fmt: skip
    assert_one_line(result, "log.csv, row 1", "item_id")
    assert result.returncode == 1
    assert not (tmp_path / "out").exists()
