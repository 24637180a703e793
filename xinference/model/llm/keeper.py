"""A small process between a worker and an engine, so that no part of the engine outlives the worker.

    worker ── keeper ── engine's API server ── EngineCore, ...
                 └ adopts whatever an ancestor above leaves behind (child subreaper)

The engine is a tree of processes that know nothing of the worker. A parent-death signal reaches only the direct child and is lost by its
children; a process group is not killed when the worker is. The keeper therefore
    * learns of the worker's death twice over (end of file on its standard input; SIGUSR1 by parent-death signal) and then kills the tree,
    * kills what is left of the tree when the engine's first process ends, and ends the same way as that process did,
    * passes SIGTERM on to the engine's first process only, which knows how to stop its own children.
If the keeper itself is killed, the engine's first process dies by its parent-death signal, and the worker finds the rest by the mark in
its environment (``orphans.py``), at once or when it starts the next time.

Run by path with ``python -I -S keeper.py COMMAND...``: standard library only, a few milliseconds to start. Standard input is one end of a
socket pair: its end of file means that the worker is gone, and one line goes the other way: ``engine PID`` or ``refused REASON``.
"""

import ctypes
import os
import resource
import select
import signal
import sys
from types import FrameType

LIFELINE = 0  # standard input
STARTED = "engine "
REFUSED = "refused "
MARK = "XINFERENCE_ENGINE_KEEPER"  # the same name as in orphans.py, which this script cannot import
CANNOT_START = 127  # exit status when the command could not be executed
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
OWNER_ONLY = 0o077


def prctl(option: int, value: int) -> None:
    """Linux ``prctl`` with one argument. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def children_of(parent: int) -> list[int]:
    """Direct children of a process, zombies included; one pass over /proc."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if int(fields[1]) == parent:
            found.append(int(name))
    return found


def kill_tree() -> None:
    """Kill all descendants and reap them.

    Orphans fall to this process, so killing direct children until there are none reaches every descendant, in whatever session it hides.
    """
    while True:
        for pid in children_of(os.getpid()):
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def run_engine(command: list[str], keeper_pid: int) -> None:
    """In the forked child: become the engine. Returns only by exception."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper_pid:  # the keeper died before the line above
        os.kill(os.getpid(), signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, LIFELINE)
    os.umask(OWNER_ONLY)
    os.execvpe(command[0], command, os.environ)  # noqa: S606  the command is a list, never a shell's


def mark_environment() -> None:
    """Put this process's identity (pid and start time) where all descendants inherit it."""
    with open("/proc/self/stat", "rb") as file:
        start_time = int(file.read().rpartition(b")")[2].split()[19])
    os.environ[MARK] = f"{os.getpid()}.{start_time}"
    os.environ["SPT_NOENV"] = "1"  # or else setproctitle, which vLLM uses, overwrites the environment that others can see


def spawn(command: list[str]) -> int:
    """Start the engine; returns its pid once it is executing. Raises OSError when it cannot be executed."""
    keeper_pid = os.getpid()
    reader, writer = os.pipe()  # closed by exec; carries the reason when exec fails
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            run_engine(command, keeper_pid)
        except BaseException as error:
            reason = error.strerror if isinstance(error, OSError) else repr(error)
            os.write(writer, f"{command[0]}: {reason}".encode())
        os._exit(CANNOT_START)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        reason = file.read().decode()
    if reason:
        os.waitpid(pid, 0)
        raise OSError(reason)
    return pid


def reap(engine: int) -> int | None:
    """Collect ended children; returns the engine's wait status once it has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == engine:
            return status
        if pid == 0:
            return None


def at_end(descriptor: int) -> bool:
    """True when the other side is closed; discards what it sent."""
    try:
        return not os.read(descriptor, 4096)
    except ConnectionResetError:
        return True


def watch(engine: int, parent: int, signals: int) -> int | None:
    """Serve events until the engine ends (its wait status) or the worker is gone (None)."""
    while True:
        ready, _, _ = select.select([LIFELINE, signals], [], [])
        if LIFELINE in ready and at_end(LIFELINE):
            return None
        if signals not in ready:
            continue
        for number in os.read(signals, 512):
            if number == signal.SIGCHLD:
                status = reap(engine)
                if status is not None:
                    return status
            elif number in (signal.SIGTERM, signal.SIGINT):
                os.kill(engine, number)
            elif number == signal.SIGUSR1 and os.getppid() != parent:
                # Sent too when only the thread that started us ends; then the parent is still there.
                return None


def end_like(status: int) -> None:
    """Leave with the engine's own exit status or signal, so that the worker sees how the engine ended."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def note_only(number: int, frame: FrameType | None) -> None:
    """Handler that leaves the work to the wakeup descriptor."""


def main() -> None:
    parent = os.getppid()
    mark_environment()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, note_only)
    signal.set_wakeup_fd(writer)
    # An actor's sub-pool blocks SIGINT, and a signal mask is inherited over fork and exec: vLLM would never see an interrupt.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        engine = spawn(sys.argv[1:])
    except OSError as error:
        os.write(LIFELINE, f"{REFUSED}{error}\n".encode())
        os._exit(CANNOT_START)
    os.write(LIFELINE, f"{STARTED}{engine}\n".encode())
    status = watch(engine, parent, reader)
    kill_tree()
    end_like(signal.SIGKILL if status is None else status)  # a signal's number is the wait status of a process that it killed


if __name__ == "__main__":
    main()
