"""Guards of copies: bounds, layouts, marks, validation, pins."""

from benchmarks.guards.guard import Guard, In

TRANSFER = "pure/test_guards_transfer.py"
LIFE = "pure/test_connector_life.py"
FAILED = "pure/test_connector_failed_loads.py"
CLEAR = "pure/test_connector_clear.py"
SHARING = "pure/test_connector_sharing.py"
STATES_UNCHANGED = "the copy of one owner's bytes is published, of two owners' never"
blocks = In("transfer/blocks.py", LIFE, FAILED, CLEAR)
mover = In("transfer/mover.py", "cpu/test_transfer_cpu.py", "pure/test_transfer_bytes.py")
plain = In("transfer/bytes.py", "pure/test_transfer_bytes.py", "cpu/test_transfer_cpu.py")
cpu = In("transfer/cpu.py", "cpu/test_transfer_cpu.py")
strided = In("transfer/strided.py", "cpu/test_guards_strided.py", "cpu/test_transfer_cpu.py")
staged = In("transfer/staged.py", "cpu/test_transfer_cpu.py")
loader = In("transfer/loader.py", TRANSFER, FAILED, LIFE, SHARING, CLEAR)

GUARDS: tuple[Guard, ...] = (
    blocks("generation", "            self._generations[block] += 1\n", "", STATES_UNCHANGED),
    blocks("epoch", "            self._epochs[block] = epoch\n", "", "what was written before a clear is not saved after it"),
    mover("block_low", "if not 0 <= block < num_blocks:", "if not block < num_blocks:", "a negative block is not the last one"),
    mover("block_high", "if not 0 <= block < num_blocks:", "if not 0 <= block:", "no block behind the last is read or written"),
    mover("place_low", "if not 0 <= place < num_places:", "if not place < num_places:", "a negative place is not the last one"),
    mover("place_high", "if not 0 <= place < num_places:", "if not 0 <= place:", "no place behind the last is read or written"),
    mover("place_too_small", "    if place_bytes < block_bytes:\n", "    if False:\n", "a block fits into its place"),
    plain("whole_blocks", "if block_bytes <= 0 or len(memory) % block_bytes:", "if False:", "memory is whole blocks"),
    plain(
        "save_outside",
        "        refuse_outside(copies, self.num_blocks, slab.num_places)\n        size = self._block_bytes\n"
        "        for block, place in copies:\n            start = place * slab.place_bytes\n            slab.view",
        "        size = self._block_bytes\n        for block, place in copies:\n            start = place * slab.place_bytes\n"
        "            slab.view",
        "a save that names memory which does not exist moves nothing",
    ),
    plain(
        "load_outside",
        "        refuse_outside(copies, self.num_blocks, slab.num_places)\n        size = self._block_bytes\n"
        "        for block, place in copies:\n            start = place * slab.place_bytes\n            self._memory",
        "        size = self._block_bytes\n        for block, place in copies:\n            start = place * slab.place_bytes\n"
        "            self._memory",
        "a load that names memory which does not exist moves nothing",
    ),
    cpu("writable", "        if not slab.writable:\n", "        if False:\n", "nobody writes to a peer's slab"),
    cpu(
        "outside",
        "        refuse_outside(copies, self._strided.num_blocks, slab.rows.shape[0])\n",
        "",
        "a batch that names memory which does not exist moves nothing",
    ),
    strided("one_dimension", "    if len(candidates) != 1:\n", "    if not candidates:\n", "a tensor of unclear layout is refused"),
    strided("nothing", "        if not strided:\n", "        if False:\n", "an engine without KV memory is refused"),
    strided("shared_memory", "(tensor.data_ptr(), tensor.numel())", "(name, tensor.numel())", "layers that share memory are copied once"),
    strided(
        "same_storage",
        "layer.storage.data_ptr() == head.storage.data_ptr() and layer.dims",
        "layer.dims",
        "one operation copies layers of one storage",
    ),
    strided("same_dims", " and layer.dims == head.dims", "", "one operation copies layers of one shape"),
    strided("ascending", "if not same or distance <= 0 or", "if not same or", "one operation copies layers in the order of memory"),
    strided("equal_distance", " or (count > 1 and distance != step):", ":", "one operation copies layers at equal distances"),
    strided("words_offset", "return layer.offset % size == 0 and", "return", "words lie on their multiples"),
    strided("words_dims", " and layer.dims[-1][0] % size == 0 and all", " and all", "words do not reach over a layer's end"),
    staged("writable", "        if not slab.writable:\n", "        if False:\n", "nobody writes to a peer's slab"),
    staged(
        "save_outside",
        "        refuse_outside(copies, self._strided.num_blocks, slab.rows.shape[0])\n"
        "        for blocks, places, host, device in self._turns(copies):\n            with",
        "        for blocks, places, host, device in self._turns(copies):\n            with",
        "a save that names memory which does not exist moves nothing",
    ),
    staged(
        "load_outside",
        "        refuse_outside(copies, self._strided.num_blocks, slab.rows.shape[0])\n"
        "        for blocks, places, host, device in self._turns(copies):\n            torch",
        "        for blocks, places, host, device in self._turns(copies):\n            torch",
        "a load that names memory which does not exist moves nothing",
    ),
    staged(
        "save_waits",
        "            self._lane.wait()\n            slab.rows",
        "            slab.rows",
        "bytes are in the slot before they are taken from it",
    ),
    staged(
        "load_waits",
        "columns.reshape(len(blocks), *segment.tensor.shape[1:]))\n            self._lane.wait()\n",
        "columns.reshape(len(blocks), *segment.tensor.shape[1:]))\n",
        "bytes are in their block before the load has ended",
    ),
    staged("follows", "        self._lane.follow(mark)\n", "        pass\n", "copies begin after the step that wrote their blocks"),
    staged(
        "slot_of_one",
        "max(1, slot_bytes // strided.block_bytes)",
        "slot_bytes // strided.block_bytes",
        "a large block gets a slot of its own size",
    ),
    loader(
        "follow",
        "            if mark is not None:\n",
        "            if False:\n",
        "loads begin after what still writes to their blocks",
        "pure/test_transfer_marks.py",
    ),
    loader(
        "failed_whole",
        "            for job in jobs:\n                job.failed_blocks.update(piece.block for piece in job.pieces)\n        ended",
        "        ended",
        "loads that raised are recomputed",
        "pure/test_transfer_marks.py",
        LIFE,
        FAILED,
    ),
    loader(
        "ends",
        "            self._state.end_load(job, started, ended)\n",
        "            pass\n",
        "every load ends, and its places are let go",
    ),
    loader(
        "cancelled",
        "for job in jobs if not job.cancelled for piece",
        "for job in jobs for piece",
        "nothing is copied for a request that ended",
    ),
    loader(
        "elsewhere",
        "(OWN_SLAB, *(peer.replica_uid for peer in self._state.peers.attached))",
        "(OWN_SLAB,)",
        "a gap in one slab is filled from another",
    ),
    loader(
        "moved",
        "                job_by_block[piece.block].moved[piece.block] = other\n",
        "                pass\n",
        "tokens are counted for the slab they came from",
    ),
    loader(
        "missing_failed",
        "            job_by_block[piece.block].failed_blocks.add(piece.block)\n",
        "            pass\n",
        "a block that was not found is recomputed",
    ),
    loader(
        "batch_failed",
        '                self._state.report("a load", error)\n'
        "                failed = {block for read in batch.reads for block in read.blocks}\n",
        '                self._state.report("a load", error)\n                failed = set()\n',
        "a batch whose copy raised is recomputed",
    ),
    loader(
        "own_pin",
        "found = [piece.place] if piece.place != UNPINNED else state.tier.pin((piece.key,))",
        "found = [piece.place] if piece.place != UNPINNED else [p for p in [state.segment.place_of(piece.key)] if p is not None]",
        "an own place is pinned while it is copied",
    ),
    loader("own_unpin", "                    state.tier.unpin(pinned)\n", "                    pass\n", "pins for a copy end with it"),
    loader(
        "own_missing",
        "                if not found:\n                    failed.update(blocks)\n                elif",
        "                if",
        "an own block that is gone is looked for elsewhere",
    ),
    loader(
        "peer_gone",
        "        if peer is None:\n            return failed\n",
        "        if peer is None:\n            return set()\n",
        "blocks of a peer that was let go are recomputed",
    ),
    loader(
        "peer_found",
        "            if place is not None:\n                found.append((blocks, place))\n",
        "            found.append((blocks, place or state.peers))\n",
        "a block that a peer lost is looked for elsewhere",
    ),
    loader(
        "second_look",
        "            if peer.reader.still(place.place, place.generation):\n                failed",
        "            if True:\n                failed",
        "bytes that their owner rewrote during the copy are not computed on",
    ),
    loader(
        "own_epoch",
        "epoch = state.epoch.current\n        found = []",
        "epoch = int(peer.reader.header()['epoch'])\n        found = []",
        "nothing of another epoch is loaded",
    ),
)
