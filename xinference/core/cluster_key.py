"""The secret that lets processes of one cluster talk to each other.

Whoever can send a frame to an actor pool can run code in it: xoscar unpickles what it gets. With ``XOSCAR_AUTH_KEY`` in the environment it
first checks a keyed digest of the frame. The key is the cluster's, lies in a file of the user alone, and is no sandbox: holders trust each
other.
"""

import os
import secrets
import stat
from pathlib import Path

VARIABLE = "XOSCAR_AUTH_KEY"
FILE_NAME = "cluster.key"


class ClusterKeyRefused(OSError):
    """The key file is readable by others, or empty, or missing where none may be made."""


def cluster_key(home: Path) -> str:
    """The key of this home, made at first use.

    Raises:
        ClusterKeyRefused: others could have read it.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = home / FILE_NAME
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _read(path)
    with os.fdopen(fd, "w") as file:
        key = secrets.token_hex(32)
        file.write(key)
    return key


def _read(path: Path) -> str:
    info = path.stat()
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise ClusterKeyRefused(f"{path} must belong to the user that runs the server and be closed to others: chmod 600 {path}")
    key = path.read_text().strip()
    if not key:
        raise ClusterKeyRefused(f"{path} is empty: delete it to have a new key made")
    return key


def use_cluster_key(home: Path) -> None:
    """Put the key into the environment, where xoscar looks for it and child processes inherit it; a key that is there already wins."""
    if not os.environ.get(VARIABLE):
        os.environ[VARIABLE] = cluster_key(home)


def use_given_cluster_key(home: Path) -> None:
    """The same for who joins a cluster: a key made here would be a stranger's.

    Raises:
        ClusterKeyRefused: there is none, or others could have read it.
    """
    if os.environ.get(VARIABLE):
        return
    if not has_cluster_key(home):
        raise ClusterKeyRefused(missing_key(home))
    os.environ[VARIABLE] = cluster_key(home)


def has_cluster_key(home: Path) -> bool:
    """Whether a key was given to this process or lies in its home."""
    return bool(os.environ.get(VARIABLE)) or (home / FILE_NAME).exists()


def missing_key(home: Path) -> str:
    """What to do when there is none."""
    return f"the cluster's key is missing: copy {FILE_NAME} from the supervisor's home to {home} or set {VARIABLE}"
