"""Guards of the scheduler half: every step of the engine."""

from benchmarks.guards.guard import Guard, In

STEPS = "pure/test_guards_steps.py"
ACCOUNTS = "pure/test_guards_accounts.py"
LIFE = "pure/test_connector_life.py"
FAILED = "pure/test_connector_failed_loads.py"
CLEAR = "pure/test_connector_clear.py"
SHARING = "pure/test_connector_sharing.py"
LEADERS = "pure/test_connector_leaders.py"
SYNCHRONOUS = "cpu/test_schedule_failed_loads.py"
ENGINE = "cpu/test_connector_vllm_scheduler.py"
loads = In("connector/loads.py", LIFE, FAILED, SHARING, LEADERS)
scheduler = In("connector/scheduler.py", STEPS, ACCOUNTS, LIFE, FAILED, SHARING, CLEAR)

GUARDS: tuple[Guard, ...] = (
    scheduler(
        "preempt_asked",
        "        if state.phase is Phase.RUNNING:\n            self._preempt(state, now)\n        elif",
        "        if False:\n            pass\n        elif",
        "a running request that is asked about was preempted",
    ),
    scheduler(
        "load_failed_whole",
        "            self._settle_load(state, now)  # asked again, so nothing of it was usable\n",
        "            pass\n",
        "a load of which nothing was good is settled",
    ),
    scheduler(
        "corrupted",
        "        if self._shared.corrupted:\n            state.offer = None\n            return 0, False\n",
        "",
        "corrupt books serve nothing",
    ),
    scheduler(
        "corrupted_saves", "if candidates and not shared.corrupted else None", "if candidates else None", "corrupt books save nothing"
    ),
    scheduler(
        "fresh_known",
        "        self._fresh_blocks.extend(block_ids[num_known:])\n",
        "        self._fresh_blocks.extend(block_ids)\n",
        "a block shared with a request that runs keeps its owner",
    ),
    scheduler(
        "fresh",
        "        self._fresh_blocks.extend(block_ids[num_known:])\n",
        "",
        "a block handed to somebody else while it is saved is not published",
    ),
    scheduler(
        "fresh_more",
        "            self._fresh_blocks.extend(more)\n",
        "",
        "a block handed to somebody else while it is saved is not published",
    ),
    scheduler(
        "hand_out",
        "            shared.blocks.hand_out(self._fresh_blocks, shared.epoch.current)\n            self._fresh_blocks.clear()\n"
        "            saves",
        "            self._fresh_blocks.clear()\n            saves",
        "a block handed to somebody else while it is saved is not published",
    ),
    scheduler(
        "hand_out_once", "            self._fresh_blocks.clear()\n            saves", "            saves", "a block has a new owner once"
    ),
    scheduler(
        "rescue_generations",
        "            self._shared.blocks.hand_out(range(len(self._shared.blocks)), self._shared.epoch.current)\n",
        "",
        "after a step that could not be looked at no save under way counts",
    ),
    scheduler(
        "rescue_promise",
        "        with self._shared.lock:\n            self._shared.epoch.promised = False\n",
        "        with self._shared.lock:\n",
        "a promise ends with its schedule",
    ),
    scheduler(
        "promise_ends",
        "            shared.epoch.promised = False\n            shared.epoch.apply()\n",
        "            shared.epoch.apply()\n",
        "a promise ends with its schedule",
        "pure/test_guards_transfer.py",
    ),
    scheduler(
        "apply",
        "            shared.epoch.promised = False\n            shared.epoch.apply()\n",
        "            shared.epoch.promised = False\n",
        "a busy engine clears at its next step",
        CLEAR,
    ),
    scheduler(
        "failed_state",
        "if state is None or not num_external_tokens or state.load is not None:",
        "if state is None or state.load is not None:",
        "an allocation without external tokens has no load to fail",
        LIFE,
        FAILED,
        ENGINE,
    ),
    scheduler("failed_twice", " or state.load is not None:", ":", "a load that was opened is not opened again", LIFE, FAILED, ENGINE),
    scheduler(
        "account_fixed",
        "        if not state.completed:\n            state.local_tokens",
        "        if True:\n            state.local_tokens",
        "the account is fixed when the prefill first completes",
    ),
    scheduler("pre_clear", " if blocks.epoch(block) < epoch)", ")", "only local blocks of before a clear count as such", CLEAR),
    scheduler(
        "examined_anew", "        state.examined = 0\n", "", "a prefix that was cleared while its request was preempted is saved again"
    ),
    scheduler("preempt_running", " and state.phase is Phase.RUNNING:\n", ":\n", "a preemption is taken note of once"),
    scheduler(
        "tainted",
        "if full > state.examined and not state.tainted:",
        "if full > state.examined:",
        "what was computed on a load that failed is not kept",
    ),
    scheduler(
        "taint_set", "        state.tainted = state.phase is Phase.RUNNING\n", "", "what was computed on a load that failed is not kept"
    ),
    scheduler(
        "rolled_back",
        "        state.computed_tokens = good_stop * self._engine.tokens_per_block\n",
        "",
        "tokens behind a failed block are computed again, and so counted",
    ),
    scheduler(
        "completing_undone",
        "            state.completing_step = 0\n            self._completing.remove(state)\n",
        "            pass\n",
        "a prefill whose load failed has not completed",
    ),
    scheduler(
        "table_again",
        "new_blocks[len(state.block_ids) :] if state.admitted else new_blocks",
        "new_blocks",
        "a whole table is not taken for an addition",
        "cpu/test_connector_vllm_scheduler.py",
        LIFE,
        FAILED,
    ),
    scheduler(
        "hash_known",
        "known = min(full, len(state.chain), len(state.block_ids))",
        "known = min(full, len(state.block_ids))",
        "a block without its hash is not saved",
        LIFE,
        FAILED,
        SHARING,
        ENGINE,
    ),
    scheduler("recomputed", "        if state.high_water_tokens > before:\n", "        if False:\n", "tokens computed again are counted"),
    scheduler(
        "recomputed_max",
        "min(after, state.high_water_tokens) - before",
        "after - before",
        "only what had been computed counts as computed again",
    ),
    scheduler(
        "complete_once",
        "if not state.completed and not state.completing_step and after",
        "if not state.completing_step and after",
        "a request is counted once",
    ),
    scheduler(
        "complete_listed",
        "not state.completed and not state.completing_step and after >=",
        "not state.completed and after >=",
        "a request is counted once",
    ),
    scheduler("complete_prefill", " and after >= state.num_prompt_tokens:", ":", "an account is fixed when the prefill is complete"),
    scheduler("complete_upto", " and self._completing[0].completing_step <= upto_step:", ":", "an account is fixed after its step has run"),
    scheduler(
        "steps_in_flight",
        "self._complete(self._step - self._steps_in_flight + 1, now)",
        "self._complete(self._step, now)",
        "with two steps under way the outcome is that of the older",
    ),
    scheduler(
        "short_steps",
        "        if self._built_tokens >= 2 * self._engine.tokens_per_block:\n",
        "        if True:\n",
        "steps that decode say nothing of prefill",
    ),
    scheduler(
        "unknown_end",
        "            if request is None:\n                return\n",
        "            if request is None:\n                raise KeyError(request_id)\n",
        "a request that was never heard of may end",
    ),
    scheduler(
        "output_negative",
        "max(0, request.num_tokens - state.num_prompt_tokens)",
        "(request.num_tokens - state.num_prompt_tokens)",
        "no output is never less than none",
    ),
    scheduler(
        "end_settles",
        "        self._settle_load(state, now)  # a synchronous one of the step that is just ending\n",
        "",
        "a load of a request that ends is counted",
    ),
    scheduler(
        "aborted_early",
        'if status != "aborted" or output_tokens:',
        "if True:",
        "a request aborted before its first token has no account fixed",
    ),
    scheduler(
        "end_completing",
        "                self._completing.remove(state)\n                if status",
        "                if status",
        "a request that ended is not completed again",
    ),
    scheduler("abandon", "            self._loads.abandon(state)\n", "", "a load whose request ended is cut short"),
    scheduler(
        "forgotten",
        "state = self._requests.pop(request_id, None)",
        "state = self._requests.get(request_id)",
        "a request that ended is forgotten",
    ),
    scheduler(
        "wake_forgotten",
        "        self.wake_at.pop(request_id, None)\n        output_tokens",
        "        output_tokens",
        "a request that ended is forgotten",
    ),
    scheduler(
        "preempt_settles",
        '        """Its blocks are gone; it will be asked about again like a new one."""\n        self._settle_load(state, now)\n',
        '        """Its blocks are gone; it will be asked about again like a new one."""\n',
        "a load of a preempted request is counted",
    ),
    scheduler(
        "preempt_completes",
        "        if state.completing_step:\n            self._completing.remove(state)\n            with",
        "        if False:\n            self._completing.remove(state)\n            with",
        "a request preempted at its first token is accounted as it was admitted",
    ),
    scheduler(
        "high_water",
        "            state.high_water_tokens = max(state.high_water_tokens, state.computed_tokens)\n",
        "            pass\n",
        "tokens computed again are counted",
    ),
    scheduler(
        "preempt_blocks",
        "        state.block_ids = []\n        state.computed_tokens = 0\n",
        "        state.computed_tokens = 0\n",
        "blocks that were given back are not saved",
    ),
    scheduler(
        "reset_idle",
        " and cache.idle() and cache.reset():",
        " and cache.reset():",
        "the engine's own cache is reset when no block is in use",
        CLEAR,
    ),
    scheduler(
        "reset_refused",
        " and cache.idle() and cache.reset():",
        " and cache.idle() and (cache.reset() or True):",
        "a reset that was refused is tried again",
        CLEAR,
    ),
    scheduler(
        "reset_once", "if self._local_epoch != epoch and cache", "if cache", "the engine's own cache is reset after a clear only", CLEAR
    ),
    scheduler(
        "unwritten",
        "        if self._loads.builds_on_unwritten(state):\n",
        "        if False:\n",
        "nobody builds on blocks that a load of this schedule is to fill",
        SYNCHRONOUS,
    ),
    scheduler(
        "failures_undone",
        "failures_undone=steps_in_flight == 1",
        "failures_undone=True",
        "no step is computed on a load that failed in the step before it",
        SYNCHRONOUS,
    ),
    scheduler(
        "forget",
        "            self.local_cache.forget({*job.failed_blocks, *state.block_ids[good_stop:]})\n",
        "            pass\n",
        "blocks of a failed load are found by nobody",
        SYNCHRONOUS,
    ),
    scheduler(
        "forget_behind",
        "{*job.failed_blocks, *state.block_ids[good_stop:]}",
        "job.failed_blocks",
        "blocks computed on a failed load are found by nobody",
        SYNCHRONOUS,
    ),
    loads("unwritten_end", "        self._unwritten.clear()\n", "", "blocks that were filled are built on", SYNCHRONOUS),
    loads(
        "unwritten_key", "index < stop and state.chain[index] == key", "index < stop", "only who shares blocks waits for them", SYNCHRONOUS
    ),
)
