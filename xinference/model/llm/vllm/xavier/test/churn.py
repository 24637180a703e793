"""Random schedules of replicas that share their blocks, against a model of the truth.

python -m xinference.model.llm.vllm.xavier.test.churn --count 1000000     many, from --first on; the smallest failing one is printed
python -m xinference.model.llm.vllm.xavier.test.churn --seed 4711         one, as it is
"""

import argparse
import sys
import time

from xinference.model.llm.vllm.xavier.test.truth_coverage import COUNT_FOR_COVERAGE, Coverage
from xinference.model.llm.vllm.xavier.test.truth_runs import Failure, quiet, run, run_many
from xinference.model.llm.vllm.xavier.test.truth_schedule import draw

PROGRESS_SECONDS = 10.0


def many(count: int, first: int) -> int:
    """Run so many; the exit code."""
    coverage, began = Coverage(), time.monotonic()
    shown = began

    def progress(counted: int, seed: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= PROGRESS_SECONDS:
            shown = now
            print(f"{counted:,} of {count:,} schedules, seed {seed}, {counted / (now - began):.0f} a second", flush=True)

    try:
        others = run_many(count, first, coverage, progress)
    except Failure as failure:
        print(failure)
        return 1
    seconds = time.monotonic() - began
    print(coverage.table())
    print(f"{count:,} schedules reached a load, a save, a preemption or an abort, {others:,} others did not; none failed, {seconds:.0f} s")
    empty = coverage.empty(count)
    for cell in (*empty, *coverage.surprising()):
        print(f"{'nothing' if cell in empty else 'something'} in {cell[0]} x {cell[1]}")
    return 1 if empty or coverage.surprising() else 0


def one(seed: int) -> int:
    """Run the schedule of a seed and show it; the exit code."""
    schedule = draw(seed)
    print(schedule)
    with quiet() as directory:
        run(schedule, Coverage(), directory)
    print("nothing wrong")
    return 0


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=COUNT_FOR_COVERAGE, help="schedules that are to reach something")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="only this one")
    arguments = parser.parse_args()
    return many(arguments.count, arguments.first) if arguments.seed is None else one(arguments.seed)


if __name__ == "__main__":
    sys.exit(main())
