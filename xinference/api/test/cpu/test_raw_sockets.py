"""What no HTTP client would send: each has an answer in the error shape, none costs a 500, a connection or the next request's time."""

import json
from pathlib import Path
from typing import Any

import pytest

from xinference.api.config import ApiConfig
from xinference.api.test.bench import ANSWER, setup
from xinference.api.test.fakes import FakeCluster, answering, model, serving
from xinference.api.test.wire import HEALTH, HOST, JSON, chunked, line, nothing_left, post
from xinference.settings import Limits, Settings

CHAT = b'{"model":"m","messages":[{"role":"user","content":"x"}]%s}'
QUICK = ApiConfig(abort_seconds=0.1, keep_connection_seconds=0.05)
UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
NO_HTTP = (400, "invalid_http")
NO_JSON = (400, "invalid_json")


def nested(depth: int) -> bytes:
    """A chat whose deepest container is at this depth, the body itself counting as 1."""
    return CHAT % (b',"x":' + b"[" * (depth - 1) + b"]" * (depth - 1))


REFUSED: dict[str, tuple[bytes, tuple[int, str | None]]] = {
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", NO_HTTP),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", NO_HTTP),
    "CONNECT": (b"CONNECT evil.example:443 HTTP/1.1\r\n" + HOST + b"\r\n", NO_HTTP),
    "method of its own": (b"FOO /health HTTP/1.1\r\n" + HOST + b"\r\n", NO_HTTP),
    "bytes in the path": (b"GET /v1/models/\xff HTTP/1.1\r\n" + HOST + b"\r\n", NO_HTTP),
    "NUL in a field": (b"GET /health HTTP/1.1\r\n" + HOST + b"x: a\x00b\r\n\r\n", NO_HTTP),
    "folded field": (b"GET /health HTTP/1.1\r\n" + HOST + b"x-request-id: a\r\n b\r\n\r\n", NO_HTTP),
    "bare line feeds": (b"GET /health HTTP/1.1\nhost: localhost\n\n", NO_HTTP),
    "length and chunks": (chunked(b"0\r\n\r\n", b"content-length: 4\r\n"), NO_HTTP),
    "two lengths": (post(b"{} ", fields=b"content-length: 2\r\n"), NO_HTTP),
    "negative length": (post(b"{}", length=-2), NO_HTTP),
    "length of 30 digits": (post(b"{}", length=10**29), NO_HTTP),
    "chunk size of letters": (chunked(b"zz\r\n{}\r\n0\r\n\r\n"), NO_HTTP),
    "chunk size that overflows": (chunked(b"f" * 17 + b"\r\n"), NO_HTTP),
    "chunk longer than its size": (chunked(b"1\r\n{}\r\n0\r\n\r\n"), NO_HTTP),
    "unknown transfer encoding": (b"POST /v1/chat/completions HTTP/1.1\r\n" + JSON + b"transfer-encoding: gzip\r\n\r\nx", NO_HTTP),
    "two hosts": (b"GET /health HTTP/1.1\r\n" + HOST + b"host: evil.example\r\n\r\n", (400, "foreign_host")),
    "foreign host": (b"GET /health HTTP/1.1\r\nhost: evil.example\r\n\r\n", (400, "foreign_host")),
    "own host as user info": (b"GET /health HTTP/1.1\r\nhost: localhost@evil.example\r\n\r\n", (400, "foreign_host")),
    "half an address": (b"GET /nothing HTTP/1.1\r\nhost: [::1\r\n\r\n", (400, "foreign_host")),
    "port of letters": (b"GET /health HTTP/1.1\r\nhost: localhost:x\r\n\r\n", (400, "foreign_host")),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", (400, "foreign_host")),
    "foreign host of an absolute target": (b"GET http://localhost/health HTTP/1.1\r\nhost: evil.example\r\n\r\n", (400, "foreign_host")),
    "origin that is no address": (
        b"POST /v1/models/m/cancel HTTP/1.1\r\n" + HOST + b"origin: http://[\r\n\r\n",
        (403, "foreign_origin"),
    ),
    "origin that begins as ours": (
        b"POST /v1/models/m/cancel HTTP/1.1\r\n" + HOST + b"origin: http://localhost.evil.example\r\n\r\n",
        (403, "foreign_origin"),
    ),
    "origin that ends as ours": (
        b"POST /v1/models/m/cancel HTTP/1.1\r\n" + HOST + b"origin: http://evil.localhost\r\n\r\n",
        (403, "foreign_origin"),
    ),
    "head of 64 KiB and more": (b"GET /health HTTP/1.1\r\n" + HOST + b"x: " + b"a" * 65536 + b"\r\n\r\n", (431, "request_head_too_large")),
    "head of megabytes": (b"GET /health HTTP/1.1\r\n" + HOST + b"x: " + b"a" * 3_000_000, (431, "request_head_too_large")),
    "address of megabytes": (b"GET /" + b"a" * 3_000_000, (431, "request_head_too_large")),
    "129 fields": (b"GET /health HTTP/1.1\r\n" + HOST + b"x: a\r\n" * 128 + b"\r\n", (431, "request_head_too_large")),
    "100,000 fields": (b"GET /health HTTP/1.1\r\n" + HOST + b"x: a\r\n" * 100_000 + b"\r\n", (431, "request_head_too_large")),
    "text": (b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST + b"content-length: 2\r\n\r\n{}", (415, "unsupported_media_type")),
    "path upwards": (b"GET /v1/models/../../../etc/passwd HTTP/1.1\r\n" + HOST + b"\r\n", (404, "model_not_found")),
    "path upwards, encoded": (b"GET /v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd HTTP/1.1\r\n" + HOST + b"\r\n", (404, "model_not_found")),
    "path upwards, twice": (b"GET /v1/models/%252e%252e%252fetc HTTP/1.1\r\n" + HOST + b"\r\n", (404, "model_not_found")),
    "log of a path": (b"GET /v1/models/..%2f..%2fetc%2fpasswd/logs HTTP/1.1\r\n" + HOST + b"\r\n", (404, "model_not_found")),
    "line breaks in the path": (b"GET /v1/models/x%0d%0aset-cookie:%20a=b%0d%0a/y HTTP/1.1\r\n" + HOST + b"\r\n", (404, "not_found")),
    "NUL and half a letter in the path": (b"GET /v1/models/%00%c3 HTTP/1.1\r\n" + HOST + b"\r\n", (404, "model_not_found")),
    "number of 5,000 digits": (b"GET /v1/requests?limit=" + b"1" * 5000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", (400, None)),
    "invalid UTF-8": (post(b'{"model":"\xff"}'), NO_JSON),
    "NUL": (post(b"{}\x00"), NO_JSON),
    "half a surrogate": (post(CHAT % rb',"user":"\ud800"'), NO_JSON),
    "NaN": (post(CHAT % b',"temperature":NaN'), NO_JSON),
    "Infinity": (post(CHAT % b',"temperature":-Infinity'), NO_JSON),
    "1e999": (post(CHAT % b',"temperature":1e999'), NO_JSON),
    "10**400": (post(CHAT % (b',"seed":1' + b"0" * 400)), (400, None)),
    "10**400 as an engine's field": (post(CHAT % (b',"min_p_of_mine":1' + b"0" * 400)), (400, None)),
    "10**5000": (post(CHAT % (b',"seed":1' + b"0" * 5000)), NO_JSON),
    "65 levels": (post(nested(65)), (400, "limit_exceeded")),
    "a million levels": (post(b"[" * 1_000_000), (400, "limit_exceeded")),
    "list": (post(b"[1]"), NO_JSON),
    "reserved field, given twice": (post(CHAT % b',"kv_transfer_params":null,"kv_transfer_params":{}'), (400, None)),
    "launch of NaN": (post(b'{"replica":NaN}', "/v1/models"), NO_JSON),
    "launch of a million levels": (post(b"[" * 1_000_000, "/v1/models"), (400, "limit_exceeded")),
    "scale, invalid UTF-8": (post(b'{"replica":"\xff"}', "/v1/models/m/scale"), NO_JSON),
    "scale, a million levels": (post(b"[" * 1_000_000, "/v1/models/m/scale"), NO_JSON),
    "scale, 5,000 digits": (post(b'{"replica":' + b"1" * 5000 + b"}", "/v1/models/m/scale"), NO_JSON),
    "scale, NaN": (post(b'{"replica":NaN}', "/v1/models/m/scale"), (400, None)),
    "10 MiB and one byte": (post(b" " * (10 * 1024 * 1024 + 1)), (413, "request_too_large")),
    "10 MiB and one byte in chunks": (
        chunked((b"100000\r\n" + b" " * 0x100000 + b"\r\n") * 10 + b"1\r\n \r\n"),
        (413, "request_too_large"),
    ),
    "100 TiB announced": (post(b"", length=100 * 2**40), (413, "request_too_large")),
    "100 TiB announced, to be asked for": (post(b"", length=100 * 2**40, fields=b"expect: 100-continue\r\n"), (413, "request_too_large")),
}


