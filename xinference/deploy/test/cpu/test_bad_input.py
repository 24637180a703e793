"""Wrong words and wrong servers: every command says what was wrong and what to do, with an exit code, and never a traceback."""

import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
import pytest

from xinference.client.test.fakes import KEY, FakeServer, serving
from xinference.deploy.cli import COMMANDS, LazyGroup, cli, run
from xinference.errors import InvalidRequest
from xinference.settings import Limits, Settings, read_settings

# Each command that asks a server, as it is meant to be called.
ASKING: dict[str, tuple[str, ...]] = {
    "list": ("list",),
    "show": ("show", "m"),
    "logs": ("logs", "m"),
    "logs of a stream": ("logs", "m", "--follow"),
    "scale": ("scale", "m", "--replica", "2"),
    "terminate": ("terminate", "m"),
    "chat": ("chat", "m", "--prompt", "x"),
    "generate": ("generate", "m", "--prompt", "x"),
    "cache stats": ("cache", "stats", "m"),
    "cache clear": ("cache", "clear", "m"),
    "limits": ("limits",),
    "keys list": ("keys", "list"),
    "keys create": ("keys", "create", "n"),
    "keys revoke": ("keys", "revoke", "k"),
    "launch": ("launch", "--model-path", "/x"),
    "launch, planned": ("launch", "--model-path", "/x", "--dry-run"),
}
Tool = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tool:
    """Runs one command line; returns exit code, stdout and stderr."""
    monkeypatch.delenv("XINFERENCE_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: str, endpoint: str = "http://127.0.0.1:1") -> tuple[int, str, str]:
        monkeypatch.setenv("XINFERENCE_ENDPOINT", endpoint)
        code = run(cli, list(words), "xinference")
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert "Error: unexpected " not in err, "an error that nobody foresaw"
        return code, out, err

    return call


@contextmanager
def saying(answer: bytes) -> Iterator[str]:
    """The address of a server that answers everything with these bytes and hangs up."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            data = b""
            while b"\r\n\r\n" not in data:
                part = self.request.recv(65536)
                if not part:
                    return
                data += part
            length = next((int(row.split(b":")[1]) for row in data.split(b"\r\n") if row.lower().startswith(b"content-length:")), 0)
            left = length - len(data.partition(b"\r\n\r\n")[2])
            while left > 0:
                left -= len(self.request.recv(65536))
            self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def http(content: bytes, status: str = "200 OK", content_type: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
    return head.encode() + content


STRANGERS: dict[str, bytes] = {
    "a page": http(b"<html>hello</html>", content_type="text/html"),
    "a page of a proxy": http(b"<html>bad gateway</html>", "502 Bad Gateway", "text/html"),
    "a redirection": b"HTTP/1.1 302 Found\r\nlocation: http://evil.example/\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
    "null": http(b"null"),
    "a list": http(b"[]"),
    "a number": http(b"7"),
    "an object of others": http(b'{"data":7}'),
    "rows of others": http(b'{"data":[7]}'),
    "an empty object": http(b"{}"),
    "an error of others": http(b'{"detail":"nope"}', "404 Not Found"),
    "an error that is a text": http(b'{"error":"nope"}', "500 Internal Server Error"),
    "a million levels": http(b"[" * 1_000_000),
    "a million levels of an error": http(b"[" * 1_000_000, "500 Internal Server Error"),
    "invalid UTF-8": http(b'{"data":"\xff"}'),
    "another protocol": b"SSH-2.0-OpenSSH_9.9\r\n",
    "nothing": b"",
    "half an answer": b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{",
}


# Answers that a command could take for its own; what all commands read alike is tried with three of them.
SHAPES = ("a page", "null", "an object of others", "rows of others", "an empty object")
FEW = ("terminate", "logs of a stream", "launch")


@pytest.mark.parametrize("stranger", STRANGERS)
def test_whatever_is_no_server_of_this_api_is_told_of_in_words(tool: Tool, stranger: str) -> None:
    with saying(STRANGERS[stranger]) as endpoint:
        for name in ASKING if stranger in SHAPES else FEW:
            words = ASKING[name]
            code, out, err = tool(*words, endpoint=endpoint)
            assert (code, out) == (1, ""), name
            assert len(err) > 30, name


def test_every_command_that_asks_a_server_is_among_those() -> None:
    def leaves(name: str, command: click.Command) -> Iterator[str]:
        if isinstance(command, click.Group):
            for child in command.list_commands(click.Context(command)):
                found = command.get_command(click.Context(command), child)
                assert found is not None
                yield from leaves(f"{name} {child}", found)
        else:
            yield name

    group = LazyGroup()
    known = {leaf for name in COMMANDS for leaf in leaves(name, group.get_command(click.Context(group), name))}  # type: ignore[arg-type]
    assert known - {"quickstart", "doctor"} <= set(ASKING)


@pytest.mark.parametrize("name", ASKING)
def test_nobody_there_and_a_wrong_key_are_told_of_in_words(tool: Tool, name: str) -> None:
    code, out, err = tool(*ASKING[name])
    assert (code, out) == (1, "")
    assert "start one with `xinference-local`" in err
    with serving(FakeServer(key=KEY)) as address:
        code, out, err = tool(*ASKING[name], "--api-key", "wrong", endpoint=address)
        assert (code, out) == (1, "")
        assert "XINFERENCE_API_KEY" in err
        code, out, err = tool(*ASKING[name], "-o", "json", endpoint=address)
        assert (code, out, json.loads(err)["error"]["code"]) == (1, "", "invalid_api_key")


@pytest.mark.parametrize(
    ("endpoint", "code"),
    [
        ("http://[::1", 2),
        ("ftp://127.0.0.1", 2),
        ("http://127.0.0.1:99999", 2),
        ("http://127.0.0.1:x", 2),
        ("http://nobody.invalid:1", 1),
        ("http://127.0.0.1:1\n", 2),
        ("http://", 2),
        ("://", 2),
        ("http://a b", 2),
        ("http://127.0.0.1:1/\x00", 2),
        ("http://\x1b[31m", 2),
    ],
)
def test_an_endpoint_that_is_none_is_told_of_in_words(tool: Tool, endpoint: str, code: int) -> None:
    for words in (("list",), ("logs", "m", "--follow")):
        found, out, err = tool(*words, "-e", endpoint)
        assert (found, out) == (code, "")
        assert "Error: " in err
        assert "\x1b" not in err


@pytest.mark.parametrize("key", ["schlüssel", "a\nb", "a\x00b", "\x7f"])
def test_a_key_that_no_header_can_carry_is_told_of_without_repeating_it(tool: Tool, key: str) -> None:
    code, out, err = tool("list", "--api-key", key)
    assert (code, out) == (2, "")
    assert "printable ASCII" in err
    assert key not in err


@pytest.mark.parametrize(
    "words",
    [
        ("no-such-command",),
        ("list", "more"),
        ("list", "-o", "yaml"),
        ("list", "--no-such-option"),
        ("show",),
        ("show", ""),
        ("show", "\udcff"),
        ("generate", "m", "--prompt", "\udcff"),
        ("show", "m", "--model-uid", "n"),
        ("scale", "m"),
        ("scale", "m", "--replica", "0"),
        ("scale", "m", "--replica", "1e3"),
        ("scale", "m", "--replica", "2", "--timeout", "nan"),
        ("terminate", "m", "--drain", "-1"),
        ("terminate", "m", "--drain", "nan"),
        ("terminate", "m", "--drain", "inf"),
        ("logs", "m", "--tail", "-1"),
        ("generate", "m", "--prompt", "x", "--temperature", "nan"),
        ("generate", "m", "--prompt", "x", "--max-tokens", "0"),
        ("launch",),
        ("launch", "--model-path", "/x", "--replica", "-1"),
        ("launch", "--model-path", "/x", "--replica", str(10**30)),
        ("launch", "--model-path", "/x", "--xavier-cpu-cache-bytes", "12QiB"),
        ("launch", "--model-path", "/x", "--xavier-cpu-cache-bytes", "-1"),
        ("launch", "--model-path", "/x", "--engine-arg", "no-value"),
        ("launch", "--model-path", "/x", "--replica-config", "{"),
        ("launch", "--model-path", "/x", "--replica-config", "[" * 100_000),
        ("launch", "--model-path", "/x", "--replica-config", "@/nonexistent"),
        ("launch", "--model-path", "/x", "--enable-xavier=perhaps"),
        ("cache",),
        ("cache", "show", "m"),
        ("keys",),
        ("keys", "create"),
    ],
    ids=lambda words: " ".join(words)[:60],
)
def test_wrong_words_are_2_and_no_server_is_asked(tool: Tool, words: tuple[str, ...]) -> None:
    server = FakeServer()
    with serving(server) as address:
        code, out, err = tool(*words, endpoint=address)
    assert (code, out) == (2, "")
    assert err.strip()
    assert server.seen == []


@pytest.mark.parametrize(
    ("variable", "value", "kind"),
    [
        ("XINFERENCE_PORT", "abc", Settings),
        ("XINFERENCE_DRAIN_SECONDS", "soon", Settings),
        ("XINFERENCE_REQUIRE_KEY", "perhaps", Settings),
        ("XINFERENCE_LIMIT_BODY_BYTES", "-1", Limits),
        ("XINFERENCE_LIMIT_REQUEST_SECONDS", "0", Limits),
    ],
)
def test_a_variable_that_cannot_be_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, kind: Any) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidRequest) as caught:
        read_settings(kind)
    assert variable in str(caught.value)
    assert value in str(caught.value)


def test_a_list_in_a_variable_that_is_none_is_told_how_to_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XINFERENCE_ALLOWED_HOSTS", "a,b")
    with pytest.raises(InvalidRequest, match=r'\["a"\]'):
        read_settings(Settings)


def test_an_error_that_nobody_foresaw_is_told_of_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def broken() -> None:
        raise KeyError("id")

    assert run(broken, [], "broken") == 1
    err = capsys.readouterr().err
    assert "KeyError: 'id'" in err
    assert "XINFERENCE_TRACEBACK=1" in err
    monkeypatch.setenv("XINFERENCE_TRACEBACK", "1")
    with pytest.raises(KeyError):
        run(broken, [], "broken")
