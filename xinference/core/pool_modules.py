"""Imported first in every process of the actor system, and needed for what it leaves out: torch.

When a pool starts, xoscar (0.12) imports every library whose objects it could serialise. With torch installed that takes 1.3 of the 2 s of
a start and 150 MiB of each process, main and sub-pools. No actor of ours sends tensors, so torch's serializer is taken off the list before.
"""

from xoscar.serialization.torch import TorchTensorSerializer

TorchTensorSerializer.unregister("torch.Tensor")  # idempotent
