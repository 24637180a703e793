"""Processes of real engines are killed and stopped, replicas come and go: the others give to each request the words of an engine alone."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from xinference.client.sync_client import Client
from xinference.test.live.conftest import CONTROL, READY_SECONDS, SHARED, Product, sources_of
from xinference.test.live.test_served_sharing import BLOCK, prompt_of, saved, text_of

HANG_SECONDS = 5.0  # the default of replica_hang_seconds
DEATH_SECONDS = 1.0
SLACK_SECONDS = 4.0  # two cores that compute, and a report that crosses two processes
NUM_PROMPTS = 4
WORKERS = 2


def until(condition: Callable[[], Any], what: str) -> None:
    """Poll as long as an engine may take to start."""
    deadline = time.monotonic() + READY_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {READY_SECONDS:.0f} s: {what}"
        time.sleep(0.05)


class Others:
    """Requests without a pause, each compared with the control's words."""

    def __init__(self, product: Product, replica_uid: str | None) -> None:
        self._product = product
        self._replica_uid = replica_uid
        self._prompts = [prompt_of(6100 + number, (2 + number) * BLOCK + 3) for number in range(NUM_PROMPTS)]
        self._right = [text_of(product.ask(prompt)) for prompt in self._prompts]
        self._end = threading.Event()
        self.num_right = 0
        self.failures: list[str] = []

    def work(self) -> None:
        steer = {} if self._replica_uid is None else {"replica_uid": self._replica_uid}
        with Client(self._product.server.endpoint, answer_seconds=READY_SECONDS) as client:
            number = 0
            while not self._end.is_set():
                index, number = number % NUM_PROMPTS, number + 1
                try:
                    answer = client.generate(SHARED, self._prompts[index], temperature=0, max_tokens=12, debug=True, **steer)
                except Exception as error:  # whatever it is, it is a request that failed
                    self.failures.append(f"{type(error).__name__}: {error}")
                    return
                sources = answer["xinference"]["sources"]
                if sum(sources.values()) != len(self._prompts[index]):
                    self.failures.append(f"prompt {index}: {sources} do not add up")
                if text_of(answer) != self._right[index]:
                    self.failures.append(f"prompt {index}: {text_of(answer)!r} instead of {self._right[index]!r}")
                self.num_right += 1

    def end(self) -> None:
        self._end.set()

    def more(self) -> None:
        """Wait until each worker has had another answer, begun after this."""
        before = self.num_right
        until(lambda: self.failures or self.num_right >= before + 2 * WORKERS, "requests go on")


@contextmanager
def others_asked(product: Product, replica_uid: str | None) -> Iterator[Others]:
    """Requests to one replica, or to whichever the route chooses, for the time of the block; all of them are right."""
    others = Others(product, replica_uid)
    threads = [threading.Thread(target=others.work) for _ in range(WORKERS)]
    for thread in threads:
        thread.start()
    try:
        others.more()
        yield others
        others.more()
    finally:
        others.end()
        for thread in threads:
            thread.join(READY_SECONDS)
    assert others.failures == []


def process_of(replica: dict[str, Any], kind: str) -> psutil.Process:
    server = psutil.Process(replica["pid"])
    if kind == "core":
        return next(process for process in server.children(recursive=True) if "EngineCore" in " ".join(process.cmdline()) + process.name())
    return [server, *server.parents()][("server", "keeper", "pool").index(kind)]


def replica_of(product: Product, model: str, uid: str) -> dict[str, Any]:
    return next(found for found in product.client.replicas(model) if found["replica_uid"] == uid)


def failed(product: Product, model: str, after: float) -> dict[str, Any]:
    """The event of the failure. Events are followed from the first: their stream ends only when it is left."""
    news = product.client.events(model, follow=True)
    return next(event for event in news if event["stage"] == "replica_failed" and event["time"] > after)


def back(product: Product, model: str, before: dict[str, Any]) -> None:
    def ready() -> bool:
        now = replica_of(product, model, before["replica_uid"])
        return now["state"] == "ready" and now["incarnation"] != before["incarnation"]

    until(ready, f"{before['replica_uid']} is ready again")


