"""Where the actor system keeps its sockets: a directory of each process alone, short enough for the kernel, gone when the process is.

xoscar names a socket after a number made of the process id, and two main pools can come to the same number (pid 1000, second pool; pid
2000, first pool; or equal pids in two containers with one home). It reads ``XOSCAR_DIR`` once, when it is imported.
"""

import atexit
import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

from xinference.model.llm.sockets import prepare_directory

VARIABLE = "XOSCAR_DIR"
MAX_DIRECTORY_BYTES = 55  # the kernel takes socket paths of 107 bytes; xoscar adds "/.xoscar/socket/" and 32 hex digits


def actor_directory(home: Path, pid: int) -> Path:
    """The directory of one process; under the system's temporary directory when the home is too deep. Not created here."""
    directory = home / "actors" / str(pid)
    if len(os.fsencode(directory)) > MAX_DIRECTORY_BYTES:
        digest = hashlib.sha256(os.fsencode(home)).hexdigest()[:8]
        directory = Path(tempfile.gettempdir()) / f"xinference-{os.getuid()}-{digest}" / "actors" / str(pid)
    return directory


def sweep(directory: Path) -> list[Path]:
    """Remove the directories beside this one whose processes are gone: killed ones leave theirs."""
    removed = []
    for other in directory.parent.glob("*"):
        if other.name.isdigit() and not Path(f"/proc/{other.name}").exists():
            shutil.rmtree(other, ignore_errors=True)
            removed.append(other)
    return removed


def use_actor_directory(home: Path) -> None:
    """Create this process's directory and put it into the environment; one that is there already wins.

    Does nothing once xoscar was imported: this process would keep to the old directory, and its sub-pools would look in the new one.

    Raises:
        SocketPathRefused: the directory is not ours alone.
    """
    if os.environ.get(VARIABLE) or "xoscar" in sys.modules:
        return
    directory = actor_directory(home, os.getpid())
    for part in (directory.parent.parent, directory.parent, directory):
        prepare_directory(part)
    sweep(directory)
    os.environ[VARIABLE] = str(directory)
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
