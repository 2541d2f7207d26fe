"""Keys, scopes, hosts, origins, rates and CORS in front of the routes, over the fake engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from fastapi.routing import APIRoute
from starlette.routing import Mount, Route
from test_service_http import assert_problem

from gti_core.bundle.delta import CatalogState
from service.access.keyfile import add_key, revoke_key
from service.access.start import AccessError
from service.app import create_app
from service.context import ServingContext
from service.engine.fake import FakeEngine
from service.onboarding.running import Onboarding
from service.settings import ConfigError, Settings, load_settings
from service.store import Store

NOW = datetime.now(UTC)
# Spelled out, not taken from the service: what is open is decided here once more.
OPEN = {
    "/livez", "/readyz", "/startupz", "/docs", "/docs/oauth2-redirect", "/docs-static",
    "/openapi.json",
}  # fmt: skip
BODY = {"history": ["a1"]}


class Keys:
    """A keys file with one key of each kind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read, self.read_record = add_key(path, "Shop", "read", NOW)
        self.admin, self.admin_record = add_key(path, "Import", "admin", NOW)
        self.expired, _ = add_key(path, "Old", "admin", NOW, NOW - timedelta(days=1))
        self.revoked, record = add_key(path, "Gone", "admin", NOW)
        revoke_key(path, record.id, NOW)

    def all(self) -> list[str]:
        return [self.read, self.admin, self.expired, self.revoked]


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.json")


Make = Callable[..., Any]


@pytest.fixture
def make(make_client: Any, tiny_context: ServingContext, tiny_model: Any, tmp_path: Path) -> Make:
    """Clients with a store, their data in a folder of the test's own."""

    def build(**settings: Any) -> Any:
        context = tiny_context
        store = Store(str(tmp_path / "gti.db"), context.name, context.digest, context.vocabulary)
        base = CatalogState(context.catalog, context.vocabulary, context.index)
        options = {"onboarding": Onboarding(store, base, poll_s=0.02)}
        client = make_client(
            FakeEngine(tiny_model),
            app_options=options,
            **({"data_dir": tmp_path, "audit_log": None} | settings),
        )
        return client.wait_ready()

    return build


@pytest.fixture
def guarded(make: Make, keys: Keys) -> Any:
    return make(auth="on")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def every_request(app: FastAPI) -> list[tuple[str, str, str]]:
    """(route, method, path) of every route and of methods that it has not."""
    requests = []
    for route in app.routes:
        if isinstance(route, Mount):
            assert route.path == "/docs-static"
            requests += [(route.path, "GET", f"{route.path}/swagger-ui.css")]
            continue
        assert isinstance(route, APIRoute | Route)
        path = (
            route.path.replace("{item_id:path}", "a1")
            .replace("{job_id:id}", "0" * 32)
            .replace("{number}", "1")
        )
        assert "{" not in path
        methods = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
        requests += [(route.path, method, path) for method in sorted(methods)]
    return requests


def test_no_route_is_forgotten(guarded: Any) -> None:
    """Every route with every method: without a key only those listed here answer."""
    requests = every_request(guarded.app)
    assert len({path for path, _, _ in requests}) >= 15
    for route, method, path in requests:
        response = guarded.request(method, path)
        if route in OPEN:
            assert response.status_code in (200, 405), (method, path)
        else:
            assert response.status_code == 401, (method, path)
            assert response.headers["www-authenticate"].startswith("Bearer ")


def test_a_read_key_opens_everything_but_admin(guarded: Any, keys: Keys) -> None:
    for route, method, path in every_request(guarded.app):
        status = guarded.request(method, path, headers=bearer(keys.read)).status_code
        if route.startswith("/v1/admin"):
            assert status == 403, (method, path)
        else:
            assert status not in (401, 403), (method, path)


def test_an_admin_key_opens_everything(guarded: Any, keys: Keys) -> None:
    for _, method, path in every_request(guarded.app):
        response = guarded.request(method, path, headers=bearer(keys.admin))
        assert response.status_code not in (401, 403), (method, path)


