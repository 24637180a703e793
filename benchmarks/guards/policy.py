"""Guards of the policies: books, order, admission, batches, leaders, loads."""

from benchmarks.guards.guard import Guard, In

placement = In("policy/placement.py", "pure/test_policy_placement.py", "pure/test_policy_placement_schedules.py")
places = In("policy/places.py", "pure/test_guards_policy.py", "pure/test_policy_placement.py", "pure/test_policy_placement_schedules.py")
recency = In("policy/recency.py", "pure/test_policy_placement.py", "pure/test_policy_placement_schedules.py")
admission = In("policy/admission.py", "pure/test_policy_admission.py")
batching = In("policy/batching.py", "pure/test_policy_batching.py")
leaders = In("policy/leaders.py", "pure/test_guards_policy.py", "pure/test_policy_leaders.py")
loading = In("policy/loading.py", "pure/test_guards_policy.py", "pure/test_policy_loading.py")
rates = In("policy/rates.py", "pure/test_policy_rates.py")

BOOKS: tuple[Guard, ...] = (
    placement("no_places", "        if num_places < 1:\n", "        if False:\n", "a book without a place is refused"),
    placement(
        "parent_gone",
        "if parent is not None and table.state(parent) not in (RESERVED, STORED):",
        "if False:",
        "a chain does not go on under a parent that is gone",
    ),
    placement("admission", "if not seen and order.reused(place):", "if False:", "content that came once does not displace reused content"),
    placement("victim_cut", "                table.cut(place)\n", "", "an evicted place is no child of its parent any more"),
    placement("victim_told", "                evicted.append(place)\n", "", "the records of evicted places are counted"),
    placement("victim_unlinked", "                order.drop(place)\n", "", "an evicted place is given up once"),
    placement(
        "commit_reserved",
        "if state != RESERVED or (parent != NO_PLACE and table.state(parent) != STORED):",
        "if parent != NO_PLACE and table.state(parent) != STORED:",
        "a cancelled reservation is not published",
    ),
    placement(
        "commit_parent",
        "if state != RESERVED or (parent != NO_PLACE and table.state(parent) != STORED):",
        "if state != RESERVED:",
        "a stored chain has no gap",
    ),
    placement("abort_state", "if table.state(place) not in (RESERVED, CANCELLED):", "if False:", "what is stored cannot be aborted"),
    placement(
        "abort_children", "        if table.children[place]:\n", "        if False:\n", "a place is not handed out under its children"
    ),
    placement("restore_untouched", "if not table.untouched(place) or (", "if (", "a place in use is not restored over"),
    placement(
        "restore_parent",
        "or (parent is not None and table.state(parent) != STORED):",
        "or False:",
        "an adopted chain has no gap",
    ),
    placement("touch_stored", "if table.state(place) != STORED or table.parent", "if table.parent", "only stored places are ordered"),
    placement(
        "touch_parent", "table.parent[place] not in before or place in before", "place in before", "a parent stays newer than its child"
    ),
    placement("touch_twice", "not in before or place in before:", "not in before:", "a place is linked once"),
    placement("pin_stored", "        if table.state(place) != STORED:\n", "        if False:\n", "only stored places are pinned"),
    placement("unpin_pinned", "        if not table.pins[place]:\n", "        if False:\n", "an unpin too many is found"),
    placement("unpin_last", "        if table.pins[place]:\n", "        if False:\n", "a place pinned twice stays until its second unpin"),
    placement(
        "unpin_withdrawn", "        if state == WITHDRAWN:\n", "        if False:\n", "a cleared place becomes free after its last reader"
    ),
    placement("unpin_stored", "        if state == WITHDRAWN:\n", "        if True:\n", "a stored place stays after its last reader"),
    placement("evict_own_chain", "if place != keep and not", "if not", "nothing is evicted for a chain from that chain itself"),
    placement("evict_parents", " and not self._table.children[place] and not", " and not", "a chain is given up from its tail"),
    placement("evict_pinned", " and not self._table.pins[place]:", ":", "what is being read is not given up"),
    placement(
        "evict_scan", "elif passed_over == EVICTION_SCAN_PLACES:", "elif False:", "a reservation looks at a bounded number of places"
    ),
    placement("clear_order", "        self._order.clear()\n", "", "nothing is evicted that was cleared"),
    placement("check_table", "        self._table.check()\n", "", "books that contradict each other are found"),
    placement(
        "check_order", "        self._order.check(self._table.parent, stored)\n", "", "an order that contradicts the places is found"
    ),
    places("negative", "        if place < 0:\n", "        if False:\n", "a place that does not exist is an error, not the last one"),
    places("untouched_fresh", "place >= self._fresh and self", "self", "a place that was given out once is not restored"),
    places("untouched_free", " and self.flags[place] == FREE", "", "a place in use is not restored over"),
    places("cut_last_child", "if not self.children[parent] and self", "if self", "a withdrawn parent waits for all its children"),
    places("cut_withdrawn", "and self.flags[parent] == WITHDRAWN:", "and False:", "a withdrawn parent becomes free after its children"),
    places("cut_stored", " and self.flags[parent] == WITHDRAWN:", ":", "a stored parent stays when its last child goes"),
    places("release_fresh", "        if place < self._fresh:\n", "        if True:\n", "a free place is linked once"),
    places("clear_seen", ", RESERVED | SEEN: CANCELLED", "", "a clear cancels reservations of known content too"),
    places("clear_reserved", "{RESERVED: CANCELLED, ", "{", "a place being filled during a clear is not handed out"),
    places("clear_pinned", "{STORED | PINNED: WITHDRAWN | PINNED, ", "{", "a place being read during a clear is not handed out"),
    places("clear_cancelled", ", CANCELLED: CANCELLED}", "}", "a place being filled during two clears is not handed out"),
    places("clear_twice_pinned", ", WITHDRAWN | PINNED: WITHDRAWN | PINNED}", "}", "a place read during two clears is not handed out"),
    places("clear_parent", "            self.parent[held.start()] = NO_PLACE\n", "", "what is held over a clear has no parent"),
    places("clear_children", "            self.children[held.start()] = 0\n", "", "what is held over a clear has no children"),
    places("clear_fresh", "        self._fresh = 0\n\n", "\n", "all places are free after a clear"),
    places(
        "check_states", "        require([states.count(state) for", "        list([states.count(state) for", "a wrong sum by state is found"
    ),
    places("check_pins_sum", "require(sum(pins > 0", "bool(sum(pins > 0", "a wrong number of pinned places is found"),
    places("check_alone", "require(not alone, ", "(not alone, ", "a place without its parent is found"),
    places(
        "check_children",
        "require(state == FREE or self.children",
        "str(state == FREE or self.children",
        "a wrong number of children is found",
    ),
    places("check_pins", "require((pins > 0) == pinned", "str((pins > 0) == pinned", "a pin that the flags do not know is found"),
    places("check_withdrawn", "require(state != WITHDRAWN", "str(state != WITHDRAWN", "a place that nobody holds is found"),
    places("check_free", "        self._check_free(states)\n", "", "a free place that is linked nowhere is found"),
    recency(
        "protected_parent",
        "protected = seen and (parent == NO_PLACE or bool(self._reused[parent]))",
        "protected = seen",
        "a child is protected only while its parent is",
    ),
    recency("older_than_parent", "target.add_older_than(place, parent)", "target.add_newest(place)", "a child is older than its parent"),
    recency("share_at_add", "        if protected:\n            self._demote_surplus()\n", "", "protected content holds its share only"),
    recency(
        "share_at_touch",
        ".add_newest(place)\n        self._demote_surplus()\n",
        ".add_newest(place)\n",
        "protected content holds its share only",
    ),
    recency("tail_first", "for place in reversed(prefix):", "for place in prefix:", "a prefix is given up from its tail"),
    recency(
        "order_check",
        'require(ranks.keys() == set(stored) and len(ranks) == self.size, "',
        'str("',
        "a place missing from the order is found",
    ),
    recency("share_check", "require(self._protected.size <=", "str(self._protected.size <=", "too many protected places are found"),
    recency("marks_check", "require(sum(self._reused", "bool(sum(self._reused", "marks that do not fit the lists are found"),
    recency(
        "parents_check",
        "require(parent[place] == NO_PLACE or",
        "bool(parent[place] == NO_PLACE or",
        "a child newer than its parent is found",
    ),
)

