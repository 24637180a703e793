"""A worker process of its own, for tests that kill one: ``python -m xinference.core.test.worker_main FOLDER ADDRESS``."""

import asyncio
import signal
import sys
from pathlib import Path

from xinference.core.cluster import start_worker
from xinference.core.test.clusters import settings_in


async def run(folder: Path, address: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    worker = await start_worker(settings_in(folder), address)
    print("started", flush=True)
    await stop.wait()
    await worker.stop(2.0)


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), sys.argv[2]))
