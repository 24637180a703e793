"""A few replicas under one clock and one supervisor, and everything that can happen to them. Nothing here decides: a schedule does."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from xinference.model.llm.vllm.xavier.directory import files as files_module
from xinference.model.llm.vllm.xavier.directory import reader as reader_module
from xinference.model.llm.vllm.xavier.directory import segment as segment_module
from xinference.model.llm.vllm.xavier.directory.control import ControlPageWriter, ControlState, PeerEntry
from xinference.model.llm.vllm.xavier.directory.layout import LINE_WORDS, RECORD_BYTES, WORD_BYTES
from xinference.model.llm.vllm.xavier.directory.names import control_path, segment_path, unfinished_path
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.directory.records import GENERATION
from xinference.model.llm.vllm.xavier.directory.segment import SegmentWriter
from xinference.model.llm.vllm.xavier.errors import SharedMemoryFull
from xinference.model.llm.vllm.xavier.test.mini_blocks import BLOCK, Request, require
from xinference.model.llm.vllm.xavier.test.mini_engine import NAMESPACE, Clock
from xinference.model.llm.vllm.xavier.test.truth import Truth, check_accounts, check_idle, check_replica
from xinference.model.llm.vllm.xavier.test.truth_coverage import Coverage
from xinference.model.llm.vllm.xavier.test.truth_replica import Killed, LastStores, Replica, dying_while_it_opens, let_go

UIDS = ("a", "b", "c")
MAX_REQUESTS = 4  # in one engine at once
RING_RECORDS = 64
DRAIN_ROUNDS = 400


class Shape(NamedTuple):
    """Sizes of one replica."""

    num_blocks: int
    cache_blocks: int
    budget: int


class Slot:
    """One replica's name: what outlives its processes."""

    def __init__(self, uid: str, shape: Shape) -> None:
        self.uid, self.shape = uid, shape
        self.replica: Replica | None = None
        self.page: ControlPageWriter | None = None
        self.last_states: set[str] = {"idle"}
        self.entry: PeerEntry | None = None
        self.peers: tuple[PeerEntry, ...] = ()
        self.ended: list[tuple[Request, str]] = []


