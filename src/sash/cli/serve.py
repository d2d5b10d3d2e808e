"""``sash serve``: the OpenAI-compatible server."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from sash.cli.options import EngineOptions, option_panel, with_options
from sash.spec.errors import ConfigError

_server = option_panel("Server")


@dataclass(frozen=True)
class ServeOptions:
    """How the server is reached and what it allows; None and False leave the default, the environment or the file."""

    host: Annotated[str | None, _server("Address to listen on. Default: 127.0.0.1.")] = None
    port: Annotated[int | None, _server("Port to listen on; 0 takes a free one. Default: 8000.")] = None
    api_key: Annotated[
        list[str] | None, _server("Only requests with this key; repeatable. Better in SASH_SERVE_API_KEY.")
    ] = None
    served_model_name: Annotated[
        list[str] | None, _server("What requests call the model; repeatable. Default: the model's name.")
    ] = None
    cors_origin: Annotated[
        list[str] | None, _server("A web page's origin that may call from a browser; repeatable.")
    ] = None
    root_path: Annotated[str | None, _server("Prefix under which a proxy publishes the server.")] = None
    tls_cert: Annotated[Path | None, _server("Certificate (PEM); with --tls-key the server speaks HTTPS.")] = None
    tls_key: Annotated[Path | None, _server("Its private key.")] = None
    chat_template: Annotated[Path | None, _server("A jinja file in place of the model's own template.")] = None
    trust_request_chat_template: Annotated[
        bool, _server("Requests may bring a template.", "--trust-request-chat-template")
    ] = False
    tool_call_parser: Annotated[
        str | None,
        _server("How the model writes tool calls: hermes, mistral, llama3, gemma. Default: by the template."),
    ] = None
    max_body_bytes: Annotated[int | None, _server("Larger request bodies are refused. Default: 32 MiB.")] = None
    max_prompts: Annotated[int | None, _server("Prompts in one request at most. Default: 1024.")] = None
    max_waiting: Annotated[int | None, _server("Answers that may wait; more get 429. Default: 256.")] = None
    drain_s: Annotated[float | None, _server("Seconds to finish in after SIGTERM. Default: 60.")] = None
    jobs_dir: Annotated[
        str | None, _server("Folder of the jobs store, or none. Default: sash/jobs/PORT in $XDG_STATE_HOME.")
    ] = None
    jobs_concurrency: Annotated[
        int | None, _server("Answers of jobs that may run at a time. Default: 3/4 of --max-num-seqs.")
    ] = None
    max_restarts: Annotated[int | None, _server("Times that a failed engine is started again. Default: 3.")] = None
    log_format: Annotated[str | None, _server("json, or text for people. Default: json.")] = None
    log_prompts: Annotated[bool, _server("Write prompts into the log.", "--log-prompts")] = False

    def given(self) -> dict[str, object]:
        """What was given, by name."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
            if value is not None and value is not False
        }


@with_options
def serve(
    serving: ServeOptions,
    engine: EngineOptions,
    model: Annotated[
        str | None, typer.Argument(help="gemma3-270m, smollm2-135m, a Hugging Face folder, a .gguf file, or a hub id.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of options; flags and environment win.")] = None,
) -> None:
    """Serve a model over HTTP as OpenAI's API does. Options may also stand in a file, or in the environment as
    SASH_SERVE_PORT and the like."""
    try:
        import sash.server.run as run
        from sash.server.config import folder, serve_config
        from sash.server.logs import configure_logs
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the server's packages are not installed ({error.name} is missing): pip install 'sash-llm[serve]'"
        ) from error
    given = {**serving.given(), **engine.given()} | ({} if model is None else {"model": model})
    if serving.jobs_dir is not None:
        given["jobs_dir"] = folder("--jobs-dir", serving.jobs_dir)
    chosen = serve_config(given, os.environ, config)
    configure_logs(chosen.settings.log_format)
    code = run.serve(chosen)
    if code:
        raise typer.Exit(code)
