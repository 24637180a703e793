"""The list of guards stays true: what it names is there, once, and the code without it is still a program."""

from pathlib import Path

import pytest

from benchmarks.guards.guard import XAVIER, Guard, GuardMissing
from benchmarks.guards.listed import GUARDS

ROOT = Path(__file__).parents[3]
# Decide nothing that a guard could stand around, or run only on a device that no test has.
WITHOUT_GUARDS = {"errors.py", "connector/metadata.py", "transfer/jobs.py", "transfer/cuda.py", "policy/order.py"}


def test_every_guard_stands_once_in_its_file_and_what_is_left_without_it_compiles() -> None:
    faults = []
    for guard in GUARDS:
        try:
            guard.removed_from(ROOT)
        except GuardMissing as error:
            faults.append(str(error))
    assert faults == []


def test_every_guard_has_a_name_of_its_own_and_tests_that_exist() -> None:
    assert len({guard.name for guard in GUARDS}) == len(GUARDS)
    for guard in GUARDS:
        assert guard.text != guard.without
        assert guard.protects
        assert guard.tests
        assert [test for test in guard.tests if not (ROOT / test.partition("::")[0]).is_file()] == []


def test_every_file_of_the_shared_cache_has_guards_or_is_known_to_need_none() -> None:
    package = ROOT / XAVIER
    sources = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if path.name != "__init__.py"}
    sources = {source for source in sources if not source.startswith("test/")}
    guarded = {guard.file.removeprefix(f"{XAVIER}/") for guard in GUARDS if guard.file.startswith(XAVIER)}
    assert sources - guarded == WITHOUT_GUARDS


@pytest.mark.parametrize(
    ("source", "without"),
    [("if b:\n    pass\n", "pass\n"), ("if a:\n    pass\nif a:\n    pass\n", "if b:\n"), ("if a:\n    pass\n", "if (:\n")],
    ids=["not there", "there twice", "no program"],
)
def test_an_entry_that_does_not_fit_its_file_is_refused(tmp_path: Path, source: str, without: str) -> None:
    (tmp_path / "guarded.py").write_text(source)
    guard = Guard("guarded.entry", "guarded.py", "if a:\n", without, "nothing", ("guarded.py",))
    with pytest.raises(GuardMissing, match=r"guarded\.entry"):
        guard.removed_from(tmp_path)
