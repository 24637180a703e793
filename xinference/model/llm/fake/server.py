"""The fake engine as a process: a stand-in for ``python -m vllm.entrypoints.openai.api_server``.

``python -m xinference.model.llm.fake.server --uds PATH --model-name UID [--config JSON]``
"""

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
import sys
from pathlib import Path

from aiohttp import web

from xinference.model.llm.fake.blocks import BlockPool
from xinference.model.llm.fake.config import FakeConfig, FakeConfigRefused
from xinference.model.llm.fake.engine import FakeEngine
from xinference.model.llm.fake.routes import FakeServer
from xinference.model.llm.fake.shared_cache import SharedCache
from xinference.model.llm.fake.sharing import NoSharing, Sharing

logger = logging.getLogger("xinference.fake")

SHUTDOWN_SECONDS = 1.0


async def serve(uds: Path, model_name: str, config: FakeConfig) -> None:
    """Serve until SIGTERM or SIGINT. Like vLLM, the socket is bound at once and listens only when the engine is up."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: None if config.ignore_sigterm else stop.set())
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(uds))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), config.start_delay_seconds)

    def sharing(pool: BlockPool) -> Sharing:
        return NoSharing() if config.xavier is None else SharedCache(config, pool)

    engine = FakeEngine(config, sharing)
    runner = web.AppRunner(
        FakeServer(model_name, engine).app(), access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_SECONDS
    )
    loop_task = asyncio.create_task(engine.run())
    try:
        await runner.setup()
        await web.SockSite(runner, sock).start()
        logger.info("serving %s", model_name)
        await stop.wait()
        logger.info("stopping")
    finally:
        loop_task.cancel()
        await runner.cleanup()
        engine.sharing.close()
        uds.unlink(missing_ok=True)  # noqa: ASYNC240  nothing is served any more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uds", type=Path, required=True)
    parser.add_argument("--model-name", required=True)
    parser.add_argument("--config", default="{}", help="FakeConfig as JSON")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stdout)
    try:
        config = FakeConfig.from_json(args.config)
    except FakeConfigRefused as error:
        parser.error(str(error))
    if config.fail_start:
        raise SystemExit(f"RuntimeError: {config.fail_start}")
    asyncio.run(serve(args.uds, args.model_name, config))


if __name__ == "__main__":
    main()
