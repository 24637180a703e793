"""Guards of files in shared memory: who may touch them, who still runs, what is swept."""

from benchmarks.guards.directory import HOSTILE, PROCESSES, SEGMENT, files, liveness, names, sweep
from benchmarks.guards.guard import Guard

FILES_TESTS = "pure/test_scenario_files.py"
STALE = "pure/test_scenario_stale.py"

GUARDS: tuple[Guard, ...] = (
    files("no_follow", "os.O_NOFOLLOW | os.O_NONBLOCK", "os.O_NONBLOCK", "a link is not followed", HOSTILE),
    files("no_hang", "os.O_NOFOLLOW | os.O_NONBLOCK", "os.O_NOFOLLOW", "a pipe of a segment's name does not hang its reader", HOSTILE),
    files("release_once", "fd, self._fd = self._fd, -1", "fd = self._fd", "a descriptor is closed once"),
    files("fork", "os.register_at_fork(after_in_child=_drop_in_child)\n", "", "a forked child does not keep the lock", PROCESSES),
    files(
        "lock_foreign",
        "            _refuse_foreign(path, os.fstat(fd))\n            fcntl",
        "            fcntl",
        "another user's file is not adopted",
        HOSTILE,
    ),
    files("lock", "            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n", "", "a live owner is not adopted"),
    files(
        "lock_wait",
        "            if time.monotonic() >= deadline:\n",
        "            if True:\n",
        "a successor waits for an owner that is just ending",
        PROCESSES,
    ),
    files(
        "lock_deadline", "            if time.monotonic() >= deadline:\n", "            if False:\n", "a successor does not wait for ever"
    ),
    files(
        "lock_same",
        "        if lock.same_file(path):\n            return lock\n",
        "        if True:\n            return lock\n",
        "a file replaced while its lock was taken is not the one adopted",
    ),
    files(
        "unfinished",
        "            _remove_if_free(left)\n",
        "            pass\n",
        "what an owner left unfinished is removed by its successor",
        PROCESSES,
    ),
    files("mode", ", 0o600))", ", 0o666))", "a segment is private"),
    files("new_locked", "        fcntl.flock(lock._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n", "", "a new segment is its owner's"),
    files(
        "allocated",
        "            allocate(file.fileno(), num_bytes, path)\n",
        "            os.ftruncate(file.fileno(), num_bytes)\n",
        "touching a segment never kills",
    ),
    files(
        "link",
        "        os.link(unfinished, path)\n",
        "        os.rename(unfinished, path)\n        return\n",
        "of two processes that make one segment the later gives way",
    ),
    files(
        "regular", "    if not stat.S_ISREG(status.st_mode):\n", "    if False:\n", "directories, pipes and sockets are refused", HOSTILE
    ),
    files("user", "    if status.st_uid != os.geteuid():\n", "    if False:\n", "another user's file is not read", HOSTILE),
    files("read_foreign", "        _refuse_foreign(path, status)\n", "", "another user's file is not read", HOSTILE),
    files("sparse", "        _refuse_sparse(path, status)\n", "", "reading a hole never kills", HOSTILE),
    names(
        "unfinished_own",
        "unfinished.fullmatch(entry)",
        'entry.endswith(".tmp")',
        "only what was on its way to this name is removed",
        PROCESSES,
        "pure/test_sweep.py",
    ),
    files(
        "open_to_others",
        "    if status.st_mode & _WRITABLE_BY_OTHERS:\n",
        "    if False:\n",
        "a file that others may write to is not read",
        STALE,
        FILES_TESTS,
    ),
    files(
        "read_open_to_others",
        "        refuse_open_to_others(path, status)\n",
        "",
        "a file that others may write to is not read",
        STALE,
        FILES_TESTS,
    ),
    files(
        "not_made",
        "        discard(lock, name)\n        if isinstance(error",
        "        if isinstance(error",
        "nothing is left of a file that could not be made",
        FILES_TESTS,
    ),
    files(
        "short_for_now",
        "permanent=error.errno not in _FOR_NOW)\n\n\ndef _remove",
        "permanent=True)\n\n\ndef _remove",
        "a peer is not given up for want of a descriptor",
        FILES_TESTS,
        STALE,
    ),
    files(
        "mapped",
        "    except (OSError, ValueError) as error:\n",
        "    except KeyError as error:\n",
        "a file truncated before it is mapped is refused",
        FILES_TESTS,
        STALE,
    ),
    files(
        "swept",
        "    with contextlib.suppress(FileNotFoundError):",
        "    with contextlib.suppress(KeyError):",
        "a file swept as it gets its name is made all the same",
        FILES_TESTS,
        STALE,
    ),
    files(
        "closed_watch",
        "        if self._fd < 0:\n            raise ValueError",
        "        if False:\n            raise ValueError",
        "a closed file is not taken for an empty one",
        SEGMENT,
        STALE,
    ),
    files(
        "reopened",
        'open(f"/proc/self/fd/{self._fd}", "r+b")',
        'open(path, "r+b")',
        "the file that is mapped is the one that is locked",
        FILES_TESTS,
        STALE,
        SEGMENT,
    ),
    liveness("zombie", '    if fields[_STATE] in (b"Z", b"X"):\n', "    if False:\n", "a dead owner that nobody reaped is dead", PROCESSES),
    liveness(
        "start",
        "return pid > 0 and start_ticks(pid) == started_ticks",
        "return pid > 0 and start_ticks(pid) is not None",
        "a newcomer with the owner's number is not the owner",
    ),
    liveness("command", 'text.rpartition(b")")', 'text.partition(b")")', "a command's name does not hide its state", PROCESSES),
    sweep("worker", "name.worker_id != worker_id or replica_uid", "replica_uid", "another worker's files are left alone"),
    sweep("replica", " or replica_uid not in (None, name.replica_uid):", ":", "another replica's files are left alone"),
    sweep(
        "stale_locked",
        "        if lock is None:\n            continue\n        lock.release()\n        try:",
        "        if lock is not None:\n            lock.release()\n        try:",
        "a live owner's file is not stale",
    ),
    sweep(
        "stale_age",
        "        if age >= min_age_seconds:\n",
        "        if True:\n",
        "a file of an owner that is about to be relaunched is not stale",
    ),
    sweep(
        "stale_removed",
        "        lock = _try_lock(file.path)\n        if lock is not None:\n            removed",
        "        lock = _try_lock(file.path) or FileLock(-1)\n        if lock is not None:\n            removed",
        "a live owner's file is not removed",
    ),
)
