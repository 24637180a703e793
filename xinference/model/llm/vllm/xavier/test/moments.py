"""Every moment in the life of an owner: what its file holds after each store, by running its real code one instruction at a time.

A process that is killed or stopped leaves its file as it was after some store. Python makes one store an instruction, and a store of one
word is one instruction of the machine, so the images taken here are all there are but for copies of whole blocks, which are taken whole.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = "/xavier/"
TESTS = "/xavier/test/"


class Moments:
    """Images of the file with this name, in order, without repetitions; none while there is no such file.

    ``where`` says for each which function made it, and in which line.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self.images: list[bytes] = []
        self.where: list[str] = []

    def run(self, work: Callable[[], Any]) -> Any:
        """Do the work, and take an image after each instruction of the package."""
        try:
            return each_instruction(lambda: self._take(*_caller()), work)
        finally:
            self._take("the end", 0)

    def _take(self, function: str, line: int) -> None:
        try:
            image = self._path.read_bytes()
        except FileNotFoundError:
            return
        if not self.images or self.images[-1] != image:
            self.images.append(image)
            self.where.append(f"{function}:{line}")


def each_instruction(tick: Callable[[], None], work: Callable[[], Any]) -> Any:
    """Do the work, and tick between any two instructions of the package's own code."""

    def enter(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if not _ours(frame.f_code):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return step

    def step(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        if event in ("opcode", "return"):
            tick()
        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        return work()
    finally:
        sys.settrace(before)


def _caller() -> tuple[str, int]:
    """The function and line of the package that is being run."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not _ours(frame.f_code):
        frame = frame.f_back
    return ("?", 0) if frame is None else (frame.f_code.co_name, frame.f_lineno)


def _ours(code: CodeType) -> bool:
    return PACKAGE in code.co_filename and TESTS not in code.co_filename
