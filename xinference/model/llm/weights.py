"""Identity and size of a model's weights, without reading all of them.

Two replicas may exchange KV only if their weights are equal. Reading 100 GB at each launch is out of the question; so the identity covers
what tells weights apart in practice: the configs, and of every weight file its name, size, time of change, header, samples of its bytes.
"""

import hashlib
import json
import struct
from pathlib import Path

SAMPLE_BYTES = 4096
SAMPLES_PER_FILE = 64
MAX_HEADER_BYTES = 64 << 20
_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_CONFIGS = ("config.json", "quantize_config.json", "hf_quant_config.json", "adapter_config.json")


def weight_files(path: Path) -> list[Path]:
    """The files that hold the weights; of several formats the one that vLLM loads first."""
    for pattern in _PATTERNS:
        found = sorted(file for file in path.glob(pattern) if file.is_file() and file.name != "training_args.bin")
        if found:
            return found
    return []


def weights_bytes(path: Path) -> int:
    """Size of the weight files; 0 if there are none."""
    return sum(file.stat().st_size for file in weight_files(path))


def model_identity(path: Path) -> str:
    """32 hex digits; equal for equal configs and weight files, also at different paths.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for name in _CONFIGS:
        file = path / name
        if file.is_file():
            digest.update(name.encode() + hashlib.sha256(file.read_bytes()).digest())
    for file in weight_files(path):
        info = file.stat()
        digest.update(json.dumps([file.name, info.st_size, info.st_mtime_ns]).encode())
        digest.update(_sampled(file, info.st_size))
    return digest.hexdigest()[:32]


def _sampled(file: Path, size: int) -> bytes:
    """Digest over a safetensors file's header, its start and end, and samples spread evenly in between."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        start = stream.read(SAMPLE_BYTES)
        digest.update(start)
        if file.suffix == ".safetensors" and len(start) >= 8:
            (length,) = struct.unpack("<Q", start[:8])
            stream.seek(0)
            digest.update(stream.read(min(8 + length, MAX_HEADER_BYTES)))
        for i in range(1, SAMPLES_PER_FILE + 1):
            stream.seek(max(0, (size - SAMPLE_BYTES) * i // SAMPLES_PER_FILE))
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.digest()
