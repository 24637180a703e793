"""All guards, in the order of the package."""

from benchmarks.guards import copies, directory, engines, files, halves, loads, outside, policy, segments, steps, store, threads
from benchmarks.guards.guard import Guard

GUARDS: tuple[Guard, ...] = (
    *directory.GUARDS,
    *files.GUARDS,
    *segments.GUARDS,
    *policy.GUARDS,
    *store.GUARDS,
    *copies.GUARDS,
    *threads.GUARDS,
    *loads.GUARDS,
    *steps.GUARDS,
    *halves.GUARDS,
    *engines.GUARDS,
    *outside.GUARDS,
)
