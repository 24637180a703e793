import dataclasses
import json
from typing import Any

import pytest

from xinference.model.llm.vllm.xavier.config import XavierConfig
from xinference.model.llm.vllm.xavier.errors import BudgetTooSmall, ConfigRefused, SegmentRefused, XavierError

CONFIG = XavierConfig("worker-1", "m-0", 0xFFFF_FFFF_FFFF_FFFF, "/dev/shm", 1 << 30, "sha256:0")


def test_a_config_survives_the_wire_and_json() -> None:
    assert XavierConfig.from_wire(json.loads(json.dumps(CONFIG.to_wire()))) == CONFIG


def test_limits_may_be_left_out() -> None:
    wire = {
        k: v
        for k, v in CONFIG.to_wire().items()
        if k in ("worker_id", "replica_uid", "incarnation", "shm_dir", "cpu_cache_bytes", "model_identity")
    }
    assert XavierConfig.from_wire(wire) == CONFIG


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"surprise": 1}, "unknown settings: surprise"),
        ({"worker_id": "a.b"}, "worker_id must be"),
        ({"replica_uid": ""}, "replica_uid must be"),
        ({"replica_uid": "x" * 49}, "replica_uid must be"),
        ({"incarnation": 7}, "incarnation must be up to 16 hex digits"),
        ({"incarnation": "0"}, "incarnation must be a positive"),
        ({"incarnation": "10000000000000000"}, "incarnation must be up to 16 hex digits"),
        ({"shm_dir": "relative"}, "shm_dir must be an absolute path"),
        ({"cpu_cache_bytes": -1}, "must not be negative"),
        ({"cpu_cache_bytes": "1"}, "cpu_cache_bytes must be int, not str"),
        ({"cpu_cache_bytes": True}, "cpu_cache_bytes must be int, not bool"),
        ({"followers_max": 0}, "followers_max must be positive"),
        ({"copier_poll_seconds": float("nan")}, "copier_poll_seconds must be positive"),
        ({"copier_poll_seconds": float("inf")}, "copier_poll_seconds must be positive"),
        ({"async_load_max_share": 1.5}, "async_load_max_share must be at most 1"),
        ({"batch_max_blocks": 1.5}, "batch_max_blocks must be int, not float"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigRefused, match=message):
        XavierConfig.from_wire({**CONFIG.to_wire(), **change})


def test_a_missing_setting_is_refused_by_name() -> None:
    wire = CONFIG.to_wire()
    del wire["shm_dir"], wire["worker_id"]
    with pytest.raises(ConfigRefused, match="missing settings: shm_dir, worker_id"):
        XavierConfig.from_wire(wire)


def test_whole_numbers_pass_for_fractions() -> None:
    assert dataclasses.replace(CONFIG, copier_poll_seconds=1).copier_poll_seconds == 1


def test_errors_form_one_tree_and_say_whether_to_try_again() -> None:
    assert issubclass(BudgetTooSmall, XavierError)
    error = SegmentRefused("gone", permanent=False)
    assert (str(error), error.reason, error.permanent) == ("gone", "gone", False)