def test_routes_of_any_kind_need_a_key(guarded: Any, keys: Keys) -> None:
    """What is added tomorrow, without a thought of keys, is closed."""

    async def hello(_: Any = None) -> PlainTextResponse:
        return PlainTextResponse("hello")

    app: FastAPI = guarded.app
    app.add_api_route("/new", hello)
    app.add_route("/plain", hello)
    app.mount("/mounted", hello)  # type: ignore[arg-type]
    app.add_api_route("/v1/admin/new", hello)
    app.add_api_route("/elsewhere", hello, tags=["admin"])
    for path in ("/new", "/plain", "/mounted/x", "/v1/admin/new", "/elsewhere", "/nothing", "/"):
        assert_problem(guarded.get(path), 401, "unauthorized")
    for path in ("/new", "/plain"):
        assert guarded.get(path, headers=bearer(keys.read)).text == "hello"
    for path in ("/v1/admin/new", "/elsewhere"):
        assert_problem(guarded.get(path, headers=bearer(keys.read)), 403, "forbidden_scope")
        assert guarded.get(path, headers=bearer(keys.admin)).text == "hello"


@pytest.mark.parametrize(
    "path",
    ["/livez/", "/LIVEZ", "/livez/../v1/info", "//livez", "/livez%2F..%2Fv1%2Finfo", "/docs/x",
     "/docs-static-not", "/v1/items/livez", "/v1/info?x=/livez", "/v1/info#/livez",
     "/openapi.json/x", "/livez;x"],
)  # fmt: skip
def test_paths_that_look_open_are_not(guarded: Any, path: str) -> None:
    assert_problem(guarded.get(path), 401, "unauthorized")


def test_both_headers_are_taken(guarded: Any, keys: Keys) -> None:
    for headers in (bearer(keys.read), {"X-API-Key": keys.read}):
        assert guarded.post("/v1/recommendations", json=BODY, headers=headers).status_code == 200


