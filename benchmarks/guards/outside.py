"""Guards of what is read of the cache from outside: the replica's view of its segment, the model's clear, usage in answers."""

from benchmarks.guards.guard import Guard, In

view = In("xinference/core/cache_view.py", "xinference/core/test/cpu/test_cache_view.py", "xinference/core/test/pure/test_cache_view.py")
service = In(
    "xinference/core/cache_service.py", "xinference/core/test/pure/test_cache_clear.py", "xinference/core/test/pure/test_cache_service.py"
)
usage = In("xinference/api/usage.py", "xinference/api/test/pure/test_usage_details.py", "xinference/api/test/pure/test_usage.py")

GUARDS: tuple[Guard, ...] = (
    view(
        "incarnation",
        "expected_incarnation=self._order.incarnation",
        "expected_incarnation=None",
        "the segment of another start is not read",
    ),
    view(
        "replaced",
        "if self._reader is not None and not self._reader.replaced():",
        "if self._reader is not None:",
        "a segment that was replaced is let go",
    ),
    view(
        "confirmed",
        'reader.header()["epoch_confirmed"] >= epoch:',
        'reader.header()["epoch_confirmed"] >= 0:',
        "a clear is confirmed when the engine says so",
    ),
    view(
        "confirm_deadline",
        "            if self._clock.now() >= deadline:\n                return False\n",
        "            if False:\n                return False\n",
        "nobody waits for ever for a clear",
    ),
    view(
        "record_deadline",
        "            if self._clock.now() >= deadline:\n                return None\n",
        "            if False:\n                return None\n",
        "nobody waits for ever for a record",
    ),
    view(
        "all_ended",
        'if entries and all(entry.state != "running" for entry in entries):',
        "if entries:",
        "a request is accounted for when all its prompts are",
    ),
    view("some", "if entries and all(entry.state", "if all(entry.state", "a request without a record is not accounted for"),
    view("limit", "        if reader is None or limit <= 0:\n", "        if reader is None:\n", "no records are asked for, none are given"),
    view(
        "suspicious",
        "        if silent < SUSPICIOUS_SECONDS:\n            return max(0.0, silent)\n",
        "",
        "an engine that beats is not looked at further",
    ),
    view("runs", "        if ran != self._ran_ns:\n", "        if False:\n", "a core that runs without beating is not silent"),
    view("unfinished", "                and not name.unfinished\n", "", "a file on its way is not read"),
    view("control_page", "                and name.namespace\n", "", "a control page is not read as a segment"),
    view(
        "own_files",
        "                and (name.worker_id, name.replica_uid) == (self._machine.worker_id, self._order.replica_uid)\n",
        "",
        "another replica's segment is not read",
    ),
    view(
        "no_cache", "        if self._order.cache is None:\n            return []\n", "", "a replica without a cache looks for no segment"
    ),
    view(
        "not_happened",
        "offset + monotonic_us / 1e6 if monotonic_us else None",
        "offset + monotonic_us / 1e6",
        "what has not happened has no time",
    ),
    service(
        "not_shared",
        "        if not d.spec.enable_xavier:\n            raise",
        "        if False:\n            raise",
        "a model without a shared cache is told so",
    ),
    service("epoch", "        d.epoch += 1\n", "", "a clear starts a new epoch"),
    service("bump", "        self._state.controls.bump()\n", "", "pages of before are not taken for the present ones"),
    service("push", "        await self.push_controls()\n        held", "        held", "a clear reaches every engine"),
    service(
        "held",
        "for keeper in d.keepers.values() if keeper.state in HELD]\n        confirmed",
        "for keeper in d.keepers.values()]\n        confirmed",
        "replicas that run are waited for",
    ),
    service("pending", 'status = "pending" if pending else "cleared"', 'status = "cleared"', "a clear that is not confirmed is pending"),
    service(
        "freed_negative",
        "freed = max(0, before - await self._used_bytes(d))",
        "freed = before - await self._used_bytes(d)",
        "bytes given back are never less than none",
    ),
    service(
        "workers_that_fail",
        "for worker_id, controls in by_worker.items()), return_exceptions=True\n",
        "for worker_id, controls in by_worker.items())\n",
        "a worker that does not answer does not end a clear",
    ),
    service(
        "confirm_unreachable",
        "CONFIRM_SECONDS, wait_seconds=CONFIRM_SECONDS))\n        except Unreachable:\n            return False",
        "CONFIRM_SECONDS, wait_seconds=CONFIRM_SECONDS))\n        except Unreachable:\n            return True",
        "a replica that does not answer has not confirmed",
    ),
    service(
        "record_unreachable",
        "        except Unreachable:\n            return None\n        return found\n\n    async def recent",
        "        except KeyError:\n            return None\n        return found\n\n    async def recent",
        "a replica that does not answer has no record",
    ),
    service(
        "recent_unreachable",
        "        except Unreachable:\n            return []\n",
        "        except KeyError:\n            return []\n",
        "a replica that does not answer has no records",
    ),
    service(
        "report_unreachable",
        "        except Unreachable:\n            return None\n        return found\n\n    async def _used_bytes",
        "        except KeyError:\n            return None\n        return found\n\n    async def _used_bytes",
        "a replica that does not answer has no report",
    ),
    service("recent_limit", "        return records[:limit]\n", "        return records\n", "as many records are given as were asked for"),
    service(
        "recent_order",
        '        records.sort(key=lambda record: record["times"]["queued"] or 0.0, reverse=True)\n',
        "",
        "the newest records are given",
    ),
    service("recent_shared", " if d.spec.enable_xavier for k", " for k", "only models that share are asked"),
    service("other_start", "other.incarnation in mapped:", "mapped:", "a peer is attached when its present start is mapped"),
    usage(
        "length",
        'elif record.get("prompt_tokens") != usage.get("prompt_tokens"):',
        "elif False:",
        "a record of another length is not believed",
    ),
    usage("missing", "Figure.MISSING if expected else Figure.ENGINE", "Figure.ENGINE", "a record that did not arrive is told of"),
    usage("number", '    elif details.get("cached_tokens") is None:\n', "    elif False:\n", "cached tokens are always a number"),
    usage(
        "not_changed",
        "details = dict(given) if isinstance(given, dict) else {}",
        "details = given if isinstance(given, dict) else {}",
        "the usage given is not changed",
    ),
    usage("foreign_details", "dict(given) if isinstance(given, dict) else {}", "dict(given or {})", "details that are no object are none"),
    usage(
        "times",
        "queued is None or first_token is None or first_token < queued",
        "queued is None or first_token is None",
        "a time to the first token is never negative",
    ),
    usage("no_time", "queued is None or first_token is None or first", "first", "without both times the measured one stands"),
    usage(
        "no_record",
        'times = record.get("times", {}) if record is not None else {}',
        'times = record.get("times", {})',
        "without a record the measured time stands",
    ),
    usage(
        "invented",
        '"sources": record["sources"] if record is not None else None',
        '"sources": record["sources"] if record is not None else {}',
        "sources are not invented",
    ),
)
