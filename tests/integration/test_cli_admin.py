"""``gti onboard``, ``gti compact`` and ``gti serve`` over a store, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from test_cli import ROOT, Served, assert_one_line, environment, gti

from gti_core.bundle import load_bundle
from service.client import AdminClient, ClientError


def onboard_file(folder: Path, *titles: str) -> Path:
    file = folder / "items.jsonl"
    records = [{"item_id": f"n{n}", "title": title} for n, title in enumerate(titles)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_from_a_file_to_served_to_a_new_bundle(tmp_path: Path, tiny_bundle: Path) -> None:
    served = Served(tmp_path, tiny_bundle)
    [command] = [line for line in served.welcome.splitlines() if "curl" in line]
    url = command.split()[2].removesuffix("/v1/recommendations")
    store = tmp_path / ".gti" / "gti.db"
    script = str(ROOT / "tests" / "fake_worker.py")
    worker = subprocess.Popen(
        [sys.executable, script, str(tiny_bundle), str(store)],
        env=environment(),
        stderr=subprocess.DEVNULL,
    )
    try:
        bad = gti("onboard", str(onboard_file(tmp_path, "reject")), "--url", url)
        assert bad.returncode == 1
        assert bad.stdout == "n0\trejected: unlike its text\n"
        assert "is rejected" in bad.stderr
        mixed = gti("onboard", str(onboard_file(tmp_path, "reject", "Fine")), "--url", url)
        assert mixed.returncode == 1
        assert mixed.stdout == "n0\trejected: unlike its text\nn1\tlive\n"
        assert "1 of 2 items were rejected" in mixed.stderr
        done = gti("onboard", str(onboard_file(tmp_path, "One")), "--url", url)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "n0\tlive\n"
        assert "served from version 3" in done.stderr
        again = gti("onboard", str(onboard_file(tmp_path, "One")), "--url", url)
        assert again.stdout == "n0\tknown\n"
        assert httpx.get(f"{url}/v1/items/n0").json()["title"] == "One"
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait(30)
        returncode, errors = served.end()
    assert returncode == 0
    assert "version 3 is served" in errors

    # The rows of the fake grounder are too narrow for this bundle: compaction says so.
    arguments = ["--bundle", str(tiny_bundle), "--data-dir", ".gti", "-o", "out"]
    result = gti("compact", *arguments, cwd=tmp_path)
    assert result.returncode == 1
    assert_one_line(result, "rows onboarded don't fit")


def test_compact_makes_a_bundle_that_has_a_store_of_its_own(
    tmp_path: Path, tiny_bundle: Path
) -> None:
    arguments = ["--bundle", str(tiny_bundle), "--store", "my.db", "-o", "out"]
    result = gti("compact", *arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    made = load_bundle(tmp_path / "out")
    assert result.stdout == f"out: 12 items of version 1, digest {made.digest}\n"
    other = gti(
        "serve", "--engine", "fake", "--port", "0", "--bundle", "out", "--store", "my.db",
        cwd=tmp_path,
    )  # fmt: skip
    assert other.returncode == 1
    before = load_bundle(tiny_bundle).digest[:12]
    assert_one_line(other, "my.db", before, made.digest[:12], "--store")


@pytest.mark.parametrize("content", [b"not a database" * 1000, b""])
def test_a_store_that_is_no_database(tmp_path: Path, tiny_bundle: Path, content: bytes) -> None:
    file = tmp_path / "my.db"
    file.write_bytes(content)
    if not content:
        file.unlink()
        file.mkdir()
    result = gti(
        "serve", "--engine", "fake", "--port", "0", "--bundle", str(tiny_bundle),
        "--store", "my.db", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 1
    assert_one_line(result, "my.db")


def test_a_service_that_is_not_there(tmp_path: Path) -> None:
    file = onboard_file(tmp_path, "One")
    result = gti("onboard", str(file), "--url", "http://127.0.0.1:9")
    assert result.returncode == 1
    assert "127.0.0.1:9" in result.stderr


@pytest.mark.parametrize("url", ["file:///etc/passwd", "127.0.0.1:8000"])
def test_only_http_addresses_are_asked(url: str) -> None:
    with pytest.raises(ClientError, match="no http address"):
        AdminClient(url)


def test_the_switches_have_both_ways(tmp_path: Path) -> None:
    text = gti("serve", "--help").stdout
    for name in ("--admin", "--no-admin", "--grounding-worker", "--no-grounding-worker"):
        assert name in text
    result = gti("serve", "--bundle", "nowhere", cwd=tmp_path, GTI_ADMIN="maybe")
    assert result.returncode == 2
    assert_one_line(result, "--admin", "GTI_ADMIN", "'maybe'")
    assert os.listdir(tmp_path) == []  # noqa: PTH208