HOSTILE: dict[str, list[tuple[str, bytes]]] = {
    "none": [],
    "empty": [("Authorization", b"")],
    "empty bearer": [("Authorization", b"Bearer ")],
    "empty key header": [("X-API-Key", b"")],
    "basic": [("Authorization", b"Basic KEY")],
    "key without scheme": [("Authorization", b"KEY")],
    "two bearers": [("Authorization", b"Bearer KEY"), ("Authorization", b"Bearer KEY")],
    "good and bad": [("Authorization", b"Bearer KEY"), ("Authorization", b"Bearer x")],
    "bad and good": [("Authorization", b"Bearer x"), ("Authorization", b"Bearer KEY")],
    "both headers": [("Authorization", b"Bearer KEY"), ("X-API-Key", b"KEY")],
    "list": [("Authorization", b"Bearer KEY, Bearer KEY")],
    "non-ascii": [("Authorization", b"Bearer KEY\xff\xc3\xa9")],
    "only non-ascii": [("X-API-Key", "gti_😀".encode())],
    "nul": [("X-API-Key", b"KEY\x00")],
    "longer": [("X-API-Key", b"KEYx")],
    "10 kB": [("Authorization", b"Bearer gti_0123abcd_" + b"x" * 10_000)],
    "10 kB of spaces": [("Authorization", b"Bearer" + b" " * 10_000 + b"x")],
    "upper case": [("X-API-Key", b"UPPER")],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(guarded: Any, keys: Keys, name: str) -> None:
    headers = [
        (
            header,
            value.replace(b"KEY", keys.admin.encode()).replace(
                b"UPPER", keys.admin.upper().encode()
            ),
        )
        for header, value in HOSTILE[name]
    ]
    response = guarded.get("/v1/info", headers=headers)
    assert_problem(response, 401, "unauthorized")
    assert keys.admin not in response.text


def test_nobody_learns_what_is_wrong_with_a_key(guarded: Any, keys: Keys) -> None:
    wrong = keys.read[:-1] + ("A" if keys.read[-1] != "A" else "B")
    answers = []
    for key in ("gti_00000000_" + "x" * 43, wrong, keys.expired, keys.revoked, "nonsense"):
        response = guarded.get("/v1/admin/jobs", headers={**bearer(key), "X-Request-ID": "r"})
        assert_problem(response, 401, "unauthorized")
        answers.append((response.text, sorted(response.headers.items())))
    assert all(answer == answers[0] for answer in answers)


def test_a_key_in_the_query_is_none(guarded: Any, keys: Keys) -> None:
    for name in ("key", "api_key", "token", "access_token", "X-API-Key", "Authorization"):
        response = guarded.get(f"/v1/info?{name}={keys.admin}")
        assert_problem(response, 401, "unauthorized")
        assert keys.admin not in response.text


def test_the_body_is_not_read_before_the_key(guarded: Any, keys: Keys) -> None:
    big = b"x" * 2_000_000
    assert_problem(guarded.post("/v1/admin/items", content=big), 401, "unauthorized")
    response = guarded.post("/v1/admin/items", content=b"{", headers=bearer(keys.read))
    assert_problem(response, 403, "forbidden_scope")
    assert 'scope="admin"' in response.headers["www-authenticate"]


def test_the_file_is_followed_while_it_runs(guarded: Any, keys: Keys) -> None:
    late, record = add_key(keys.path, "Late", "read", NOW)
    guarded.sleep(1.05)
    assert guarded.get("/v1/info", headers=bearer(late)).status_code == 200
    revoke_key(keys.path, record.id, NOW)
    guarded.sleep(1.05)
    assert guarded.get("/v1/info", headers=bearer(late)).status_code == 401
    keys.path.write_text("{")
    guarded.sleep(1.05)
    assert guarded.get("/v1/info", headers=bearer(late)).status_code == 401
    assert guarded.get("/v1/info", headers=bearer(keys.read)).status_code == 200


def test_admin_routes_work_on_any_address_with_a_key(make: Make, keys: Keys) -> None:
    client = make(host="0.0.0.0")
    headers = {**bearer(keys.admin), "Host": "recommender.example"}
    response = client.request("DELETE", "/v1/admin/items/50", headers=headers)
    assert (response.status_code, response.json()["version"]) == (200, 2)
    off = make(host="0.0.0.0", admin=False)
    response = off.get("/v1/admin/jobs", headers=headers)
    assert "--no-admin" in assert_problem(response, 403, "admin_disabled")["detail"]


@pytest.mark.parametrize(
    "settings", [{"host": "0.0.0.0"}, {"host": "::"}, {"host": "10.0.0.1"}, {"auth": "on"}]
)
@pytest.mark.parametrize("content", [None, "expired"])
def test_without_a_valid_key_it_does_not_start(
    make: Make, tmp_path: Path, settings: dict[str, Any], content: str | None
) -> None:
    if content is not None:
        add_key(tmp_path / "keys.json", "Old", "admin", NOW, NOW - timedelta(days=1))
    with pytest.raises(AccessError, match="gti keys add NAME --scope admin --data-dir"):
        make(**settings)


def test_off_is_for_loopback_addresses() -> None:
    with pytest.raises(ConfigError, match=r"--auth off needs a loopback address.*gti keys add"):
        load_settings({"auth": "off", "host": "0.0.0.0"})
    assert not load_settings({"auth": "off", "host": "::1"}).auth_on
    assert load_settings({"auth": "on"}).auth_on
    assert not load_settings({}).auth_on
    # A name that may mean anything is no loopback address.
    assert load_settings({"host": "localhost.example"}).auth_on


FOREIGN = ["evil.example", "localhost.evil.example:80", "", "127.0.0.1@evil.example"]


@pytest.mark.parametrize("host", FOREIGN)
def test_foreign_hosts_are_refused_while_there_are_no_keys(client: Any, host: str) -> None:
    """DNS rebinding: a page's own name, pointed at this machine."""
    for path in ("/v1/info", "/v1/items/a1", "/docs", "/livez"):
        response = client.get(path, headers={"Host": host})
        assert_problem(response, 421, "foreign_host")
    rebound = {"Host": host, "Origin": f"http://{host}"}
    response = client.request("DELETE", "/v1/admin/items/a1", headers=rebound)
    assert_problem(response, 421, "foreign_host")


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1:8000", "[::1]:8000"])
def test_own_hosts_are_answered(client: Any, host: str) -> None:
    assert client.get("/v1/info", headers={"Host": host}).status_code == 200


def test_with_keys_any_host_may_stand_there(guarded: Any, keys: Keys) -> None:
    headers = {**bearer(keys.read), "Host": "recommender.example"}
    assert guarded.get("/v1/info", headers=headers).status_code == 200
    # But no host lets anyone past.
    for host in ("localhost", "127.0.0.1"):
        assert_problem(guarded.get("/v1/info", headers={"Host": host}), 401, "unauthorized")


def test_rate_limit_per_key(make: Make, keys: Keys) -> None:
    client = make(auth="on", rate_limit=2)
    answers = [client.get("/v1/info", headers=bearer(keys.read)) for _ in range(6)]
    assert [answer.status_code for answer in answers] == [200] * 4 + [429] * 2
    assert answers[0].headers["ratelimit-policy"] == '"default";q=4;w=2'
    assert answers[0].headers["ratelimit"] == '"default";r=3;t=1'
    assert_problem(answers[-1], 429, "rate_limited")
    assert answers[-1].headers["retry-after"] == "1"
    assert answers[-1].headers["ratelimit"] == '"default";r=0;t=2'
    # Another key has a rate of its own; health has none; who has no key uses nobody's up.
    assert client.get("/v1/info", headers=bearer(keys.admin)).status_code == 200
    for _ in range(20):
        response = client.get("/livez")
        assert response.status_code == 200
        assert "ratelimit" not in response.headers
        assert client.get("/v1/info").status_code == 401
    client.sleep(1.05)
    assert client.get("/v1/info", headers=bearer(keys.read)).status_code == 200


def test_rate_limit_per_address_without_keys(make: Make) -> None:
    client = make(rate_limit=1)
    statuses = [client.get("/v1/info").status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
    other = httpx.AsyncClient(
        transport=httpx.ASGITransport(client.app, client=("127.0.0.9", 5)),
        base_url="http://localhost",
    )
    assert client.runner.run(other.get("/v1/info")).status_code == 200
    client.runner.run(other.aclose())


def test_no_limit_no_headers(client: Any) -> None:
    response = client.get("/v1/info")
    assert not [name for name in response.headers if name.startswith("ratelimit")]


ORIGIN = "https://shop.example"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}


def test_cors_is_off(client: Any) -> None:
    preflight = client.request("OPTIONS", "/v1/recommendations", headers=PREFLIGHT)
    assert_problem(preflight, 405, "method_not_allowed")
    for response in (preflight, client.get("/v1/info", headers={"Origin": ORIGIN})):
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_cors_for_listed_origins(make: Make, keys: Keys) -> None:
    client = make(auth="on", cors_origin="https://other.example/, https://Shop.example")
    response = client.request("OPTIONS", "/v1/recommendations", headers=PREFLIGHT)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "Authorization" in response.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in response.headers
    foreign = client.request(
        "OPTIONS", "/v1/recommendations", headers=PREFLIGHT | {"Origin": "https://evil.example"}
    )
    assert foreign.status_code == 400
    assert "access-control-allow-origin" not in foreign.headers
    asked = client.get("/v1/info", headers={"Origin": ORIGIN, **bearer(keys.read)})
    assert asked.headers["access-control-allow-origin"] == ORIGIN
    # A page must be able to read why it was refused.
    refused = client.get("/v1/info", headers={"Origin": ORIGIN})
    assert_problem(refused, 401, "unauthorized")
    assert refused.headers["access-control-allow-origin"] == ORIGIN
    # With a key, a page of a listed origin may administer; one of another may not.
    path = "/v1/admin/jobs"
    assert client.get(path, headers={"Origin": ORIGIN, **bearer(keys.admin)}).status_code == 200
    evil = client.get(path, headers={"Origin": "https://evil.example", **bearer(keys.admin)})
    assert_problem(evil, 403, "admin_disabled")


def test_without_keys_no_page_of_another_origin_administers(make: Make) -> None:
    client = make(cors_origin=ORIGIN)
    assert client.get("/v1/info", headers={"Origin": ORIGIN}).status_code == 200
    response = client.get("/v1/admin/jobs", headers={"Origin": ORIGIN})
    assert_problem(response, 403, "admin_disabled")


@pytest.mark.parametrize(
    "origin", ["*", "shop.example", "https://shop.example/path", "null", "a b"]
)
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"--cors-origin \(GTI_CORS_ORIGIN\)"):
        load_settings({"cors_origin": origin})


