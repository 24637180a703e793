"""One inference request, from its admission to the end of its answer.

                     ┌── work: choose replica ─> connect ─> relay ── (failed before the first byte: once more, elsewhere)
    supervise ───────┤
                     └── watches: client gone, ended from outside, deadline, silence (keep-alive)

Two tasks, because the server does not stop a handler whose client has left, and because a silent stream must be kept alive while the
work waits for its replica. Whatever ends the request cancels the work, which closes the replica's connection, which aborts the engine.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from xinference.api.answer import Answer, SlowReader
from xinference.api.body import RESERVED_FIELDS, Kind, Prepared
from xinference.api.control import Json
from xinference.api.errors import RequestTimedOut
from xinference.api.fit import check_fit
from xinference.api.gateway import Gateway
from xinference.api.history import CLIENT_GONE, OK, SLOW_READER, Past
from xinference.api.normalise import ENGINE_FAILED, REPLICA_DIED, Refusal, refusal, stream_refusal
from xinference.api.route_table import ModelRoutes, Replica
from xinference.api.sse import EventTooLarge, StreamRewriter, json_event
from xinference.api.upstream import AnswerTooLarge, ConnectionLost, Upstream
from xinference.api.usage import correct, debug_object, time_to_first_token
from xinference.api.watch import client_gone
from xinference.core.request_legs import merge
from xinference.errors import EngineDied, InternalError, NoReplicaAvailable, XinferenceError

logger = logging.getLogger(__name__)

MAX_LOGGED_CHARACTERS: Final = 500


@dataclass(frozen=True)
class Ask:
    """What a client asked for.

    Args:
        request_id: the x-request-id.
        request_hex: 32 hex digits under which the engine accounts for it.
        received: monotonic seconds.
        steer: the replica it must go to, or None.
        debug: whether the answer tells where its tokens came from.
    """

    kind: Kind
    prepared: Prepared
    request_id: str
    request_hex: str
    received: float
    steer: str | None = None
    debug: bool = False


class Refused(Exception):
    """A replica answered that it will not or cannot."""

    def __init__(self, refused: Refusal) -> None:
        super().__init__(refused.detail)
        self.refused = refused


class Exchange(Response):
    """Answers one request. Errors before the first byte are raised, for the app's handlers to turn into a status."""

    def __init__(self, gateway: Gateway, ask: Ask) -> None:
        self._gateway = gateway
        self._ask = ask
        self._ended: asyncio.Future[XinferenceError] = asyncio.get_running_loop().create_future()
        self._outcome = OK
        self._ttft_seconds: float | None = None
        self._first_byte_seconds: float | None = None  # of an answer in one piece
        self.model_uid = ask.prepared.model
        received = time.time() - (time.monotonic() - ask.received)
        num_choices = ask.prepared.num_choices
        self._past = Past(ask.request_id, ask.request_hex, self.model_uid, ask.kind.name, num_choices, received)
        self.ids = (ask.request_id, ask.request_hex)
        self.background = None

    def end(self, error: XinferenceError) -> None:
        """End the request from outside; the client gets the error."""
        if not self._ended.done():
            self._ended.set_result(error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = Answer(scope, send, self._gateway.limits.slow_reader_bytes)
        routes = await self._gateway.table.find(self.model_uid)
        check_fit(self._ask.kind, self._ask.prepared, routes.model)
        with self._gateway.admitted(self), self._measured():
            work = asyncio.create_task(self._work(routes, answer))
            gone = asyncio.create_task(client_gone(receive))
            try:
                await self._supervise(work, gone, answer)
            except SlowReader:
                self._outcome = SLOW_READER
                self._gateway.metrics.slow_readers.labels(self.model_uid).inc()
                self._gateway.metrics.refused.labels("slow_reader_bytes").inc()
                answer.cut()
            except XinferenceError as error:
                await self._fail(answer, error)
            except Exception as error:
                logger.exception("request %s failed", self._ask.request_id)
                await self._fail(answer, InternalError(ENGINE_FAILED), error)
            finally:
                work.cancel()
                gone.cancel()
                await asyncio.gather(work, gone, return_exceptions=True)

    async def _fail(self, answer: Answer, error: XinferenceError, cause: Exception | None = None) -> None:
        self._outcome = error.code or "error"
        if not answer.started:
            raise error from cause
        await answer.fail(error)

    async def _supervise(self, work: asyncio.Task[None], gone: asyncio.Task[None], answer: Answer) -> None:
        """Wait for the work's end, or for a reason to end it."""
        deadline = self._ask.received + self._gateway.limits.request_seconds
        keep_alive = self._gateway.config.keep_alive_seconds
        while True:
            now = time.monotonic()
            next_look = min(deadline, answer.last_sent + keep_alive) if self._ask.prepared.stream else deadline
            reasons: set[asyncio.Future[Any]] = {work, gone, self._ended}
            await asyncio.wait(reasons, timeout=max(0.0, next_look - now), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            if gone.done():
                if answer.finished:
                    return await work  # the server says so too of a client that has got all; the work only tidies up
                self._outcome = CLIENT_GONE
                return None
            if self._ended.done():
                raise self._ended.result()
            now = time.monotonic()
            if now >= deadline:
                self._gateway.metrics.refused.labels("request_seconds").inc()
                raise RequestTimedOut(f"the request ran for {self._gateway.limits.request_seconds:g} s, which is the limit")
            if self._ask.prepared.stream and now >= answer.last_sent + keep_alive:
                await answer.keep_alive()

    async def _work(self, routes: ModelRoutes, answer: Answer) -> None:
        """Try replicas until one has answered."""
        tried: list[Replica] = []
        while True:
            if tried:
                # What failed may have been replaced meanwhile.
                routes = self._gateway.table.get(routes.uid) or routes
            replica = self._next_replica(routes, tried)
            self._past.replica_uid = replica.replica_uid
            tried.append(replica)
            try:
                with self._gateway.using(routes.uid, replica):
                    await self._attempt(routes, replica, answer)
            except (AnswerTooLarge, EventTooLarge) as error:
                logger.warning("request %s: replica %s sent %s", self._ask.request_id, replica.replica_uid, error)
                raise InternalError(ENGINE_FAILED) from error
            except ConnectionLost as error:
                self._gateway.report_failure(routes.uid, replica, str(error))
                if answer.has_events:
                    raise EngineDied(REPLICA_DIED) from error
            except Refused as error:
                refused = error.refused
                self._log(replica, refused)
                if refused.dead:
                    self._gateway.report_failure(routes.uid, replica, "its engine died")
                if answer.has_events or not refused.elsewhere or self._is_last(routes, tried):
                    raise refused.error from error
            else:
                return
            if len(tried) >= self._gateway.config.attempts or self._ask.steer is not None:
                raise NoReplicaAvailable(f"{len(tried)} replicas failed on this request")
            self._gateway.metrics.retries.labels(routes.uid).inc()

    def _log(self, replica: Replica, refused: Refusal) -> None:
        """The engine's own words go to the log for faults alone: its words on a request may quote the request."""
        words = refused.detail[:MAX_LOGGED_CHARACTERS] if refused.error.status >= 500 else refused.error.code
        level = logging.WARNING if refused.error.status >= 500 else logging.DEBUG
        logger.log(level, "request %s: replica %s answered: %s", self._ask.request_id, replica.replica_uid, words)

    def _next_replica(self, routes: ModelRoutes, tried: list[Replica]) -> Replica:
        if self._ask.steer is not None:
            return self._gateway.steered(routes, self._ask.steer)
        return self._gateway.choose(routes, tried, self._ask.prepared.prefix)

    def _is_last(self, routes: ModelRoutes, tried: list[Replica]) -> bool:
        """Whether no further replica can be asked; then what this one said is the answer."""
        keys = {replica.key for replica in tried}
        left = any(replica.key not in keys for replica in routes.ready)
        return self._ask.steer is not None or not left or len(tried) >= self._gateway.config.attempts

    async def _attempt(self, routes: ModelRoutes, replica: Replica, answer: Answer) -> None:
        """Ask one replica.

        Raises:
            ConnectionLost: it is not there, or went away.
            Refused: it answered with an error.
        """
        kind, prepared = self._ask.kind, self._ask.prepared
        headers = {"x-request-id": self._ask.request_id}
        connection = self._gateway.upstreams.post(replica.endpoint, kind.path, prepared.content, headers)
        async with self._until_gone(routes.uid, replica), connection as upstream:
            if upstream.status >= 400:
                body = await upstream.read_all(self._gateway.config.response_bytes)
                raise Refused(refusal(upstream.status, body, kind))
            if prepared.stream:
                await self._relay(routes, replica, upstream, answer)
            else:
                await self._pass_on(routes, replica, upstream, answer)

    async def _relay(self, routes: ModelRoutes, replica: Replica, upstream: Upstream, answer: Answer) -> None:
        """Send a stream on as it comes."""
        rewriter = StreamRewriter(self._gateway.config.event_bytes)
        while not rewriter.done:
            data = await upstream.read_some()
            if not data:
                raise ConnectionLost("the stream ended before it was complete")
            events = rewriter.feed(data)
            if events:
                if not answer.has_events:
                    self._first_event()
                await answer.events(events)
            if rewriter.error is not None:
                raise Refused(stream_refusal(rewriter.error, self._ask.kind, answer.has_events))
        if rewriter.usage is not None:
            await self._settle(routes, replica, rewriter.usage, self._ask.prepared.wants_usage)
            if self._ask.prepared.wants_usage or self._ask.debug:
                await answer.events(json_event(rewriter.usage))
        await answer.done()
        await upstream.finish(self._gateway.config.finish_seconds)

    async def _pass_on(self, routes: ModelRoutes, replica: Replica, upstream: Upstream, answer: Answer) -> None:
        """Send an answer on that comes in one piece."""
        self._first_byte_seconds = time.monotonic() - self._ask.received
        content = await upstream.read_all(self._gateway.config.response_bytes)
        if not self._ask.kind.generates:
            return await answer.json(content)
        body = msgspec.json.decode(content)
        for name in RESERVED_FIELDS:
            body.pop(name, None)
        if body.get("usage") is not None:
            await self._settle(routes, replica, body, wanted=True)
        return await answer.json(msgspec.json.encode(body))

    async def _settle(self, routes: ModelRoutes, replica: Replica, body: Json, wanted: bool) -> None:
        """Put the right usage figure, and the debug object, into an answer or a usage chunk."""
        metrics, usage = self._gateway.metrics, body["usage"]
        self._past.settled(usage)
        metrics.prompt_tokens.labels(routes.uid).inc(usage.get("prompt_tokens") or 0)
        metrics.completion_tokens.labels(routes.uid).inc(usage.get("completion_tokens") or 0)
        if not wanted and not self._ask.debug:
            return
        expected = routes.shares_cache
        record = await self._gateway.record(routes.uid, replica, self._ask.request_hex) if expected else None
        if record is not None and "legs" in record:
            record = merge(record["legs"], self._ask.prepared.num_choices)
        corrected = correct(usage, record, expected)
        metrics.usage_figures.labels(routes.uid, corrected.figure.value).inc()
        body["usage"] = corrected.usage
        if self._ask.debug:
            whole = not self._ask.prepared.stream
            ttft = time_to_first_token(corrected.record, self._first_byte_seconds) if whole else self._ttft_seconds
            body["xinference"] = debug_object(replica.replica_uid, corrected.record, ttft)

    def _first_event(self) -> None:
        self._past.first_event()
        self._ttft_seconds = time.monotonic() - self._ask.received
        self._gateway.metrics.ttft_seconds.labels(self.model_uid, self._ask.kind.name).observe(self._ttft_seconds)

    @asynccontextmanager
    async def _until_gone(self, uid: str, replica: Replica) -> AsyncIterator[None]:
        """Give up a replica that the route table says is over, even when its connection still looks alive.

        Raises:
            ConnectionLost: it is over.
        """
        with self._gateway.table.watch(uid, replica) as gone:
            inside = True

            def cut(_: asyncio.Future[None]) -> None:
                if inside:
                    limit.reschedule(0)

            try:
                async with asyncio.timeout(None) as limit:
                    gone.add_done_callback(cut)
                    try:
                        yield
                    finally:
                        inside = False
                        gone.remove_done_callback(cut)
            except TimeoutError:
                raise ConnectionLost("the supervisor gave the replica up") from None

    @contextmanager
    def _measured(self) -> Iterator[None]:
        metrics, labels = self._gateway.metrics, (self.model_uid, self._ask.kind.name)
        if self._gateway.history.add(self._past):
            metrics.records_dropped.inc()
        try:
            yield
        finally:
            self._past.ended(self._outcome)
            metrics.requests.labels(*labels, self._outcome).inc()
            metrics.request_seconds.labels(*labels).observe(time.monotonic() - self._ask.received)