async def test_what_cannot_be_is_refused_in_the_error_shape_and_leaves_nothing_behind() -> None:
    cluster = FakeCluster()
    await cluster.put(model())
    async with serving(cluster, config=QUICK) as served, nothing_left(served):
        found: dict[str, Any] = {}
        for name, (data, _) in REFUSED.items():
            async with line(served) as connection:
                await connection.send(data)
                reply = await connection.reply()
                found[name] = (reply.status, reply.error["code"])
                assert reply.headers["content-type"] == "application/json", name
                assert "set-cookie" not in reply.headers, name
        assert found == {name: expected for name, (_, expected) in REFUSED.items()}
    assert {name for name, _ in cluster.calls} <= {"route_changes", "route_table", "describe_model", "logs", "cancel_launch"}
    assert cluster.asked("cancel_launch") == []


ACCEPTED: dict[str, bytes] = {
    "64 levels": post(nested(64)),
    "one byte at a time": chunked(b"".join(b"1\r\n%c\r\n" % byte for byte in CHAT % b"") + b"0\r\n\r\n"),
    "chunk extensions and trailers": chunked(b"%x;a=b\r\n%s\r\n0\r\nx-later: 1\r\n\r\n" % (len(CHAT % b""), CHAT % b"")),
    "an offer of HTTP/2": post(CHAT % b"", fields=UPGRADE),
    "an offer of a web socket": post(CHAT % b"", fields=b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: x\r\n"),
    "absolute target": post(CHAT % b"").replace(b"POST /", b"POST http://localhost/"),
    "HTTP/1.0": post(CHAT % b"").replace(b"HTTP/1.1", b"HTTP/1.0"),
    "host in capitals": post(CHAT % b"").replace(HOST, b"HOST: LocalHost:80\r\n"),
    "key given twice": post(CHAT % b',"model":"m"'),
    "NUL inside a text": post(CHAT % rb',"user":"\u0000"'),
    "wrong charset": post(CHAT % b"").replace(b"application/json", b"application/json; charset=utf-16"),
}


async def test_what_is_odd_but_right_is_answered(tmp_path: Path) -> None:
    async with setup(tmp_path, answering(ANSWER), config=QUICK) as (_, [engine], served, _), nothing_left(served):
        for name, data in ACCEPTED.items():
            async with line(served) as connection:
                await connection.send(data)
                reply = await connection.reply()
                assert (reply.status, json.loads(reply.content)["object"]) == (200, "chat.completion"), (name, reply.content)
    assert len(engine.received) == len(ACCEPTED)
    assert {body["messages"][0]["content"] for _, body, _ in engine.received} == {"x"}


async def test_requests_that_offer_another_protocol_may_follow_each_other(tmp_path: Path) -> None:
    async with setup(tmp_path, answering(ANSWER), config=QUICK) as (_, _, served, _), nothing_left(served), line(served) as connection:
        await connection.send(post(CHAT % b"", fields=UPGRADE) * 3 + HEALTH)
        assert [(await connection.reply()).status for _ in range(4)] == [200] * 4
        await connection.send(post(CHAT % b"", fields=UPGRADE.replace(b"Upgrade,", b"Upgrade, close,")))
        assert (await connection.reply()).headers["connection"] == "close"
        assert await connection.end() == b""


async def test_a_body_that_offers_another_protocol_may_come_in_pieces(tmp_path: Path) -> None:
    async with setup(tmp_path, answering(ANSWER), config=QUICK) as (_, _, served, _), line(served) as connection:
        whole = post(CHAT % b"", fields=UPGRADE)
        for byte in range(0, len(whole), 7):
            await connection.send(whole[byte : byte + 7])
        assert (await connection.reply()).status == 200


async def test_two_hosts_are_refused_where_any_one_is_taken_too() -> None:
    async with serving(FakeCluster(), config=QUICK, settings=Settings(host="0.0.0.0")) as served:
        for more, status in [(b"", 200), (b"host: models.example\r\n", 400)]:
            async with line(served) as connection:
                await connection.send(b"GET /health HTTP/1.1\r\nhost: models.example\r\n" + more + b"\r\n")
                assert (await connection.reply()).status == status


async def test_pipelined_requests_are_answered_in_order() -> None:
    cluster = FakeCluster()
    async with serving(cluster, config=QUICK) as served, nothing_left(served), line(served) as connection:
        paths = ["/health", "/nothing", "/version", "/v1/models", "/ready"] * 20
        await connection.send(b"".join(b"GET %s HTTP/1.1\r\n%s\r\n" % (path.encode(), HOST) for path in paths))
        assert [(await connection.reply()).status for _ in paths] == [200, 404, 200, 200, 200] * 20


async def test_what_stands_behind_a_body_says_nothing_of_its_request(tmp_path: Path) -> None:
    """A proxy in front strips fields from heads, and may not know of those behind a body."""
    async with setup(tmp_path, answering(ANSWER), config=QUICK) as (_, _, served, _), line(served) as connection:
        body = b"%x\r\n%s\r\n0\r\n" % (len(CHAT % b""), CHAT % b"")
        await connection.send(chunked(body + b"x-request-id: forged\r\nx-xinference-replica: nobody\r\n\r\n"))
        reply = await connection.reply()
    assert reply.status == 200
    assert reply.headers["x-request-id"] != "forged"


async def test_a_field_cannot_be_put_into_an_answer_with_line_breaks() -> None:
    async with serving(FakeCluster(), config=QUICK) as served:
        for given in (b"a\rset-cookie: x=y", b"a%0d%0aset-cookie: x=y", b"a\tb", b"\xe4"):
            async with line(served) as connection:
                await connection.send(b"GET /health HTTP/1.1\r\n" + HOST + b"x-request-id: " + given + b"\r\n\r\n")
                reply = await connection.reply()
                assert "set-cookie" not in reply.headers
                assert reply.headers.get("x-request-id", "").encode("latin-1") != given


async def test_a_head_at_its_limits_passes() -> None:
    limits = Limits(head_bytes=2000, head_fields=20)
    async with serving(FakeCluster(), config=QUICK, limits=limits) as served:
        for fields, status in [(19, 200), (20, 431)]:
            async with line(served) as connection:
                await connection.send(b"GET /health HTTP/1.1\r\n" + HOST + b"x: a\r\n" * fields + b"\r\n")
                assert (await connection.reply()).status == status
        used = len("/health" + "host" + "localhost" + "x")
        for size, status in [(2000 - used, 200), (2001 - used, 431)]:
            async with line(served) as connection:
                await connection.send(b"GET /health HTTP/1.1\r\n" + HOST + b"x: " + b"a" * size + b"\r\n\r\n")
                assert (await connection.reply()).status == status


@pytest.mark.parametrize("trailers", [b"x: %s\r\n" % (b"a" * 70_000), b"x: a\r\n" * 200])
async def test_endless_fields_behind_a_body_end_their_request(trailers: bytes) -> None:
    cluster = FakeCluster()
    async with serving(cluster, config=QUICK) as served, nothing_left(served), line(served) as connection:
        await connection.send(chunked(b"2\r\n{}\r\n0\r\n" + trailers * 10))
        assert (await connection.reply()).status == 431
        assert await connection.end() == b""