class World:
    """The replicas of one schedule.

    Args:
        directory: stands for /dev/shm; empty.
        shapes: sizes of the replicas, which are made at once.
        coverage: what happened in which state is noted there.
    """

    def __init__(self, directory: Path, shapes: tuple[Shape, ...], coverage: Coverage) -> None:
        self.directory, self.coverage = directory, coverage
        self.clock = Clock()
        self.truth = Truth()
        self.epoch = 1
        self.pauses: Callable[[Replica], None] = lambda replica: None
        self.starts = 0
        self._alive: set[int] = set()
        self._num_requests = 0
        self._last: list[LastStores] = []
        self.slots = [Slot(uid, shape) for uid, shape in zip(UIDS, shapes, strict=False)]

    @contextmanager
    def processes(self) -> Iterator[None]:
        """Who runs is what this world says, while it lasts."""
        real = segment_module.start_ticks, reader_module.runs
        segment_module.start_ticks = lambda pid: self.starts
        reader_module.runs = lambda pid, ticks: ticks in self._alive
        try:
            for slot in self.slots:
                self.start(slot, None)
                self.tell(slot, 0xFF)
            for slot in self.slots:
                slot.replica.poll()
            yield
        finally:
            segment_module.start_ticks, reader_module.runs = real
            self.truth.close()

    # ---- life

    def start(self, slot: Slot, last: LastStores | None) -> bool:
        """An engine starts in this slot; what its predecessor left is adopted. False if it dies over it."""
        self.starts += 1
        self._alive.add(self.starts)
        slot.entry = PeerEntry("w", slot.uid, self.starts)
        self._write_page(slot, ())
        self.truth.forget(self.path(slot))
        shape = slot.shape
        try:
            with dying_while_it_opens(last):
                replica = Replica(
                    (self.directory, slot.uid, self.clock),
                    lambda replica: self.pauses(replica),
                    lambda replica, event, states: self.coverage.note(event, states),
                    self.truth.learn,
                    num_blocks=shape.num_blocks,
                    cache_blocks=shape.cache_blocks,
                    budget=shape.budget,
                    incarnation=self.starts,
                    epoch=self.epoch,
                    page=slot.page,
                    request_ring_records=RING_RECORDS,
                )
        except (Killed, SharedMemoryFull):
            self._alive.discard(self.starts)
            raise
        replica.ticks = self.starts
        slot.replica = replica
        slot.ended = replica.ended
        return True

    def kill(self, slot: Slot) -> None:
        """SIGKILL."""
        replica = slot.replica
        assert replica is not None
        self._bury(slot)
        replica.kill()

    def _bury(self, slot: Slot) -> None:
        replica, slot.replica = slot.replica, None
        if replica is not None:
            slot.last_states = replica.states()
            self._alive.discard(replica.ticks)

    def last_stores(self, slot: Slot, num_stores: int) -> LastStores:
        """The slot's engine, or the one that starts there next, dies after so many more stores."""
        replica = slot.replica

        def kill(segment: SegmentWriter) -> None:
            self.note("crash_at_a_store", slot)
            if slot.replica is replica:
                self._bury(slot)
            if replica is None:
                let_go(segment)
            else:
                replica.kill(segment)

        last = LastStores(num_stores, kill)
        self._last.append(last)
        return last

    def stop(self, slot: Slot, unlink: bool) -> None:
        """The engine is shut down: it drains, and leaves its file to a successor, or to nobody."""
        replica = slot.replica
        assert replica is not None
        path = replica.engine.state.segment.path
        self._bury(slot)
        replica.act(replica.engine.close, "step")
        replica.dead = True
        if unlink and os.path.exists(path):
            os.unlink(path)
            self.truth.forget(path)

    def start_without_room(self, slot: Slot) -> None:
        """There is no room for a new file: the start is refused in words, and nothing is left behind."""
        real = os.posix_fallocate

        def full(fd: int, offset: int, num_bytes: int) -> None:
            if num_bytes > 1 << 14:  # the page is there already
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(fd, offset, num_bytes)

        before = set(os.listdir(self.directory)) | {os.path.basename(control_path("", "w", slot.uid))}
        files_module.os.posix_fallocate = full  # type: ignore[assignment]
        try:
            self.start(slot, None)
        except SharedMemoryFull as error:
            require("free" in str(error), f"the refusal does not say what is free: {error}")
        else:
            require(False, "a segment was made without room for it")
        finally:
            files_module.os.posix_fallocate = real
        require(set(os.listdir(self.directory)) <= before, "a refused start left a file behind")

    def forget_file(self, slot: Slot) -> None:
        """Somebody removed what the predecessor left."""
        if os.path.exists(self.path(slot)):
            os.unlink(self.path(slot))
            self.truth.forget(self.path(slot))

    def leave_unfinished(self, slot: Slot) -> None:
        """A process was killed while it made the slot's file."""
        path = unfinished_path(self.path(slot))
        Path(path).write_bytes(bytes(4096))
        os.chmod(path, 0o600)

    def tear(self, slot: Slot, number: int) -> None:
        """One word of one record in the slot's file is lost. Never the generation: all withdrawing rests on that one store."""
        if os.path.exists(self.path(slot)):
            geometry = SegmentReader.open(self.path(slot), expected_incarnation=None).geometry
            word = [word for word in range(LINE_WORDS) if word != GENERATION][number // 64 % (LINE_WORDS - 1)]
            with open(self.path(slot), "r+b") as file:
                file.seek(geometry.records_offset + number % geometry.num_places * RECORD_BYTES + word * WORD_BYTES)
                file.write(bytes(WORD_BYTES))

    def path(self, slot: Slot) -> str:
        """The slot's segment."""
        return segment_path(str(self.directory), "w", slot.uid, NAMESPACE)

    # ---- the supervisor

    def tell(self, slot: Slot, mask: int) -> None:
        """The slot's control page names the peers of this mask, as they run now."""
        peers = tuple(other.entry for bit, other in enumerate(self.slots) if mask >> bit & 1 and other.entry is not None)
        self._write_page(slot, peers)

    def clear(self) -> None:
        """A new epoch for all."""
        self.epoch += 1
        for slot in self.slots:
            if slot.page is not None:
                self._write_page(slot, slot.peers)

    def _write_page(self, slot: Slot, peers: tuple[PeerEntry, ...]) -> None:
        slot.peers = peers
        state = ControlState(epoch=self.epoch, peers=peers)
        if slot.page is None:
            slot.page = ControlPageWriter.create(control_path(str(self.directory), "w", slot.uid), state)
        else:
            slot.page.write(state)

    # ---- requests

    def add(self, slot: Slot, tokens: list[int], max_tokens: int, **kinds: object) -> bool:
        """A request arrives. False if there are enough."""
        replica = slot.replica
        assert replica is not None
        if len(replica.requests) >= MAX_REQUESTS:
            return False
        self._num_requests += 1
        replica.add(f"{slot.uid}{self._num_requests}", tokens, max_tokens, **kinds)
        return True

    def warm(self, slot: Slot, tokens: list[int]) -> None:
        """A request from arrival to end, in an engine without any; the engine forgets it, its tier does not."""
        replica = slot.replica
        if replica is None or replica.requests:
            return
        self.add(slot, tokens, 1)
        for _ in range(DRAIN_ROUNDS):
            replica.step()
            replica.act(replica.copy, "copier")
            if not replica.requests or replica.frozen or replica.copier_works:
                break
        if replica.idle():
            replica.reset()

    # ---- what is looked at

    def note(self, event: str, slot: Slot) -> None:
        """An event happened to a slot, in the states in which its engine is, or was when it ended."""
        self.coverage.note(event, slot.replica.states() if slot.replica is not None else slot.last_states)

    def check(self) -> None:
        """Everything that must be true at any moment."""
        for slot in self.slots:
            if slot.replica is not None:
                check_replica(slot.replica)
        for slot in self.slots:
            self.truth.check_file(self.path(slot))

    def check_peers(self, slot: Slot) -> None:
        """After a look at the control page: who is attached runs, and is the start that the page names."""
        replica = slot.replica
        for peer in replica.engine.state.peers.attached if replica is not None else ():
            require(peer.entry in slot.peers, f"{peer.entry} is attached but not wanted")
            named = peer.entry.incarnation
            require(peer.reader.owner_incarnation() == named, f"start {peer.reader.owner_incarnation()} is attached as {named}")
            require(named in self._alive, f"{peer.entry} is attached but does not run")

    # ---- the end

    def settle(self) -> None:
        """Let everything end; then nothing is held, every account adds up, and after a clear nothing is found or held at all."""
        self.pauses = lambda replica: None
        for last in self._last:
            last.disarmed = True
        living = [slot for slot in self.slots if slot.replica is not None]
        for slot in living:
            slot.replica.frozen = False
            slot.replica.failing.clear()
            self._drain(slot.replica)
        self.check()
        for slot in living:
            check_idle(slot.replica)
            check_accounts(slot.replica, slot.ended)
        self.clear()
        for slot in living:
            self._prove_cleared(slot)
        self.check()

    def _drain(self, replica: Replica) -> None:
        for _ in range(DRAIN_ROUNDS):
            if not replica.requests:
                break
            replica.step()
            replica.copy()
        require(not replica.requests, f"still there: {[(r.request_id, r.status) for r in replica.requests.values()]}")
        replica.step()
        replica.copy()
        replica.poll()

    def _prove_cleared(self, slot: Slot) -> None:
        replica = slot.replica
        replica.poll()
        replica.step()
        replica.poll()
        header = replica.header()
        require(header["epoch_confirmed"] == self.epoch, f"epoch {self.epoch} is not confirmed: {header['epoch_confirmed']}")
        require(header["used_bytes"] == 0, f"{header['used_bytes']} bytes are held after a clear")
        if slot.ended:
            request, _ = slot.ended[-1]
            again = replica.add("again", request.tokens[: request.num_prompt], 1, salt=request.salt)
            replica.step()
            require(again.local_tokens == again.external_tokens == 0, f"a hit after a clear: {again}")
            replica.run()

    def close(self) -> None:
        """Let everything go."""
        for slot in self.slots:
            if slot.replica is not None:
                self.kill(slot)
            if slot.page is not None:
                slot.page.close()


def prompt(number: int) -> list[int]:
    """One of few families, cut somewhere and sometimes continued: prefixes are shared, and fork."""
    family, length, fork = number % 2, number // 2 % (5 * BLOCK), number // 40 % 8
    stem = [family * 37 + index for index in range(1 + length)]
    return stem + [200 + fork * 5 + index for index in range((0, 0, 0, 0, 1, BLOCK, BLOCK, 3)[fork])]
