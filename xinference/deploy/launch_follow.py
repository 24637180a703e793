"""Following a launch on a terminal: progress bars, and what Ctrl-C means.

held          Ctrl-C while the launch is being asked for: remembered until its uid is known, else nobody could cancel it
following     first Ctrl-C: cancel, and wait until the server has given everything back
cancelling    second Ctrl-C: detach; the server finishes on its own
"""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from xinference.client.sync_client import Client
from xinference.deploy.output import printable, progress_console
from xinference.errors import LaunchCancelled, XinferenceError

Json = dict[str, Any]
WHOLE: Final = "model"


class Interrupted(Exception):
    """Ctrl-C ended the command; says what became of the launch."""


class HeldInterrupt:
    """Whether Ctrl-C was pressed while it was held back."""

    pressed = False


@contextlib.contextmanager
def interrupts_held() -> Iterator[HeldInterrupt]:
    """Remember a first Ctrl-C in the block instead of delivering it; a second one interrupts at once.

    It is not delivered at the end of the block either: there it could still come before the block's result is in anybody's hands.
    """
    held = HeldInterrupt()

    def hold(signum: int, frame: FrameType | None) -> None:
        if held.pressed:
            signal.default_int_handler(signum, frame)
        held.pressed = True

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, before)


def follow_launch(client: Client, model_uid: str, held: HeldInterrupt) -> Json:
    """Show a launch to its end; returns the ready model.

    Args:
        held: a Ctrl-C from before the uid was known counts as the first one.

    Raises:
        XinferenceError: the launch failed.
        Interrupted: the user pressed Ctrl-C.
    """
    with LaunchProgress(model_uid) as progress:
        try:
            if not held.pressed:
                return client.wait(model_uid, progress.show)
        except KeyboardInterrupt:
            pass
        try:
            progress.say(f"cancelling the launch of {model_uid}; press Ctrl-C again to leave that to the server")
            return _cancel(client, model_uid, progress)
        except KeyboardInterrupt:
            raise Interrupted(f"detached; `xinference show {model_uid}` tells what became of the launch") from None


def _cancel(client: Client, model_uid: str, progress: "LaunchProgress") -> Json:
    client.cancel(model_uid)
    try:
        client.wait(model_uid, progress.show)
    except LaunchCancelled:
        raise Interrupted(f"the launch of {model_uid} was cancelled") from None
    except XinferenceError as error:
        raise Interrupted(f"the launch of {model_uid} ended by itself: {error}") from error
    raise Interrupted(f"{model_uid} was ready before it could be cancelled; `xinference terminate {model_uid}` stops it")


class LaunchProgress:
    """One bar for the model and one for each replica; without a terminal, one line for each event."""

    def __init__(self, model_uid: str) -> None:
        self._model_uid = model_uid
        self._console = progress_console()
        self._progress = Progress(
            TextColumn("{task.fields[name]}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[message]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "LaunchProgress":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """A line between the bars."""
        self._progress.console.print(text, markup=False)

    def show(self, event: Json) -> None:
        """One event of the launch."""
        name = event.get("replica_uid") or WHOLE
        message = " ".join(printable(str(event.get("message") or event["stage"])).splitlines())
        if not self._console.is_terminal:
            label = self._model_uid if name == WHOLE else name
            self._console.print(f"{label}: {message}", markup=False, soft_wrap=True)
            return
        if name not in self._tasks:
            label = self._model_uid if name == WHOLE else name
            self._tasks[name] = self._progress.add_task("", total=1.0, name=label, message=message)
        self._progress.update(self._tasks[name], completed=float(event.get("progress") or 0.0), message=message)
