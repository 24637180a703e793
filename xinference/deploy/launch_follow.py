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
from rich.table import Column

from xinference.client.sync_client import Client
from xinference.deploy.cli import INTERRUPTED
from xinference.deploy.output import printable, progress_console
from xinference.errors import LaunchCancelled, XinferenceError

Json = dict[str, Any]
PLANNED: Final = "planned"
REPLICA_READY: Final = "replica_ready"
NAME_WIDTH: Final = 12
BAR_WIDTH: Final = 24


class Interrupted(Exception):
    """Ctrl-C ended the command; says what became of the launch.

    Args:
        code: for programs: ``launch_cancelled`` if that is what became of it, else ``interrupted``.
    """

    def __init__(self, message: str, code: str = INTERRUPTED) -> None:
        super().__init__(message)
        self.code = code


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
        raise Interrupted(f"the launch of {model_uid} was cancelled", LaunchCancelled.default_code) from None
    except XinferenceError as error:
        raise Interrupted(f"the launch of {model_uid} ended by itself: {error}") from error
    raise Interrupted(f"{model_uid} was ready before it could be cancelled; `xinference terminate {model_uid}` stops it")


class LaunchProgress:
    """One bar for the model and one for each replica; without a terminal, one line for each event.

    An event's progress is that of the whole launch. Nobody knows how far a single replica is until it is ready.
    """

    def __init__(self, model_uid: str) -> None:
        self._model_uid = model_uid
        self._console = progress_console()
        self._progress = Progress(
            TextColumn("{task.fields[name]}", markup=False, table_column=Column(no_wrap=True, min_width=NAME_WIDTH)),
            BarColumn(bar_width=BAR_WIDTH),
            TextColumn("{task.fields[message]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            expand=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "LaunchProgress":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """A line above the bars."""
        self._console.print(text, markup=False, soft_wrap=not self._console.is_terminal)

    def show(self, event: Json) -> None:
        """One event of the launch."""
        replica_uid, stage = event.get("replica_uid"), event["stage"]
        message = " ".join(printable(str(event.get("message") or stage)).splitlines())
        name = replica_uid or self._model_uid
        if stage == PLANNED or not self._console.is_terminal:
            self.say(f"{name}: {message}")
            return
        model = self._task(self._model_uid)
        self._progress.update(model, total=1.0, completed=float(event.get("progress") or 0.0))
        self._progress.update(self._task(name), message=message)
        if stage == REPLICA_READY:
            self._progress.update(self._task(name), total=1.0, completed=1.0)

    def _task(self, name: str) -> TaskID:
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task("", total=None, name=name, message="")
        return self._tasks[name]
