"""``gti keys``, and a real service that asks for keys, in processes of their own."""

from __future__ import annotations

import http.server
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_cli import assert_one_line, environment, gti
from test_cli_admin import onboard_file
from typer.testing import CliRunner

from gti_core.data.dataset import ItemText
from service.access.keyfile import add_key, read_keys
from service.cli import app
from service.client import AdminClient, ClientError

KEY = re.compile(r"gti_([0-9a-f]{8})_[A-Za-z0-9_-]{43}")


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``gti keys ...`` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["keys", *arguments], prog_name="gti")

    return run


def test_add_list_revoke(keys: Any, tmp_path: Path) -> None:
    added = keys("add", "Shop", "--scope", "read", "--expires", "90d")
    assert added.exit_code == 0
    # Nothing but the key on standard output, so that a script can take it from there.
    found = KEY.fullmatch(added.stdout.rstrip("\n"))
    assert found is not None
    assert "only time" in added.stderr
    assert found[0] not in added.stderr
    keys("add", "Import job", "--scope", "admin")
    listed = keys("list").stdout
    assert found[0].split("_", 2)[2] not in listed
    header, first, second = (re.split(r" {2,}", line) for line in listed.splitlines())
    assert header == ["id", "name", "scope", "created", "expires", "state"]
    assert (first[:3], first[5]) == ([found[1], "Shop", "read"], "valid")
    assert (second[1:3], second[4:]) == (["Import job", "admin"], ["never", "valid"])
    lifetime = datetime.fromisoformat(first[4]) - datetime.fromisoformat(first[3])
    assert lifetime == timedelta(days=90)
    revoked = keys("revoke", found[1])
    assert revoked.stdout == f"key {found[1]} (Shop) is revoked\n"
    assert [line.split()[-1] for line in keys("list").stdout.splitlines()] == [
        "state", "revoked", "valid",
    ]  # fmt: skip
    assert [path.name for path in (tmp_path / ".gti").iterdir()] == ["keys.json"]