def audit(folder: Path) -> list[dict[str, Any]]:
    file = folder / "audit.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def audited(client: Any, folder: Path, expected: int) -> list[dict[str, Any]]:
    """The audit log, as soon as it has so many entries."""
    for _ in range(200):
        if len(audit(folder)) >= expected:
            break
        client.sleep(0.01)
    entries = audit(folder)
    assert len(entries) == expected, entries
    return entries


def test_audit_of_changes(guarded: Any, keys: Keys, tmp_path: Path) -> None:
    headers = bearer(keys.admin)
    guarded.get("/v1/admin/jobs", headers=headers)
    guarded.get("/v1/admin/jobs")
    guarded.post("/v1/recommendations", json=BODY, headers=headers)
    items = [{"item_id": "n1", "title": "Secret title"}, {"item_id": "n2", "title": "Two"}]
    job = guarded.post("/v1/admin/items", json={"items": items}, headers=headers).json()["job_id"]
    guarded.request("DELETE", "/v1/admin/items/e/1", headers={**headers, "X-Request-ID": "r7"})
    guarded.request("PATCH", "/v1/admin/items/e/1", json={"available": True}, headers=headers)
    guarded.post("/v1/admin/versions/1/activate", headers=headers)
    guarded.post(f"/v1/admin/jobs/{job}:cancel", headers=headers)
    guarded.post("/v1/admin/versions/99/activate", headers=headers)
    guarded.post("/v1/admin/items", content=b"{", headers=headers)
    entries = audited(guarded, tmp_path, 7)
    routes = [(e["method"], e["route"], e["status"]) for e in entries]
    assert routes == [
        ("POST", "/v1/admin/items", 202),
        ("DELETE", "/v1/admin/items/{item_id:path}", 200),
        ("PATCH", "/v1/admin/items/{item_id:path}", 200),
        ("POST", "/v1/admin/versions/{number}/activate", 200),
        ("POST", "/v1/admin/jobs/{job_id:id}:cancel", 200),
        ("POST", "/v1/admin/versions/{number}/activate", 404),
        ("POST", "/v1/admin/items", 415),
    ]
    assert (entries[0]["item_count"], entries[0]["job_id"]) == (2, job)
    assert (entries[1]["item_id"], entries[1]["version"], entries[1]["request_id"]) == (
        "e/1", 2, "r7",
    )  # fmt: skip
    assert [entries[2]["version"], entries[3]["version"], entries[5]["version"]] == [3, 1, 99]
    assert entries[4]["job_id"] == job
    for entry in entries:
        assert (entry["key_id"], entry["key_name"]) == (keys.admin_record.id, "Import")
        assert entry["client"] == "127.0.0.1"
        assert datetime.fromisoformat(entry["time"]) >= NOW - timedelta(seconds=1)
        assert "refused" not in entry
    assert "Secret title" not in (tmp_path / "audit.jsonl").read_text()


