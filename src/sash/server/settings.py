"""ServerSettings: everything about the service that isn't the engine's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How the server is reached and what it allows.

    Args:
        model_name: what requests call the model.
        served_model_names: further names that requests may use.
        host: address to listen on.
        port: 0 takes a free one.
        api_keys: any of them lets a request in; none: everybody may.
        cors_origins: web pages that may call from a browser; none by default.
        root_path: prefix under which a proxy publishes the server.
        tls_cert: certificate file (PEM); with ``tls_key`` the server speaks HTTPS.
        tls_key: its private key.
        max_body_bytes: larger request bodies are refused with 413.
        max_prompts: prompts in one completions request at most.
        max_waiting: answers that may wait; more are turned away with 429.
        request_timeout_s: seconds after which a request is ended; so long may its body take to come, too.
        drain_s: seconds that running requests get to finish after SIGTERM.
        heartbeat_s: a stream that has nothing to say for so long sends a comment, so that proxies keep the line.
        chat_template: jinja file that replaces the model's own template.
        tool_call_parser: how the model writes tool calls: hermes, mistral, llama3, gemma; auto tells by the template.
        trust_request_chat_template: requests may bring a template.
        log_prompts: write prompts into the log.
        jobs_dir: folder of the jobs store (``sash.server.jobs.database.default_jobs_dir``); None: there are no jobs.
        jobs_concurrency: answers of jobs that may run at a time, as long as no more run altogether; None: three
            quarters of the engine's seats, so that a client who comes now finds one.
        jobs_max_requests: requests in one job at most.
        jobs_max_stored: jobs in the store at most, ended ones included.
        jobs_max_bytes: size of the store at most.
        jobs_retention_s: seconds after which a job that has ended is forgotten.
        log_format: json, or text for people.
        max_restarts: times that a failed engine is started again within ten minutes before the server exits.
    """

    model_name: str
    served_model_names: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    root_path: str = ""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    max_body_bytes: int = 32 << 20
    max_prompts: int = 1024
    max_waiting: int = 256
    request_timeout_s: float = 300.0
    drain_s: float = 60.0
    heartbeat_s: float = 15.0
    chat_template: Path | None = None
    tool_call_parser: str = "auto"
    trust_request_chat_template: bool = False
    log_prompts: bool = False
    jobs_dir: Path | None = None
    jobs_concurrency: int | None = None
    jobs_max_requests: int = 50_000
    jobs_max_stored: int = 1000
    jobs_max_bytes: int = 8 << 30
    jobs_retention_s: float = 7 * 86400.0
    log_format: str = "json"
    max_restarts: int = 3

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model, the first one first."""
        return tuple(dict.fromkeys((self.model_name, *self.served_model_names)))
