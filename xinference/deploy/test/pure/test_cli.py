"""The command line against the fake server: what is printed, where, and which exit code."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from xinference.client.test.fakes import KEY, FakeServer, serving
from xinference.deploy.cli import ALIASES, COMMANDS, LazyGroup, cli, run


class Tool(Protocol):
    def __call__(self, *words: str) -> tuple[int, str, str]: ...


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def address(server: FakeServer) -> Iterator[str]:
    with serving(server) as address:
        yield address


@pytest.fixture
def tool(address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tool:
    """Runs one command line; returns exit code, stdout and stderr."""
    monkeypatch.setenv("XINFERENCE_ENDPOINT", address)
    monkeypatch.delenv("XINFERENCE_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: str) -> tuple[int, str, str]:
        code = run(cli, list(words), "xinference")
        out, err = capsys.readouterr()
        return code, out, err

    return call


LAUNCH = ("launch", "--model-uid", "m", "--model-path", "/models/m")


def sent(server: FakeServer) -> dict[str, Any]:
    """The body of the launch that the server saw."""
    body: dict[str, Any] = next(body for method, target, body, _ in server.seen if (method, target.split("?")[0]) == ("POST", "/v1/models"))
    return body


def test_a_model_goes_through_its_life(tool: Tool) -> None:
    assert tool(*LAUNCH, "--replica", "2", "--enable-xavier")[0] == 0
    code, out, _ = tool("list")
    assert code == 0
    assert out.split()[-6:] == ["m", "ready", "2", "on", "2048", "-"]
    assert "m-1" in tool("show", "m")[1]
    assert tool("scale", "m", "--replica", "3")[1] == "m: 3 of 3 replicas ready\n"
    assert "peer_cpu" in tool("cache", "stats", "m")[1]
    assert tool("cache", "clear", "m")[1] == "cleared, 4.0 KiB freed\n"
    assert tool("terminate", "m")[0] == 0
    assert tool("list", "-o", "json")[1] == "[]\n"


def test_limits_are_shown_with_what_they_have_refused(tool: Tool) -> None:
    code, out, _ = tool("limits")
    assert code == 0
    assert out.split()[-8:] == ["choices", "4", "8", "3", "upper", "bound", "of", "`n`"]


@pytest.mark.parametrize(
    "words", [("list",), ("show", "m"), ("scale", "m", "-r", "1"), ("cache", "stats", "m"), ("cache", "clear", "m"), ("limits",)]
)
def test_every_result_can_be_had_as_json_alone_on_stdout(tool: Tool, words: tuple[str, ...]) -> None:
    tool(*LAUNCH)
    code, out, _ = tool(*words, "-o", "json")
    assert code == 0
    json.loads(out)


@pytest.mark.parametrize(
    "words", [("--enable-xavier",), ("--enable-xavier=true",), ("--enable_xavier", "True"), ("--enable-xavier", "yes")]
)
def test_sharing_is_switched_on_in_every_spelling(tool: Tool, server: FakeServer, words: tuple[str, ...]) -> None:
    assert tool(*LAUNCH, "--replica", "2", *words)[0] == 0
    assert sent(server)["enable_xavier"] is True


@pytest.mark.parametrize("words", [("--enable-xavier=false",), ("--enable_xavier", "False")])
def test_sharing_is_switched_off_in_every_spelling(tool: Tool, server: FakeServer, words: tuple[str, ...]) -> None:
    assert tool(*LAUNCH, *words)[0] == 0
    assert sent(server)["enable_xavier"] is False


def test_upstreams_spellings_of_a_launch_work(tool: Tool, server: FakeServer) -> None:
    words = (
        "-n name -s 7 -f pytorch -en vllm -t LLM -u m -r 2 --n-gpu auto --max_model_len 4096 --enforce_eager --gpu_memory_utilization=0.5"
    )
    assert tool("launch", "--model_path", "/models/m", *words.split())[0] == 0
    expected: dict[str, Any] = {
        "model_name": "name",
        "model_size_in_billions": "7",
        "model_format": "pytorch",
        "model_engine": "vllm",
        "model_type": "LLM",
    }
    expected |= {
        "model_uid": "m",
        "replica": 2,
        "n_gpu": "auto",
        "max_model_len": 4096,
        "enforce_eager": True,
        "gpu_memory_utilization": 0.5,
    }
    assert expected.items() <= sent(server).items()


def test_engine_arguments_and_environment_are_pairs(tool: Tool, server: FakeServer) -> None:
    words = ("--engine-arg", "max-model-len=512", "--engine-arg", "dtype=bfloat16", "--env", "OMP_NUM_THREADS=1")
    assert tool(*LAUNCH, *words)[0] == 0
    assert sent(server)["engine_config"] == {"max_model_len": 512, "dtype": "bfloat16"}
    assert sent(server)["envs"] == {"OMP_NUM_THREADS": "1"}
    assert "not of the form NAME=VALUE" in tool(*LAUNCH, "--engine-arg", "max-model-len")[2]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("launch", "--enable-xavir"), "--enable-xavier"),
        (("launch", "--max-modl-len", "512"), "--max-model-len"),
        (("list", "--outptu", "json"), "--output"),
        (("lsit",), "'list'"),
        (("cache", "clera", "m"), "clear"),
    ],
)
def test_a_misspelt_word_is_refused_with_the_nearest_one(tool: Tool, server: FakeServer, words: tuple[str, ...], hint: str) -> None:
    code, _, err = tool(*words)
    assert code == 2
    assert "Did you mean" in err
    assert hint in err
    assert server.seen == []


def test_a_dry_run_spells_out_the_arithmetic_and_launches_nothing(tool: Tool, server: FakeServer) -> None:
    code, out, _ = tool(*LAUNCH, "--replica", "2", "--enable-xavier", "--dry-run")
    assert code == 0
    assert "32 tokens x 1.0 KiB = 32.0 KiB" in out
    assert "1 MiB / 32 KiB a block = 32 blocks = 1,024 tokens" in out
    assert server.models == {}
    assert json.loads(tool(*LAUNCH, "--dry-run", "-o", "json")[1])["kv"]["bytes_per_block"] == 32768


def test_a_launch_that_is_not_waited_for_returns_at_once(tool: Tool, server: FakeServer) -> None:
    server.holds.add("m")
    code, out, _ = tool(*LAUNCH, "--detach")
    assert code == 0
    assert "xinference show m" in out


def test_progress_goes_to_stderr_event_by_event(tool: Tool) -> None:
    _, out, err = tool(*LAUNCH)
    assert [line.split(":")[0] for line in err.splitlines()] == ["m", "m", "m"]
    assert "plan made" not in out


def test_a_launch_that_fails_says_why_and_exits_with_1(tool: Tool, server: FakeServer) -> None:
    server.fails["m"] = "the weights are damaged"
    code, out, err = tool(*LAUNCH)
    assert (code, out) == (1, "")
    assert "Error: the weights are damaged" in err
    assert "the weights are damaged" in tool("show", "m")[1]


def test_what_the_server_refuses_as_malformed_exits_with_2_and_names_the_field(tool: Tool) -> None:
    code, _, err = tool(*LAUNCH, "--enable-xavier")
    assert code == 2
    assert "[replica]" in err


def test_an_unknown_model_exits_with_1_and_shows_the_request_id(tool: Tool) -> None:
    code, out, err = tool("show", "nobody")
    assert (code, out) == (1, "")
    assert "there is no model 'nobody'" in err
    assert "request id: request-1" in err


def test_errors_are_json_for_whoever_asked_for_json(tool: Tool) -> None:
    code, out, err = tool("show", "nobody", "-o", "json")
    assert (code, out) == (1, "")
    assert json.loads(err)["error"]["code"] == "model_not_found"


def test_no_server_is_said_in_words(tool: Tool) -> None:
    code, _, err = tool("list", "-e", "http://127.0.0.1:1")
    assert code == 1
    assert "no server answers at http://127.0.0.1:1" in err


def test_the_key_is_taken_from_the_environment(tool: Tool, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.key = KEY
    code, _, err = tool("list")
    assert code == 1
    assert "XINFERENCE_API_KEY" in err
    monkeypatch.setenv("XINFERENCE_API_KEY", KEY)
    assert tool("list")[0] == 0


def test_a_streamed_answer_is_printed_with_its_cache_hits_on_stderr(tool: Tool) -> None:
    tool(*LAUNCH)
    code, out, err = tool("chat", "m", "--prompt", "good day")
    assert (code, out) == (0, "good day \n")
    assert "32 of 64 prompt tokens cached" in err
    assert tool("generate", "m", "--prompt", "one two", "--no-stream")[1] == "one two\n"


def test_an_answer_can_be_steered_to_a_replica(tool: Tool, server: FakeServer) -> None:
    tool(*LAUNCH, "--replica", "2")
    answer = json.loads(tool("generate", "m", "--prompt", "x", "--replica", "m-1", "-o", "json")[1])
    assert answer["choices"][0]["text"] == "x"
    assert server.seen[-1][3]["x-xinference-replica"] == "m-1"


def test_an_engine_that_dies_inside_an_answer_exits_with_1(tool: Tool) -> None:
    tool(*LAUNCH)
    code, out, err = tool("generate", "m", "--prompt", "die")
    assert (code, out) == (1, "half")
    assert "the engine died" in err


def test_control_characters_of_a_model_do_not_reach_the_terminal(tool: Tool) -> None:
    tool(*LAUNCH)
    assert tool("generate", "m", "--prompt", "a\x1b[2Jb\x9bc")[1] == "a[2Jbc \n"


def test_logs_are_printed_for_one_replica(tool: Tool) -> None:
    tool(*LAUNCH)
    assert tool("logs", "m", "--replica", "m-0", "--tail", "2")[1] == "line 0 of m-0\nline 1 of m-0\n"
    assert tool("logs", "m", "--tail", "1", "--follow")[1] == "line 0 of all\n"


@pytest.mark.parametrize("words", [("show",), ("show", "m", "--model-uid", "n")])
def test_a_command_about_a_model_needs_exactly_one_uid(tool: Tool, words: tuple[str, ...]) -> None:
    assert tool(*words)[0] == 2


def test_a_model_can_be_named_as_upstream_does(tool: Tool) -> None:
    tool(*LAUNCH)
    assert tool("terminate", "--model_uid", "m")[0] == 0


def test_a_relative_model_path_means_the_users_directory(
    tool: Tool, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tool("launch", "--model-path", "here")
    assert sent(server)["model_path"] == str(tmp_path / "here")


def test_the_overview_says_of_each_command_what_the_command_says_of_itself() -> None:
    group = cli
    assert isinstance(group, LazyGroup)
    context = group.make_context("xinference", ["list"], resilient_parsing=True)
    for name, entry in COMMANDS.items():
        command = group.get_command(context, name)
        assert command is not None
        assert (command.name, command.short_help) == (name, entry.help)
    assert set(ALIASES.values()) <= set(COMMANDS)
