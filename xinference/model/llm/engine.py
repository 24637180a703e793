"""One engine server process on a Unix socket: start it, wait until it serves, watch it, stop it, leave nothing behind.

    created ─start→ running ─(process ends)→ ended
                       └─────stop──────────→ ended

Knows nothing of vLLM: a command, an environment and a socket path. The process tree is guarded by ``keeper.py``.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from xinference.model.llm import keeper
from xinference.model.llm.engine_log import LineCutter, Redactor, cause_of
from xinference.model.llm.orphans import kill_orphans
from xinference.model.llm.sockets import SOCKET_MODE, check_length, prepare_directory
from xinference.model.llm.stopped import stopped_process

logger = logging.getLogger(__name__)

TAIL_LINES = 60  # log lines kept to explain a failure
CAUSE_LINES = 12  # of these, how many go into the message
HEALTH_TIMEOUT_SECONDS = 5.0
POLL_SECONDS = 0.1
READ_BYTES = 65536
DRAIN_SECONDS = 2.0  # how long the last output may take to arrive after the end
KEEPER_SECONDS = 3.0  # how long the keeper may take to kill the tree before its group is killed from here
KILL_SECONDS = 10.0  # how long the kernel may take to end a killed process group


class EngineError(Exception):
    """Base of what can go wrong with an engine process.

    EngineError
    ├── EngineNotStarted   the command cannot be executed
    ├── EngineExited       the process ended before it served
    └── EngineNotReady     it did not serve in time
    """


class EngineNotStarted(EngineError):
    pass


class EngineExited(EngineError):
    pass


class EngineNotReady(EngineError):
    pass


@dataclass(frozen=True)
class _Run:
    """What exists from ``start`` on."""

    process: asyncio.subprocess.Process
    output: asyncio.StreamReader
    output_pipe: asyncio.ReadTransport
    lifeline: socket.socket


class EngineProcess:
    """An engine server and its process tree.

    Args:
        command: argument vector; nothing is passed through a shell.
        env: the whole environment of the process.
        uds: path of the Unix socket that the command will serve on; its directory is made private.
        log: called on the event loop with every line the engine prints, secrets redacted, no line end.
        secrets: values to redact beside those of secret-looking variables in ``env``.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], uds: Path, log: Callable[[str], None], secrets: Sequence[str] = ()
    ) -> None:
        self.uds = Path(uds)
        self._command = list(command)
        self._env = dict(env)
        self._log = log
        self._redact = Redactor([*Redactor.for_environment(env).secrets, *secrets])
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._run: _Run | None = None
        self._watcher: asyncio.Task[int] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._stopping = False
        self.pid: int | None = None

    async def start(self) -> None:
        """Start the process; returns when it is executing, long before it serves.

        Raises:
            SocketPathRefused: the socket path is too long or its directory is not ours alone.
            EngineNotStarted: the command cannot be executed.
        """
        check_length(self.uds)
        prepare_directory(self.uds.parent)
        self.uds.unlink(missing_ok=True)
        run = await self._spawn()
        self._run = run
        self._watcher = asyncio.create_task(self._watch(run))
        answer = await _first_line(run.lifeline)
        if not answer.startswith(keeper.STARTED):
            await self.wait()
            raise EngineNotStarted(f"cannot start the engine: {answer.removeprefix(keeper.REFUSED) or 'its keeper ended at once'}")
        self.pid = int(answer.removeprefix(keeper.STARTED))

    async def wait_ready(self, timeout: float) -> None:
        """Wait until ``GET /health`` answers 200. The process keeps running when this raises EngineNotReady or is cancelled.

        Raises:
            EngineExited: the process ended first; the message holds the cause and the last log lines.
            EngineNotReady: ``timeout`` seconds went by.
        """
        watcher = self._started()
        poll = asyncio.create_task(self._poll_health())
        try:
            await asyncio.wait({poll, watcher}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if watcher.done():
                raise EngineExited(self.explain(watcher.result()))
            if not poll.done():
                raise EngineNotReady(f"the engine did not serve within {timeout:g} s{self._last_lines()}")
            poll.result()
        finally:
            poll.cancel()
            await asyncio.wait({poll})

    async def health(self, timeout: float = HEALTH_TIMEOUT_SECONDS) -> bool:
        """True if the engine answers its health check with 200 in time."""
        if not self.running:
            return False
        try:
            async with self._http().get("/health", timeout=aiohttp.ClientTimeout(total=timeout)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def wait(self) -> int:
        """Wait for the end of the process; its exit status, negative for a signal. Nothing of its tree is left then."""
        return await asyncio.shield(self._started())

    async def stop(self, grace_seconds: float) -> int | None:
        """SIGTERM, then after ``grace_seconds`` SIGKILL for the whole group; removes the socket. Safe to call twice, and in any state.

        Returns:
            The exit status, or None if it was never started.
        """
        self._stopping = True
        try:
            if self._run is not None and self._watcher is not None and not self._watcher.done():
                with contextlib.suppress(ProcessLookupError):
                    self._run.process.send_signal(signal.SIGTERM)
                await asyncio.wait({self._watcher}, timeout=grace_seconds)
        finally:
            await asyncio.shield(self._end())
        return self._watcher.result() if self._watcher is not None and self._watcher.done() else None

    def stopped(self) -> str | None:
        """The process of the engine, its keeper included, that a signal has stopped, as "PID (NAME)"; None if there is none."""
        return None if self._run is None else stopped_process(self._run.process.pid)

    @property
    def running(self) -> bool:
        return self._watcher is not None and not self._watcher.done()

    @property
    def keeper_pid(self) -> int | None:
        return None if self._run is None else self._run.process.pid

    def explain(self, status: int) -> str:
        """Why the engine ended, in words: exit status, most likely cause, last lines."""
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        if status == -signal.SIGKILL and not self._stopping:
            how += " (out of memory, or someone killed it)"
        cause = cause_of(self._tail, killed=status < 0)
        return f"the engine {how}{': ' + cause if cause else ''}{self._last_lines()}"

    def _last_lines(self) -> str:
        lines = list(self._tail)[-CAUSE_LINES:]
        return "\nlast lines of its log:\n  " + "\n  ".join(lines) if lines else ""

    def _started(self) -> asyncio.Task[int]:
        if self._watcher is None:
            raise EngineError("the engine process was not started")
        return self._watcher

    async def _spawn(self) -> _Run:
        """Start the keeper. The output pipe is ours, not asyncio's: with its own, Python 3.11 waits for the end of the process *and* of the
        pipe, which any stray grandchild can hold open."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        read_end, write_end = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", keeper.__file__, *self._command,
                stdin=theirs.fileno(), stdout=write_end, stderr=asyncio.subprocess.STDOUT, env=self._env, start_new_session=True,
            )  # fmt: skip
        except BaseException:
            ours.close()
            os.close(read_end)
            raise
        finally:
            theirs.close()
            os.close(write_end)
        output = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(output)
        pipe = os.fdopen(read_end, "rb", buffering=0)  # the transport closes it
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
        return _Run(process, output, transport, ours)

    async def _watch(self, run: _Run) -> int:
        """Relay the output until the keeper has ended; then make sure that nothing of its tree is left."""
        relay = asyncio.create_task(self._relay(run.output))
        status = await run.process.wait()
        if status < 0:  # perhaps the keeper itself was killed, and could not end the tree
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.process.pid, signal.SIGKILL)
            await asyncio.to_thread(kill_orphans)
        await asyncio.wait({relay}, timeout=DRAIN_SECONDS)
        relay.cancel()
        run.output_pipe.close()
        return status

    async def _relay(self, stream: asyncio.StreamReader) -> None:
        cutter = LineCutter()
        while chunk := await stream.read(READ_BYTES):
            self._emit(cutter.feed(chunk))
        self._emit(cutter.end())

    def _emit(self, lines: Sequence[str]) -> None:
        for line in lines:
            clean = self._redact(line)
            self._tail.append(clean)
            self._log(clean)

    async def _poll_health(self) -> None:
        while not (self._socket_is_there() and await self.health()):  # noqa: ASYNC110  nothing tells when another process serves
            await asyncio.sleep(POLL_SECONDS)

    def _socket_is_there(self) -> bool:
        try:
            mode = self.uds.stat().st_mode
        except OSError:
            return False
        if not stat.S_ISSOCK(mode):
            return False
        if stat.S_IMODE(mode) != SOCKET_MODE:
            self.uds.chmod(SOCKET_MODE)
        return True

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession("http://engine", connector=aiohttp.UnixConnector(str(self.uds), limit=2))
        return self._session

    async def _end(self) -> None:
        run, watcher = self._run, self._watcher
        if run is not None and watcher is not None:
            run.lifeline.close()  # the keeper kills the whole tree, other sessions included
            with contextlib.suppress(ProcessLookupError):
                run.process.send_signal(signal.SIGCONT)  # unless it is stopped itself
            await asyncio.wait({watcher}, timeout=KEEPER_SECONDS)
            if not watcher.done():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(run.process.pid, signal.SIGKILL)
                await asyncio.wait({watcher}, timeout=KILL_SECONDS)
            if not watcher.done():
                logger.error("engine process group %s did not end within %s s of being killed", run.process.pid, KILL_SECONDS)
        if self._session is not None:
            await self._session.close()
            self._session = None
        self.uds.unlink(missing_ok=True)


async def _first_line(lifeline: socket.socket) -> str:
    """The keeper's one line, or what arrived of it before it ended."""
    received = b""
    while b"\n" not in received:
        chunk = await asyncio.get_running_loop().sock_recv(lifeline, 4096)
        if not chunk:
            break
        received += chunk
    return received.decode(errors="replace").strip()
