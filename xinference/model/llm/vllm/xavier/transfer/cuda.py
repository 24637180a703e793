"""CUDA streams as the lane of a mover."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class CudaLane:
    """A stream of its own on one device.

    Args:
        device: the device of the engine's KV memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]

    def host_slot(self, shape: tuple[int, int], word: torch.dtype) -> torch.Tensor:
        """Pinned memory: a copy from or to anything else would hold the host up."""
        return torch.empty(shape, dtype=word, pin_memory=True)

    def mark(self) -> torch.cuda.Event:
        """An event in the stream that the calling thread, the engine's, works on."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def follow(self, mark: torch.cuda.Event) -> None:
        """The device waits; the host does not."""
        self._stream.wait_event(mark)

    @contextmanager
    def queued(self) -> Iterator[None]:
        """The calling thread works on this device and stream."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def wait(self) -> None:
        """Until the stream is idle; the interpreter lock is free meanwhile."""
        self._stream.synchronize()
