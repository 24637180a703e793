"""Guards of the connector: which engines may share, and with whom; what is read off the engine."""

from benchmarks.guards.guard import Guard, In

ENDS = "pure/test_guards_life.py"
LIFE = "pure/test_connector_life.py"
FAILED = "pure/test_connector_failed_loads.py"
CLEAR = "pure/test_connector_clear.py"
ENGINE = "cpu/test_connector_vllm_scheduler.py"
VIEWS = "cpu/test_connector_views.py"
engine = In("connector/engine.py", ENDS, LIFE, FAILED, "pure/test_transfer_copier.py", VIEWS)
adapters = In("connector/adapters.py", ENDS, "pure/test_connector_facts.py")
facts = In("connector/facts.py", "pure/test_connector_facts.py")
identity = In("connector/identity.py", "pure/test_guards_identity.py", "pure/test_connector_facts.py")
views = In("connector/views.py", VIEWS)
connector = In("connector/connector.py", VIEWS, ENGINE)

GUARDS: tuple[Guard, ...] = (
    engine("close_once", "        if self.closed:\n            return\n", "", "a second close does nothing"),
    engine(
        "copy_under_way",
        "        if not self.copier.close(DRAIN_SECONDS):\n"
        '            logger.warning("a copy did not end in time: the segment stays locked until this process ends")\n'
        "            return\n",
        "        self.copier.close(DRAIN_SECONDS)\n",
        "the segment is not let go while a copy writes to it",
    ),
    engine("closed_told", "            self.state.closed = True\n", "", "hooks after a shutdown touch no segment", ENGINE, LIFE, FAILED),
    engine(
        "start_epoch",
        "        epoch = control.state.epoch\n",
        "        epoch = 0\n",
        "an engine that starts after a clear starts in its epoch",
        CLEAR,
    ),
    engine("two_engines", "        if key in self._engines:\n", "        if False:\n", "one start of a replica has one engine"),
    engine(
        "forgotten", "engine = self._engines.pop((config", "engine = self._engines.get((config", "an engine that was closed is forgotten"
    ),
    adapters("path", 'f"{name}\\0{os.path.realpath(path)}"', 'f"{name}"', "an adapter of another path is another adapter"),
    adapters(
        "name", 'f"{name}\\0{os.path.realpath(path)}"', 'f"{os.path.realpath(path)}"', "an adapter of another name is another adapter"
    ),
    adapters("files", ", *_files(path)):", "):", "an adapter of other files is another adapter"),
    adapters("size", "\\0{status.st_size}", "", "a file of another size is another adapter"),
    adapters("time", "\\0{status.st_mtime_ns}", "", "a file changed in place is another adapter"),
    adapters("inode", "\\0{status.st_ino}", "", "a file that was replaced is another adapter"),
    adapters("loaded", "if known is None or fresh:", "if True:", "what the engine has loaded keeps its digest"),
    adapters("fresh", "if known is None or fresh:", "if known is None:", "what is loaded in place gets a new digest"),
    adapters(
        "bounded",
        "        if len(self._digest_by_loading) >= DIGESTS_MAX:\n",
        "        if False:\n",
        "digests that are kept are bounded",
    ),
    adapters(
        "changed",
        "return known if known == present else self._nobodys(loading)",
        "return known",
        "files that changed after they were loaded share nothing",
    ),
    adapters(
        "used_last",
        "self._digest_by_loading.pop(loading, None)",
        "self._digest_by_loading.get(loading)",
        "an adapter in use is remembered",
    ),
    adapters("nobodys", "return os.urandom(DIGEST_BYTES)", "return bytes(DIGEST_BYTES)", "two requests on doubtful weights do not meet"),
    facts(
        "oldest",
        "if not OLDEST_VERSION <= version_of(facts.version) <= NEWEST_VERSION:",
        "if not version_of(facts.version) <= NEWEST_VERSION:",
        "an older engine is refused",
    ),
    facts(
        "newest",
        "if not OLDEST_VERSION <= version_of(facts.version) <= NEWEST_VERSION:",
        "if not OLDEST_VERSION <= version_of(facts.version):",
        "a newer engine is refused",
    ),
    facts("unknown_version", "    if match is None:\n", "    if False:\n", "a version that cannot be read is refused"),
    facts("executor", '    if facts.executor not in ("uni", "UniProcExecutor"):\n', "    if False:\n", "both halves are in one process"),
    facts("parallel", "        if size > 1:\n", "        if False:\n", "parallel engines are refused"),
    facts("role", '    if facts.role != "kv_both":\n', "    if False:\n", "an engine of another role is refused"),
    facts("failure_policy", '    if facts.failure_policy != "recompute":\n', "    if False:\n", "a failed load does not fail its request"),
    facts("device", "    if facts.device not in SHARED_DEVICES:\n", "    if False:\n", "memory that cannot be copied is refused"),
    facts("runner", '    if facts.runner != "generate":\n', "    if False:\n", "pooling models are refused"),
    facts("speculative", "    if facts.speculative:\n", "    if False:\n", "speculative decoding is refused"),
    facts("scales", "    if facts.kv_scales == SCALES_COMPUTED:\n", "    if False:\n", "scales that differ between engines are refused"),
    facts("groups", "    if len(facts.groups) != 1:\n", "    if False:\n", "hybrid models are refused"),
    facts("attention", "        if group.kind != SHARED_SPEC:\n", "        if False:\n", "other kinds of attention are refused"),
    facts("limits", '        yield from (f"its attention has {limit}" for limit in group.limits)\n', "", "windows and chunks are refused"),
    facts("hash_size", "        if group.block_size != facts.hash_block_size:\n", "        if False:\n", "a hash covers a block"),
    facts("all_reasons", "    if reasons:\n", "    if False:\n", "an engine for which sharing is not proven is refused"),
    identity("seed", 'sha256(b"seed:" + seed.encode())', 'sha256(b"seed:")', "another seed is another root"),
    identity(
        "fixed_version", "version_of(facts.version) >= FIXED_ROOT_VERSION and facts", "facts", "a root drawn at random is nobody else's"
    ),
    identity("resistant", " and facts.hash_algorithm in RESISTANT_ALGORITHMS:", ":", "a root drawn at random is nobody else's"),
    identity("random", 'sha256(b"random:" + random_bytes)', 'sha256(b"random:")', "a root drawn at random is nobody else's"),
    *(
        identity(
            f"field_{name}", f"        {name}={value},\n", f"        {name}={empty},\n", f"engines that differ in {name} share nothing"
        )
        for name, value, empty in (
            ("engine_version", "facts.version", '""'),
            ("python_version", '".".join(platform.python_version_tuple()[:2])', '""'),
            ("model_identity", "config.model_identity", '""'),
            ("dtype", "facts.dtype", '""'),
            ("quantization", "facts.quantization", '""'),
            ("kv_cache_dtype", "facts.kv_cache_dtype", '""'),
            ("kv_scales", "facts.kv_scales", '""'),
            ("rope_overrides", "facts.rope_overrides", '""'),
            ("block_size", "facts.hash_block_size", "16"),
            ("block_layout", "block_layout", '""'),
            ("attention_backend", "facts.attention_backend", '""'),
            ("instruction_set", "facts.instruction_set", '""'),
            ("hash_algorithm", "facts.hash_algorithm", '""'),
            ("hash_root", "root", '""'),
            ("speculative", "facts.speculative", '""'),
            ("tp_size", 'sizes.get("tensor_parallel_size", 1)', "1"),
            ("pp_size", 'sizes.get("pipeline_parallel_size", 1)', "1"),
        )
    ),
    *(
        identity(f"group_{name}", f"group.{name}{end}", f"{empty}{end}", f"engines whose groups differ in {name} share nothing")
        for name, end, empty in (
            ("kind", ",", '""'),
            ("block_size", ",", "16"),
            ("page_bytes", ",", "1"),
            ("layer_names", ",", "()"),
            ("details", ")", "()"),
        )
    ),
    views(
        "version",
        'if not isinstance(ours, Mapping) or ours.get("v") != PARAMS_VERSION:',
        "if not isinstance(ours, Mapping):",
        "parameters of another version give no identity",
    ),
    views(
        "mapping",
        'if not isinstance(ours, Mapping) or ours.get("v")',
        'if ours is None or ours.get("v")',
        "parameters that are not the route's give no identity",
    ),
    views(
        "hex",
        "    except ValueError:\n        return None\n    return identity",
        "    except KeyError:\n        return None\n    return identity",
        "an identity that is no hex is none",
    ),
    views(
        "length",
        "return identity if len(identity) == REQUEST_ID_BYTES else None",
        "return identity",
        "an identity of another length is none",
    ),
    views("text", 'bytes.fromhex(text) if isinstance(text, str) else b""', "bytes.fromhex(text)", "an identity that is no text is none"),
    views(
        "logprobs", " or (params is not None and params.prompt_logprobs is not None)", "", "a request for prompt logprobs is given nothing"
    ),
    views("skip", "bool(request.skip_reading_prefix_cache) or ", "", "a request that may not be given cached blocks is given none"),
    views(
        "adapter", '_adapter(request.lora_request, adapters) if request.lora_request is not None else b""', 'b""', "adapters are told apart"
    ),
    views("inplace", 'bool(getattr(lora, "load_inplace", False))', "False", "what is loaded in place gets a new digest"),
    views("window", '        yield "a sliding window"\n', "        yield from ()\n", "a sliding window is refused"),
    views("chunk", '        yield "chunks"\n', "        yield from ()\n", "chunked attention is refused"),
    views("not_causal", '        yield "no causal mask"\n', "        yield from ()\n", "attention without a causal mask is refused"),
    views(
        "pool_idle",
        "return self._pool.get_num_free_blocks() == self._pool.num_gpu_blocks - 1",
        "return True",
        "the engine's own cache is reset when no block is in use",
        ENGINE,
        VIEWS,
    ),
    views(
        "wake",
        "        elif after >= wake_at.get(request_id, 0):\n",
        "        elif False:\n",
        "a step that fills a block is looked at",
        ENGINE,
    ),
    connector(
        "block_bytes",
        "        if mover.block_bytes != facts.block_bytes:\n",
        "        if False:\n",
        "tensors that are not what the configuration says are refused",
    ),
    connector("unproven", "        refuse_unproven(self._facts)\n", "", "an engine for which sharing is not proven is refused"),
    connector(
        "worker_half", "            if engine is None:\n", "            if False:\n", "a scheduler half without its worker half is refused"
    ),
    connector(
        "foreign_meta",
        "connector_metadata if isinstance(connector_metadata, StepMeta) else EMPTY",
        "connector_metadata",
        "metadata of somebody else is nothing to do",
    ),
    connector(
        "cleared",
        "        super().clear_connector_metadata()\n        self._meta = EMPTY\n",
        "        super().clear_connector_metadata()\n",
        "a step's work is done in its step",
    ),
    connector(
        "loads_fail",
        "lambda: worker.start_loads(meta), lambda: worker.fail_loads(meta))",
        "lambda: worker.start_loads(meta), lambda: None)",
        "loads whose start raised fail and are reported",
        ENGINE,
    ),
    connector(
        "allocation_fails",
        "            lambda: self._half.allocation_failed(request.request_id, block_ids, num_external_tokens, time.monotonic()),\n",
        "            lambda: None,\n",
        "an allocation that raised ends as a failed load",
        ENGINE,
    ),
    connector(
        "rescue",
        "            self._half.rescue,\n",
        "            lambda: EMPTY,\n",
        "a step that could not be looked at is dispatched with its loads",
        ENGINE,
    ),
    connector(
        "unregistered",
        "        if self._worker is None:\n            return None, None\n",
        "",
        "hooks before KV memory is registered do nothing",
    ),
    connector(
        "two_steps",
        "in_flight = 2 if vllm_config.scheduler_config.async_scheduling else 1",
        "in_flight = 1",
        "with two steps under way the outcome is that of the older",
    ),
    connector(
        "reset_refused",
        'this request is refused")\n        return False',
        'this request is refused")\n        return None',
        "one engine's cache is not cleared for itself",
    ),
)
