"""What a replica's segment says: budget, counters, accounting records. Read in the replica's process, without a call to the engine."""

import asyncio
import os
from pathlib import Path
from typing import Any

from xinference.core.clock import Clock
from xinference.core.machine import Machine
from xinference.core.orders import ReplicaOrder
from xinference.core.request_legs import cached_tokens, merge
from xinference.model.llm.vllm.xavier.directory.names import parse_name
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.directory.requests import SOURCES, RequestEntry
from xinference.model.llm.vllm.xavier.errors import XavierError

POLL_SECONDS = 0.002  # while somebody waits for a record: a look costs some microseconds
CONFIRM_POLL_SECONDS = 0.02
SUSPICIOUS_SECONDS = 1.0  # without a beat, of which there are four a second: then the process itself is looked at


class CacheView:
    """The segment of one engine start, mapped when it is first wanted and exists."""

    def __init__(self, machine: Machine, order: ReplicaOrder, clock: Clock) -> None:
        self._clock = clock
        self._machine = machine
        self._order = order
        self._reader: SegmentReader | None = None
        self._ran_ns = -1
        self._ran_at = clock.now()

    def report(self) -> dict[str, Any] | None:
        """Tier, counters and token sources, or None while there is no segment."""
        reader = self._open()
        if reader is None:
            return None
        header, counters = reader.header(), reader.counters()
        name = parse_name(os.path.basename(reader.path))
        geometry = reader.geometry
        return {
            "namespace": None if name is None else name.namespace,
            "epoch_confirmed": header["epoch_confirmed"],
            "attached": sorted(reader.attached()),
            "tiers": {
                "cpu": {
                    "budget_bytes": None if self._order.cache is None else self._order.cache.cpu_cache_bytes,
                    "file_bytes": geometry.file_bytes,
                    "book_bytes": geometry.book_bytes,
                    "used_bytes": header["used_bytes"],
                    "blocks": header["used_places"],
                    "capacity_blocks": geometry.num_places,
                    "block_bytes": geometry.place_bytes,
                    "tokens_per_block": self._order.block_size,
                }
            },
            "sources": {source: counters[f"prompt_tokens_{source}"] for source in SOURCES},
            "counters": counters,
        }

    def silence_seconds(self) -> float | None:
        """For how long the engine's core has neither beaten in its segment nor run at all; None if there is no segment.

        The beat alone would not do: a helper thread that fails ends the beat of an engine that goes on serving.
        """
        reader = self._open()
        if reader is None:
            return None
        now = self._clock.now()
        header = reader.header()
        silent = now - header["heartbeat_us"] / 1e6
        if silent < SUSPICIOUS_SECONDS:
            return max(0.0, silent)
        ran = run_time_ns(header["pid"])
        if ran != self._ran_ns:
            self._ran_ns, self._ran_at = ran, now
        return min(silent, now - self._ran_at)

    async def wait_confirmed(self, epoch: int, wait_seconds: float) -> bool:
        """Whether the engine's slab holds nothing older than ``epoch``; waits that long for it."""
        deadline = self._clock.now() + wait_seconds
        while True:
            reader = self._open()
            if reader is not None and reader.header()["epoch_confirmed"] >= epoch:
                return True
            if self._clock.now() >= deadline:
                return False
            await asyncio.sleep(CONFIRM_POLL_SECONDS)

    async def wait_request(self, request: str, wait_seconds: float) -> dict[str, Any] | None:
        """The record of a request whose accounting is fixed, or None if there is none within the time.

        A request with several prompts or choices has several; see ``request_legs``. All of them are there before its answer ends.

        Args:
            request: 32 hex digits, as the route drew them.
        """
        key = bytes.fromhex(request)
        deadline = self._clock.now() + wait_seconds
        while True:
            reader = self._open()
            entries = reader.find_request(key) if reader is not None else []
            if entries and all(entry.state != "running" for entry in entries):
                return self._merged(entries)
            if self._clock.now() >= deadline:
                return None
            await asyncio.sleep(POLL_SECONDS)

    def recent(self, limit: int) -> list[dict[str, Any]]:
        """The newest records, newest first; one for each request, however many prompts or choices it has."""
        reader = self._open()
        if reader is None or limit <= 0:
            return []
        entries, _ = reader.requests_since(0)
        legs: dict[bytes, list[RequestEntry]] = {}
        for entry in entries:
            # Where the latest change of a request is, is its place in the order.
            legs[entry.request] = [*legs.pop(entry.request, ()), entry]
        newest = list(legs.values())[-limit:]
        return [self._merged(some) for some in reversed(newest)]

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _merged(self, entries: list[RequestEntry]) -> dict[str, Any]:
        # One offset for all: what began in the same step must keep the same time, or nobody can tell which choice was the first.
        offset = self._clock.wall() - self._clock.now()
        return merge([self._as_record(entry, offset) for entry in entries])

    def _as_record(self, entry: RequestEntry, offset: float) -> dict[str, Any]:
        sources = dict(zip(SOURCES, entry.sources, strict=True))
        return {
            "request_id": entry.request.hex(),
            "model_uid": self._order.model_uid,
            "replica_uid": self._order.replica_uid,
            "state": "running" if entry.state == "first_token" else entry.state,
            "prompt_tokens": entry.prompt_tokens,
            "output_tokens": entry.output_tokens,
            "sources": sources,
            "cached_tokens": cached_tokens(sources),
            "pre_clear_tokens": entry.pre_clear_tokens,
            "recomputed_tokens": entry.recomputed_tokens,
            "times": {
                "queued": _unix(entry.queued_us, offset),
                "scheduled": _unix(entry.scheduled_us, offset),
                "load_started": _unix(entry.load_started_us, offset),
                "loaded": _unix(entry.loaded_us, offset),
                "first_token": _unix(entry.first_token_us, offset),
                "finished": _unix(entry.finished_us, offset),
            },
        }

    def _open(self) -> SegmentReader | None:
        if self._reader is not None and not self._reader.replaced():
            return self._reader
        self.close()
        for path in self._candidates():
            try:
                self._reader = SegmentReader.open(path, expected_incarnation=self._order.incarnation)
            except (XavierError, OSError):  # not there yet, or of a former start
                continue
            return self._reader
        return None

    def _candidates(self) -> list[str]:
        """The replica's segments; more than one if it was relaunched in another namespace."""
        if self._order.cache is None:
            return []
        found = []
        for entry in os.listdir(self._machine.shm_dir):
            name = parse_name(entry)
            if (
                name
                and not name.unfinished
                and name.namespace
                and (name.worker_id, name.replica_uid) == (self._machine.worker_id, self._order.replica_uid)
            ):
                found.append(os.path.join(self._machine.shm_dir, entry))
        return found


def run_time_ns(pid: int) -> int:
    """CPU time that all threads of a process have had, in nanoseconds; 0 if there is no such process.

    From ``schedstat``: ``stat`` counts ticks of 10 ms, of which an idle engine needs none in seconds.
    """
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total += int(path.read_text().split()[0])
        except (OSError, ValueError, IndexError):  # the thread ended
            continue
    return total


def _unix(monotonic_us: int, offset: float) -> float | None:
    """CLOCK_MONOTONIC microseconds as unix seconds; None for "has not happened". ``offset`` is the one clock minus the other."""
    return offset + monotonic_us / 1e6 if monotonic_us else None