FAULTS = [(0, "core", signal.SIGSTOP), (1, "pool", signal.SIGKILL), (0, "keeper", signal.SIGSTOP), (1, "core", signal.SIGKILL)]


@pytest.mark.parametrize(("index", "kind", "number"), FAULTS, ids=[f"{kind} {number.name}" for _, kind, number in FAULTS])
def test_a_process_of_one_replica_fails_and_the_other_answers_as_an_engine_alone(
    product: Product, index: int, kind: str, number: signal.Signals
) -> None:
    uid, other = product.replicas[index], product.replicas[1 - index]
    prompt = prompt_of(6000 + FAULTS.index((index, kind, number)), 8 * BLOCK)  # one that no segment has from an earlier fault
    right = text_of(product.ask(prompt))
    saved(product, index, prompt, lambda: product.ask(prompt, index))
    before, steady = replica_of(product, SHARED, uid), replica_of(product, SHARED, other)
    pool = process_of(before, "pool")
    family = [pool, *pool.children(recursive=True)]
    with others_asked(product, other):
        at = time.time()
        os.kill(process_of(before, kind).pid, number)
        event = failed(product, SHARED, at)
        promised = DEATH_SECONDS if number == signal.SIGKILL else HANG_SECONDS
        print(f"{kind} {number.name}: noticed after {event['time'] - at:.2f} s: {event['message'].splitlines()[0]}")
        assert event["time"] - at <= promised + SLACK_SECONDS
        _, alive = psutil.wait_procs(family, HANG_SECONDS)
        assert alive == []
        back(product, SHARED, before)
    assert replica_of(product, SHARED, other)["incarnation"] == steady["incarnation"]
    assert text_of(product.ask(prompt, index)) == right
    assert product.status(index)["counters"]["adopted_blocks"] > 0


def test_a_stopped_core_of_an_engine_without_a_segment_is_noticed_although_its_server_answers(product: Product) -> None:
    prompt = prompt_of(6200, 3 * BLOCK)
    right = text_of(product.ask(prompt))
    (before,) = product.client.replicas(CONTROL)
    core = process_of(before, "core")
    at = time.time()
    core.suspend()
    event = failed(product, CONTROL, at)
    print(f"noticed after {event['time'] - at:.2f} s: {event['message'].splitlines()[0]}")
    assert f"process {core.pid} " in event["message"]
    assert "has been stopped" in event["message"]
    assert event["time"] - at <= HANG_SECONDS + SLACK_SECONDS
    back(product, CONTROL, before)
    assert text_of(product.ask(prompt)) == right


def test_replicas_come_and_go_and_the_cache_is_cleared_while_requests_run(product: Product) -> None:
    prompt = prompt_of(6300, 8 * BLOCK)
    right = text_of(product.ask(prompt))
    with others_asked(product, None) as others:
        (added,) = product.client.scale(SHARED, 3)["replicas"]
        until(lambda: replica_of(product, SHARED, added)["state"] == "ready", "the third replica is ready")
        saved(product, 0, prompt, lambda: product.ask(prompt, 0))

        def shared() -> bool:
            answer = product.client.generate(SHARED, prompt, replica_uid=added, temperature=0, max_tokens=12, debug=True)
            assert text_of(answer) == right
            return sources_of(answer)["peer_cpu"] > 0 or sources_of(answer)["local"] > 0

        until(shared, "the third replica reads from the others")
        for _ in range(3):
            others.more()
            assert product.client.clear(SHARED)["status"] in ("cleared", "pending")
        assert text_of(product.ask(prompt, 1)) == right
        product.client.remove_replica(SHARED, added, 10.0)
        until(lambda: len(product.client.replicas(SHARED)) == 2, "the third replica is gone")
        others.more()
        another = prompt_of(6301, 8 * BLOCK)
        saved(product, 0, another, lambda: product.ask(another, 0))
        assert sources_of(product.ask(another, 1))["peer_cpu"] > 0
    assert text_of(product.ask(prompt, 1)) == right
