"""All guards, in the order of the package."""

from benchmarks.guards import copies, directory, engines, loads, outside, policy, shared_memory, steps, store, threads
from benchmarks.guards.guard import Guard

GUARDS: tuple[Guard, ...] = (
    *directory.GUARDS,
    *shared_memory.GUARDS,
    *policy.GUARDS,
    *store.GUARDS,
    *copies.GUARDS,
    *threads.GUARDS,
    *loads.GUARDS,
    *steps.GUARDS,
    *engines.GUARDS,
    *outside.GUARDS,
)
