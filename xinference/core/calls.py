"""Calls to actors of other processes: always with a deadline, and with one error for "it did not answer".

``xo.wait_for`` and not asyncio's: a cancelled actor call waits for the other side to confirm the cancellation, which a hung process never
does. After a timeout or a cancellation the effect of the call is unknown; every call of ours is idempotent or bound to an incarnation.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any

import xoscar as xo
from xoscar.backends.router import Router
from xoscar.errors import ActorNotExist, ServerClosed

from xinference.core.errors import Closed, Unreachable


async def call(awaitable: Awaitable[Any], timeout_seconds: float) -> Any:
    """Await an actor call. When it times out or is cancelled, the other side is told, and nobody waits for it to agree.

    Raises:
        Unreachable: the other process is dead, hung, or has no such actor.
        Closed: the connection ended before the answer: the process died, or does not accept our frames.
        Whatever the method itself raised.
    """
    task = asyncio.ensure_future(awaitable)
    task.add_done_callback(_seen)
    try:
        return await xo.wait_for(task, timeout_seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    except TimeoutError:
        raise Unreachable(f"no answer within {timeout_seconds:g} s") from None
    except ServerClosed as error:
        raise Closed("the process is gone (ServerClosed)") from error
    except (ConnectionError, ActorNotExist) as error:
        raise Unreachable(f"the process is gone ({type(error).__name__})") from error


def _seen(task: "asyncio.Future[Any]") -> None:
    """Take note of a result that nobody waits for any more, so that asyncio does not complain of it."""
    if not task.cancelled():
        task.exception()


def forget_route(address: str) -> None:
    """Have an address looked for where it says it is.

    xoscar reaches the pools of its own process by inner addresses, and may still know one for a port that a pool of this process had
    once and that now belongs to another process.
    """
    router = Router.get_instance()
    if router is not None:
        router.remove_router(Router([], None, mapping={address: ""}))
