"""Timings and bounds of the API that users do not set: one home for each default."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ApiConfig:
    """What the API waits for, and for how long.

    Limits that users may change are in ``xinference.settings.Limits``.
    """

    keep_alive_seconds: float = 15.0
    """a stream silent for this long gets a comment; proxies in between cut silent connections"""
    usage_wait_seconds: float = 0.05
    """how long a replica waits for a request's accounting record to be written before its own figure is given"""
    usage_answer_seconds: float = 0.25
    """how long a usage figure waits for the replica to say so: the way there crosses processes, which stall while others start or die"""
    keep_connection_seconds: float = 2.0
    """an idle connection to a replica is kept for this long; vLLM closes them after 5 s, and must not be the first"""
    finish_seconds: float = 0.1
    """how long the end of a stream that was complete may take before its connection is closed instead of kept"""
    connect_seconds: float = 5.0
    """connecting to a replica"""
    route_poll_seconds: float = 30.0
    """long poll for changes of the route table"""
    route_retry_seconds: float = 0.5
    """pause after a failed poll; the last known table stays in use"""
    event_poll_seconds: float = 10.0
    """long poll for events and log lines; shorter than keep_alive_seconds so that a comment goes out in time"""
    log_poll_seconds: float = 0.5
    """pause between two looks for new log lines"""
    xavier_stream_seconds: float = 1.0
    """pause between two readings of /xavier/stream"""
    control_seconds: float = 60.0
    """longest wait for an answer of the supervisor, beside what a call is asked to wait"""
    metrics_scrape_seconds: float = 2.0
    """longest wait for one replica's metrics; a replica that is slower is left out of this scrape"""
    suspect_seconds: float = 2.0
    """a replica that broke a connection is avoided for this long, unless the route table says earlier what became of it"""
    event_bytes: int = 16 * 1024 * 1024
    """largest single event of a replica's stream"""
    response_bytes: int = 256 * 1024 * 1024
    """largest answer of a replica that is read into memory"""
    attempts: int = 3
    """replicas tried for one request, all before its first byte"""
    abort_seconds: float = 1.0
    """a connection that must go is cut when it has not ended by itself after this long"""
