"""Guards of keys, namespaces, settings, and of what lies in shared memory."""

from dataclasses import fields

from benchmarks.guards.guard import Guard, In
from xinference.model.llm.vllm.xavier.block.namespace import Namespace

HOSTILE = "pure/test_hostile_segments.py"
SEGMENT = "pure/test_segment.py"
DAMAGED = "pure/test_guards_directory.py"
RECORDS = "pure/test_guards_records.py"
PROCESSES = "cpu/test_segment_processes.py"
key = In("block/key.py", "pure/test_block.py")
namespace = In("block/namespace.py", "pure/test_block.py", DAMAGED)
config = In("config.py", "pure/test_config.py")
records = In("directory/records.py", DAMAGED, SEGMENT, HOSTILE)
layout = In("directory/layout.py", DAMAGED, "pure/test_geometry.py", HOSTILE)
header = In("directory/header.py", HOSTILE, SEGMENT)
geometry = In("directory/geometry.py", "pure/test_geometry.py", HOSTILE)
files = In("directory/files.py", DAMAGED, SEGMENT, HOSTILE, PROCESSES)
segment = In("directory/segment.py", DAMAGED, SEGMENT, PROCESSES)
reader = In("directory/reader.py", DAMAGED, SEGMENT)
adoption = In("directory/adoption.py", RECORDS, DAMAGED, SEGMENT, HOSTILE)
control = In("directory/control.py", RECORDS, "pure/test_control.py")
counters = In("directory/counters.py", "pure/test_counters.py")
requests = In("directory/requests.py", RECORDS, "pure/test_requests.py")
liveness = In("directory/liveness.py", DAMAGED, SEGMENT, PROCESSES)
names = In("directory/names.py", "pure/test_sweep.py", PROCESSES)
sweep = In("directory/sweep.py", DAMAGED, "pure/test_sweep.py")

NAMES: tuple[Guard, ...] = (
    key("short_hash", "    if len(block_hash) < KEY_BYTES:\n", "    if False:\n", "a hash that the engine cannot vouch for is refused"),
    key("group", 'blake2b(group_id.to_bytes(4, "little") + adapter,', "blake2b(adapter,", "groups do not meet"),
    key("adapter", 'blake2b(group_id.to_bytes(4, "little") + adapter,', 'blake2b(group_id.to_bytes(4, "little"),', "adapters do not meet"),
    key("group_alone", "    if group_id or adapter:\n", "    if adapter:\n", "groups do not meet"),
    key("adapter_alone", "    if group_id or adapter:\n", "    if group_id:\n", "adapters do not meet"),
    namespace("schema", '{"schema": SCHEMA_VERSION, **asdict(self)}', "asdict(self)", "blocks of another meaning are not shared"),
    *(
        namespace(
            f"field_{field.name}",
            "**asdict(self)}",
            f'**{{name: value for name, value in asdict(self).items() if name != "{field.name}"}}}}',
            f"engines that differ in {field.name} share nothing",
        )
        for field in fields(Namespace)
    ),
    config(
        "types",
        "            _refuse_wrong_type(field.name, field.type, getattr(self, field.name))\n",
        "            pass\n",
        "a setting of the wrong type is refused",
    ),
    config("bool", " or isinstance(value, bool):", ":", "true is no number"),
    config(
        "ids", "            if not ID_PATTERN.fullmatch(getattr(self, name)):\n", "            if False:\n", "an id leads to no other file"
    ),
    config("ids_whole", "ID_PATTERN.fullmatch(", "ID_PATTERN.match(", "an id leads to no other file"),
    config(
        "incarnation", "        if not 0 < self.incarnation < WORD_LIMIT:\n", "        if False:\n", "an incarnation fits into its word"
    ),
    config("budget", "        if self.cpu_cache_bytes < 0:\n", "        if False:\n", "a budget below nothing is refused"),
    config(
        "directory",
        '        if not self.shm_dir.startswith("/"):\n',
        "        if False:\n",
        "segments lie in a directory that all replicas mean",
    ),
    config(
        "positive",
        "            if field.name in _LIMITS and not 0 < value",
        "            if False and not 0 < value",
        "limits are positive",
    ),
    config("finite", 'not 0 < value < float("inf"):', "not 0 < value:", "limits are finite"),
    config("share", "        if self.async_load_max_share > 1:\n", "        if False:\n", "a share is at most all"),
    config(
        "unknown",
        "        if unknown := sorted(set(wire) - known):\n",
        "        if unknown := []:\n",
        "a setting that nobody knows is refused",
    ),
    config(
        "missing",
        "        if missing := sorted(known - set(wire) - _LIMITS):\n",
        "        if missing := []:\n",
        "a setting that is missing is refused by name",
    ),
    config(
        "hex",
        '        if not isinstance(incarnation, str) or not re.fullmatch(r"[0-9a-f]{1,16}", incarnation):\n',
        "        if False:\n",
        "an incarnation that is no hex is refused",
    ),
    names("worker", 'rf"xinference\\.(?P<worker>{_ID})', 'rf"xinference\\.(?P<worker>.+?)', "files of others are not ours"),
    names("whole", "_NAME.fullmatch(name)", "_NAME.match(name)", "files of others are not ours"),
)