def test_audit_of_what_is_refused(guarded: Any, keys: Keys, tmp_path: Path) -> None:
    def retire(**headers: str) -> None:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        guarded.request("DELETE", "/v1/admin/items/a1", headers=names)

    retire()
    retire(X_API_Key="nonsense")
    retire(X_API_Key="gti_00000000_" + "x" * 43)
    retire(X_API_Key=keys.read)
    retire(X_API_Key=keys.expired)
    retire(X_API_Key=keys.revoked)
    retire(X_API_Key=keys.admin, Authorization=f"Bearer {keys.admin}")
    retire(X_API_Key=keys.admin, Origin="https://evil.example")
    entries = audited(guarded, tmp_path, 8)
    assert [(e["refused"], e["status"], e["key_name"]) for e in entries] == [
        ("no_key", 401, None),
        ("malformed", 401, None),
        ("unknown", 401, None),
        ("scope", 403, "Shop"),
        ("expired", 401, "Old"),
        ("revoked", 401, "Gone"),
        ("several_keys", 401, None),
        ("foreign_origin", 403, "Import"),
    ]
    assert {entry["item_id"] for entry in entries} == {"a1"}


def test_audit_without_keys(make: Make, tmp_path: Path) -> None:
    client = make()
    client.request("DELETE", "/v1/admin/items/a1")
    client.request("DELETE", "/v1/admin/items/a2", headers={"Host": "evil.example"})
    first, second = audited(client, tmp_path, 2)
    assert (first["key_id"], first["key_name"], first["status"]) == ("loopback", None, 200)
    assert (second["refused"], second["status"]) == ("foreign_host", 421)


