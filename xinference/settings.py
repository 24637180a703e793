"""Where the server keeps things, what it binds to, and its limits: one home for each default.

Every field can be set by an environment variable ``XINFERENCE_<FIELD>`` in upper case; command-line options win over it.
"""

from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from xinference.errors import InvalidRequest

S = TypeVar("S", bound=BaseSettings)


def read_settings(kind: type[S], **given: Any) -> S:
    """Settings from the environment and from what is given.

    Raises:
        InvalidRequest: a value that cannot be; the message names its variable.
    """
    try:
        return kind(**given)
    except (ValidationError, SettingsError) as error:
        if isinstance(error, SettingsError):
            raise InvalidRequest(f'the environment: {error}; lists are written as JSON, such as ["a"]') from None
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        variable = f"{kind.model_config['env_prefix']}{name.upper()}"
        where = f"--{name.replace('_', '-')}" if name in given else variable
        raise InvalidRequest(f"{where}: {first['msg'][:1].lower()}{first['msg'][1:]}, not {first['input']!r}", param=name) from None


class Limits(BaseSettings):
    """What the API accepts: the one home of these defaults. What is over a limit is refused, and counted under the limit's name."""

    model_config = SettingsConfigDict(env_prefix="XINFERENCE_LIMIT_", frozen=True)

    connections: int = Field(default=2048, ge=1, description="open connections before 429; a request needs one of its own")
    head_bytes: int = Field(default=64 * 1024, ge=1024, description="address and header fields of a request")
    head_fields: int = Field(default=128, ge=16, description="header fields of a request")
    pipelined_requests: int = Field(default=128, ge=1, description="requests that wait on one connection while it answers another one")
    body_bytes: int = Field(default=10 * 1024 * 1024, ge=1, description="one request body")
    bodies_bytes: int = Field(default=512 * 1024 * 1024, ge=1, description="bodies of all open requests together before 429")
    json_depth: int = Field(default=64, ge=4, description="objects and lists inside each other in a body; the outermost counts")
    messages: int = Field(default=2048, ge=1, description="entries of `messages`")
    prompts: int = Field(default=128, ge=1, description="entries of `prompt` or `input`")
    choices: int = Field(default=8, ge=1, description="upper bound of `n`")
    stop_strings: int = Field(default=4, ge=0, description="entries of `stop`")
    logprobs: int = Field(default=20, ge=0, description="upper bound of `logprobs`, `top_logprobs` and `prompt_logprobs`")
    tools: int = Field(default=128, ge=0, description="entries of `tools`")
    queued_requests: int = Field(default=1024, ge=1, description="open requests of one model, those in its queue included, before 429")
    slow_reader_bytes: int = Field(default=1024 * 1024, ge=1024, description="unread bytes of a stream before it is aborted")
    event_streams: int = Field(default=32, ge=1, description="open event, log and statistics streams before 429")
    key_concurrent_requests: int = Field(
        default=0, ge=0, description="open requests of one API key before 429, for keys without a limit of their own; 0: no limit"
    )
    key_requests_per_minute: int = Field(
        default=0, ge=0, description="requests of one API key in a minute before 429, for keys without a limit of their own; 0: no limit"
    )
    head_read_seconds: float = Field(default=30.0, gt=0, description="how long the head of a request may take to arrive")
    body_read_seconds: float = Field(default=60.0, gt=0, description="how long a request body may take to arrive")
    unread_seconds: float = Field(
        default=30.0, gt=0, description="how long a client may read nothing of an answer whose connection ends with it"
    )
    request_seconds: float = Field(default=3600.0, gt=0, description="a request that lasts longer is aborted")


class Settings(BaseSettings):
    """How this process runs. Frozen: read once at start."""

    model_config = SettingsConfigDict(env_prefix="XINFERENCE_", frozen=True)

    home: Path = Field(default=Path("~/.xinference"), description="keys, demo model, logs, sockets")
    host: str = "127.0.0.1"
    port: int = 9997
    allowed_hosts: tuple[str, ...] = Field(default=(), description="further names in the Host header, for a reverse proxy before loopback")
    supervisor_port: int = Field(default=9998, description="xoscar port of the supervisor; 0 picks a free one")
    shm_dir: Path = Path("/dev/shm")  # noqa: S108  (shared memory is what is wanted)
    require_key: bool = Field(default=False, description="ask for an API key on loopback too")
    isolate_tenants: bool = Field(
        default=False, description="no API key is served from cache that another key's prompts filled; asks for keys on loopback too"
    )
    model_roots: tuple[Path, ...] = Field(default=(), description="if set, model paths must lie inside one of these")
    trust_remote_code: bool = Field(default=False, description="allow models that run their own Python code")
    allow_fake_engine: bool = Field(default=False, description="allow model_engine=fake, the engine of the test suite")
    heartbeat_seconds: float = 1.0
    worker_lost_seconds: float = Field(default=5.0, description="a worker silent for this long is lost")
    replica_hang_seconds: float = Field(default=5.0, description="an engine that answers no health check for this long is hung")
    launch_seconds: float = Field(default=900.0, description="a replica that is not ready by then has failed")
    drain_seconds: float = Field(default=30.0, description="how long a stop waits for open requests")
    restarts: int = Field(default=3, description="relaunches of a replica within restart_window_seconds before it stays failed")
    restart_window_seconds: float = 600.0
    log_lines: int = Field(default=2000, description="engine log lines kept in memory per replica")
    request_records: int = Field(default=1000, description="recent requests kept for /v1/requests")

    @property
    def home_dir(self) -> Path:
        """``home`` with ``~`` resolved; not created here."""
        return self.home.expanduser()
