"""Guards of what the threads of an engine share: the helper thread, peers, epochs."""

from benchmarks.guards.guard import Guard, In

TRANSFER = "pure/test_guards_transfer.py"
LIFE = "pure/test_connector_life.py"
FAILED = "pure/test_connector_failed_loads.py"
CLEAR = "pure/test_connector_clear.py"
SHARING = "pure/test_connector_sharing.py"
POLLS = "pure/test_scenario_polls.py"
STATES_UNCHANGED = "the copy of one owner's bytes is published, of two owners' never"
epoch = In("transfer/epoch.py", TRANSFER, CLEAR)
copier = In("transfer/copier.py", TRANSFER, "pure/test_transfer_copier.py", LIFE, FAILED, CLEAR, SHARING)
peers = In("transfer/peers.py", TRANSFER, "pure/test_transfer_peers.py")
state = In("transfer/state.py", TRANSFER, LIFE, FAILED, CLEAR)

GUARDS: tuple[Guard, ...] = (
    copier(
        "bounded_batch",
        "max(1, min(config.batch_max_blocks, config.batch_max_bytes // block_bytes))",
        "1 << 30",
        "a save is copied in bounded batches",
        "pure/test_transfer_copier.py",
        "pure/test_connector_latency.py",
    ),
    copier(
        "mark_saves",
        "        mark = self._state.mover.mark()\n        with self._wake:\n            self._saves",
        "        mark = None\n        with self._wake:\n            self._saves",
        "saves begin after the step that wrote their blocks",
        "pure/test_transfer_marks.py",
    ),
    copier(
        "mark_loads",
        "        mark = self._state.mover.mark()\n        with self._wake:\n            self._loads",
        "        mark = None\n        with self._wake:\n            self._loads",
        "loads begin after what still writes to their blocks",
        "pure/test_transfer_marks.py",
    ),
    copier(
        "follow",
        "            state.mover.follow(mark)\n",
        "",
        "saves begin after the step that wrote their blocks",
        "pure/test_transfer_marks.py",
    ),
    copier("touches_bounded", "deque(maxlen=TOUCH_QUEUE)", "deque()", "touches that wait are bounded"),
    copier(
        "drain",
        "            self.run_pending()\n            return True\n",
        "            return True\n",
        "what is queued at a shutdown is saved or given back",
    ),
    copier("drop_saves", "        self._drop_saves()\n", "", "a shutdown gives back what it has no time for"),
    copier(
        "still_copying",
        "        return not self._thread.is_alive()\n",
        "        return True\n",
        "the segment is not let go while a copy writes to it",
    ),
    copier(
        "idle_poll",
        "                    self._wake.wait(self._config.copier_poll_seconds)\n",
        "                    self._wake.wait()\n",
        "an idle engine looks at its control page",
    ),
    copier("poll", "                self.poll()\n", "                pass\n", "an engine looks at its control page"),
    copier("end_when_done", "if self._closing and not self.busy:", "if self._closing:", "what is queued is saved before the thread ends"),
    copier(
        "thread_goes_on",
        '            self._state.report("the helper thread", error)\n',
        "            raise\n",
        "an error in the helper thread ends nothing",
        "pure/test_transfer_copier.py",
    ),
    copier(
        "loads_between",
        "self._run_save_batch(job.epoch, batch, mark)\n                    self._run_loads()\n",
        "self._run_save_batch(job.epoch, batch, mark)\n",
        "a load does not wait for a long save",
    ),
    copier(
        "touch_gap",
        "while head > 0 and state.segment.place_of(key_at(head - 1)) is not None:",
        "while head > 0:",
        "a fragment without its head is touched from its own beginning",
        "pure/test_connector_sharing.py",
        LIFE,
        FAILED,
    ),
    copier(
        "failed_copy", "        if failed or state.corrupted:\n", "        if state.corrupted:\n", "what was not copied is not published"
    ),
    copier(
        "corrupt_copy",
        "        if failed or state.corrupted:\n",
        "        if failed:\n",
        "nothing is published by books that contradict each other",
    ),
    copier("source_reused", "elif state.blocks.generation(piece.block) != piece.generation:", "elif False:", STATES_UNCHANGED),
    copier(
        "settled_given_back",
        "        state.tier.give_back(piece.place)\n        state.count(reason)\n",
        "        state.count(reason)\n",
        "the place of a block that is not published is free",
    ),
    copier(
        "drop_counted",
        "        state.tier.give_back(piece.place)\n        state.count(reason)\n",
        "        state.tier.give_back(piece.place)\n",
        "a drop is counted by its reason",
    ),
    copier(
        "save_closed",
        "            state.open_save(epoch, -len(batch))\n",
        "",
        "saves that ended hold no room",
        "pure/test_connector_clear.py",
        LIFE,
        FAILED,
    ),
    copier(
        "only_good",
        "good = [piece for piece in batch if self._still_good(epoch, piece)]",
        "good = []",
        "what is published was copied",
        LIFE,
        FAILED,
        SHARING,
    ),
    copier(
        "dropped_closed", "                self._state.open_save(job.epoch, -len(job.pieces))\n", "", "saves that were dropped hold no room"
    ),
    copier(
        "dropped_given_back",
        "                for piece in job.pieces:\n                    self._state.tier.give_back(piece.place)\n",
        "",
        "places of dropped saves are free",
    ),
    copier(
        "poll_goes_on",
        "                self._state.report(what, error)\n",
        "                raise\n",
        "an error at the control page ends nothing",
        POLLS,
        "pure/test_transfer_copier.py",
    ),
    copier("beat", "            state.segment.beat()\n", "            pass\n", "an engine that lives says so"),
    copier(
        "attached_told",
        "            state.segment.set_attached([peer.entry.incarnation for peer in state.peers.attached])\n",
        "",
        "which peers are mapped can be read from outside",
        "pure/test_transfer_peers.py",
    ),
    copier("ask", "            state.epoch.ask(state.control.state.epoch)\n", "", "an idle engine learns of a clear"),
    copier("apply", "            state.epoch.apply()\n", "", "an idle engine carries a clear out"),
    copier("confirm", "            state.epoch.confirm(state.oldest_open_epoch())\n", "", "a clear that was carried out is confirmed"),
    copier(
        "unchanged_page",
        "        if page is not None:\n            self",
        "        if True:\n            self",
        "a page without a change costs nothing",
    ),
    peers(
        "no_longer_wanted",
        "if peer.entry not in self._wanted or peer.reader.replaced():",
        "if peer.reader.replaced():",
        "a peer that is no longer named is let go",
    ),
    peers(
        "replaced",
        "if peer.entry not in self._wanted or peer.reader.replaced():",
        "if peer.entry not in self._wanted:",
        "a segment that was replaced is let go",
    ),
    peers("alive", "            return peer.reader.alive()\n", "            return True\n", "a dead peer is let go"),
    peers(
        "no_descriptor",
        "        except OSError:  # no descriptor",
        "        except KeyError:  # no descriptor",
        "a peer is not given up for want of a descriptor",
        "pure/test_scenario_polls.py",
        "pure/test_scenario_stale.py",
        "pure/test_scenario_files.py",
    ),
    epoch("ask_back", "self.wanted = max(self.wanted, epoch)", "self.wanted = epoch", "an older epoch is never gone back to"),
    epoch(
        "promised",
        "if self.wanted == self.current or self.promised:",
        "if self.wanted == self.current:",
        "a promised load keeps its places",
    ),
    epoch("apply_once", "if self.wanted == self.current or self.promised:", "if self.promised:", "a clear is carried out once"),
    epoch("apply_clears", "        self._tier.clear(self.current)\n", "", "a clear clears"),
    epoch("clears_counted", '        self._segment.counters.add("clears")\n', "", "clears are counted"),
    epoch(
        "confirm_open",
        "oldest_open >= self.current and self.confirmed",
        "self.confirmed",
        "a clear is confirmed when nothing older is held",
    ),
    epoch(
        "needs_step", "return self.promised or self.wanted != self.current", "return self.promised", "a busy engine clears at its next step"
    ),
    epoch(
        "needs_step_promised",
        "return self.promised or self.wanted != self.current",
        "return self.wanted != self.current",
        "a promise ends with its schedule",
    ),
    state(
        "count_closed",
        "        if not self.closed:\n",
        "        if True:\n",
        "nothing is counted in a segment that was let go",
        LIFE,
        FAILED,
        "cpu/test_connector_vllm_scheduler.py",
    ),
    state("logged_once", "        if (where, type(error)) not in self.reported:\n", "        if True:\n", "a log is not flooded"),
    state("corrupted", "            self.corrupted = True\n", "", "corrupt books end sharing"),
    state("withdraw_all", "            self._withdraw_all()\n", "", "no peer reads what corrupt books vouch for"),
    state("hook_errors", '            self.count("hook_errors")\n', "            pass\n", "every error is counted"),
    state(
        "oldest_saves",
        "self.epoch.current, *self.open_saves, *(job",
        "self.epoch.current, *(job",
        "a clear is confirmed after the saves under way",
        CLEAR,
    ),
    state(
        "oldest_loads",
        ", *(job.epoch for job in self.open_loads.values())))",
        "))",
        "a clear is confirmed after the loads under way",
        CLEAR,
    ),
    state("end_once", "            if job.done:\n                return\n", "", "a load lets its places go once"),
    state(
        "end_unpins",
        "            self.tier.unpin([piece.place for piece in job.pieces if piece.place != UNPINNED])\n",
        "",
        "places of a load that ended can be given up",
    ),
    state("end_pinned_only", " if piece.place != UNPINNED])", "])", "only what was pinned is unpinned"),
    state(
        "end_epoch",
        "if job.epoch != self.epoch.current and not job.cancelled:",
        "if False:",
        "a load under way at a clear is recomputed",
        CLEAR,
    ),
    peers("own", " if (entry.worker_id, entry.replica_uid) != own)", ")", "a replica never attaches to itself"),
    peers(
        "attempts_forgotten",
        " if entry in self._wanted}\n        self._warned",
        "}\n        self._warned",
        "a peer that comes back is tried at once",
    ),
    peers("warned_forgotten", "        self._warned &= set(self._wanted)\n", "", "a peer that comes back is warned of again"),
    peers("detached_counted", '            self._count("peer_detached", lost)\n', "            pass\n", "peers let go are counted"),
    peers(
        "permanent",
        "(attempt.permanent or now < attempt.next_at)",
        "now < attempt.next_at",
        "a file that can never be read is not read again",
    ),
    peers(
        "pause",
        "(attempt.permanent or now < attempt.next_at)",
        "attempt.permanent",
        "a peer that is not there is not asked for at every poll",
    ),
    peers("pause_doubles", "attempt.pause_seconds * 2", "attempt.pause_seconds", "pauses between attempts grow"),
    peers(
        "pause_max",
        "min(attempt.pause_seconds * 2, self._config.probe_retry_max_seconds)",
        "attempt.pause_seconds * 2",
        "pauses between attempts are bounded",
    ),
    peers("incarnation", "expected_incarnation=entry.incarnation", "expected_incarnation=None", "the segment of another start is not read"),
    peers("attach_alive", "        if not reader.alive():\n", "        if False:\n", "the segment of a dead peer is not attached"),
    peers("refused_counted", '        self._count("peer_attach_refused")\n', "", "refusals are counted"),
    peers("warned_once", "        if entry not in self._warned:\n", "        if True:\n", "a log is not flooded"),
    peers("rejected_once", "            self._rejected[peer.entry] = rejected\n", "", "a rejected record is counted once"),
    peers("rejected_anew", "        self._rejected.pop(entry, None)\n", "", "rejected records of a new mapping are counted from zero"),
)
