"""Where an engine's Unix socket lies: a directory of ours alone, and a path short enough for the kernel."""

import hashlib
import os
import stat
import tempfile
from pathlib import Path

# sun_path holds 108 bytes with its final zero; some libraries add a suffix while they bind.
MAX_SOCKET_PATH_BYTES = 100
DIRECTORY_MODE = 0o700
SOCKET_MODE = 0o600


class SocketPathRefused(OSError):
    """The socket directory belongs to someone else, is open to others, or its path is too long."""


def socket_path(run_dir: Path, worker_id: str, replica_uid: str) -> Path:
    """The socket of one replica. The name is a hash: ids may be long and the path must not.

    Falls back to a private directory under the system's temporary directory when ``run_dir`` is too deep. Creates the directory.

    Raises:
        SocketPathRefused: the directory is not ours alone, or even the fallback is too deep.
    """
    name = hashlib.sha256(f"{worker_id}/{replica_uid}".encode()).hexdigest()[:16] + ".sock"
    path = run_dir / name
    if len(os.fsencode(path)) >= MAX_SOCKET_PATH_BYTES:
        home = hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:8]
        path = Path(tempfile.gettempdir()) / f"xinference-{os.getuid()}-{home}" / name
    check_length(path)
    prepare_directory(path.parent)
    return path


def prepare_directory(directory: Path) -> None:
    """Create the directory with mode 0700, or check that the existing one is ours and closed to others.

    Raises:
        SocketPathRefused: it is a link, another user's, or cannot be closed to others.
    """
    directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    info = directory.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise SocketPathRefused(f"{directory} must be a directory of the user that runs the server")
    if stat.S_IMODE(info.st_mode) & 0o077:
        directory.chmod(DIRECTORY_MODE)


def check_length(path: Path) -> None:
    """Raises SocketPathRefused when the kernel could not bind to this path."""
    length = len(os.fsencode(path))
    if length >= MAX_SOCKET_PATH_BYTES:
        raise SocketPathRefused(f"socket path of {length} bytes, the limit is {MAX_SOCKET_PATH_BYTES - 1}: {path}")
