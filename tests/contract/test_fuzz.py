"""Bytes that no client library would send: never a 500, never a hang, and it answers afterwards."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest
from contract_service import serving
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Address = tuple[str, int]
TIMEOUT_S = 30
QUIET_S = 0.3
RECOMMEND = b"POST /v1/recommendations HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
ONBOARD = b"POST /v1/admin/items HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
AS_JSON = b"Content-Type: application/json\r\n"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    with serving(tmp_path_factory.mktemp("fuzz")) as address:
        yield address


def exchange(address: Address, data: bytes, *, whole: bool = True) -> bytes:
    """Send bytes and read to the end. A hang is a TimeoutError, which fails the test.

    Args:
        address: the server's.
        data: what to send.
        whole: whether it is a whole request. Else the server may rightly wait for the rest: after
            a quiet moment this side ends its half.
    """
    received = b""
    with socket.create_connection(address, TIMEOUT_S if whole else QUIET_S) as connection:
        try:
            connection.sendall(data)
            while True:
                try:
                    part = connection.recv(65536)
                except TimeoutError:
                    if whole:
                        raise
                    whole = True
                    connection.settimeout(TIMEOUT_S)
                    connection.shutdown(socket.SHUT_WR)
                    continue
                if not part:
                    break
                received += part
        except (BrokenPipeError, ConnectionResetError):
            # Refused before all was sent; what it answered may be lost with the connection.
            pass
    return received


def status(answer: bytes) -> int | None:
    """Status of an answer; None for a connection closed without one."""
    if not answer:
        return None
    assert answer.startswith(b"HTTP/1.1 "), answer[:80]
    return int(answer[9:12])


def assert_alive(address: Address) -> None:
    answer = exchange(
        address, b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    )
    assert status(answer) == 200


def send(address: Address, data: bytes, *, whole: bool = True) -> int | None:
    """Status of the answer to bytes, after which the service must still answer."""
    found = status(exchange(address, data, whole=whole))
    assert found is None or found < 500, found
    assert_alive(address)
    return found


def with_body(head: bytes, body: bytes) -> bytes:
    return head + AS_JSON + b"Content-Length: %d\r\n\r\n" % len(body) + body


DEEP = 100_000
BODIES = {
    "deep lists": (b"[" * DEEP + b"]" * DEEP, {400, 422}),
    "deep objects": (b'{"a":' * DEEP + b"1" + b"}" * DEEP, {400, 422}),
    "deep and open": (b"[" * DEEP, {400}),
    "deep attribute": (
        b'{"items": [{"item_id": "n", "title": "x", "attributes": {"a": '
        + b"[" * DEEP + b"]" * DEEP + b"}}]}",
        {400, 422},
    ),
    "more digits than are read": (b'{"history": [], "k": ' + b"9" * 10_000 + b"}", {400, 422}),
    "many digits": (b'{"history": [], "k": ' + b"9" * 4_000 + b"}", {422}),
    "a float too large": (b'{"history": [], "k": 1e999999}', {422}),
    "NaN": (b'{"history": [], "k": NaN}', {422}),
    "lone surrogate": (b'{"history": ["\\ud800"]}', {422}),
    "lone surrogate as a name": (b'{"\\udfff": 1}', {422}),
    "bad UTF-8": (b'{"history": ["\xff\xfe"]}', {400}),
    "overlong UTF-8": (b'{"history": ["\xc0\x80"]}', {400}),
    "byte-order mark": (b'\xef\xbb\xbf{"history": []}', {200, 400, 422}),
    "UTF-16": ('{"history": []}'.encode("utf-16"), {200, 400, 422}),
    "nothing": (b"", {422}),
    "null": (b"null", {422}),
    "NUL": (b"\x00" * 100, {400}),
    "too large": (b" " * 1_100_000, {413, None}),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("head", [RECOMMEND, ONBOARD], ids=["recommend", "onboard"])
def test_bodies(address: Address, name: str, head: bytes) -> None:
    body, allowed = BODIES[name]
    # A body that suits one route may be wrong for the other, in another way.
    assert send(address, with_body(head, body)) in allowed | {422}


def test_of_duplicate_keys_the_last_counts(address: Address) -> None:
    body = b'{"k": 1, "history": [], "k": 2}'
    answer = exchange(address, with_body(RECOMMEND, body))
    assert len(json.loads(answer.partition(b"\r\n\r\n")[2])["items"]) == 2


GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
REQUESTS = {
    "header of 100 kB": GET + b"X-Large: " + b"a" * 100_000 + b"\r\n\r\n",
    "header of 1 MB": GET + b"X-Large: " + b"a" * 1_000_000 + b"\r\n\r\n",
    "key of 60 kB": GET + b"Authorization: Bearer " + b"a" * 60_000 + b"\r\n\r\n",
    "10,000 headers": GET + b"".join(b"X-%d: 1\r\n" % n for n in range(10_000)) + b"\r\n",
    "the same header 1,000 times": GET + b"X-Request-ID: a\r\n" * 1_000 + b"\r\n",
    "header without a name": GET + b": x\r\n\r\n",
    "folded header": GET + b"X-A: 1\r\n 2\r\n\r\n",
    "NUL in a header": GET + b"X-Request-ID: a\x00b\r\n\r\n",
    "bytes in a header": GET + b"X-Request-ID: \xff\xfe\r\nIdempotency-Key: \xff\r\n\r\n",
    "no host": b"GET /livez HTTP/1.1\r\nConnection: close\r\n\r\n",
    "two hosts": GET + b"Host: evil.example\r\n\r\n",
    "length that is no number": RECOMMEND + AS_JSON + b"Content-Length: x\r\n\r\n{}",
    "negative length": RECOMMEND + AS_JSON + b"Content-Length: -1\r\n\r\n{}",
    "huge length": RECOMMEND + AS_JSON + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n{}",
    "length above the body": RECOMMEND + AS_JSON + b"Content-Length: 50\r\n\r\n{}",
    "length below the body": RECOMMEND + AS_JSON + b"Content-Length: 2\r\n\r\n{}{}{}",
    "two lengths": RECOMMEND + AS_JSON + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "chunked": RECOMMEND + AS_JSON + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "chunk that is no number": RECOMMEND
    + AS_JSON
    + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "chunk that is cut off": RECOMMEND + AS_JSON + b"Transfer-Encoding: chunked\r\n\r\nff\r\n{}",
    "chunked and a length": RECOMMEND
    + AS_JSON
    + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "unknown coding": RECOMMEND + AS_JSON + b"Transfer-Encoding: gzip\r\n\r\n{}",
    "expectation": RECOMMEND + AS_JSON + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
    "upgrade": GET + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 50,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /livez\r\n\r\n",
    "nothing": b"",
    "half a request": b"GET /livez HT",
}
PATHS = [
    b"/v1/items/%00",
    b"/v1/items/%2e%2e",
    b"/v1/items/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    b"/v1/items/..%2f..%2f",
    b"/v1/items/../../etc/passwd",
    b"/docs-static/%2e%2e/%2e%2e/app.py",
    b"/docs-static/..%2f..%2fapp.py",
    b"/v1/items/%ff%fe",
    b"/v1/items/%ed%a0%80",
    b"/v1/items/%",
    b"/v1/items/%zz",
    b"/v1/items/" + b"a" * 60_000,
    b"/v1/items/" + b"%2f" * 20_000,
    b"//v1//info",
    b"/v1/items?cursor=%00",
    b"/v1/items?q=%ff&q=%00",
    b"/v1/items?" + b"&".join(b"a%d=1" % n for n in range(5_000)),
    b"/v1/admin/jobs/%0d%0aX-Evil:1",
    b"/v1/admin/versions/9999999999999999999999/activate",
    b"http://evil.example/v1/info",
    b"*",
    b"/\xff",
]  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_requests(address: Address, name: str) -> None:
    send(address, REQUESTS[name], whole=False)


@pytest.mark.parametrize("path", PATHS, ids=range(len(PATHS)))
@pytest.mark.parametrize("method", [b"GET", b"POST", b"DELETE", b"BREW"])
def test_paths_and_methods(address: Address, path: bytes, method: bytes) -> None:
    answer = exchange(
        address, method + b" " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    )
    found = status(answer)
    assert found is None or 400 <= found < 500 or (found == 200 and method == b"GET"), found
    assert b"root:" not in answer
    assert b"X-Evil" not in answer.partition(b"\r\n\r\n")[0]
    assert_alive(address)


GENERATED = settings(
    max_examples=25,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner)
)
fields = st.sampled_from(["history", "query", "k", "filters", "items", "item_id", "title", "zz"])


@GENERATED
@given(data=st.binary(max_size=300), head=st.sampled_from([b"", GET, RECOMMEND, b"GET /"]))
def test_any_bytes(address: Address, data: bytes, head: bytes) -> None:
    send(address, head + data, whole=False)


@GENERATED
@given(body=st.dictionaries(fields, values, max_size=4) | values)
@pytest.mark.parametrize("head", [RECOMMEND, ONBOARD], ids=["recommend", "onboard"])
def test_any_json(address: Address, head: bytes, body: object) -> None:
    found = send(address, with_body(head, json.dumps(body).encode()))
    assert found in {200, 202, 409, 422}


@GENERATED
@given(body=st.binary(max_size=200))
def test_any_body(address: Address, body: bytes) -> None:
    assert send(address, with_body(RECOMMEND, body)) in {200, 400, 422}
