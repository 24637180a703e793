"""Whether a server is there at all."""

from typing import Final

from xinference.client.sync_client import Client
from xinference.errors import XinferenceError

ANSWER_SECONDS: Final = 2.0


def is_running(endpoint: str) -> bool:
    """Whether a server of this API answers at an endpoint; needs no key."""
    try:
        with Client(endpoint, answer_seconds=ANSWER_SECONDS) as client:
            health = client.read("/health")
    except XinferenceError:
        return False
    return isinstance(health, dict) and health.get("status") == "ok"
