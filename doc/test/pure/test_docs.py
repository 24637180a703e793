"""What the pages name exists: commands, options, paths of the API, metrics, tests, modules, messages; what they generate is whole."""

import re
from pathlib import Path

import click
import pytest

from doc.test.pages import (
    PAGES,
    PLAIN,
    ROOT,
    SOURCE,
    CommandLine,
    command_lines,
    extension,
    literals,
    messages,
    name_of,
    names_of_tests,
    section_of,
)
from xinference.api import administration, health, news, overview
from xinference.api.openai import openai_router
from xinference.core.states import MODEL_MOVES, REPLICA_MOVES
from xinference.deploy.launch_fields import unknown_options
from xinference.deploy.session import Invocation
from xinference.model.llm.vllm.xavier.config import XavierConfig
from xinference.model.llm.vllm.xavier.directory.counters import COUNTERS
from xinference.model.llm.vllm.xavier.directory.requests import SOURCES
from xinference.settings import Limits, Settings

each_page = pytest.mark.parametrize("page", [*PAGES, *PLAIN], ids=name_of)
GUIDE = SOURCE / "user_guide" / "xavier.rst"
# Commands of other people's tools, whose words are not ours to check.
FOREIGN = {"git", "cd", "pip", "python3"}
PATHS = [
    (method, route.path)
    for router in (health.router, openai_router(), news.router, administration.router, administration.model_router, overview.router)
    for route in router.routes
    for method in route.methods  # type: ignore[attr-defined]
]
CURL_TAKES_A_VALUE = {"-H", "-d", "-X"}
# Pages name files from the top, or from the package that they are about.
ROOTS = [ROOT, *(ROOT / "xinference" / below for below in ("", "model/llm", "model/llm/vllm", "model/llm/vllm/xavier"))]
FILE = re.compile(r"[A-Za-z_.-]+/[A-Za-z0-9_./-]+\.(?:py|md|toml|cfg|rst)|xinference/[a-z_/]+")
VLLMS_OWN = ("vllm/distributed/", "vllm/v1/")
MODULE = re.compile(r"xinference(?:\.[a-z_]+)+")
DESIGN_SECTIONS = ("Problem", "Contract", "What can still go wrong", "Tests that hold it")


def parse(command: click.Command, words: list[str], name: str) -> click.Context:
    """Parse a command line as the tool does, down to the command that would run; raises click's errors."""
    context = command.make_context(name, list(words), obj=Invocation())
    if isinstance(command, click.Group):
        found, child, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert child is not None
        return parse(child, rest, f"{name} {found}")
    return context


def check_ours(line: CommandLine) -> None:
    program, *words = line.words
    command = extension("commands").PROGRAMS[program]
    words = ["1" if word == "N" else str(SOURCE) if word.startswith("/models") else word for word in words]
    context = parse(command, words, program)
    if context.args:  # what is left over must name engine arguments
        known = [spelling for option in context.command.params for spelling in option.opts]
        unknown_options(context.args, "vllm", known)


def check_curl(line: CommandLine) -> None:
    words, method, url = list(line.words[1:]), "GET", ""
    while words:
        word = words.pop(0)
        if word in CURL_TAKES_A_VALUE:
            value = words.pop(0)
            method = value if word == "-X" else "POST" if word == "-d" and method == "GET" else method
        elif not word.startswith("-"):
            url = word
    path = re.sub(r"^http://[^/]+", "", url).partition("?")[0]
    fits = [found for verb, found in PATHS if verb == method and re.fullmatch(re.sub(r"\{[^}]+\}", "[^/]+", found), path)]
    assert fits, f"{line.page}: the API has no {method} {path}"


def check_make(line: CommandLine) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wanted = [word for word in line.words[1:] if "=" not in word]
    assert wanted, line
    assert set(wanted) <= targets, f"{line.page}: make has no {wanted}"


