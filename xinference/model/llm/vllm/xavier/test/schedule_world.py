"""Two replicas on vLLM's real schedulers, and the events that can befall them: a random schedule is a list of those.

After each event the replicas are looked over (``verify``), and in the end they are left to finish and must be idle, balanced and right.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.request import Request

from xinference.model.llm.vllm.xavier.block.key import BlockKey, block_key
from xinference.model.llm.vllm.xavier.directory.control import ControlState
from xinference.model.llm.vllm.xavier.directory.geometry import segment_geometry, total_bytes
from xinference.model.llm.vllm.xavier.test.schedule_coverage import Coverage
from xinference.model.llm.vllm.xavier.test.schedule_events import Event, Sizes
from xinference.model.llm.vllm.xavier.test.vllm_schedule import LAYERS, Replica
from xinference.model.llm.vllm.xavier.test.vllm_worker import BLOCK, SLOT_BYTES, Slots, true_text

UIDS = ("a", "b")
BLOCK_BYTES = len(LAYERS) * BLOCK * SLOT_BYTES
RECORDS = 64
FAMILIES = 2
MAX_STEPS = 1500
SEVERAL_TURNS = ("run", "steps", "brink")


class Clock:
    """CLOCK_MONOTONIC, moved by events."""

    def __init__(self) -> None:
        self.now = 1_000_003.0

    def monotonic(self) -> float:
        """In place of time.monotonic."""
        return self.now


@dataclass
class World:
    """Replicas and what is true of them.

    Args:
        directory: stands for /dev/shm; empty.
        model: directory of any model.
        depth: steps in flight.
        sizes: of the replicas.
        clock: which the connectors read too.
    """

    directory: Path
    model: Path
    depth: int
    sizes: Sizes
    clock: Clock
    coverage: Coverage = field(default_factory=Coverage)
    epoch: int = 1
    num_asked: int = 0
    incarnation: int = 0
    # Requests whose client is still there, by replica.
    live: list[dict[str, int]] = field(default_factory=lambda: [{}, {}])
    truth: dict[BlockKey, np.ndarray] = field(default_factory=dict)
    sources: list[tuple[Request, Slots, int]] = field(default_factory=list)
    reached: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.replicas = [self._replica(index, None) for index in range(len(UIDS))]
        self._tell()
        for replica in self.replicas:
            replica.engine.copier.poll()

    def _replica(self, index: int, before: Replica | None) -> Replica:
        sizes = self.sizes
        self.incarnation += 1
        replica = Replica(
            self.directory,
            UIDS[index],
            self.model,
            num_blocks=sizes.num_blocks,
            depth=self.depth,
            budget=sizes.budget,
            incarnation=self.incarnation,
            page=before.page if before else None,
            cpu_cache_bytes=total_bytes(segment_geometry(sizes.cache_blocks, BLOCK_BYTES, RECORDS)),
            request_ring_records=RECORDS,
            batch_max_blocks=sizes.batch_blocks,
            async_load_max_share=sizes.share,
        )
        replica.copying = False
        engine = replica.engine
        engine.clock = engine.copier._clock = engine.copier._loader._clock = self.clock.monotonic
        replica.connector._worker._loader._clock = self.clock.monotonic
        return replica

    def _tell(self) -> None:
        """The control pages name who is there now; they are read when a ``poll`` comes."""
        for replica in self.replicas:
            others = tuple(other.entry for other in self.replicas if other is not replica)
            replica.page.write(ControlState(epoch=self.epoch, peers=others))

    def close(self) -> None:
        """End all that runs."""
        for replica in self.replicas:
            replica.mover.during_load = replica.mover.during_save = None
            replica.close()
            replica.page.close(unlink=True)

    # ---- events

    def happen(self, event: Event) -> None:
        """Let an event happen, and look at what it did."""
        self.clock.now += (event.number >> 24) / 1000
        act = partial(getattr(self, f"_on_{event.kind}"), event.replica, event.number)
        if event.kind in SEVERAL_TURNS:
            act()
        else:
            self._watched(act)
        self.verify()

    def _watched(self, act: Callable[[], None]) -> None:
        watch = [self.coverage.watch(replica) for replica in self.replicas]
        act()
        for replica, seen in zip(self.replicas, watch, strict=True):
            self.coverage.note(replica, seen)

    def _on_ask_long(self, index: int, number: int) -> None:
        """A short prompt with a long answer."""
        self._on_ask(index, number, long=True)

    def _on_ask(self, index: int, number: int, long: bool = False) -> None:
        if len(self.live[index]) >= 6:
            return
        rng = random.Random(number)
        length = max(1, (rng.randint(1, 2) if long else rng.randint(1, 4)) * BLOCK + rng.choice((-1, 0, 1, 1, 9)))
        family = rng.randrange(FAMILIES)
        tokens = [(family * 131 + position * 7) % 499 for position in range(length)]
        if rng.random() < 0.2:
            tokens[length // 2 :] = [rng.randrange(500, 900) for _ in tokens[length // 2 :]]
        salt = rng.choice((None, None, None, None, None, "salt"))
        max_tokens = rng.choice((60, 90, 120) if long else (1, 2, 20, 60))
        self.num_asked += 1
        name = f"r{self.num_asked}"
        kinds: dict[str, Any] = {"prompt_logprobs": 1} if rng.random() < 0.05 else {}
        replica = self.replicas[index]
        if rng.random() < 0.15:  # ends at a token that it will sample
            kinds["stop_token_ids"] = [rng.choice(true_text(tokens, salt or "", max_tokens))]
        request = replica.add(name, tokens, max_tokens, salt, **kinds)
        self.live[index][name] = length
        self.sources.append((request, Slots([*tokens, *replica.expected[name]], salt or ""), 0))

    def _on_dispatch(self, index: int, number: int) -> None:
        replica = self.replicas[index]
        if len(replica.in_flight) < self.depth and replica.scheduler.has_requests():
            output = replica.dispatch()
            self.coverage.preempted(replica, output)
        else:
            self._on_outcome(index, number)

    def _on_outcome(self, index: int, number: int) -> None:
        replica = self.replicas[index]
        replica.outcome()
        for name in [name for name in self.live[index] if name not in replica.scheduler.requests]:
            self._ended(index, name, aborted=False)

    def _on_copy(self, index: int, number: int) -> None:
        copier = self.replicas[index].engine.copier
        if copier.busy:
            copier.run_one() if number % 2 else copier.run_pending()

    def _on_run(self, index: int, number: int) -> None:
        """A few turns in which the helper thread keeps up."""
        replica = self.replicas[index]
        for _ in range(1 + number % 40):
            self._watched(partial(self._on_dispatch, index, number))
            self._watched(replica.engine.copier.run_pending)

    def _on_steps(self, index: int, number: int) -> None:
        """A few turns in which the helper thread does nothing."""
        for _ in range(1 + number % 40):
            self._watched(partial(self._on_dispatch, index, number))

    def _on_brink(self, index: int, number: int) -> None:
        """Turns without the helper thread, up to a few before the one in which a request is preempted."""
        replica = self.replicas[index]
        for _ in range(80):
            free = replica.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            left = [-request.num_computed_tokens % BLOCK for request in replica.scheduler.running]
            if not left or (free < len(left) and min(left) <= number % 4):
                return
            self._watched(partial(self._on_dispatch, index, number))

    def _on_forget(self, index: int, number: int) -> None:
        """The engine's own prefix cache is reset; vLLM refuses while blocks are in use."""
        if not self.replicas[index].scheduler.requests:
            self.replicas[index].scheduler.reset_prefix_cache()

    def _on_abort(self, index: int, number: int) -> None:
        if self.live[index]:
            name = list(self.live[index])[number % len(self.live[index])]
            self.coverage.aborted(self.replicas[index], name)
            self.replicas[index].abort(name)
            self._ended(index, name, aborted=True)

    def _on_poll(self, index: int, number: int) -> None:
        self.replicas[index].engine.copier.poll()

    def _on_clear(self, index: int, number: int) -> None:
        self.epoch += 1
        self._tell()
        self._on_poll(index, number)

    def _on_crash(self, index: int, number: int) -> None:
        """As SIGKILL: clients lose their requests, the successor adopts what was published."""
        self._again(index, self.replicas[index].kill, "crash")

    def _on_restart(self, index: int, number: int) -> None:
        self._again(index, self.replicas[index].close, "restart")

    def _again(self, index: int, end: Callable[[], None], event: str) -> None:
        old = self.replicas[index]
        self.coverage.ended(old, event)
        old.mover.during_load = old.mover.during_save = None
        end()
        self.live[index].clear()
        self.replicas[index] = self._replica(index, old)
        self._tell()
        self.replicas[index].engine.copier.poll()

    def _on_fail_load(self, index: int, number: int) -> None:
        self.replicas[index].mover.load_fails.append(True)

    def _on_fail_save(self, index: int, number: int) -> None:
        self.replicas[index].mover.save_fails.append(True)

    def _on_during_load(self, index: int, number: int) -> None:
        """In the middle of this replica's next load the other one goes on, writes, gives up blocks, or dies."""
        self.replicas[index].mover.during_load = lambda: self._meanwhile(1 - index, number, among=("go_on", "go_on", "clear", "crash"))

    def _on_during_save(self, index: int, number: int) -> None:
        """In the middle of this replica's next save its step thread goes on."""
        self.replicas[index].mover.during_save = lambda: self._meanwhile(index, number, among=("go_on", "go_on", "abort", "clear"))

    def _meanwhile(self, index: int, number: int, among: tuple[str, ...]) -> None:
        replica = self.replicas[index]
        during = replica.mover.during_load, replica.mover.during_save
        replica.mover.during_load = replica.mover.during_save = None  # one thread: nothing is carried out inside what is carried out
        what = among[number % len(among)]
        if what == "abort":
            self._on_abort(index, number >> 4)
        elif what == "clear":
            self.epoch += 1
            self._tell()
        elif what == "crash" and not replica.engine.copier._working:
            self._on_crash(index, number)
            return
        for _ in range(1 + number % 7):
            self._watched(partial(self._on_dispatch, index, number))
            if not replica.engine.copier._working:
                replica.engine.copier.run_pending()
        replica.mover.during_load, replica.mover.during_save = during

    # ---- what must hold

    def _ended(self, index: int, name: str, aborted: bool) -> None:
        replica = self.replicas[index]
        length = self.live[index].pop(name)
        entry = replica.record(name)
        assert min(entry.sources) >= 0
        assert entry.prompt_tokens == length
        accounted = replica.first_computed.get(name)
        if accounted is not None:
            computed = replica.computed_of(name)
            assert computed == length - min(accounted, length), f"{name}: {computed} computed in the record, from {accounted} of {length}"
        if not aborted:
            text, expected = replica.text[name], replica.expected[name]
            stops = replica.stops_of(name)
            assert text == expected or (text == expected[: len(text)] and text[-1] in stops), f"{name} ended early"
            self.reached["finished"] += 1

    def verify(self) -> None:
        """Books balance, chains have no gaps, budgets hold, and what is published is what its key says."""
        self._learn()
        for replica in self.replicas:
            state = replica.engine.state
            state.tier.check()
            assert state.segment.geometry.file_bytes <= replica.config.cpu_cache_bytes
            assert replica.num_errors == replica.mover.num_failed
            slab = np.frombuffer(state.segment.slab_view(), dtype=np.uint8)
            size = state.segment.geometry.place_bytes
            for place in range(state.segment.geometry.num_places):
                view = state.tier._book.view(place)
                if view.state == "stored":
                    assert view.parent is None or state.tier._book.view(view.parent).state == "stored"
                    key = state.segment.key_of(place)
                    assert key is not None
                    same = slab[place * size : place * size + BLOCK_BYTES].tobytes() == self.truth[key].tobytes()
                    assert same, f"place {place} of {replica.config.replica_uid} holds other bytes than its key says"

    def _learn(self) -> None:
        """The bytes of every block whose hash is known by now."""
        for position, (request, slots, known) in enumerate(self.sources):
            hashes = request.block_hashes
            for index in range(known, len(hashes)):
                wanted = slots.until((index + 1) * BLOCK)[index * BLOCK :]
                self.truth[block_key(hashes[index], 0, b"")] = np.stack([wanted] * len(LAYERS))
            self.sources[position] = (request, slots, max(known, len(hashes)))

    def finish(self) -> None:
        """Nothing more befalls them: all requests end, and nothing is held."""
        for index, replica in enumerate(self.replicas):
            replica.mover.load_fails.clear()
            replica.mover.save_fails.clear()
            replica.mover.during_load = replica.mover.during_save = None
            for _ in range(MAX_STEPS):
                if not replica.scheduler.has_requests() and not replica.in_flight:
                    break
                self.clock.now += 0.01
                self._on_dispatch(index, 0)
                replica.engine.copier.run_pending()
            else:
                statuses = {name: replica.status(name) for name in self.live[index]}
                raise AssertionError(f"{replica.config.replica_uid} did not finish: {statuses}")
            replica.engine.copier.run_pending()
            assert not self.live[index]
            replica.check()
            replica.engine.copier.poll()
            assert replica.engine.state.epoch.confirmed == self.epoch
            assert replica.engine.state.open_saves == {}
            assert replica.engine.state.tier._book.counts().pinned == 0
        self.verify()