@pytest.mark.parametrize("target", ["", "off"])
def test_audit_off(make: Make, tmp_path: Path, target: str) -> None:
    client = make(audit_log=target)
    assert client.request("DELETE", "/v1/admin/items/a1").status_code == 200
    client.sleep(0.05)
    assert not (tmp_path / "audit.jsonl").exists()
    assert not Path(target or "none").exists()


def test_secrets_stand_nowhere(
    guarded: Any, keys: Keys, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys in each place that a client may put them, a faulty engine included."""
    with caplog.at_level(logging.DEBUG):
        for key in keys.all():
            for headers in (bearer(key), {"X-API-Key": key}, {"X-Request-ID": key}):
                answer = guarded.get(f"/v1/info?key={key}", headers=headers)
                # The request's id is logged, echoed and handed to the engine.
                assert key not in answer.headers["x-request-id"]
                guarded.get(f"/v1/items/{key}", headers=headers)
                guarded.get(f"/{key}", headers=headers)
                guarded.request("DELETE", f"/v1/admin/items/{key}", headers=headers)
                guarded.post(f"/v1/admin/jobs/{key}:cancel", headers=headers)
                guarded.post("/v1/recommendations", json={"history": [key]}, headers=headers)

        async def fail(_: Any) -> Any:
            raise RuntimeError("inside")

        guarded.app.state.runtime._engine.decode = fail
        response = guarded.post("/v1/recommendations", json=BODY, headers=bearer(keys.read))
        assert response.status_code == 500
    audited(guarded, tmp_path, 4 * 3 * 2)
    # Records as any handler would see them, but for the test's own client, and the audit log.
    lines = [str(record.__dict__) for record in caplog.records if record.name[:4] != "http"]
    seen = "\n".join(lines) + (tmp_path / "audit.jsonl").read_text()
    assert "/v1/items/gti_" in seen
    for key in keys.all():
        assert key.split("_", 2)[2] not in seen


def test_openapi_says_what_each_operation_needs(client: Any) -> None:
    document = client.get("/openapi.json").json()
    assert set(document["components"]["securitySchemes"]) == {"bearer", "apiKey"}
    for path, item in document["paths"].items():
        for operation in item.values():
            admin = path.startswith("/v1/admin")
            wanted = [] if path in OPEN else [{"bearer": []}, {"apiKey": []}, {}]
            assert operation["security"] == wanted, path
            scope = None if path in OPEN else "admin" if admin else "read"
            assert operation.get("x-required-scope") == scope
            assert ("401" in operation["responses"]) is (path not in OPEN)
            if admin:
                answer = operation["responses"]["403"]["content"]["application/problem+json"]
                assert set(answer["examples"]) == {"admin_disabled", "forbidden_scope"}


def test_websockets_are_closed(guarded: Any) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/info", "headers": [], "query_string": b""}
    guarded.runner.run(guarded.app(scope, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_a_damaged_keys_file_at_the_start(tiny_context: ServingContext, tmp_path: Path) -> None:
    from service.access.keys import KeysError

    (tmp_path / "keys.json").write_text("{")
    settings = Settings(auth="on", data_dir=tmp_path)
    with pytest.raises(KeysError, match="is no keys file"):
        create_app(tiny_context, settings, lambda _: None)  # type: ignore[arg-type, return-value]
