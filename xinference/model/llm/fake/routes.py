"""The fake's HTTP routes: the replica interface of vLLM's OpenAI server, and ``/fake/...`` for tests."""

import asyncio
import json
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import asdict, replace
from typing import Any

from aiohttp import web

from xinference.model.llm.fake import answers, calls, vocabulary
from xinference.model.llm.fake.answers import Answer, sse
from xinference.model.llm.fake.calls import Call
from xinference.model.llm.fake.config import FakeConfigRefused, Faults, changed
from xinference.model.llm.fake.engine import EngineFailed, FakeEngine
from xinference.model.llm.fake.metrics import Metrics
from xinference.model.llm.fake.refusal import Refused, invalid_field, no_such_model
from xinference.model.llm.fake.request import Sequence
from xinference.model.llm.fake.transcript import Piece, Transcript

VERSION = "0.32.0+fake"
REMEMBERED_REQUESTS = 200
MAX_BODY_BYTES = 64 * 1024 * 1024


class FakeServer:
    """Routes over one engine.

    Args:
        model_name: the served name.
        engine: runs the sequences.
    """

    def __init__(self, model_name: str, engine: FakeEngine) -> None:
        self.model_name = model_name
        self.engine = engine
        self.metrics = Metrics(model_name)
        self._created = int(time.time())
        self._received: deque[dict[str, Any]] = deque(maxlen=REMEMBERED_REQUESTS)
        self._aborted: deque[str] = deque(maxlen=REMEMBERED_REQUESTS)
        self._num_received = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/version", self.version),
                web.get("/metrics", self.show_metrics),
                web.get("/v1/models", self.models),
                web.post("/v1/chat/completions", self.chat),
                web.post("/v1/completions", self.completions),
                web.post("/tokenize", self.tokenize),
                web.post("/detokenize", self.detokenize),
                web.get("/fake/state", self.state),
                web.post("/fake/faults", self.set_faults),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Errors in vLLM's shape, and the hang fault."""
        if self.engine.faults.hang and not request.path.startswith("/fake/"):
            await asyncio.Event().wait()
        try:
            response: web.StreamResponse = await handler(request)
        except Refused as refused:
            return web.json_response(refused.body, status=refused.status)
        except web.HTTPException as error:  # vLLM's router answers these itself, in its framework's shape
            return web.json_response({"detail": error.reason}, status=error.status)
        except EngineFailed as failed:
            return web.json_response(Refused(str(failed), 500, "InternalServerError").body, status=500)
        return response

    # ---- small routes

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.engine.faults.dead else 200)

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics.text(self.engine), content_type="text/plain")

    async def models(self, request: web.Request) -> web.Response:
        card = {
            "id": self.model_name, "object": "model", "created": self._created, "owned_by": "vllm", "root": self.model_name,
            "parent": None, "max_model_len": self.engine.config.max_model_len, "permission": [],
        }  # fmt: skip
        return web.json_response({"object": "list", "data": [card]})

    async def tokenize(self, request: web.Request) -> web.Response:
        fields = calls.Fields(await self._body(request))
        self._check_model(fields)
        if "messages" in fields.body:
            tools = fields.body.get("tools") or []
            tokens = calls.render(calls.checked_messages(fields.body["messages"]), tools, fields.body.get("add_generation_prompt", True))
        else:
            tokens = vocabulary.encode(fields.string("prompt"))
        strings = [vocabulary.decode([t]) for t in tokens] if fields.boolean("return_token_strs") else None
        limit = self.engine.config.max_model_len
        return web.json_response({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": strings})

    async def detokenize(self, request: web.Request) -> web.Response:
        fields = calls.Fields(await self._body(request))
        self._check_model(fields)
        tokens = fields.body.get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(t, int) and t >= 0 for t in tokens):
            raise invalid_field("body.tokens", "Input should be a valid list", tokens)
        return web.json_response({"prompt": vocabulary.decode(t for t in tokens if t < vocabulary.VOCAB_SIZE)})

    async def state(self, request: web.Request) -> web.Response:
        """What tests look at: queues, ended requests, what was received, which requests were aborted."""
        engine = self.engine
        return web.json_response(
            {
                "running": len(engine.scheduler.running),
                "waiting": len(engine.scheduler.waiting),
                "loading": len(engine.scheduler.loading),
                "free_blocks": engine.pool.num_free,
                "num_blocks": engine.pool.num_blocks,
                "steps": engine.num_steps,
                "preemptions": engine.scheduler.preemptions,
                "prompt_tokens": engine.num_prompt_tokens,
                "output_tokens": engine.num_output_tokens,
                "finished": dict(engine.finished),
                "num_received": self._num_received,
                "received": list(self._received),
                "aborted": list(self._aborted),
                "faults": asdict(engine.faults),
            }
        )

    async def set_faults(self, request: web.Request) -> web.Response:
        """Change some faults; an empty object heals all."""
        body = await self._body(request)
        try:
            self.engine.set_faults(changed(self.engine.faults if body else Faults(), body))
        except FakeConfigRefused as error:
            raise Refused(str(error)) from error
        return web.json_response(asdict(self.engine.faults))

    # ---- generation

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=True)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=False)

    async def _generate(self, request: web.Request, chat: bool) -> web.StreamResponse:
        body = await self._body(request)
        faults = self.engine.faults
        if faults.refuse and request.transport is not None:
            request.transport.abort()
        if faults.status:
            raise Refused("Internal server error", faults.status, "InternalServerError")
        parse = calls.chat_call if chat else calls.completion_call
        call = parse(body, self.model_name, self.engine.config.max_model_len)
        request_id = request.headers.get("x-request-id") or call.request_id or uuid.uuid4().hex
        answer = Answer(call, request_id)
        self._num_received += 1
        self._received.append({"id": answer.id, "body": body, "prompt_tokens": sum(len(p) for p in call.prompts)})
        try:
            if call.stream:
                return await self._stream(request, call, answer)
            return await self._whole(call, answer)
        except (asyncio.CancelledError, ConnectionResetError):
            self._aborted.append(answer.id)
            raise

    async def _whole(self, call: Call, answer: Answer) -> web.Response:
        choices: list[list[Piece]] = [[] for _ in range(answer.num_choices)]
        async for index, piece in self._pieces(call, answer):
            choices[index].append(piece)
        tokens = 0 if call.suppress_output else sum(p.token is not None for pieces in choices for p in pieces)
        return web.json_response(answer.body(choices, tokens, choices[-1][0].cached_tokens))

    async def _stream(self, request: web.Request, call: Call, answer: Answer) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        pieces = self._pieces(call, answer)
        tokens, cached, opened = 0, 0, False
        begun: set[int] = set()
        try:
            await response.prepare(request)
            async for index, piece in pieces:
                if not opened:
                    opened, cached = True, piece.cached_tokens
                    for chunk in filter(None, map(answer.first_chunk, range(answer.num_choices))):
                        await response.write(sse(chunk))
                tokens += piece.token is not None
                chunks = answer.chunks(index, piece, first=index not in begun)
                begun.add(index)
                for data in chunks:
                    if call.usage_in_every_chunk:
                        data["usage"] = answers.usage(call, tokens, cached)
                    await response.write(sse(data))
            if call.include_usage:
                await response.write(sse(answer.usage_chunk(tokens, cached)))
        except EngineFailed as failed:
            await response.write(sse(Refused(str(failed), 500, "InternalServerError").body))
        finally:
            await pieces.aclose()
        await response.write(sse("[DONE]"))
        return response

    async def _pieces(self, call: Call, answer: Answer) -> AsyncGenerator[tuple[int, Piece], None]:
        """News of all choices as they come. Leaving early aborts what still runs."""
        queue: asyncio.Queue[tuple[int, Piece] | BaseException | None] = asyncio.Queue()

        async def pump(index: int) -> None:
            try:
                async for piece in self._choice(call, answer, index):
                    queue.put_nowait((index, piece))
                queue.put_nowait(None)
            except EngineFailed as failed:
                queue.put_nowait(failed)

        tasks = [asyncio.create_task(pump(i)) for i in range(answer.num_choices)]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _choice(self, call: Call, answer: Answer, index: int) -> AsyncGenerator[Piece, None]:
        prompt = call.prompts[index // call.n]
        sampling = replace(call.sampling, choice=call.sampling.choice + index % call.n)
        name = f"{answer.id}-{index}"
        sequence = Sequence(name, list(prompt), len(prompt), sampling, call.salt, call.xavier_request)
        transcript = Transcript(call.stop, call.keep_stop)
        outputs = self.engine.generate(sequence)
        started = last = time.monotonic()
        try:
            async for output in outputs:
                now = time.monotonic()
                latency = self.metrics.inter_token_latency if transcript.num_tokens else self.metrics.time_to_first_token
                latency.observe(now - last)
                last = now
                piece = transcript.push(output)
                yield piece
                if transcript.finished:
                    break
        finally:
            self.metrics.request_latency.observe(time.monotonic() - started)
            await outputs.aclose()

    def _check_model(self, fields: calls.Fields) -> None:
        model = fields.string("model", self.model_name)
        if model != self.model_name:
            raise no_such_model(model, self.model_name)

    async def _body(self, request: web.Request) -> Any:
        if request.content_type != "application/json":
            raise Refused("1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed", 400, "Bad Request")
        raw = await request.read()
        try:
            return json.loads(raw) if raw else {}
        except ValueError as error:
            text = f"1 validation error:\n  {{'type': 'json_invalid', 'loc': 'body', 'msg': 'JSON decode error', 'ctx': {str(error)!r}}}"
            raise Refused(text, 400, "Bad Request", "body") from error