def check_module(line: CommandLine) -> None:
    _, _, name, *words = line.words
    path = (ROOT / name.replace(".", "/")).with_suffix(".py")
    assert path.exists(), f"{line.page}: there is no {name}"
    known = set(re.findall(r'add_argument\("(--[a-z-]+)"', path.read_text()))
    wanted = {word for word in words if word.startswith("--")}
    assert wanted <= known, f"{line.page}: {name} has no {sorted(wanted - known)}"


@each_page
def test_every_command_of_a_page_exists_with_its_options(page: Path) -> None:
    for line in command_lines(page):
        program = line.words[0]
        if program in extension("commands").PROGRAMS:
            check_ours(line)
        elif program == "curl":
            check_curl(line)
        elif program == "make":
            check_make(line)
        elif line.words[:2] == ["python", "-m"]:
            check_module(line)
        else:
            assert program in FOREIGN, f"{line.page}: {line.words}"


def test_a_command_that_does_not_exist_is_noticed() -> None:
    for text in ("xinference lunch", "xinference launch --modle-path /m", "xinference cache stats demo --deep"):
        with pytest.raises(click.UsageError):
            check_ours(CommandLine("here", text.split()))
    with pytest.raises(AssertionError, match="no GET /v1/modules"):
        check_curl(CommandLine("here", ["curl", "http://127.0.0.1:9997/v1/modules"]))
    with pytest.raises(AssertionError, match="make has no"):
        check_make(CommandLine("here", ["make", "coffee"]))
    with pytest.raises(AssertionError, match="there is no"):
        check_module(CommandLine("here", ["python", "-m", "benchmarks.coffee"]))
    with pytest.raises(AssertionError, match=r"has no \['--minuets'"):
        check_module(CommandLine("here", ["python", "-m", "benchmarks.churn", "--minuets", "1"]))


def test_the_guide_has_commands_to_check() -> None:
    assert len(list(command_lines(GUIDE))) >= 10
    assert any(line.words[:2] == ["make", "demo"] for line in command_lines(ROOT / "README.md"))


@each_page
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    known = names_of_tests()
    named = {word for text in literals(page.read_text()) for word in re.findall(r"\btest_[a-z0-9_]+(?:\.py)?", text)}
    assert named <= known, f"{name_of(page)} names tests that do not exist: {sorted(named - known)}"


@each_page
def test_every_file_and_module_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    for name in [*literals(text), *re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)]:
        if FILE.fullmatch(name) and not name.startswith(VLLMS_OWN):
            assert any((root / name).exists() for root in ROOTS), f"{name_of(page)}: {name}"
        if MODULE.fullmatch(name):
            module = ROOT / name.replace(".", "/")
            assert module.is_dir() or module.with_suffix(".py").exists(), f"{name_of(page)}: {name}"


@each_page
def test_every_metric_that_a_page_names_exists(page: Path) -> None:
    code = "".join(path.read_text() for path in (ROOT / "xinference/api").glob("metrics*.py"))
    generated = extension("facts").counters() + extension("facts").gauges()
    for name in re.findall(r"\bxinference_[a-z_]+(?=[`{])", page.read_text()):
        plain = name.removeprefix("xinference_").removesuffix("_total")
        assert name in generated or f'"{plain}"' in code or f'"{name}"' in code, f"{name_of(page)}: {name}"


def test_every_message_of_the_troubleshooting_section_is_in_the_code() -> None:
    known = messages()
    quoted = re.findall(r"^``(.+)``$", section_of(GUIDE, "Troubleshooting"), re.MULTILINE)
    assert len(quoted) >= 8
    for message in quoted:
        for part in (part.strip() for part in message.split("…")):
            assert any(part in text for text in known), f"nothing says {part!r}"


def test_every_generator_is_used_and_every_page_names_one_that_exists() -> None:
    named = {name for page in PAGES for name in re.findall(r"^\s*\.\. generated:: (\S+)$", page.read_text(), re.MULTILINE)}
    assert named == set(extension("generated").GENERATORS)


