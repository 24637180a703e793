"""Guards of the worker half, of what stands around hooks, and of accounting."""

from benchmarks.guards.guard import Guard, In

STEPS = "pure/test_guards_steps.py"
ACCOUNTS = "pure/test_guards_accounts.py"
ENDS = "pure/test_guards_life.py"
LIFE = "pure/test_connector_life.py"
FAILED = "pure/test_connector_failed_loads.py"
CLEAR = "pure/test_connector_clear.py"
SHARING = "pure/test_connector_sharing.py"
ENGINE = "cpu/test_connector_vllm_scheduler.py"
worker = In("connector/worker.py", STEPS, ACCOUNTS, LIFE, FAILED)
guard = In("connector/guard.py", ENDS, STEPS, ACCOUNTS, LIFE, FAILED, "pure/test_connector_hook_time.py")
accounting = In("connector/accounting.py", STEPS, ACCOUNTS, LIFE, FAILED, SHARING)

GUARDS: tuple[Guard, ...] = (
    worker(
        "abandoned_cancelled",
        "            job.cancelled = True  #",
        "            pass  #",
        "a load that was given up is not taken up after all",
    ),
    worker(
        "invalid_sync",
        "                    self._invalid |= job.failed_blocks\n                    self._tainted",
        "                    self._tainted",
        "blocks of a failed load are reported",
    ),
    worker(
        "taint", "                    self._tainted.append(job.request_id)\n", "", "what was computed on a load that failed is not kept"
    ),
    worker("taint_bounded", "deque(maxlen=TAINTED_MAX)", "deque()", "requests that are remembered are bounded"),
    worker(
        "fail_undone",
        "            if not job.done:\n                job.failed",
        "            if True:\n                job.failed",
        "a load that ended well is not failed afterwards",
    ),
    worker(
        "fail_ends",
        "                job.failed_blocks.update(piece.block for piece in job.pieces)\n"
        "                self._engine.state.end_load(job, now, now)\n            self._invalid",
        "                job.failed_blocks.update(piece.block for piece in job.pieces)\n            self._invalid",
        "a load that was not started lets its places go",
    ),
    worker("fail_reported", "        self._failed.extend(meta.async_loads)\n", "", "a load that was not started is reported once"),
    worker("saves_once", "if meta is EMPTY or meta is self._submitted:", "if meta is EMPTY:", "a step's saves are made once"),
    worker(
        "tainted_saves",
        "self._without_tainted(meta.saves) if self._tainted else meta.saves",
        "meta.saves",
        "what was computed on a load that failed is not kept",
    ),
    worker(
        "tainted_given_back",
        "                shared.tier.give_back(piece.place)\n",
        "                pass\n",
        "places of saves that are not made are free",
    ),
    worker("tainted_open", "            shared.open_save(job.epoch, -len(bad))\n", "", "a clear is confirmed although saves were not made"),
    worker("tainted_counted", '            shared.count("drops_tainted", len(bad))\n', "", "a drop is counted by its reason"),
    worker(
        "reported_once",
        "            if self._outstanding.pop(job.request_id, None) is not None:\n",
        "            if True:\n",
        "a load is reported once",
    ),
    worker(
        "invalid_async",
        "                finished.add(job.request_id)\n                self._invalid |= job.failed_blocks\n",
        "                finished.add(job.request_id)\n",
        "blocks of a failed load are reported with it",
    ),
    worker("invalid_once", "invalid, self._invalid = self._invalid, set()", "invalid = self._invalid", "invalid blocks are reported once"),
    worker(
        "dead_copier", "        if not self._engine.copier.alive:\n", "        if False:\n", "a copier that died leaves no request waiting"
    ),
    worker(
        "abandoned_failed",
        "            job.failed_blocks.update(piece.block for piece in job.pieces)\n"
        "            self._engine.state.end_load(job, now, now)\n        return lost",
        "            self._engine.state.end_load(job, now, now)\n        return lost",
        "blocks that a dead copier owes are recomputed",
    ),
    guard(
        "catches",
        '            self._state.report(f"hook {hook}", error)\n            return on_error()\n',
        "            raise\n",
        "an error in the cache never ends the engine",
    ),
    guard("reports", '            self._state.report(f"hook {hook}", error)\n', "", "an error in a hook is counted"),
    guard(
        "closed",
        "        if self._state.closed:\n            return on_error()\n",
        "",
        "after a shutdown hooks answer without the cache",
        ENGINE,
        LIFE,
        FAILED,
    ),
    guard("flush", "        if self._calls < FLUSH_CALLS:\n            return\n", "", "the lock is not taken for each hook"),
    guard("flushed_once", "        self._calls = self._nanoseconds = self._copy_nanoseconds = 0\n", "", "a hook's time is counted once"),
    guard(
        "copies_apart",
        "time.perf_counter_ns() - started - copied",
        "time.perf_counter_ns() - started",
        "copies are no overhead of hooks",
        "pure/test_connector_hook_time.py",
    ),
    accounting(
        "computed",
        "tokens[_COMPUTED] = state.num_prompt_tokens - sum(tokens)",
        "tokens[_COMPUTED] = state.num_prompt_tokens",
        "tokens by source sum to the prompt's length",
    ),
    accounting("completed", "        state.completed = True\n", "", "the account is fixed when the prefill first completes"),
    accounting("completing_ends", "        state.completing_step = 0\n", "", "a request is counted once"),
    accounting("requests", '        shared.count("requests", 1)\n', "", "requests are counted"),
    accounting(
        "pre_clear",
        "        if state.pre_clear_tokens:\n            shared",
        "        if False:\n            shared",
        "local tokens of before a clear are counted",
        CLEAR,
    ),
    accounting(
        "recomputed",
        "        if state.recomputed_tokens:\n            self",
        "        if False:\n            self",
        "tokens computed again are counted",
    ),
    accounting(
        "one_record",
        "ring.write(entry) if state.slot is None else ring.update(state.slot, entry)",
        "ring.write(entry)",
        "a request has one record",
    ),
)