DECISIONS: tuple[Guard, ...] = (
    admission("no_places", "        if num_places < 1:\n", "        if False:\n", "a doorkeeper without places is refused"),
    admission("zero_tag_asked", "!= (k1 & 0xFFFF or 1):", "!= (k1 & 0xFFFF):", "an empty slot is not taken for a key"),
    admission("zero_tag_noted", "= k1 & 0xFFFF or 1  #", "= k1 & 0xFFFF  #", "a key whose tag is zero is remembered"),
    admission("leading", "                return index\n", "                continue\n", "only leading keys count as seen"),
    batching("null_block", "        if block == NULL_BLOCK:\n", "        if False:\n", "nothing is written to the engine's null block"),
    batching("conflict", "        elif known != (source, place):\n", "        elif False:\n", "a block gets one content"),
    batching("max_bytes", "min(max_blocks, max_bytes // block_bytes)", "max_blocks", "a transfer has at most so many bytes"),
    batching(
        "max_blocks", "min(max_blocks, max_bytes // block_bytes)", "max_bytes // block_bytes", "a transfer has at most so many blocks"
    ),
    batching(
        "one_block",
        "max(1, min(max_blocks, max_bytes // block_bytes))",
        "min(max_blocks, max_bytes // block_bytes)",
        "a large block is moved too",
    ),
    batching("room", "            if len(part) > room:\n", "            if False:\n", "a transfer has at most so many blocks"),
    leaders("lead_once", "        self.done(request_id)\n        before =", "        before =", "who leads anew does not lead twice"),
    leaders(
        "late_leader_goes",
        "            self.done(before.request_id)\n",
        "            pass\n",
        "a late leader's end does not end its successor",
    ),
    leaders(
        "patience_floor",
        "max(PATIENCE_FLOOR_SECONDS, self._patience_factor * expected_seconds)",
        "self._patience_factor * expected_seconds",
        "a short load is not late within a step",
    ),
    leaders("own_load", "load is None or load.request_id == request_id", "load is None", "a leader does not wait for itself"),
    leaders("patience", "if now > self._deadline_by_follower.get(request_id, now):", "if False:", "nobody waits longer than for one load"),
    leaders(
        "patience_room",
        '            self._stop_following(request_id)\n            return "alone"',
        '            return "alone"',
        "who waits no more makes room",
    ),
    leaders("late", "        if now > load.deadline:\n", "        if False:\n", "a late leader is replaced"),
    leaders("followers_max", "        if len(load.followers) >= self._followers_max:\n", "        if False:\n", "few wait for one load"),
    leaders(
        "one_wait",
        "        self._stop_following(request_id)\n        load.followers",
        "        load.followers",
        "a request waits for one load",
    ),
    leaders(
        "patience_once",
        "self._deadline_by_follower.setdefault(request_id, load.deadline)",
        "self._deadline_by_follower[request_id] = load.deadline",
        "patience is never renewed",
    ),
    leaders(
        "patience_forgotten", "        self._deadline_by_follower.pop(request_id, None)\n", "", "a request whose wait ended may wait anew"
    ),
    loading("gap", "        if before.stop != after.start:\n", "        if False:\n", "runs with a gap are not loaded"),
    loading("min_blocks", "    if stop - start < max(1, limits.min_blocks):\n", "    if False:\n", "too few blocks are not worth a load"),
    loading(
        "certain",
        "        if run.source not in CERTAIN_SOURCES:\n",
        "        if False:\n",
        "what somebody else may overwrite is not loaded within a step",
    ),
    loading(
        "sync_min",
        "num_blocks < max(1, limits.min_blocks) or num_blocks",
        "num_blocks",
        "a load within a step has at least the least blocks",
    ),
    loading("sync_blocks", " or num_blocks > limits.sync_max_blocks", "", "a load within a step has a bound in blocks"),
    loading("sync_seconds", " or seconds > limits.sync_max_seconds", "", "a load within a step has a bound in time"),
    loading("slower", "    if _saved_seconds(best, start, rates) <= 0:\n", "    if False:\n", "what is computed faster is not loaded"),
    rates("no_seconds", "if amount > 0 and seconds > 0:", "if amount > 0:", "a clock that stood still says nothing of speed"),
    rates("no_amount", "if amount > 0 and seconds > 0:", "if seconds > 0:", "a sample without an amount says nothing of speed"),
    rates("nothing_known", " if seconds else None", "", "a rate without a sample is unknown"),
    rates("copies_fade", "        self._copy.fade(COPY_KEPT_PER_PREFILL)\n", "", "a copy measured as slow is tried again"),
)

GUARDS = (*BOOKS, *DECISIONS)
