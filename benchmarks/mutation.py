"""Whether the tests notice when a guard is gone: `python -m benchmarks.mutation [--only NAME ...] [--jobs 1]`.

Every guard of the shared cache stands in `benchmarks.guards` with what the code is without it. Each in turn is taken away in a copy of
the tree, and the tests that should notice are run there: the one that noticed in the last run, those named with the guard, then all of
its area. A guard counts as held only by a test that goes red (or does not end, or takes its process along: said so). A mutant that does
not even load is a fault of the list, and so is a test that is red without any mutation. Names may be beginnings: `--only tier.` takes all
of `store/tier.py`. Outcomes are kept by guard: a run over some of them leaves those of the others as they are.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

from benchmarks.guards.guard import XAVIER_TESTS, Guard, GuardMissing
from benchmarks.guards.listed import GUARDS
from benchmarks.report import RESULTS, circumstances, keep

ROOT = Path(__file__).parents[1]
COPIED = ("xinference", "conftest.py", "pyproject.toml", "setup.cfg")
# All tests of an area, for a guard that those named with it do not miss.
XAVIER_SUITES = (f"{XAVIER_TESTS}/pure", f"{XAVIER_TESTS}/cpu")
OUTSIDE_SUITES = ("xinference/core/test/pure", "xinference/core/test/cpu/test_cache_view.py", "xinference/api/test/pure")
# A shape is no behaviour: a file may well be too long, or import less, without a guard.
NOT_ASKED = "test_layers.py"
# Named, since loading whatever else is installed takes longer than most of the tests.
PLUGINS = ("pytest_timeout", "pytest_asyncio.plugin", "_hypothesis_pytestplugin")
# A test that has hung for so long does not end; a run that has lasted so long has a loop somewhere else.
TEST_SECONDS, FIRST_RUN_SECONDS, WHOLE_RUN_SECONDS = 90, 300, 1200
HYPOTHESIS_SEED = 7
# A mutant of which a test says this was not a program; the guard's entry is to be mended.
MALFORMED = re.compile(r"\b(NameError|ImportError|ModuleNotFoundError|SyntaxError|IndentationError): ")
RED = re.compile(r"^(FAILED|ERROR) (\S+::.*?)(?: - (.*))?$", re.MULTILINE)
TIMED_OUT = "Timeout"

Verdict = Literal["caught", "caught, does not end", "caught, kills its process", "survived", "entry at fault"]


@dataclass(frozen=True)
class Outcome:
    """What became of one guard: the first test that went red, or what is wrong with the entry."""

    name: str
    file: str
    protects: str
    verdict: Verdict
    first_red: str
    seconds: float


@dataclass(frozen=True)
class Run:
    """One run of tests: its exit status (None: ended for lack of time), the first red test and what it said."""

    status: int | None
    red: str
    said: str

    @property
    def green(self) -> bool:
        """All tests passed."""
        return self.status == 0


NO_SUCH_TEST = 4  # pytest's exit status
NOT_RUN = Run(NO_SUCH_TEST, "", "")


class Tree:
    """A copy of the tree in which guards are taken away, one at a time."""

    def __init__(self, root: Path, original: Path = ROOT) -> None:
        self._root = root
        for name in COPIED:
            source = original / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules", "dist"))
            elif source.exists():
                shutil.copy2(source, root / name)

    @contextmanager
    def without(self, guard: Guard) -> Iterator[None]:
        """The tree without this guard, for as long as the context lasts."""
        path = self._root / guard.file
        status = path.stat()
        whole = path.read_text()
        path.write_text(guard.removed_from(self._root))
        try:
            yield
        finally:
            path.write_text(whole)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # so that its byte code is good again

    def test(self, tests: Sequence[str], seconds: float, whole: bool = False) -> Run:
        """Run these tests up to the first that is red.

        Args:
            whole: nothing is taken away, so that byte code may be kept. A mutant's is not: two of one size within a second would be taken
                for each other.
        """
        shutil.rmtree(self._root / ".hypothesis", ignore_errors=True)  # no example of another mutant's
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-o", f"timeout={TEST_SECONDS}"]
        command += [argument for plugin in ("no:cacheprovider", *PLUGINS) for argument in ("-p", plugin)]
        command += [f"--basetemp={self._root / 'tmp'}", f"--hypothesis-seed={HYPOTHESIS_SEED}", f"--ignore-glob=*{NOT_ASKED}", *tests]
        environment = {**os.environ, "PYTHONPATH": str(self._root), "PYTHONDONTWRITEBYTECODE": "" if whole else "1"}
        environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "400"}
        process = subprocess.Popen(
            command, cwd=self._root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            text, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return Run(None, "", f"not done after {seconds} s")
        finally:  # whatever a test had started when it went red
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        found = RED.search(text)
        return Run(process.returncode, found[2] if found else "", (found[3] or "") if found else text[-300:])


def judge(tree: Tree, guard: Guard, whole: bool, noticed: str = "") -> Outcome:
    """Take one guard away and see who notices.

    Args:
        whole: whether all tests of the area are asked if those named with the guard stay green.
        noticed: the test that went red the last time, asked before all others.
    """
    started = time.monotonic()
    try:
        with tree.without(guard):
            run = tree.test([noticed], FIRST_RUN_SECONDS) if noticed else NOT_RUN
            if run.green or run.status == NO_SUCH_TEST:
                run = tree.test(guard.tests, FIRST_RUN_SECONDS)
            asked_all = run.green and whole
            if asked_all:
                run = tree.test(XAVIER_SUITES if guard.file.count("xavier") else OUTSIDE_SUITES, WHOLE_RUN_SECONDS)
    except GuardMissing as error:
        return _outcome(guard, "entry at fault", str(error), started)
    if asked_all and run.red and not tree.test([run.red], FIRST_RUN_SECONDS).green:
        return _outcome(guard, "entry at fault", f"{run.red} is red without any mutation", started)
    return _outcome(guard, *_verdict(run), started)


def _verdict(run: Run) -> tuple[Verdict, str]:
    if run.green:
        return "survived", ""
    if run.status is None or TIMED_OUT in run.said:
        return "caught, does not end", run.red or run.said
    if run.status < 0:  # a page behind the end of a file, say
        return "caught, kills its process", signal.Signals(-run.status).name
    if run.status != 1 or not run.red or MALFORMED.search(run.said):
        return "entry at fault", f"{run.red} {run.said}".strip()
    return "caught", run.red


def _outcome(guard: Guard, verdict: Verdict, first_red: str, started: float) -> Outcome:
    return Outcome(guard.name, guard.file, guard.protects, verdict, first_red, round(time.monotonic() - started, 1))


def judge_all(guards: Sequence[Guard], jobs: int, whole: bool) -> list[Outcome]:
    """All of them, in order; each job has a tree of its own."""
    trees: SimpleQueue[Tree] = SimpleQueue()
    noticed = {name: entry["first_red"] for name, entry in _kept().items() if entry["verdict"] == "caught"}
    asked = {test for guard in guards for test in (*guard.tests, noticed.get(guard.name, "").partition("::")[0]) if (ROOT / test).is_file()}

    def one(guard: Guard) -> Outcome:
        tree = trees.get()
        try:
            outcome = judge(tree, guard, whole, noticed.get(guard.name, ""))
        finally:
            trees.put(tree)
        print(f"{outcome.verdict:26} {outcome.seconds:6.1f} s  {outcome.name:38} {outcome.first_red.rpartition('/')[2]}", flush=True)
        return outcome

    with tempfile.TemporaryDirectory(prefix="mutation-") as folder, ThreadPoolExecutor(jobs) as pool:
        for job in range(jobs):
            root = Path(folder) / str(job)
            root.mkdir()
            trees.put(Tree(root))
        for _ in range(jobs):
            tree = trees.get()
            _refuse_red(tree, asked)
            trees.put(tree)
        return list(pool.map(one, guards))


def _kept() -> dict[str, dict[str, Any]]:
    """What is known of each guard from the runs so far."""
    try:
        return {entry["name"]: entry for entry in json.loads((RESULTS / "mutation.json").read_text())["guards"]}
    except FileNotFoundError:
        return {}


def keep_outcomes(outcomes: Sequence[Outcome]) -> Path:
    """Put these outcomes in the place of older ones of the same guards. Each says at which commit it was found."""
    commit = circumstances()["commit"]
    known = _kept() | {outcome.name: {**asdict(outcome), "commit": commit} for outcome in outcomes}
    entries = [known[guard.name] for guard in GUARDS if guard.name in known]
    verdicts = Counter(entry["verdict"] for entry in entries)
    result = {"guards_listed": len(GUARDS), "verdicts": verdicts, "guards": entries}
    return keep("mutation", {"command": "python -m benchmarks.mutation [--only NAME ...]", **result})


def _refuse_red(tree: Tree, tests: set[str]) -> None:
    """A test that is red already would catch everything. What is compiled here need not be compiled for each mutant."""
    run = tree.test(sorted(tests), WHOLE_RUN_SECONDS, whole=True)
    if not run.green:
        raise SystemExit(f"red without any mutation: {run.red} {run.said}")


def main() -> None:
    """Judge the guards asked for, print and keep the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[""], help="guards whose names begin so")
    parser.add_argument("--jobs", type=int, default=1, help="guards at a time, each in a copy of the tree of its own")
    parser.add_argument("--named-only", action="store_true", help="ask only the tests named with a guard, not all of its area")
    arguments = parser.parse_args()
    guards = [guard for guard in GUARDS if guard.name.startswith(tuple(arguments.only))]
    if not guards:
        parser.error(f"no guard's name begins with {' or '.join(arguments.only)}")
    started = time.monotonic()
    outcomes = judge_all(guards, arguments.jobs, whole=not arguments.named_only)
    seconds = round(time.monotonic() - started)
    counts = Counter(outcome.verdict for outcome in outcomes)
    print(f"\n{len(outcomes)} guards in {seconds} s: " + ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    print(keep_outcomes([outcome for outcome in outcomes if outcome.verdict != "survived" or not arguments.named_only]))
    if counts["survived"] or counts["entry at fault"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
