"""What happens on a small tmpfs that is full, out of inodes or read-only, for a test that starts this in a mount namespace of its own.

Run as ``python -m <this module> DIRECTORY SCENARIO``, where DIRECTORY is a tmpfs. Prints one line of JSON: what was seen.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from xinference.model.llm.vllm.xavier.directory.control import ControlPageReader, ControlPageWriter, ControlState
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.errors import XavierError
from xinference.model.llm.vllm.xavier.test.mini_engine import Clock, MiniEngine
from xinference.model.llm.vllm.xavier.test.segments import SEGMENT_NAME, content, fill, key, open_segment, small

Seen = dict[str, object]


def take_all(directory: Path) -> Path:
    """Leave no byte free."""
    filler = directory / "filler"
    with open(filler, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    return filler


def free_bytes(directory: Path) -> int:
    room = os.statvfs(directory)
    return room.f_bavail * room.f_frsize


def refusal(attempt: Callable[[], object]) -> list[str]:
    """The kind of error that an attempt ends with, and its words."""
    try:
        attempt()
    except XavierError as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def create(directory: Path) -> Seen:
    """A segment and a page that find no room, and find it once there is some."""
    filler = take_all(directory)
    seen: Seen = {
        "segment": refusal(lambda: open_segment(directory)),
        "page": refusal(lambda: ControlPageWriter.create(str(directory / "page"))),
        "left": sorted(os.listdir(directory)),
    }
    filler.unlink()
    open_segment(directory).close()
    ControlPageWriter.create(str(directory / "page"))
    return seen


def adopt(directory: Path) -> Seen:
    """A predecessor's file needs no room; one with holes in it does, and is refused instead of killing who touches a hole."""
    segment = open_segment(directory)
    fill(segment, 0, key(0))
    segment.close()
    sparse = directory / "sparse"
    sparse.mkdir()
    raw = (directory / SEGMENT_NAME).read_bytes()
    with open(sparse / SEGMENT_NAME, "wb") as file:
        file.write(raw[:4096])
        file.truncate(len(raw))
    take_all(directory)
    successor = open_segment(directory, incarnation=8)
    return {
        "free": free_bytes(directory),
        "adopted": successor.place_of(key(0)),
        "sparse": refusal(lambda: open_segment(sparse)),
        "reader": refusal(lambda: SegmentReader.open(str(sparse / SEGMENT_NAME), expected_incarnation=None)),
    }


def grow(directory: Path) -> Seen:
    """A successor with a larger budget: the old file goes first, so it fits where both would not; or not at all, and leaves nothing."""
    room = free_bytes(directory)
    first = open_segment(directory, small(num_places=room * 6 // 10 // 4096, place_bytes=4096))
    first.close()
    larger = open_segment(directory, small(num_places=room * 8 // 10 // 4096, place_bytes=4096), incarnation=8)
    larger.close()
    return {
        "grown": larger.geometry.num_places > first.geometry.num_places,
        "too large": refusal(lambda: open_segment(directory, small(num_places=2 * room // 4096, place_bytes=4096), incarnation=9)),
        "left": sorted(os.listdir(directory)),
    }


def serve(directory: Path) -> Seen:
    """Two replicas go on sharing, evicting, clearing, relaunching with not one byte free: everything was allocated when it was made."""
    clock = Clock()
    one, two = (MiniEngine(directory, uid, clock, cache_blocks=8) for uid in ("one", "two"))
    take_all(directory)
    one.know(two)
    two.know(one)
    sources = []
    for number in range(12):
        start = number * 7
        one.ask(f"one-{number}", range(start, start + 20))
        two.ask(f"two-{number}", range(start, start + 20))
        sources.append(two.sources(f"two-{number}"))
    one.know(two, epoch=2)
    two.know(one, epoch=2)
    two.ask("after", range(20))
    after = two.sources("after")
    one.ask("again", range(100, 120))
    one.check()
    two.check()
    evictions = one.counter("evictions")
    one.engine.close()
    relaunched = MiniEngine(directory, "one", clock, cache_blocks=8, incarnation=2, epoch=2, page=one.page)
    adopted = relaunched.counter("adopted_blocks")
    relaunched.know(two, epoch=2)
    relaunched.ask("restored", range(100, 120))
    relaunched.check()
    return {
        "free": free_bytes(directory),
        "peer tokens": sum(source.get("peer_cpu", 0) for source in sources),
        "after the clear": after,
        "evictions": evictions,
        "adopted": adopted,
        "restored": relaunched.sources("restored"),
        "errors": two.counter("hook_errors") + relaunched.counter("hook_errors"),
    }


def inodes(directory: Path) -> Seen:
    """Room enough, but no inode."""
    room = os.statvfs(directory)
    for number in range(room.f_favail):
        (directory / f"empty-{number}").touch()
    seen: Seen = {
        "segment": refusal(lambda: open_segment(directory)),
        "page": refusal(lambda: ControlPageWriter.create(str(directory / "page"))),
        "left": len(os.listdir(directory)) - room.f_favail,
    }
    for number in range(2):  # one for the file, one for its second name while it gets it
        (directory / f"empty-{number}").unlink()
    open_segment(directory).close()
    return seen


def read_only(directory: Path) -> Seen:
    """What is there can be read and not replaced."""
    segment = open_segment(directory)
    fill(segment, 0, key(0))
    segment.close()
    ControlPageWriter.create(str(directory / "page"), ControlState(5)).close(unlink=False)
    subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True)
    reader = SegmentReader.open(str(directory / SEGMENT_NAME), expected_incarnation=None)
    place = reader.find(key(0), 1)
    with reader.slab_view() as slab:
        good = place is not None and slab[place.place * 64 : place.place * 64 + 64] == content(key(0), 64)
    return {
        "read": good,
        "state": ControlPageReader.open(str(directory / "page")).state.epoch,
        "owner": refusal(lambda: open_segment(directory)),
        "new": refusal(lambda: ControlPageWriter.create(str(directory / "other"))),
    }


SCENARIOS = {scenario.__name__: scenario for scenario in (create, adopt, grow, serve, inodes, read_only)}


if __name__ == "__main__":
    print(json.dumps(SCENARIOS[sys.argv[2]](Path(sys.argv[1]))))