WORDS: tuple[Guard, ...] = (
    records(
        "place",
        "            if not 0 <= place < self._num_places:\n                continue\n",
        "",
        "a hint that names no place leads nowhere",
    ),
    records("key", "            if r0 != k0 or r1 != k1:\n                continue\n", "", "a record of another key is no rejected record"),
    records(
        "epoch",
        "if written == epoch and check == record_check(place, k0, k1, generation, epoch, p0, p1, flags):\n                return",
        "if check == record_check(place, k0, k1, generation, written, p0, p1, flags):\n                return",
        "a reader serves exactly its own epoch",
    ),
    records(
        "check",
        "if written == epoch and check == record_check(place, k0, k1, generation, epoch, p0, p1, flags):\n                return",
        "if written == epoch:\n                return",
        "a torn or withdrawn record is found by nobody",
    ),
    records("rejected", "            self.rejected += 1\n", "", "records that do not validate are counted"),
    records(
        "still",
        "return bool(self._records[place * LINE_WORDS + GENERATION] == generation)",
        "return True",
        "a place that was reused during a copy is noticed",
    ),
    records(
        "record",
        "        if check != record_check(place, k0, k1, generation, epoch, p0, p1, flags):\n            return None\n",
        "",
        "an invalid record says nothing",
    ),
    records(
        "withdraw",
        "        self._records[base + GENERATION] = (self._records[base + GENERATION] + 1) & MASK\n",
        "",
        "a withdrawn place is found by nobody, and copies of it fail",
    ),
    records(
        "withdraw_wraps",
        "(self._records[base + GENERATION] + 1) & MASK",
        "self._records[base + GENERATION] + 1",
        "a damaged generation can be withdrawn",
    ),
    records("withdraw_hint", "        self.drop_hint(place, self._records[base + K0])\n", "", "a withdrawn block leaves room in the index"),
    records(
        "check_last",
        "        records[base + K0] = k0\n",
        "        records[base + CHECK] = record_check(place, k0, k1, records[base + GENERATION], epoch, p0, p1, flags)\n"
        "        records[base + K0] = k0\n",
        "a record is valid when all of it is written",
        "pure/test_interleavings.py",
    ),
    records(
        "flags",
        "(order << 1 | (parent is not None)) & MASK",
        "(order << 1 | (parent is not None))",
        "a damaged order does not end publishing",
    ),
    records(
        "other_epoch",
        "self._records[place * LINE_WORDS + EPOCH] != epoch:\n                return slot",
        "False:\n                return slot",
        "hints of an older epoch make room",
    ),
    records(
        "full_line",
        "self._records[place * LINE_WORDS + EPOCH] != epoch:\n                return slot",
        "True:\n                return slot",
        "a full line of the index refuses a block",
    ),
    records("free_word", "            if hints[slot] == 0:\n", "            if True:\n", "a block does not push another out of the index"),
    records(
        "hint_place",
        "if not 0 <= place < self._num_places or self._records[place",
        "if self._records[place",
        "a damaged hint makes room",
        HOSTILE,
        SEGMENT,
    ),
    records(
        "own_hint",
        "            if hints[slot] == word:\n",
        "            if hints[slot]:\n",
        "withdrawing a block leaves the hints of others",
    ),
    records(
        "index_empty",
        "            self._file[start:stop] = _ZEROS[: stop - start]\n",
        "            pass\n",
        "an index is rebuilt from nothing",
    ),
    records("aligned", "    if start % WORD_BYTES or stop % WORD_BYTES:\n", "    if False:\n", "words lie on their multiples"),
    *(
        layout(
            f"check_{word}",
            "hash((k0, k1, place, generation, epoch, parent0, parent1, flags))",
            f"hash(({words}))",
            f"a check word commits to the record's {word}",
        )
        for word, words in (
            ("k0", "k1, place, generation, epoch, parent0, parent1, flags"),
            ("k1", "k0, place, generation, epoch, parent0, parent1, flags"),
            ("place", "k0, k1, generation, epoch, parent0, parent1, flags"),
            ("generation", "k0, k1, place, epoch, parent0, parent1, flags"),
            ("epoch", "k0, k1, place, generation, parent0, parent1, flags"),
            ("parent0", "k0, k1, place, generation, epoch, parent1, flags"),
            ("parent1", "k0, k1, place, generation, epoch, parent0, flags"),
            ("flags", "k0, k1, place, generation, epoch, parent0, parent1"),
        )
    ),
    layout("sample", "2|{sample:x}|", "2|", "a file of a Python that hashes otherwise is not read"),
    layout("counters", "{'|'.join(spec.name for spec in COUNTERS)}", "", "a file with other counters is not read"),
    layout("entries", '|{ENTRY_FORMAT}"', '"', "a file with other request records is not read"),
    layout(
        "machine",
        '    if machine.lower() not in ("x86_64", "amd64"):\n',
        "    if False:\n",
        "machines that reorder stores are refused",
        SEGMENT,
    ),
    header("short", "    if len(raw) < HEADER_BYTES:\n", "    if False:\n", "a file without a header is refused"),
    header("magic", "    if words[Word.MAGIC] != MAGIC:\n", "    if False:\n", "a file that is no segment is refused by its name"),
    header("layout", "    if words[Word.LAYOUT] != layout_word():\n", "    if False:\n", "a file of another layout is refused by its name"),
    header(
        "static",
        "    for word, value in static_words(geometry).items():\n",
        "    for word, value in ():\n",
        "no offset of a stranger's is used",
    ),
    header(
        "static_check",
        "return {**words, Word.STATIC_CHECK: hash(tuple(words.values())) & MASK}",
        "return words",
        "a header damaged in a way that fits its file is refused",
    ),
    header("size", "    if size != geometry.file_bytes:\n", "    if False:\n", "a file is as large as its header says"),
    geometry("places_least", "if not 1 <= num_places <= MAX_PLACES:", "if not num_places <= MAX_PLACES:", "a segment has a place"),
    geometry("places_most", "if not 1 <= num_places <= MAX_PLACES:", "if not 1 <= num_places:", "a place fits into its hint"),
    geometry(
        "bytes_least", "if not 1 <= place_bytes <= MAX_PLACE_BYTES or", "if not place_bytes <= MAX_PLACE_BYTES or", "a place has bytes"
    ),
    geometry("bytes_most", "if not 1 <= place_bytes <= MAX_PLACE_BYTES or", "if not 1 <= place_bytes or", "sizes do not overflow"),
    geometry("whole_lines", " or place_bytes % LINE_BYTES:", ":", "places lie on cache lines"),
    geometry(
        "ring_least",
        "if not 1 <= request_records <= MAX_REQUEST_RECORDS:",
        "if not request_records <= MAX_REQUEST_RECORDS:",
        "a ring has a record",
    ),
    geometry("ring_most", "if not 1 <= request_records <= MAX_REQUEST_RECORDS:", "if not 1 <= request_records:", "a ring has a bound"),
    geometry("block_bytes", "    if block_bytes < 1:\n", "    if False:\n", "a block has bytes"),
    geometry(
        "too_small", "    if total_bytes(smallest) > budget_bytes:\n", "    if False:\n", "a budget without room for one block is refused"
    ),
    geometry(
        "rounded",
        "place_bytes = _round_up(block_bytes, LINE_BYTES)",
        "place_bytes = block_bytes // LINE_BYTES * LINE_BYTES",
        "a block fits into its place",
    ),
    geometry("books", "return geometry.file_bytes + geometry.book_bytes", "return geometry.file_bytes", "the budget holds the books too"),
    geometry(
        "filling_books",
        " + min(num_places, FILLING_MAX_BLOCKS) * BOOK_BYTES_PER_FILLING",
        "",
        "the budget holds the books of blocks on their way",
        "pure/test_geometry.py",
        "pure/test_tier.py",
    ),
    geometry(
        "fits",
        "if total_bytes(segment_geometry(middle, place_bytes, request_records)) <= budget_bytes:",
        "if True:",
        "file and books never exceed the budget",
    ),
)

GUARDS = (*NAMES, *WORDS)
