"""What a launch request may say, and how it is told what is wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference.core.spec import parse_spec
from xinference.errors import InvalidRequest, NotSupported

XAVIER = {"model_path": "/m", "replica": 2, "enable_xavier": True}


def refusal(**body: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_spec({"model_path": "/m", **body})
    return caught.value


def test_the_smallest_launch_is_one_vllm_replica_without_sharing() -> None:
    spec = parse_spec({"model_path": "/m"})
    assert (spec.replica, spec.enable_xavier, spec.model_engine, spec.engine_config) == (1, False, "vllm", {})


def test_sizes_come_as_numbers_or_with_units() -> None:
    assert parse_spec({**XAVIER, "xavier_cpu_cache_bytes": "256MiB"}).xavier_cpu_cache_bytes == 268435456
    assert parse_spec({**XAVIER, "xavier_cpu_cache_bytes": " 1 GiB "}).xavier_cpu_cache_bytes == 1073741824
    assert parse_spec({**XAVIER, "xavier_cpu_cache_bytes": 4096}).xavier_cpu_cache_bytes == 4096


@pytest.mark.parametrize("size", ["lots", "-1", -1, True, 1.5, "12 apples"])
def test_what_is_no_size_is_refused_with_an_example(size: object) -> None:
    error = refusal(replica=2, enable_xavier=True, xavier_cpu_cache_bytes=size)
    assert error.param == "xavier_cpu_cache_bytes"


@pytest.mark.parametrize("size", ["1.5.2GiB", "1GiB2", "1 GiB 2", "GiB", "1.5", "0x10", "1e9", "١GiB", "9" * 21, "1\nGiB", "1Mi B"])
def test_a_size_is_one_number_and_one_unit_and_the_refusal_shows_how(size: str) -> None:
    error = refusal(replica=2, enable_xavier=True, xavier_cpu_cache_bytes=size)
    assert error.param == "xavier_cpu_cache_bytes"
    assert "256MiB, 1.5GiB or 4GB" in error.message


def test_a_size_may_have_a_fraction_of_a_unit() -> None:
    assert parse_spec({**XAVIER, "xavier_cpu_cache_bytes": "1.5GiB"}).xavier_cpu_cache_bytes == 1610612736
    assert parse_spec({**XAVIER, "xavier_cpu_cache_bytes": "4gb"}).xavier_cpu_cache_bytes == 4_000_000_000


@pytest.mark.parametrize("value", [True, False, "2", 2.0, [2]])
def test_a_number_of_replicas_is_a_number(value: object) -> None:
    assert refusal(replica=value).param == "replica"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n_gpu": True}, "n_gpu"),
        ({"n_gpu": [1]}, "n_gpu"),
        ({"gpu_idx": True}, "gpu_idx.0"),
        ({"gpu_idx": ["0"]}, "gpu_idx.0"),
        ({"replica_config": [{"devices": [{"gpu_idx": True}]}]}, "replica_config.0.devices.0.gpu_idx"),
        ({"model_size_in_billions": True}, "model_size_in_billions"),
        ({"dry_run": "true"}, "dry_run"),
        ({"wait_ready": 1}, "wait_ready"),
    ],
)
def test_true_is_no_number_and_text_is_neither(body: dict[str, object], param: str) -> None:
    assert refusal(**body).param == param


@pytest.mark.parametrize("name", ["model_path", "model_name", "worker_ip"])
@pytest.mark.parametrize("text", ["/m\0", "/m\nx", "/m\x1b[2J", "/m\x7f", "/m\x85", "/m\ud800"])
def test_control_characters_are_refused_in_paths_and_names(name: str, text: str) -> None:
    error = refusal(**{name: text})
    assert error.param == name


def test_an_engine_argument_cannot_hold_a_zero_byte() -> None:
    assert refusal(engine_config={"dtype": "a\0"}).param == "engine_config.dtype"


def test_a_model_path_may_hold_any_letter() -> None:
    assert parse_spec({"model_path": "/models/Größe 模型"}).model_path == "/models/Größe 模型"


def test_both_spellings_of_a_field_are_one_field() -> None:
    assert parse_spec({"model_path": "/m", "size_in_billions": "0_5"}).model_size_in_billions == "0_5"
    error = refusal(transfer_backend_type="nixl")
    assert error.param == "vllm_transfer_backend_type"


def test_dashes_and_capitals_are_spellings_too() -> None:
    spec = parse_spec({"model-path": "/m", "model-engine": "vLLM", "enable-xavier": "false", "max-model-len": "2048"})
    assert spec.engine_config == {"max_model_len": 2048}


def test_an_unknown_field_is_refused_with_the_nearest_name() -> None:
    error = refusal(repilca=2)
    assert error.param == "repilca"
    assert "did you mean 'replica'?" in error.message


def test_an_unknown_engine_argument_is_refused_with_the_nearest_name() -> None:
    error = refusal(engine_config={"max_modle_len": 1024})
    assert error.param == "engine_config.max_modle_len"
    assert "did you mean 'max_model_len'?" in error.message


def test_a_known_engine_argument_may_stand_beside_the_fields() -> None:
    assert parse_spec({"model_path": "/m", "max_num_seqs": 8}).engine_config == {"max_num_seqs": 8}


def test_an_engine_argument_given_in_both_places_is_refused() -> None:
    assert refusal(max_num_seqs=8, engine_config={"max_num_seqs": 8}).param == "max_num_seqs"


@pytest.mark.parametrize(
    "name", ["trust_remote_code", "middleware", "tool_server", "worker_cls", "kv_transfer_config", "chat_template", "uds", "api_key"]
)
def test_arguments_that_load_code_or_belong_to_the_launcher_are_refused_with_the_reason(name: str) -> None:
    error = refusal(engine_config={name: "x"})
    assert error.param == f"engine_config.{name}"
    assert "cannot be set: " in error.message


@pytest.mark.parametrize(("name", "value"), [("max_model_len", "many"), ("enforce_eager", "maybe"), ("max_num_seqs", 1.5), ("dtype", [1])])
def test_an_engine_argument_of_the_wrong_kind_is_refused(name: str, value: object) -> None:
    assert refusal(engine_config={name: value}).param == f"engine_config.{name}"


def test_xavier_with_one_replica_is_refused_and_says_what_to_give() -> None:
    error = refusal(enable_xavier=True)
    assert error.param == "replica"
    assert "replica=2" in error.message


@pytest.mark.parametrize("name", ["xavier_cpu_cache_bytes", "xavier_gpu_cache_bytes"])
def test_a_budget_without_xavier_is_refused(name: str) -> None:
    assert refusal(**{name: "1GiB"}).param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [("tensor_parallel_size", 2), ("pipeline_parallel_size", 2), ("data_parallel_size", 2), ("enable_prefix_caching", False)],
)
def test_xavier_refuses_what_it_is_not_proven_for(name: str, value: object) -> None:
    error = refusal(replica=2, enable_xavier=True, engine_config={name: value})
    assert error.param == f"engine_config.{name}"


def test_xavier_refuses_it_for_a_single_replica_too() -> None:
    configs = [{}, {"engine_config": {"tensor_parallel_size": 2}}]
    assert refusal(replica=2, enable_xavier=True, replica_config=configs).param == "engine_config.tensor_parallel_size"


def test_a_gpu_tier_is_refused_for_now_and_zero_is_not() -> None:
    with pytest.raises(NotSupported):
        parse_spec({**XAVIER, "xavier_gpu_cache_bytes": "1GiB"})
    assert parse_spec({**XAVIER, "xavier_gpu_cache_bytes": 0}).xavier_gpu_cache_bytes == 0


def test_prefill_and_decode_roles_are_refused_by_name() -> None:
    with pytest.raises(NotSupported, match="prefill/decode roles are not available in this version"):
        parse_spec({"model_path": "/m", "replica": 2, "replica_config": [{"role": "prefill"}, {"role": "decode"}]})


@pytest.mark.parametrize(
    ("roles", "words"),
    [(["prefill", "prefill"], "decode replica"), (["hybrid", "decode"], "cannot be mixed")],
)
def test_roles_that_make_no_whole_are_refused_as_such(roles: list[str], words: str) -> None:
    error = refusal(replica=2, replica_config=[{"role": role} for role in roles])
    assert words in error.message


def test_replica_config_has_one_entry_for_each_replica() -> None:
    assert refusal(replica=3, replica_config=[{}, {}]).param == "replica_config"


def test_an_unknown_field_of_a_replica_is_named_with_its_place() -> None:
    error = refusal(replica=2, replica_config=[{}, {"rol": "hybrid"}])
    assert (error.param, "'role'" in error.message) == ("replica_config.1.rol", True)


def test_a_replica_config_adds_to_the_common_engine_arguments() -> None:
    spec = parse_spec(
        {"model_path": "/m", "replica": 2, "max_num_seqs": 8, "replica_config": [{}, {"engine_config": {"max_num_seqs": "4", "seed": 1}}]}
    )
    assert spec.engine_config_of(0) == {"max_num_seqs": 8}
    assert spec.engine_config_of(1) == {"max_num_seqs": 4, "seed": 1}


@pytest.mark.parametrize("name", ["block_size", "max_model_len", "kv_cache_memory_bytes"])
def test_what_the_plan_computes_with_cannot_differ_between_replicas(name: str) -> None:
    error = refusal(replica=2, replica_config=[{}, {"engine_config": {name: 64}}])
    assert error.param == f"replica_config.1.engine_config.{name}"


def test_two_replicas_of_one_name_are_refused() -> None:
    assert refusal(replica=2, replica_config=[{"replica_uid": "a"}, {"replica_uid": "a"}]).param == "replica_config"


@pytest.mark.parametrize("uid", ["", "a b", "-a", "a/", "x" * 129, "a\nb", "."])
def test_a_model_uid_is_a_plain_name(uid: str) -> None:
    assert refusal(model_uid=uid).param == "model_uid"


@pytest.mark.parametrize("uid", ["a/../b", "a/./b", "a//b", "a..b/../c", "demo/xavier", "x/replicas", "logs", "events/a", "a/requests/b"])
def test_a_model_uid_can_stand_in_a_path_without_being_taken_for_another(uid: str) -> None:
    assert refusal(model_uid=uid).param == "model_uid"


@pytest.mark.parametrize(
    "body", [{"model_path": "/models/logs"}, {"model_path": "/m/ü"}, {"model_name": "a/../b"}, {"model_name": "demo/xavier"}]
)
def test_a_name_that_is_no_uid_asks_for_one(body: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="Give model_uid") as caught:
        parse_spec({"model_path": "/m", **body}).served_name()
    assert caught.value.param == "model_uid"


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"model_path": "/models/Qwen2.5-0.5B/"}, "Qwen2.5-0.5B"),
        ({"model_path": "/models/my model (1)"}, "my-model-1"),
        ({"model_path": "/models/Größe 2..3"}, "Gr-e-2..3"),
        ({"model_path": "/models/x", "model_name": "qwen"}, "qwen"),
        ({"model_path": "/models/x", "model_name": "qwen", "model_uid": "mine"}, "mine"),
    ],
)
def test_a_model_without_a_uid_is_named_after_its_name_or_its_directory(body: dict[str, str], name: str) -> None:
    assert parse_spec(body).served_name() == name


def test_a_model_that_nothing_can_be_named_after_asks_for_a_uid() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_spec({"model_path": "/"}).served_name()
    assert caught.value.param == "model_uid"


def test_a_model_uid_may_hold_slashes_and_dots() -> None:
    assert parse_spec({"model_path": "/m", "model_uid": "Qwen/Qwen2.5-0.5B"}).model_uid == "Qwen/Qwen2.5-0.5B"


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PYTHONPATH", "VLLM_PLUGINS", "CUDA_VISIBLE_DEVICES", "PATH", "vllm_x", "VLLM_API_KEY"])
def test_environment_variables_that_load_code_or_are_not_an_engines_are_refused(name: str) -> None:
    assert refusal(envs={name: "x"}).param == f"envs.{name}"


def test_an_engines_environment_variable_is_accepted() -> None:
    assert parse_spec({"model_path": "/m", "envs": {"VLLM_LOGGING_LEVEL": "DEBUG"}}).envs == {"VLLM_LOGGING_LEVEL": "DEBUG"}


def test_an_address_is_no_model_path() -> None:
    assert refusal(model_path="https://example.com/m").param == "model_path"


def test_a_name_alone_asks_for_a_path() -> None:
    with pytest.raises(NotSupported, match="give model_path") as caught:
        parse_spec({"model_name": "qwen"})
    assert caught.value.param == "model_path"


@pytest.mark.parametrize("replica", [0, -1, 65, "two", None])
def test_the_number_of_replicas_is_between_1_and_64(replica: object) -> None:
    assert refusal(replica=replica).param == "replica"


def test_devices_are_one_for_each_replica() -> None:
    assert refusal(replica=2, gpu_idx=[0]).param == "gpu_idx"
    assert parse_spec({"model_path": "/m", "replica": 2, "gpu_idx": "0,1"}).gpu_idx == [0, 1]


def test_faults_of_the_fake_engine_are_known_to_it_alone() -> None:
    body = {"model_path": "/m", "engine_config": {"start_delay_seconds": 1.0}}
    assert parse_spec({**body, "model_engine": "fake"}).engine_config == {"start_delay_seconds": 1.0}
    with pytest.raises(InvalidRequest):
        parse_spec(body)


def test_a_spec_survives_the_wire() -> None:
    spec = parse_spec({**XAVIER, "xavier_cpu_cache_bytes": "64MiB", "replica_config": [{"replica_uid": "a"}, {}], "max_num_seqs": 4})
    assert parse_spec(spec.to_wire()) == spec


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(
    [
        "replica",
        "enable_xavier",
        "xavier_cpu_cache_bytes",
        "replica_config",
        "gpu_idx",
        "n_gpu",
        "envs",
        "engine_config",
        "model_uid",
        "max_model_len",
    ]
)


@given(st.dictionaries(names | st.text(max_size=12), json_values, max_size=5))
def test_any_body_is_either_a_spec_or_an_invalid_request(body: dict[str, object]) -> None:
    try:
        spec = parse_spec({"model_path": "/m", **body})
    except InvalidRequest:
        return
    assert parse_spec(spec.to_wire()) == spec