def test_another_file(keys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys("add", "a", "--scope", "read", "--keys-file", "my.json")
    monkeypatch.setenv("GTI_KEYS_FILE", "my.json")
    keys("add", "b", "--scope", "read")
    monkeypatch.delenv("GTI_KEYS_FILE")
    keys("add", "c", "--scope", "read", "--data-dir", "data")
    assert [record.name for record in read_keys(tmp_path / "my.json")] == ["a", "b"]
    assert [record.name for record in read_keys(tmp_path / "data" / "keys.json")] == ["c"]
    assert keys("list").stdout.splitlines()[1:] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["add", "x", "--scope", "read", "--expires", "soon"], ["--expires", "90d", "'soon'"]),
        (["add", "x", "--scope", "read", "--expires", "2020-01-01"], ["not in the future"]),
        (["add", "\x1b[31m", "--scope", "read"], ["printable"]),
        (["revoke", "0123abcd"], ["keys.json", "gti keys list"]),
        (["list", "--keys-file", "."], ["can't be read"]),
    ],
)
def test_faults_are_one_line(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    folder = tmp_path / ".gti"
    folder.mkdir()
    result = gti("keys", *arguments, cwd=tmp_path)
    assert result.returncode == 1
    assert_one_line(result, *words)


def test_a_scope_must_be_named(keys: Any) -> None:
    assert keys("add", "x").exit_code == 2
    assert keys("add", "x", "--scope", "root").exit_code == 2


@pytest.mark.parametrize("content", [None, "{"])
def test_serve_names_what_to_do(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "my keys.json").write_text(content)
    result = gti(
        "serve", "--engine", "fake", "--port", "0", "--host", "0.0.0.0",
        "--keys-file", "my keys.json", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 1
    if content is None:
        assert_one_line(
            result, "0.0.0.0", "gti keys add NAME --scope admin --keys-file 'my keys.json'"
        )
    else:
        assert_one_line(result, "my keys.json", "is no keys file")


def test_serve_refuses_off_for_others_to_reach(tmp_path: Path) -> None:
    result = gti("serve", "--host", "0.0.0.0", cwd=tmp_path, GTI_AUTH="off")
    assert result.returncode == 2
    assert_one_line(result, "--auth off", "--host is 0.0.0.0")


def test_an_audit_log_that_cannot_be_written(tmp_path: Path) -> None:
    result = gti("serve", "--engine", "fake", "--port", "0", "--audit-log", ".", cwd=tmp_path)
    assert result.returncode == 1
    assert_one_line(result, "--audit-log", "GTI_AUDIT_LOG")


class Guarded:
    """A running `gti serve` on all addresses, with an admin key and a read key."""

    def __init__(self, folder: Path, bundle: Path) -> None:
        self.folder = folder
        self.file = folder / ".gti" / "keys.json"
        self.admin, self.admin_record = add_key(self.file, "Import", "admin", datetime.now(UTC))
        self.read, self.read_record = add_key(self.file, "Shop", "read", datetime.now(UTC))
        arguments = ["serve", "--engine", "fake", "--port", "0", "--host", "0.0.0.0"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "service", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment(GTI_LOG_FORMAT="json", GTI_LOG_LEVEL="debug", GTI_BUNDLE=str(bundle)),
        )
        watchdog = threading.Timer(60, self.process.kill)
        watchdog.start()
        assert self.process.stdout is not None
        self.command = next(line for line in self.process.stdout if "curl" in line)
        watchdog.cancel()
        self.url = self.command.split()[2].removesuffix("/v1/recommendations")

    def info(self, **headers: str) -> int:
        return httpx.get(f"{self.url}/v1/info", headers=headers).status_code

    def end(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors


@pytest.fixture
def guarded(tmp_path: Path, tiny_bundle: Path) -> Iterator[Guarded]:
    guarded = Guarded(tmp_path, tiny_bundle)
    yield guarded
    if guarded.process.poll() is None:
        guarded.process.kill()
        guarded.process.communicate()


def test_a_service_with_keys_from_start_to_end(guarded: Guarded, tmp_path: Path) -> None:
    """The welcome's command, onboarding, hostile headers, a revoked key; then what was written."""
    answer = subprocess.run(
        ["bash", "-c", guarded.command],
        capture_output=True,
        text=True,
        timeout=30,
        env=environment(GTI_KEY=guarded.read),
        check=True,
    )
    assert len(json.loads(answer.stdout)["items"]) == 9
    assert httpx.get(f"{guarded.url}/readyz").status_code == 200

    file = onboard_file(tmp_path, "One")
    for key, words in ((None, "unauthorized"), (guarded.read, "forbidden_scope")):
        given = {} if key is None else {"GTI_KEY": key}
        refused = gti("onboard", str(file), "--url", guarded.url, **given)
        assert refused.returncode == 1
        assert words in refused.stderr
        assert "no setting" not in refused.stderr
        if key is not None:
            assert key.split("_", 2)[2] not in refused.stderr
    client = AdminClient(guarded.url, f" {guarded.admin}\n")
    job = client._send("/v1/admin/items", {"items": [{"item_id": "n0", "title": "One"}]})
    assert job["state"] == "queued"

    for value in (
        b"Bearer " + b"\xff" * 50,
        b"Bearer " + guarded.admin.encode() + b"x" * 10_000,
        b"",
        b"Bearer\t" + guarded.admin.encode(),
    ):
        headers = [(b"Authorization", value)]
        response = httpx.get(f"{guarded.url}/v1/info?key={guarded.admin}", headers=headers)
        assert response.status_code == 401
        assert guarded.admin not in response.text
    huge = httpx.get(f"{guarded.url}/v1/info", headers={"Authorization": "Bearer " + "x" * 300_000})
    assert huge.status_code in (400, 401, 431)

    assert guarded.info(**{"X-API-Key": guarded.read}) == 200
    revoked = gti("keys", "revoke", guarded.read_record.id, cwd=tmp_path)
    assert revoked.returncode == 0
    deadline = time.monotonic() + 1.5
    while guarded.info(**{"X-API-Key": guarded.read}) != 401:
        assert time.monotonic() < deadline, "a revoked key is still in force"
        time.sleep(0.05)
    assert guarded.info(**{"X-API-Key": guarded.admin}) == 200

    returncode, errors = guarded.end()
    assert returncode == 0
    log = (tmp_path / ".gti" / "audit.jsonl").read_text()
    entries = [json.loads(line) for line in log.splitlines()]
    assert [(entry["status"], entry["key_name"]) for entry in entries] == [
        (401, None),
        (403, "Shop"),
        (202, "Import"),
    ]
    assert entries[2]["job_id"] == job["job_id"]
    for line in errors.splitlines():
        json.loads(line)
    written = errors + log + guarded.file.read_text()
    for key in (guarded.admin, guarded.read):
        assert key.split("_", 2)[2] not in written


def test_proxies_are_believed_only_where_keys_are_asked_for(
    tiny_context: Any, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without keys nobody may choose the address that the audit log names."""
    import service.__main__ as main
    from service.engine.fake import FakeEngine
    from service.settings import Settings

    configs: list[Any] = []

    class StopError(Exception):
        pass

    def config(*_: Any, **options: Any) -> None:
        configs.append(options["proxy_headers"])
        raise StopError

    monkeypatch.setattr(main.uvicorn, "Config", config)
    for settings in (Settings(), Settings(auth="off")):
        with main._listen(Settings(port=0)) as listener, pytest.raises(StopError):
            main._serve(settings, tiny_context, lambda _: FakeEngine(tiny_model), listener)
    assert configs == [False, False]


class _Redirect(http.server.BaseHTTPRequestHandler):
    """Sends everyone to another address and notes the keys that came."""

    target = ""
    seen: list[tuple[str, str | None]]

    def _answer(self) -> None:
        self.seen.append((self.path, self.headers["Authorization"]))
        if self.path.startswith("/v1"):
            self.send_response(302)
            self.send_header("Location", self.target)
        else:
            self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_GET = do_POST = _answer  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


def test_a_key_is_not_taken_along_to_another_address() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), _Redirect) as server:
        _Redirect.seen = []
        _Redirect.target = f"http://localhost:{server.server_port}/elsewhere"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        key = "gti_0123abcd_" + "s" * 43
        try:
            AdminClient(f"http://127.0.0.1:{server.server_port}", key)._send("/v1/admin/jobs/1")
        finally:
            server.shutdown()
            thread.join()
    assert _Redirect.seen == [("/v1/admin/jobs/1", f"Bearer {key}"), ("/elsewhere", None)]


@pytest.mark.parametrize("key", ["hunter2", "gti_0123abcd_" + "s" * 43 + "\nX: y", "é" * 60])
def test_what_is_no_key_is_not_quoted(key: str) -> None:
    with pytest.raises(ClientError, match="GTI_KEY holds no key") as caught:
        AdminClient("http://127.0.0.1:9", key).onboard([ItemText("n", "One")])
    assert key[:10] not in str(caught.value)
