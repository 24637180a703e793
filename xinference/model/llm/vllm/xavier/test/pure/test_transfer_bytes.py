"""The mover over plain bytes keeps the movers' contract."""

import pytest

from xinference.model.llm.vllm.xavier.test.mover_contract import NUM_BLOCKS, MoverContract
from xinference.model.llm.vllm.xavier.transfer.bytes import BytesMover

BLOCK_BYTES = 100


class TestBytesMover(MoverContract):
    """Block n is full of the byte n + 1."""

    def mover(self) -> BytesMover:
        self.memory = bytearray(b"".join(bytes([number + 1]) * BLOCK_BYTES for number in range(NUM_BLOCKS)))
        return BytesMover(self.memory, BLOCK_BYTES)

    def block(self, number: int) -> bytes:
        return bytes(self.memory[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES])


def test_memory_that_is_not_whole_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="not whole blocks"):
        BytesMover(bytearray(101), 50)
