"""What the files of the shared cache are called: flat names, so that one listing of the directory tells whose is what.

xinference.<worker_id>.<replica_uid>.<namespace, 16 hex>.seg     a replica's segment
xinference.<worker_id>.<replica_uid>.ctl                         a replica's control page
<either>.<8 hex>.tmp                                             one of them before it gets its name
"""

import os
import re
from dataclasses import dataclass

_ID = r"[A-Za-z0-9_-]{1,48}"
_TMP = r"\.[0-9a-f]{8}\.tmp"
_NAME = re.compile(rf"xinference\.(?P<worker>{_ID})\.(?P<replica>{_ID})\.(?:(?P<namespace>[0-9a-f]{{16}})\.seg|ctl)(?P<tmp>{_TMP})?")


@dataclass(frozen=True)
class FileName:
    """A file name of ours, taken apart. ``namespace`` is None for a control page; ``unfinished`` marks one without its final name."""

    worker_id: str
    replica_uid: str
    namespace: str | None
    unfinished: bool


def segment_path(shm_dir: str, worker_id: str, replica_uid: str, namespace: str) -> str:
    """Where the segment of this replica in this namespace (16 hex digits) lies."""
    return os.path.join(shm_dir, f"xinference.{worker_id}.{replica_uid}.{namespace}.seg")


def control_path(shm_dir: str, worker_id: str, replica_uid: str) -> str:
    """Where the control page of this replica lies."""
    return os.path.join(shm_dir, f"xinference.{worker_id}.{replica_uid}.ctl")


def unfinished_path(path: str) -> str:
    """A name for the file that will become ``path``."""
    return f"{path}.{os.urandom(4).hex()}.tmp"


def unfinished_paths(path: str) -> list[str]:
    """The files on their way to this name, left by processes that died while they made them or being made now."""
    directory, base = os.path.split(path)
    unfinished = re.compile(rf"{re.escape(base)}{_TMP}")
    return [os.path.join(directory, entry) for entry in os.listdir(directory) if unfinished.fullmatch(entry)]


def parse_name(name: str) -> FileName | None:
    """What a file name says, or None if it is not one of ours."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return FileName(match["worker"], match["replica"], match["namespace"], match["tmp"] is not None)
