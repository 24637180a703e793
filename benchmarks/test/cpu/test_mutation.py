"""The runner over the list of guards, on a small tree: what counts as noticed and what does not."""

from pathlib import Path

import pytest

from benchmarks import mutation
from benchmarks.guards.guard import Guard
from benchmarks.mutation import Tree, judge

SOURCE = '''"""A stack of at most two."""

held = []


def push(value: int) -> bool:
    if len(held) >= 2:
        return False
    held.append(value)
    return True


def drain() -> None:
    while held:
        held.pop()
'''
TESTS = """from xinference.stack import drain, push


def test_a_full_stack_takes_no_more():
    assert [push(1), push(2), push(3)] == [True, True, False]


def test_a_stack_can_be_drained():
    push(1)
    drain()
    assert push(1)
"""


def entry(text: str, without: str) -> Guard:
    return Guard("stack.guard", "xinference/stack.py", text, without, "a bound", ("xinference/test_stack.py",))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    original = tmp_path / "original"
    (original / "xinference").mkdir(parents=True)
    (original / "xinference" / "__init__.py").touch()
    (original / "xinference" / "stack.py").write_text(SOURCE)
    (original / "xinference" / "test_stack.py").write_text(TESTS)
    (tmp_path / "copy").mkdir()
    return Tree(tmp_path / "copy", original)


def test_a_guard_is_held_by_a_test_that_goes_red_without_it(tree: Tree) -> None:
    outcome = judge(tree, entry("len(held) >= 2", "False"), whole=False)
    assert (outcome.verdict, outcome.first_red) == ("caught", "xinference/test_stack.py::test_a_full_stack_takes_no_more")
    assert tree.test(["xinference/test_stack.py"], 60).green  # and it is back in its place


def test_a_guard_that_no_test_misses_has_survived(tree: Tree) -> None:
    assert judge(tree, entry("        held.pop()\n", "        held.clear()\n"), whole=False).verdict == "survived"


def test_a_mutant_that_does_not_end_is_caught_and_said_so(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutation, "TEST_SECONDS", 0.5)
    assert judge(tree, entry("        held.pop()\n", "        pass\n"), whole=False).verdict == "caught, does not end"


def test_a_mutant_that_takes_its_process_along_is_caught_and_said_so(tree: Tree) -> None:
    outcome = judge(tree, entry("        return False\n", "        import os, signal; os.kill(os.getpid(), signal.SIGBUS)\n"), whole=False)
    assert (outcome.verdict, outcome.first_red) == ("caught, kills its process", "SIGBUS")


@pytest.mark.parametrize(
    ("text", "without"),
    [
        ("len(held) >= 2", "len(hold) >= 2"),
        ("held = []\n", "import nothing_of_this_name\n"),
        ("not there", ""),
        ("    while held:\n", "    while (:\n"),
    ],
    ids=["an unknown name", "an import that fails", "no such text", "no program"],
)
def test_a_mutant_that_is_no_program_counts_for_nothing(tree: Tree, text: str, without: str) -> None:
    assert judge(tree, entry(text, without), whole=False).verdict == "entry at fault"
