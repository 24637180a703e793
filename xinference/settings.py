"""Where the server keeps things, what it binds to, and its limits: one home for each default.

Every field can be set by an environment variable ``XINFERENCE_<FIELD>`` in upper case; command-line options win over it.
"""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Limits(BaseSettings):
    """What the API accepts. A request over a limit gets a 4xx that names the limit; refusals are counted by name."""

    model_config = SettingsConfigDict(env_prefix="XINFERENCE_LIMIT_", frozen=True)

    body_bytes: int = 10 * 1024 * 1024
    json_depth: int = 64
    messages: int = 2048
    prompts: int = 128
    choices: int = Field(default=8, description="upper bound of `n`")
    stop_strings: int = 4
    logprobs: int = 20
    tools: int = 128
    queued_requests: int = Field(default=1024, description="open requests per model before 429")
    slow_reader_bytes: int = Field(default=1024 * 1024, description="unread stream bytes before the request is aborted")
    event_streams: int = Field(default=32, description="open event streams before 429")
    request_seconds: float = Field(default=3600.0, description="a request that lasts longer is aborted")


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
