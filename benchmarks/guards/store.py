"""Guards of the CPU tier: the book and the records stay in step."""

from benchmarks.guards.guard import Guard, In

tier = In("store/tier.py", "pure/test_guards_store.py", "pure/test_tier.py", "pure/test_tier_schedules.py")

GUARDS: tuple[Guard, ...] = (
    tier(
        "book_size",
        "        if book.num_places != segment.geometry.num_places:\n",
        "        if False:\n",
        "a book of another size is refused",
    ),
    tier(
        "parent_gone", "        if tail is None and chain.parent_key is not None:\n", "        if False:\n", "nothing is kept beyond a gap"
    ),
    tier(
        "stop_at_stored",
        "stop = self._segment.first_present(keys, first + 1, len(keys))",
        "stop = len(keys)",
        "a block gets no second place",
    ),
    tier(
        "stop_at_filling",
        "        if self._filling:\n            stop = next(",
        "        if False:\n            stop = next(",
        "a block on its way gets no second place",
    ),
    tier(
        "filling_max",
        "min(stop, first + FILLING_MAX_BLOCKS - len(self._filling))",
        "stop",
        "blocks on their way are bounded, as their books are",
    ),
    tier(
        "doorkeeper_asked",
        "self._doorkeeper.num_seen(wanted))",
        "len(wanted))",
        "content never offered before does not displace what was reused",
    ),
    tier("doorkeeper_told", "        self._doorkeeper.note(wanted)\n", "", "what was offered is known when it is offered again"),
    tier(
        "withdrawn_first",
        "        self._segment.invalidate_published(plan.places)",
        "        pass",
        "a place is withdrawn before its bytes can be overwritten",
    ),
    tier("filling_noted", "        self._filling.update(zip(wanted, plan.places, strict=False))\n", "", "a block on its way is known"),
    tier("evictions", '        self._segment.counters.add("evictions", len(plan.evicted))\n', "", "evictions are counted"),
    tier("refused_rest", "num_refused + len(keys) - stop, plan.refused", "num_refused, plan.refused", "every refused block is counted"),
    tier(
        "publish_wanted",
        "if self._forget_filling(place, key) and self",
        "if self",
        "what a clear or a lost parent came before is not published",
    ),
    tier("publish_room", " and self._segment.has_room(key) and", " and", "a full line of the index refuses a block and keeps the books"),
    tier(
        "publish_committed",
        "self._segment.has_room(key) and self._book.commit(place):",
        "self._segment.has_room(key):",
        "the book knows what is published",
    ),
    tier(
        "give_back_key",
        "        self._forget_filling(place, self._key_by_filling.get(place))\n",
        "",
        "a block given back may be offered again",
    ),
    tier(
        "give_back_followers",
        "        self._forget_followers(place)\n        self._book.abort(place)\n        self._note_used()",
        "        self._book.abort(place)\n        self._note_used()",
        "what was to follow a block given back may be offered again",
    ),
    tier(
        "give_back_place",
        "        self._forget_followers(place)\n        self._book.abort(place)\n        self._note_used()",
        "        self._forget_followers(place)\n        self._note_used()",
        "a place given back is free",
    ),
    tier(
        "pin_stops",
        "            if place is None:\n                break\n            self._book.pin(place)",
        "            if place is None:\n                continue\n            self._book.pin(place)",
        "pins are of leading blocks, in order",
    ),
    tier("pin", "            self._book.pin(place)\n", "", "what is being read is not given up"),
    tier("unpin", "            self._book.unpin(place)\n", "            pass\n", "what is read no more can be given up"),
    tier(
        "touch_head",
        "if places and self._book.view(places[0]).parent is None:",
        "if places:",
        "the middle of a chain does not outlive its head",
    ),
    tier("clear_epoch", "        self._segment.set_epoch(epoch)\n", "", "what was cleared is found by nobody"),
    tier(
        "clear_filling",
        "        self._filling.clear()\n        self._key_by_filling.clear()\n",
        "",
        "what was on its way at a clear is not published",
    ),
    tier("clear_book", "freed = self._book.clear()", "freed = 0", "a clear gives its bytes back"),
    tier("cleared_counted", '        self._segment.counters.add("cleared_blocks", freed)\n', "", "cleared blocks are counted"),
    tier("check_book", "        self._book.check()\n", "", "a wrong book is found"),
    tier(
        "check_records",
        '            if (view.state == "stored") != (found == place):\n',
        "            if False:\n",
        "a record that vanished or appeared is found",
    ),
    tier(
        "check_filling",
        '            if filling is not None and view.state != "reserved":\n',
        "            if False:\n",
        "a place filled without a reservation is found",
    ),
    tier(
        "check_keys",
        "        if self._filling != {key: place for place, key in self._key_by_filling.items()}:\n",
        "        if False:\n",
        "keys and places that disagree are found",
    ),
    tier(
        "refuse_settled",
        '        if view.state not in ("reserved", "cancelled"):\n',
        "        if False:\n",
        "a place that the book took back is not given back again",
    ),
    tier(
        "refuse_followers",
        "        self._forget_followers(place)\n        view =",
        "        view =",
        "what was to follow a refused block may be offered again",
    ),
    tier(
        "refuse_abort",
        "        self._book.abort(place)\n        return reason",
        "        return reason",
        "the place of a refused block is free",
    ),
    tier(
        "refuse_epoch",
        '"drops_epoch" if view.state == "cancelled" else "drops_parent"',
        '"drops_parent"',
        "a drop is counted by its reason",
    ),
    tier("refuse_index", '            reason = "drops_index_full"\n', "            pass\n", "a drop is counted by its reason"),
    tier("followers_of_followers", "                    lost.add(child)\n", "", "all that was to follow may be offered again"),
    tier(
        "filling_place",
        "if key is None or self._filling.get(key) != place:",
        "if key is None or key not in self._filling:",
        "a late copy does not end the key's second way",
    ),
    tier("refused_counted", "        self._segment.counters.add(_DROP_BY_REFUSAL[reason], num_refused)\n", "", "refusals are counted"),
    tier(
        "restore_parent",
        '                if parent is None or book.view(parent).state != "stored":\n',
        "                if False:\n",
        "an adopted chain has no gap",
    ),
    tier(
        "restore_withdrawn", "                    segment.invalidate(place)\n", "", "an adopted block without its parent is found by nobody"
    ),
    tier("adopted_dropped", "        segment.forget_adopted()\n", "", "the list of adopted places is not kept"),
    tier(
        "used_told",
        "        self._segment.set_used(used, used * self._segment.geometry.place_bytes)\n",
        "        pass\n",
        "the header says what is used",
    ),
)
