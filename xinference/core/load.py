"""How many requests an engine runs and holds in its queue, from its own metrics page."""

from pathlib import Path

import aiohttp

from xinference.core.errors import Unreachable

TIMEOUT_SECONDS = 2.0
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"


async def read_load(uds: Path) -> tuple[int, int]:
    """(running, waiting). Raises Unreachable when the engine does not say."""
    try:
        async with (
            aiohttp.ClientSession("http://engine", connector=aiohttp.UnixConnector(str(uds))) as session,
            session.get("/metrics", timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)) as response,
        ):
            text = await response.text()
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise Unreachable(f"the engine's metrics cannot be read ({type(error).__name__})") from None
    return parse_load(text)


def parse_load(text: str) -> tuple[int, int]:
    """Sums over the engine's cores. Raises Unreachable when the page has no such numbers."""
    totals = {RUNNING: 0, WAITING: 0}
    seen = set()
    for line in text.splitlines():
        name = line.split("{", 1)[0].split(" ", 1)[0]
        if name in totals:
            totals[name] += int(float(line.rsplit(" ", 1)[1]))
            seen.add(name)
    if len(seen) < len(totals):
        raise Unreachable("the engine's metrics hold no request counts")
    return totals[RUNNING], totals[WAITING]
