"""Placement and budgets: what is planned, and what is refused with the arithmetic."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference.core.placement import next_replica_uid
from xinference.core.plan import LaunchPlan, check_memory, plan_launch, room_on, show
from xinference.core.spec import parse_spec
from xinference.core.test.fakes import GiB, MiB, devices, model, snapshot, worker
from xinference.core.topology import ModelFacts, Snapshot, WorkerView
from xinference.errors import InvalidRequest, NoReplicaAvailable, NotSupported


def plan(facts: ModelFacts | None = None, view: Snapshot | None = None, **body: object) -> LaunchPlan:
    return plan_launch(parse_spec({"model_path": "/models/m", **body}), "m", facts or model(), view or snapshot())


def refusal(facts: ModelFacts | None = None, view: Snapshot | None = None, **body: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        plan(facts, view, **body)
    return caught.value


def test_replicas_are_named_after_the_model_and_numbered() -> None:
    assert [p.replica_uid for p in plan(replica=2).replicas] == ["m-0", "m-1"]
    named = plan_launch(parse_spec({"model_path": "/x"}), "Qwen/Qwen2.5 0.5B", model(), snapshot())
    assert named.replicas[0].replica_uid == "Qwen2-5-0-5B-0"


def test_a_name_that_is_taken_in_the_cluster_is_not_used_again() -> None:
    assert plan(view=snapshot(taken=frozenset({"m-0"})), replica=2).replicas[0].replica_uid == "m-2-0"
    error = refusal(view=snapshot(taken=frozenset({"a"})), replica_config=[{"replica_uid": "a"}])
    assert error.param == "replica_config.0.replica_uid"


def test_one_more_replica_gets_the_first_free_number() -> None:
    assert next_replica_uid(["m-0", "m-2"], "m", frozenset({"m-0", "m-2"})) == "m-1"


def test_replicas_are_spread_over_the_emptiest_workers_of_the_host() -> None:
    view = snapshot(worker("w1", num_replicas=1), worker("w2"), worker("w3"))
    assert [p.worker_id for p in plan(view=view, replica=4).replicas] == ["w2", "w3", "w1", "w2"]


def test_a_worker_on_another_host_is_not_used() -> None:
    view = snapshot(worker("far", host="boot.2"), worker("near", num_replicas=5))
    assert plan(view=view).replicas[0].worker_id == "near"
    with pytest.raises(NotSupported, match="other hosts"):
        plan(view=snapshot(worker("far", host="boot.2")))


def test_without_a_worker_the_answer_says_how_to_start_one() -> None:
    with pytest.raises(NoReplicaAvailable, match="xinference-worker"):
        plan(view=Snapshot((), "boot.1"))


def test_a_named_worker_is_used_or_refused() -> None:
    view = snapshot(worker("w1"), worker("w2", ip="10.0.0.2", num_replicas=9))
    assert plan(view=view, worker_ip="10.0.0.2").replicas[0].worker_id == "w2"
    error = refusal(view=view, worker_ip="10.0.0.9")
    assert (error.param, error.message) == ("worker_ip", "no worker at 10.0.0.9; workers are at 10.0.0.2, 127.0.0.1")


def test_each_replica_gets_a_device_of_its_own() -> None:
    placed = plan(view=snapshot(worker(devices=devices(2))), replica=2)
    assert [p.devices for p in placed.replicas] == [(0,), (1,)]
    assert placed.kv_cache_bytes is None
    assert placed.block_size == 16


def test_a_device_that_is_in_use_is_passed_over() -> None:
    used = WorkerView("w1", worker(devices=devices(3)).facts, 2, 0, {0: ("a-0",), 1: ("b-0",)})
    assert plan(view=snapshot(used)).replicas[0].devices == (2,)


def test_more_replicas_than_free_devices_are_refused() -> None:
    error = refusal(view=snapshot(worker(devices=devices(2))), replica=3)
    assert error.param == "replica"
    assert "gpu_idx" in error.message


def test_two_replicas_share_a_device_when_the_user_names_it_twice_and_split_its_memory() -> None:
    placed = plan(view=snapshot(worker(devices=devices(2))), replica=2, gpu_idx=[1, 1])
    assert [(p.devices, p.gpu_memory_utilization) for p in placed.replicas] == [((1,), 0.45), ((1,), 0.45)]


def test_a_device_in_use_is_shared_only_with_a_stated_share() -> None:
    used = WorkerView("w1", worker(devices=devices(1)).facts, 1, 0, {0: ("other-0",)})
    error = refusal(view=snapshot(used), gpu_idx=[0])
    assert (error.param, "other-0" in error.message) == ("gpu_idx", True)
    placed = plan(view=snapshot(used), gpu_idx=[0], gpu_memory_utilization=0.3)
    assert placed.replicas[0].devices == (0,)


def test_a_device_that_does_not_exist_is_refused() -> None:
    assert refusal(view=snapshot(worker(devices=devices(2))), gpu_idx=[7]).param == "gpu_idx"
    assert refusal(n_gpu=1).param == "n_gpu"


def test_a_model_that_cannot_share_is_refused_with_the_reason() -> None:
    error = refusal(model(sharing_refusal="it is recurrent"), replica=2, enable_xavier=True)
    assert (error.param, "it is recurrent" in error.message) == ("enable_xavier", True)
    assert plan(model(sharing_refusal="it is recurrent"), replica=2).cache is None


def test_sharing_between_devices_is_refused_for_now() -> None:
    with pytest.raises(NotSupported, match="GPUs"):
        plan(view=snapshot(worker(devices=devices(2))), replica=2, enable_xavier=True)


def test_a_cpu_engine_gets_kv_for_its_longest_request_and_a_share_of_what_is_free() -> None:
    made = plan(replica=2)
    assert made.block_size == 32
    assert made.kv_cache_bytes == 2 * GiB  # 0.2 x 20 GiB / 2
    assert made.num_threads == 3  # (8 - 1) // 2
    small = plan(model(kv_bytes_per_token=2 * MiB), snapshot(worker(memory_free_bytes=24 * GiB, shm_free_bytes=GiB)))
    assert small.kv_cache_bytes == (128 + 2) * 32 * 2 * MiB


def test_kv_memory_that_cannot_hold_one_request_is_refused_with_the_sum() -> None:
    error = refusal(kv_cache_memory_bytes=1 * MiB)
    assert error.param == "engine_config.kv_cache_memory_bytes"
    assert "128 blocks and 2 to spare of 32.0 KiB = 4.1 MiB" in error.message


def test_a_length_beyond_the_models_is_refused() -> None:
    assert refusal(max_model_len=8192).param == "engine_config.max_model_len"
    assert plan(max_model_len=1024).max_model_len == 1024


def test_the_default_cache_is_a_stated_share_of_the_scarcer_memory() -> None:
    made = plan(view=snapshot(worker(shm_free_bytes=4 * GiB)), replica=2, enable_xavier=True)
    assert made.cache is not None
    assert made.cache.cpu_cache_bytes == 409 * MiB  # 0.2 x 4 GiB / 2, in whole MiB
    assert made.cache.host_total_bytes == 818 * MiB
    assert made.cache.arithmetic.startswith("default: 20% of 4.0 GiB free / 2 replicas = 409.0 MiB each")


def test_a_given_cache_is_turned_into_blocks_and_tokens_with_the_books_counted() -> None:
    made = plan(replica=2, enable_xavier=True, xavier_cpu_cache_bytes="64MiB")
    assert made.cache is not None
    assert made.cache.file_bytes + made.cache.book_bytes <= 64 * MiB
    assert made.cache.tokens == made.cache.blocks * 32
    assert 1900 < made.cache.blocks < 2048
    assert f"= {made.cache.blocks} blocks of 32768 B = {made.cache.tokens} tokens" in made.cache.arithmetic


@pytest.mark.parametrize(("block_size", "budget"), [(8, 4 * MiB), (32, 64 * MiB), (7, 3 * MiB + 1), (128, 200 * MiB)])
def test_the_sum_of_a_cache_is_exact_and_adds_up(block_size: int, budget: int) -> None:
    made = plan(replica=2, enable_xavier=True, xavier_cpu_cache_bytes=budget, block_size=block_size, max_model_len=64)
    assert made.cache is not None
    total = re.search(r"(\d+) B - (\d+) B index and records - (\d+) B books - (\d+) B left over = (\d+) B", made.cache.arithmetic)
    product = re.search(r"= (\d+) B = (\d+) blocks of (\d+) B = (\d+) tokens", made.cache.arithmetic)
    assert total is not None
    assert product is not None
    asked, index, books, left, slab = map(int, total.groups())
    assert asked - index - books - left == slab
    assert (asked, books, left >= 0) == (budget, made.cache.book_bytes, True)
    again, blocks, block_bytes, tokens = map(int, product.groups())
    assert (again, blocks * block_bytes, blocks * block_size) == (slab, slab, tokens)


def test_the_sum_names_the_rounding_of_a_block_to_whole_lines_and_of_the_kv_cache_to_whole_blocks() -> None:
    made = plan(model(kv_bytes_per_token=70), replica=2, enable_xavier=True, xavier_cpu_cache_bytes=4 * MiB, kv_cache_memory_bytes=10 * MiB)
    assert made.cache is not None
    assert "blocks of 2240 B" in made.cache.arithmetic
    odd = plan(model(kv_bytes_per_token=71), replica=2, enable_xavier=True, xavier_cpu_cache_bytes=4 * MiB, kv_cache_memory_bytes=10 * MiB)
    assert odd.cache is not None
    assert "blocks of 2304 B (2272 B in whole lines of 64 B)" in odd.cache.arithmetic
    assert "1 block = 32 tokens x 71 bytes = 2272 B; KV cache 10485760 B - 480 B left over = 4615 blocks of 2272 B" in odd.arithmetic


def test_a_cache_that_cannot_hold_one_block_is_refused_with_the_arithmetic() -> None:
    error = refusal(replica=2, enable_xavier=True, xavier_cpu_cache_bytes=1000)
    assert error.param == "xavier_cpu_cache_bytes"
    assert "cannot hold one block" in error.message


def test_what_does_not_fit_into_memory_is_refused_with_the_sum() -> None:
    error = refusal(replica=2, enable_xavier=True, xavier_cpu_cache_bytes="9GiB", kv_cache_memory_bytes=2 * GiB)
    assert error.param == "xavier_cpu_cache_bytes"
    assert (
        "2 replicas x (engine 640.0 MiB + weights 100.0 MiB + KV cache 2.0 GiB + Xavier 9.0 GiB) = 23.4 GiB, but 20.0 GiB" in error.message
    )


def test_what_does_not_fit_into_shared_memory_is_refused_apart() -> None:
    error = refusal(view=snapshot(worker(shm_free_bytes=GiB)), replica=2, enable_xavier=True, xavier_cpu_cache_bytes="1GiB")
    assert "shared memory" in error.message
    assert "/dev/shm" in error.message


def test_memory_that_is_promised_to_others_is_not_planned_again() -> None:
    promised = WorkerView("w1", worker().facts, 1, 19 * GiB)
    assert refusal(view=snapshot(promised), replica=2).param == "replica"


def test_one_more_replica_is_checked_with_the_budget_of_the_launch() -> None:
    made = plan(replica=2, enable_xavier=True, xavier_cpu_cache_bytes="4GiB")
    check_memory(made, room_on(worker(), 1))
    with pytest.raises(InvalidRequest):
        check_memory(made, room_on(worker(memory_free_bytes=GiB), 1))


def test_a_plan_survives_the_wire() -> None:
    for made in (plan(replica=2, enable_xavier=True, xavier_cpu_cache_bytes="64MiB"), plan()):
        assert LaunchPlan.from_wire(made.to_wire()) == made


def test_the_wire_form_has_the_fields_of_the_rest_contract() -> None:
    wire = plan(replica=2, enable_xavier=True, xavier_cpu_cache_bytes="64MiB").to_wire()
    assert wire["replicas"][1] == {"replica_uid": "m-1", "worker_id": "w1", "devices": [], "gpu_memory_utilization": None}
    assert wire["kv"] == {"bytes_per_token": 1024, "block_size": 32, "bytes_per_block": 32768}
    assert set(wire["xavier"]) >= {"cpu_cache_bytes", "host_total_bytes", "blocks", "tokens", "file_bytes", "arithmetic"}
    assert plan().to_wire()["xavier"] is None


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1000, "1000 B"), (10240, "10.0 KiB"), (1536 * MiB, "1.5 GiB"), (3 << 50, "3072.0 TiB")]
)
def test_bytes_for_people(size: int, text: str) -> None:
    assert show(size) == text


@given(
    replicas=st.integers(2, 8),
    budget=st.integers(1, 8 * GiB),
    per_token=st.integers(1, 4 * MiB),
    free=st.integers(0, 64 * GiB),
    shm=st.integers(0, 64 * GiB),
)
def test_every_plan_fits_and_every_refusal_names_a_field(replicas: int, budget: int, per_token: int, free: int, shm: int) -> None:
    view = snapshot(worker(memory_free_bytes=free, shm_free_bytes=shm))
    made: LaunchPlan | None
    try:
        made = plan(model(kv_bytes_per_token=per_token), view, replica=replicas, enable_xavier=True, xavier_cpu_cache_bytes=budget)
    except InvalidRequest as error:
        refusal = error
        made = None
    if made is None:
        assert refusal.param is not None
        assert re.search(r"\d", refusal.message)
        return
    assert made.cache is not None
    assert made.memory_bytes_each * replicas <= free
    assert made.cache.file_bytes * replicas <= shm
    assert made.cache.file_bytes + made.cache.book_bytes <= budget
    assert made.cache.blocks >= 1
