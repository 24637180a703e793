"""A worker or a supervisor as a process of its own, for tests that kill one.

``python -m xinference.core.test.process_main worker FOLDER ADDRESS`` or ``... supervisor FOLDER PORT``
"""

import asyncio
import signal
import sys
from pathlib import Path

from xinference.core.cluster import start_supervisor, start_worker
from xinference.core.test.clusters import settings_in


async def run(kind: str, folder: Path, where: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    if kind == "worker":
        cluster = await start_worker(settings_in(folder), where)
    else:
        cluster = await start_supervisor(settings_in(folder, supervisor_port=int(where)))
    print("started", flush=True)
    await stop.wait()
    await cluster.stop(2.0)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
