"""What can go wrong between the processes of the control plane. None of these reaches a user as it is.

    CoreError
    ├── Unreachable     another process is dead, hung or refuses the connection; whether the call took effect is unknown
    │   └── Closed      the connection ended before the answer
    ├── ReplicaEnded    an engine start came to an end; the message is the cause
    └── OrderWithdrawn  an order arrived after it had been taken back

They travel between actors by pickle: one message each.
"""


class CoreError(Exception):
    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message


class Unreachable(CoreError):
    pass


class Closed(Unreachable):
    pass


class ReplicaEnded(CoreError):
    pass


class OrderWithdrawn(CoreError):
    pass
