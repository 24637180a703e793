"""Every error of the shared cache, as one tree.

    XavierError
    ├── ConfigRefused         a setting is missing, unknown, of the wrong type or out of range
    ├── PlatformRefused       this machine does not keep the order of stores that the protocol relies on
    ├── BudgetTooSmall        the byte budget cannot hold one block; the arithmetic is in the message
    ├── SharedMemoryFull      the file system cannot give the bytes of a segment; needed and free bytes are in the message
    ├── SegmentRefused        a segment cannot be opened: `permanent` says whether asking again can help
    ├── ControlPageRefused    a control page cannot be opened, or a state does not fit into it
    ├── ConflictingWrites     two different contents are to be written to one engine block; nothing has moved
    └── BookImbalance         a store's own books contradict each other: corruption of our own state

Only BookImbalance means that something of ours is broken; all others are answers to bad input or to a full machine.
"""


class XavierError(Exception):
    """Base of all errors of the shared cache."""


class ConfigRefused(XavierError):
    """A setting is missing, unknown, of the wrong type or out of range."""


class PlatformRefused(XavierError):
    """The machine's memory order is not the one that validated reads rely on."""


class BudgetTooSmall(XavierError):
    """The byte budget cannot hold one block."""


class SharedMemoryFull(XavierError):
    """The file system that holds segments has no room for one."""


class SegmentRefused(XavierError):
    """A segment cannot be used.

    Args:
        reason: what was found, in words for a log line.
        permanent: True when the same file can never be used; False when a later attempt may succeed.
    """

    def __init__(self, reason: str, permanent: bool) -> None:
        super().__init__(reason, permanent)
        self.reason = reason
        self.permanent = permanent

    def __str__(self) -> str:
        return self.reason


class ControlPageRefused(XavierError):
    """A control page cannot be opened, or a state does not fit into it."""


class ConflictingWrites(XavierError):
    """A plan of copies writes different content to one engine block. Raised before anything moves."""


class BookImbalance(XavierError):
    """Two books that must agree do not. Raised by the stores' ``check()``."""
