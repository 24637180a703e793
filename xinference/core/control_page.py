"""A replica's control page: the model actor's words in shared memory for its engine."""

from xinference.core.machine import Machine
from xinference.core.orders import Control, ReplicaOrder
from xinference.model.llm.vllm.xavier.directory.control import ControlPageWriter, ControlState, PeerEntry
from xinference.model.llm.vllm.xavier.directory.names import control_path


class CacheControlPage:
    """Created with the first state, so that it exists before the engine starts."""

    def __init__(self, machine: Machine, order: ReplicaOrder) -> None:
        self._path = control_path(machine.shm_dir, machine.worker_id, order.replica_uid)
        self._writer: ControlPageWriter | None = None

    def write(self, control: Control) -> None:
        """Raises ControlPageRefused when a live process writes a page of this name, or the peers do not fit."""
        state = ControlState(
            epoch=control.epoch,
            peers=tuple(PeerEntry(peer.worker_id, peer.replica_uid, peer.incarnation) for peer in control.peers),
            stopping=control.stopping,
        )
        if self._writer is None:
            self._writer = ControlPageWriter.create(self._path, state)
        else:
            self._writer.write(state)

    def remove(self) -> None:
        if self._writer is not None:
            self._writer.close(unlink=True)