def test_generated_tables_are_whole() -> None:
    facts = extension("facts")
    assert all(f"``{spec.name}``" in facts.counters() for spec in COUNTERS)
    assert all(f"``{source}``" in facts.sources() for source in SOURCES)
    assert all(f"* - ``{state.value}``" in facts.replica_states() for state in REPLICA_MOVES)
    assert all(f"* - ``{state.value}``" in facts.model_states() for state in MODEL_MOVES)
    assert all(f"``XINFERENCE_{name.upper()}``" in facts.settings() for name in Settings.model_fields)
    assert all(f"``XINFERENCE_LIMIT_{name.upper()}``" in facts.request_limits() for name in Limits.model_fields)
    limits = [name for name in XavierConfig.__dataclass_fields__ if name in vars(XavierConfig)]
    assert limits
    assert all(f"``{name}``" in facts.limits() for name in limits)


def test_every_error_of_the_platform_is_in_the_reference() -> None:
    facts = extension("facts")
    table = facts.errors()
    for code in ("context_length_exceeded", "limit_exceeded", "model_loading", "no_replica_available", "engine_dead", "insufficient_scope"):
        assert f"``{code}``" in table
    assert all(f"``{kind.__name__}``" in table for kind in facts.error_kinds())


def test_refusals_on_the_page_are_what_the_code_says() -> None:
    refusals = extension("refusals")
    assert "give replica=2 or more" in refusals.by_the_launch()
    assert "on 'xpu'" in refusals.by_the_engine()
    with pytest.raises(RuntimeError, match="nothing was refused"):
        refusals.message_of(lambda: None)


def test_the_example_plan_adds_up() -> None:
    plan = extension("refusals").plan_example()
    assert "32 tokens x 22.5 KiB = 720.0 KiB" in plan
    assert "363 blocks = 11,616 tokens" in plan
    assert 363 * 32 == 11_616


def test_markup_in_values_stays_text() -> None:
    rst = extension("rst")
    assert rst.text("a*b `c` d_ |e| f_g") == r"a\*b \`c\` d\_ \|e\| f_g"
    assert rst.code("") == "-"
    assert rst.table(("a", "b"), [("1", "2")], (1, 1)).splitlines()[4:] == ["   * - a", "     - b", "   * - 1", "     - 2"]


@pytest.mark.parametrize("name", ["block", "directory", "store", "policy", "transfer", "connector"])
def test_a_design_page_has_its_four_sections_in_order(name: str) -> None:
    text = (SOURCE / "development" / "xavier" / f"{name}.rst").read_text()
    found = re.findall(r"^([A-Z].*)\n-+$", text, re.MULTILINE)
    assert tuple(found) == DESIGN_SECTIONS
    assert (ROOT / "xinference/model/llm/vllm/xavier" / name).is_dir()


def test_every_page_is_in_a_table_of_contents() -> None:
    listed = set()
    for page in PAGES:
        for block in re.findall(r"\.\. toctree::\n(?: {3}:.*\n)*\n((?: {3}\S+\n)+)", page.read_text()):
            listed |= {(page.parent / f"{entry}.rst").resolve() for entry in block.split()}
    assert listed == {page.resolve() for page in PAGES} - {(SOURCE / "index.rst").resolve()}


def test_the_readme_is_short_and_every_benchmark_is_described() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 200
    described = (ROOT / "benchmarks/README.md").read_text()
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py")} - {"__init__.py"}
    assert scripts == set(re.findall(r"`(\w+\.py)`", described)) & scripts


@each_page
def test_a_page_speaks_only_of_the_project(page: Path) -> None:
    for word in ("/root/", "/opt/", "/tmp/", "issue #", "TODO", "FIXME"):
        assert word not in page.read_text(), f"{name_of(page)} holds {word}"
