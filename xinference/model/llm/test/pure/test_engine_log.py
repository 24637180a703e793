"""Engine logs: lines, secrets, causes."""

import pytest

from xinference.model.llm.engine_log import MAX_LINE_BYTES, REDACTED, LineCutter, Redactor, cause_of, without_prefix


def test_chunks_become_lines_whatever_their_boundaries() -> None:
    cutter = LineCutter()
    assert cutter.feed(b"one\ntw") == ["one"]
    assert cutter.feed(b"o\r\nthr") == ["two"]
    assert cutter.feed(b"ee 10%\rthree 20%\r") == ["three 10%", "three 20%"]
    assert cutter.feed(b"last") == []
    assert cutter.end() == ["last"]
    assert cutter.end() == []


def test_an_endless_line_is_cut_and_its_rest_dropped_and_counted() -> None:
    cutter = LineCutter()
    lines = cutter.feed(b"x" * (MAX_LINE_BYTES + 10))
    assert [len(line) for line in lines] == [MAX_LINE_BYTES]
    assert cutter.feed(b"y" * 50) == []
    assert cutter.feed(b"z\nnext\n") == ["next"]
    assert cutter.dropped_bytes == 10 + 50 + 1


def test_colours_and_broken_bytes_do_no_harm() -> None:
    assert LineCutter().feed(b"\x1b[31mred\x1b[0m \xff\n") == ["red �"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("Authorization: Bearer abc.def-123", f"Authorization: Bearer {REDACTED}"),
        ("{'authorization': 'Basic dXNlcg=='}", f"{{'authorization': 'Basic {REDACTED}'}}"),
        ("api_key=abcdef123456 model=m", f"api_key={REDACTED} model=m"),
        ('"hf_token": "secretsecret"', f'"hf_token": "{REDACTED}"'),
        ("using hf_abcdefghijklmnop1234", f"using {REDACTED}"),
        ("sk-abcdefghijklmnop1234 failed", f"{REDACTED} failed"),
        ("https://user:pa55word@host/x", f"https://user:{REDACTED}@host/x"),
        ("max_tokens=128 num_tokens: 4096", "max_tokens=128 num_tokens: 4096"),
        ("loading 12 tokens", "loading 12 tokens"),
    ],
)
def test_what_looks_like_a_secret_is_hidden_and_nothing_else(line: str, shown: str) -> None:
    assert Redactor()(line) == shown


def test_values_of_secret_variables_are_hidden_wherever_they_appear() -> None:
    redact = Redactor.for_environment({"MY_API_KEY": "swordfish1", "PATH": "/usr/bin", "DB_PASSWORD": "1", "LONG_SECRET": "swordfish123"})
    assert redact("a swordfish123 b swordfish1 c /usr/bin 1") == f"a {REDACTED} b {REDACTED} c /usr/bin 1"


def test_the_cause_is_the_core_s_exception_not_the_server_s_echo_of_it() -> None:
    log = [
        "(EngineCore pid=12) ERROR 11-29 16:00:00 [core.py:10] Traceback (most recent call last):",
        '(EngineCore pid=12) ERROR 11-29 16:00:00 [core.py:10]   File "x.py", line 1, in f',
        "(EngineCore pid=12) ERROR 11-29 16:00:00 [core.py:10] ValueError: No available memory for the cache blocks.",
        "(APIServer pid=9) Traceback (most recent call last):",
        "(APIServer pid=9) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        "some warning at exit",
    ]
    assert cause_of(log) == "ValueError: No available memory for the cache blocks."


def test_without_an_exception_the_last_words_are_the_cause() -> None:
    assert cause_of(["usage: ...", "api_server.py: error: unrecognized arguments: --nope", ""]).endswith("--nope")
    assert cause_of([]) == ""


PEER_ATTACHED = "(EngineCore pid=12) INFO 11-29 16:00:00 [peers.py:10] peer m-1 attached"


@pytest.mark.parametrize(
    "line", [PEER_ATTACHED, "INFO peer m-1 attached", "2026-11-29 16:00:00,123 INFO peers: no exception", "WARNING slow", "loading"]
)
def test_an_engine_that_was_killed_is_not_explained_by_what_it_happened_to_say_last(line: str) -> None:
    assert cause_of([line], killed=True) == ""


def test_an_engine_that_was_killed_is_explained_by_an_error_that_it_told_of() -> None:
    fatal = "(EngineCore pid=12) ERROR 11-29 16:00:00 [core.py:10] cannot allocate memory"
    assert cause_of([fatal, PEER_ATTACHED], killed=True) == "cannot allocate memory"
    assert cause_of(["Fatal Python error: Segmentation fault", PEER_ATTACHED], killed=True).startswith("Fatal Python error")
    assert cause_of(["MemoryError: out of it", PEER_ATTACHED], killed=True) == "MemoryError: out of it"


def test_good_news_is_never_the_cause() -> None:
    assert cause_of([PEER_ATTACHED]) == ""
    assert cause_of(["no such option", PEER_ATTACHED]) == "no such option"


def test_pydantic_errors_of_an_engine_are_found() -> None:
    lines = ["pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig", "  Value error, bad thing [type=...]"]
    assert cause_of(lines).startswith("pydantic_core._pydantic_core.ValidationError: 1 validation error")


def test_a_line_s_prefix_is_process_level_time_and_place() -> None:
    assert without_prefix("(APIServer pid=1) INFO 11-29 16:36:32 [a.py:2] hello [x] (y)") == "hello [x] (y)"
    assert without_prefix("plain text") == "plain text"
