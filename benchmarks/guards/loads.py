"""Guards of the connector: what is offered, loaded and saved, who leads, what a failed load costs."""

from benchmarks.guards.guard import Guard, In

ASKED = "pure/test_guards_loads.py"
STEPS = "pure/test_guards_steps.py"
LIFE = "pure/test_connector_life.py"
FAILED = "pure/test_connector_failed_loads.py"
CLEAR = "pure/test_connector_clear.py"
SHARING = "pure/test_connector_sharing.py"
LEADERS = "pure/test_connector_leaders.py"
SYNCHRONOUS = "cpu/test_schedule_failed_loads.py"
ENGINE = "cpu/test_connector_vllm_scheduler.py"
offers = In("connector/offers.py", ASKED, STEPS, SHARING, CLEAR, LIFE, FAILED)
loads = In("connector/loads.py", ASKED, STEPS, LIFE, FAILED, SHARING, LEADERS)
saving = In("connector/saving.py", ASKED, STEPS, SHARING, CLEAR, LIFE, FAILED)
lookup = In("connector/lookup.py", ASKED, STEPS, SHARING, CLEAR)
requests = In("connector/requests.py", SHARING)

GUARDS: tuple[Guard, ...] = (
    offers("whole_blocks", "        if part or request.barred or view", "        if request.barred or view", "counts are whole blocks"),
    offers("barred", "part or request.barred or view", "part or view", "after one failed load a request is offered nothing again"),
    offers("skip_reading", " or view.skip_reading:", ":", "a request for prompt logprobs is given nothing"),
    offers(
        "last_token",
        "min(view.num_tokens - 1, view.num_prompt_tokens)",
        "min(view.num_tokens, view.num_prompt_tokens)",
        "one token is left to compute: an over-count ends the engine",
    ),
    offers(
        "prompt_only",
        "min(view.num_tokens - 1, view.num_prompt_tokens)",
        "(view.num_tokens - 1)",
        "no more than the prompt is offered",
        SHARING,
        LIFE,
        FAILED,
        ENGINE,
    ),
    offers("hashes_known", "        stop = min(stop, len(request.chain))\n", "", "a block without its hash is not looked for"),
    offers(
        "promise_kept",
        "return offer if offer is None or offer.asynchronous or self._promise(epoch) else None",
        "return offer",
        "a promised load keeps its places",
    ),
    offers(
        "promise_wanted",
        "epoch.promised = epoch.wanted == epoch.current == found_in_epoch",
        "epoch.promised = epoch.current == found_in_epoch",
        "nothing is promised once a clear is wanted",
    ),
    offers(
        "promise_epoch",
        "epoch.promised = epoch.wanted == epoch.current == found_in_epoch",
        "epoch.promised = epoch.wanted == epoch.current",
        "nothing is promised that was found before a clear",
    ),
    offers(
        "share",
        "stop = min(stop, start + self._free_share(stop - start))",
        "stop = min(stop, start + stop - start)",
        "loads hold no more than their share of the engine's blocks",
    ),
    offers(
        "share_min",
        "            if stop - start < self._limits.min_blocks:\n",
        "            if False:\n",
        "a load without a share left is refused",
    ),
    offers(
        "share_alone",
        "max(0, self._share_blocks - held) if held else wanted",
        "max(0, self._share_blocks - held)",
        "a load that is alone may be larger than the share",
    ),
    offers(
        "share_asynchronous",
        "for job in self._engine.state.open_loads.values() if job.asynchronous)",
        "for job in self._engine.state.open_loads.values())",
        "loads within a step take no share",
    ),
    offers(
        "within_step",
        "if failures_undone and engine.state.mover.loads_within_step else 0",
        "if failures_undone else 0",
        "the step thread waits for no device",
        "pure/test_transfer_marks.py",
    ),
    offers(
        "failures_undone",
        "if failures_undone and engine.state.mover.loads_within_step else 0",
        "if engine.state.mover.loads_within_step else 0",
        "no step is computed on a load that failed in the step before it",
        ENGINE,
        SYNCHRONOUS,
    ),
    offers("cut", "_cut(hits, stop), plan", "hits, plan", "what is loaded is what was offered"),
    offers("refusal_anew", '        request.refusal = ""\n', "", "a refusal is counted for the question that it answers"),
    lookup("max_runs", " and len(found) < MAX_RUNS:", ":", "a prefix broken into many pieces costs a bounded search"),
    lookup(
        "certain",
        "        if end - start <= self._engine.config.sync_load_max_blocks:\n",
        "        if False:\n",
        "a load within a step has no gap",
    ),
    lookup("epoch", "epoch = self._engine.state.epoch.current", "epoch = None", "what is found at a peer is of the present epoch"),
    loads(
        "leaders",
        "        if self._leaders and not state.barred",
        "        if False and not state.barred",
        "identical prompts are fetched once",
    ),
    loads(
        "barred_waits",
        "if self._leaders and not state.barred and start",
        "if self._leaders and start",
        "a request that may not load waits for nobody's load",
    ),
    loads("start_in_chain", " and start < len(state.chain) and", " and", "a prompt without a further block waits for nobody"),
    loads("wait_counted", "        if waits != state.waiting:\n", "        if True:\n", "a follower is counted once"),
    loads(
        "uncounted_offer",
        "if offer is None or num_external_tokens != (offer.stop - offer.start) * self._engine.tokens_per_block:",
        "if False:",
        "tokens that were not offered are reported as failed",
    ),
    loads(
        "other_count",
        "if offer is None or num_external_tokens != (offer.stop - offer.start) * self._engine.tokens_per_block:",
        "if offer is None:",
        "another count than was offered is reported as failed",
    ),
    loads(
        "pin",
        "pinned = self._shared.tier.pin(keys) if hit.peer == OWN_SLAB else []",
        "pinned = [p for k in keys if hit.peer == OWN_SLAB and (p := self._shared.segment.place_of(k)) is not None]",
        "places of a load are pinned from its commit on",
    ),
    loads(
        "lead_told",
        "            self._board.lead(state.chain[offer.start], state.request_id, offer.expected_seconds, now)\n",
        "",
        "identical prompts are fetched once",
        LEADERS,
    ),
    loads(
        "leaves_board",
        "        self._leave_board(state)\n        state.stored_start",
        "        state.stored_start",
        "who got its blocks is waited for no more",
        LEADERS,
    ),
    loads(
        "promoted",
        "        self._leave_board(state)\n\n    def closed",
        "        pass\n\n    def closed",
        "who has its blocks is waited for no more",
        LEADERS,
    ),
    loads(
        "settle_done",
        "        if job is None or not job.done:\n",
        "        if job is None:\n",
        "the outcome of a load is read when it is written",
    ),
    loads("settle_once", "        state.load = None\n", "", "a load is counted once"),
    loads(
        "settle_closed",
        "        self._shared.open_loads.pop(state.request_id, None)\n        state.loaded_at",
        "        state.loaded_at",
        "a load that ended takes no share",
    ),
    loads(
        "closed",
        "        self._shared.open_loads.pop(request_id, None)\n\n",
        "        pass\n\n",
        "a load of a request that ended takes no share",
    ),
    loads("one_failure", "        state.barred = True\n", "", "after one failed load a request is offered nothing again"),
    loads(
        "usable",
        "num_usable = next((index for index, piece in enumerate(job.pieces) if piece.block in failed), len(job.pieces))",
        "num_usable = len(job.pieces) - len(failed)",
        "tokens before the first failed block are counted, none behind it",
    ),
    loads("failed_counted", '        self._shared.count("failed_loads")\n', "", "failed loads are counted"),
    loads("invalid_counted", '        self._shared.count("invalid_blocks", len(failed))\n', "", "invalid blocks are counted"),
    loads(
        "sources_once",
        "        if not state.completed:\n            state.external",
        "        if True:\n            state.external",
        "the account is fixed when the prefill first completes",
    ),
    loads(
        "sources_usable",
        "for piece in job.pieces[:num_usable]]",
        "for piece in job.pieces]",
        "tokens that failed are not counted as loaded",
    ),
    loads(
        "touched",
        "            self._engine.copier.submit_touch(state.chain.__getitem__, last)\n",
        "            pass\n",
        "what served a request again is kept longer",
        "pure/test_transfer_copier.py",
        LIFE,
        FAILED,
        SHARING,
    ),
    loads("cancel", "            state.load.cancelled = True\n", "            pass\n", "a load whose request ended is cut short"),
    loads(
        "abandon_board",
        "        self._leave_board(state)\n        if state.load is not None",
        "        if state.load is not None",
        "nobody waits for a request that ended",
        LEADERS,
    ),
    loads(
        "failed_board",
        "        state.barred = True\n        self._leave_board(state)\n",
        "        state.barred = True\n",
        "nobody waits for a load that failed",
        LEADERS,
    ),
    loads(
        "wait_negative",
        "max(0.0, job.ended - state.load_started_at)",
        "(job.ended - state.load_started_at)",
        "a duration is never negative",
        "pure/test_connector_latency.py",
    ),
    saving("closing", "0 if self._engine.copier.closing else FILLING_MAX", "FILLING_MAX", "nothing is reserved once the copier is closing"),
    saving("room", "FILLING_MAX_BLOCKS - sum(self._state.open_saves.values())", "1 << 30", "blocks on their way are bounded"),
    saving(
        "room_shared",
        "self._plan_one(request, full, room - len(pieces))",
        "self._plan_one(request, full, room)",
        "blocks on their way are bounded over all requests of a step",
    ),
    saving("open_save", "        self._state.open_save(epoch, len(pieces))\n", "", "a clear is confirmed after the saves under way", CLEAR),
    saving("dropped_tail", "            if request.tail is Tail.DROPPED:\n", "            if False:\n", "nothing is kept beyond a gap"),
    saving(
        "own_epoch",
        "                if stop == request.examined:\n",
        "                if False:\n",
        "what was written before a clear is not saved after it",
        CLEAR,
    ),
    saving(
        "epoch_of_block",
        " or shared.blocks.epoch(block) != shared.epoch.current:",
        ":",
        "what was written before a clear is not saved after it",
        CLEAR,
    ),
    saving("null_block", "if block == NULL_BLOCK or shared", "if shared", "the engine's null block is not saved"),
    saving(
        "skip_stored",
        "        if request.stored_start <= start < request.stored_stop:\n",
        "        if False:\n",
        "what was just loaded is not saved again",
    ),
    saving(
        "own_kept",
        "        end = self._state.tier.prefix(request.chain, start, full)\n        if end > start:",
        "        end = start\n        if end > start:",
        "what is kept is not reserved again",
    ),
    saving(
        "peer_keeps",
        "        end = self._lookup.peer_end(request.chain, start, full)\n",
        "        end = start\n",
        "what a peer keeps is not kept again",
    ),
    saving("peer_counted", '            self._state.count("drops_peer_has", end - start)\n', "", "a drop is counted by its reason"),
    saving(
        "parent_elsewhere",
        "parent = chain.parent(start) if request.tail is Tail.OWN else None",
        "parent = chain.parent(start)",
        "what follows a peer's prefix begins a chain of its own",
    ),
    saving(
        "refusal_ends",
        '            request.examined = stop\n            self._drop(request, full, "drops_parent")\n',
        "            pass\n",
        "the first refusal ends a chain",
    ),
    saving("drop_counted", "        self._state.count(reason, full - request.examined)\n", "", "drops are counted"),
    requests(
        "adapter",
        "return block_key(self._hashes[index], 0, self._adapter)",
        "return block_key(self._hashes[index], 0)",
        "adapters do not meet although the engine gives them equal hashes",
    ),
    requests(
        "identity",
        "view.xavier_request or blake2b",
        "blake2b",
        "a record is found by the identity that the route drew",
        "cpu/test_connector_vllm_scheduler.py",
        LIFE,
        FAILED,
    ),
)
