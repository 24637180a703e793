"""A worker's directories and limits on its machine, as its replica processes need them."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xinference.core.runner import Watch
from xinference.model.llm.sockets import socket_path


@dataclass(frozen=True)
class Machine:
    """Where a worker keeps things.

    Args:
        run_dir: sockets of this worker's engines; private to the user.
        shm_dir: segments and control pages.
    """

    worker_id: str
    run_dir: str
    shm_dir: str
    watch: Watch

    def socket_of(self, replica_uid: str) -> Path:
        """The Unix socket of a replica's engine. Raises SocketPathRefused."""
        return socket_path(Path(self.run_dir), self.worker_id, replica_uid)

    @property
    def sockets_dir(self) -> Path:
        """The directory of all sockets of this worker; created if it is not there."""
        return self.socket_of("").parent

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> "Machine":
        return cls(**{**wire, "watch": Watch(**wire["watch"])})
