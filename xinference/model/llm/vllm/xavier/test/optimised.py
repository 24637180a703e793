"""The life of two replicas without a single assert: what ``python -O`` is to be run on, where asserts vanish from code and tests alike.

Run as ``python -O -m <this module> DIRECTORY``. Prints one line of JSON when all was as it must be; raises otherwise.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from xinference.model.llm.vllm.xavier.config import XavierConfig
from xinference.model.llm.vllm.xavier.connector.engine import EngineRegistry
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.errors import BookImbalance, ConfigRefused, ControlPageRefused, SegmentRefused, XavierError
from xinference.model.llm.vllm.xavier.test.mini_engine import Clock, MiniEngine

done: list[str] = []


def expect(what: str, seen: object, wanted: object) -> None:
    """Raise unless they are equal."""
    if seen != wanted:
        raise SystemExit(f"{what}: {seen}, not {wanted}")
    done.append(what)


def expect_refusal(what: str, kind: type[XavierError], attempt: Callable[[], object]) -> None:
    """Raise unless the attempt is refused in this way."""
    try:
        attempt()
    except kind:
        done.append(what)
        return
    raise SystemExit(f"{what}: not refused")


def share(one: MiniEngine, two: MiniEngine) -> None:
    """A hit at a peer, one in the own slab, eviction, preemption."""
    one.know(two)
    two.know(one)
    one.ask("cold", range(20))
    expect("cold", one.sources("cold"), {"computed": 20})
    two.ask("hit", range(20))
    expect("a peer's hit", two.sources("hit"), {"peer_cpu": 16, "computed": 4})
    for number in range(30):
        two.ask(f"other-{number}", range(number * 40 + 100, number * 40 + 124))
    expect("eviction happened", two.counter("evictions") > 0, True)
    requests = [two.add(f"long-{number}", range(number * 50 + 5000, number * 50 + 5020), max_tokens=40) for number in range(4)]
    two.run(2000)
    expect("long answers end", {request.status for request in requests}, {"ended"})
    expect("books balance", two.engine.state.tier.check(), None)


def clear(one: MiniEngine, two: MiniEngine) -> None:
    """Nothing older is found afterwards."""
    for engine, other in ((one, two), (two, one)):
        engine.know(other, epoch=2)
    two.ask("after", range(20))
    expect("nothing after a clear", two.sources("after"), {"computed": 20})
    expect("the clear is confirmed", one.header()["epoch_confirmed"], 2)


def relaunch(directory: Path, one: MiniEngine, clock: Clock) -> None:
    """What was saved is found again; a second owner is refused; corrupt files and states are refused."""
    one.ask("kept", range(300, 320))
    path = one.engine.state.segment.path
    one.engine.close()
    again = MiniEngine(directory, "one", clock, num_blocks=24, cache_blocks=24, incarnation=2, epoch=2, page=one.page)
    again.ask("restored", range(300, 320))
    expect("restored", again.sources("restored"), {"cpu_tier": 16, "computed": 4})
    copy = directory / "copy"
    raw = bytearray(Path(path).read_bytes())
    raw[8 * 2] ^= 1
    copy.write_bytes(raw)
    expect_refusal("a corrupt header", SegmentRefused, lambda: SegmentReader.open(str(copy), expected_incarnation=None))
    expect_refusal("another incarnation", SegmentRefused, lambda: SegmentReader.open(path, expected_incarnation=77))
    segment = again.engine.state.segment
    place = next(place for place in range(segment.geometry.num_places) if segment.published(place))
    block = segment.key_of(place)
    expect_refusal("a place filled twice", BookImbalance, lambda: segment.publish(place, block or (0, 0), None))  # type: ignore[arg-type]
    registry = EngineRegistry()
    registry.add(again.engine)
    expect_refusal("two engines of one start", ConfigRefused, lambda: registry.add(again.engine))
    os.truncate(again.page.path, 100)
    expect_refusal("a truncated page", ControlPageRefused, again.engine.state.control.poll)
    wire = again.config.to_wire()
    expect_refusal("an unknown setting", ConfigRefused, lambda: XavierConfig.from_wire({**wire, "x": 1}))


def main(directory: Path) -> None:
    """All of it."""
    if __debug__:
        raise SystemExit("run this with -O")
    clock = Clock()
    one, two = (MiniEngine(directory, uid, clock, num_blocks=24, cache_blocks=24) for uid in ("one", "two"))
    share(one, two)
    clear(one, two)
    relaunch(directory, one, clock)
    expect("no hook failed", (one.engine.state.closed, two.counter("hook_errors")), (True, 0))
    print(json.dumps(done))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
