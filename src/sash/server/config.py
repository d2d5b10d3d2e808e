"""Where the server's options come from: flags win over the environment, the environment over the file.

Every option has one name: ``max_model_len`` is ``--max-model-len`` on the command line, ``SASH_SERVE_MAX_MODEL_LEN`` in
the environment and ``max_model_len`` (or ``max-model-len``) in the YAML file. A name that nobody knows is refused.
"""

from __future__ import annotations

import difflib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from sash.server.jobs.database import default_jobs_dir
from sash.server.settings import ServerSettings
from sash.server.tools.formats import FORMATS
from sash.spec.config import EngineConfig
from sash.spec.errors import ConfigError
from sash.spec.quantity import parse_bytes

PREFIX = "SASH_SERVE_"
DEFAULT_TIMEOUT_S = 300.0
# What goes from one process to the other as a whole number.
_WORD = 1 << 63
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
# What may be given several times has a singular name where it is given.
_LISTS = {"api_key": "api_keys", "served_model_name": "served_model_names", "cors_origin": "cors_origins"}


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """A checked configuration: what to load, how to run it, and how to serve it."""

    model: str
    settings: ServerSettings
    engine: dict[str, Any]


def _known() -> dict[str, Any]:
    """Options and their types."""
    server = get_type_hints(ServerSettings)
    del server["model_name"], server["request_timeout_s"]
    singular = {plural: name for name, plural in _LISTS.items()}
    return {"model": str} | {singular.get(n, n): hint for n, hint in server.items()} | get_type_hints(EngineConfig)


def serve_config(flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None) -> ServeConfig:
    """Put the three together.

    Args:
        flags: options given on the command line, by name.
        environ: the process's environment.
        file: a YAML file, or None.

    Raises:
        ConfigError: an unknown name, a value of another type, or no model.
    """
    known = _known()
    given = _from_file(file, known) | _from_environment(environ, known) | dict(flags)
    model = given.pop("model", None)
    if not model:
        raise ConfigError(f"no model: name one, as in sash serve gemma3-270m, by model: in the file or {PREFIX}MODEL")
    given.setdefault("request_timeout_s", DEFAULT_TIMEOUT_S)
    given["jobs_dir"] = _jobs_dir(
        given.get("jobs_dir"), environ, given.get("port", ServerSettings.__dataclass_fields__["port"].default)
    )
    names = tuple(given.pop("served_model_name", ()))
    own = {f.name for f in fields(ServerSettings)}
    settings = ServerSettings(
        model_name=names[0] if names else _name_of(model),
        served_model_names=names[1:],
        request_timeout_s=given["request_timeout_s"],
        **{_LISTS.get(n, n): v for n, v in given.items() if _LISTS.get(n, n) in own and n != "request_timeout_s"},
    )
    _check(settings)
    engine = {n: v for n, v in given.items() if n in EngineConfig.__dataclass_fields__}
    for name, value in engine.items():
        if isinstance(value, int) and not -_WORD <= value < _WORD:
            raise ConfigError(f"{name} must lie between -2^63 and 2^63, got {str(value)[:24]}…")
    return ServeConfig(model, settings, engine)


def _jobs_dir(given: Path | None, environ: Mapping[str, str], port: int) -> Path | None:
    """The folder that was named; else one for each port, so that two servers don't meet in it and one that is started
    again finds its own. The word none is for no jobs, and a server on any free port has no folder to come back to."""
    if given is None:
        return default_jobs_dir(environ) / str(port) if port else None
    return None if given == Path("none") else given


def _name_of(model: str) -> str:
    """What a model given by its path is called: a folder's or file's name without its ending."""
    path = Path(model)
    return path.name.removesuffix(".gguf") if path.exists() else model


def _from_environment(environ: Mapping[str, str], known: Mapping[str, Any]) -> dict[str, Any]:
    out = {}
    for variable, text in environ.items():
        if variable.startswith(PREFIX):
            name = variable.removeprefix(PREFIX).lower()
            _require_known(name, known, variable, lambda near: PREFIX + near.upper())
            out[name] = _size(name, text, variable) or _parse(text, known[name], variable)
    return out


def _from_file(file: Path | None, known: Mapping[str, Any]) -> dict[str, Any]:
    if file is None:
        return {}
    import yaml

    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file} can't be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {file} is not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {file} must hold names and values such as port: 8000, got {type(values).__name__}")
    out = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        _require_known(name, known, f"{key} in {file}", lambda near: near)
        if name in out:
            raise ConfigError(f"{name} stands twice in {file}, with a dash and with an underscore; keep one")
        if value is not None:
            out[name] = _size(name, value, f"{key} in {file}") or _convert(value, known[name], f"{key} in {file}")
    return out


def _require_known(name: str, known: Mapping[str, Any], where: str, spell: Any) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        raise ConfigError(f"unknown option {where}" + (f"; did you mean {spell(near[0])}?" if near else ""))


def _size(name: str, value: Any, where: str) -> int | None:
    """What a text such as 512MiB says for an option in bytes; None for everything else."""
    return parse_bytes(where, value) if name.endswith("_bytes") and isinstance(value, str) else None


def _kind(hint: Any) -> Any:
    """The type of an option that is not None."""
    if get_origin(hint) is tuple:
        return tuple
    return next((k for k in get_args(hint) if k is not NoneType), hint)


def _parse(text: str, hint: Any, where: str) -> Any:
    """A value out of the environment's text."""
    kind = _kind(hint)
    if kind is Path:
        return folder(where, text)
    if kind is tuple:
        return _filled(tuple(part.strip() for part in text.split(",") if part.strip()), where)
    if kind is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise ConfigError(f"{where} must be true or false, got {text!r}")
        return text.lower() in _TRUE
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise ConfigError(f"{where} must be a number, got {text!r}") from None
    return kind(text)


def _filled(items: tuple[str, ...], where: str) -> tuple[str, ...]:
    """``items``; to name api_key and give no key isn't meant to let everybody in."""
    if not items:
        raise ConfigError(f"{where} is empty: give it a value, or leave it out")
    return items


def folder(where: str, text: str) -> Path:
    """The path that ``where`` names. Raises ConfigError for an empty text, which would be the working directory."""
    if not text:
        raise ConfigError(f"{where} is empty: name a path, or leave it out")
    return Path(text)


def _convert(value: Any, hint: Any, where: str) -> Any:
    """A value out of the file."""
    kind = _kind(hint)
    if kind is tuple:
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str | int) for item in items):
            raise ConfigError(f"{where} must be a text or a list of texts, got {value!r}")
        return _filled(tuple(str(item) for item in items), where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind in (str, Path) and isinstance(value, str | int | float) and not isinstance(value, bool):
        return _parse(str(value), hint, where)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{where} must be {_WORDS[kind]}, got {value!r}")
    return value


def _check_tls(cert: Path, key: Path) -> None:
    """Refuse what TLS can't be spoken with, before a model is loaded.

    Raises:
        ConfigError: files that are no PEM, don't belong together, or want a password.
    """
    try:
        # The password is asked for on a terminal unless it is given; there may be none.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tls_cert={cert} and tls_key={key} can't be used ({error}): give a certificate in PEM and the key without "
            "a password that belongs to it"
        ) from error


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path"}


def _check(settings: ServerSettings) -> None:
    """Refuse what can't work.

    Raises:
        ConfigError: with a value that would.
    """
    if not 0 <= settings.port <= 65535:
        raise ConfigError(f"port must be 0 to 65535, got {settings.port}; 8000 is usual, 0 takes a free one")
    positive = ("max_body_bytes", "max_prompts", "request_timeout_s", "heartbeat_s", "jobs_concurrency")
    for name in (*positive, "jobs_max_requests", "jobs_max_stored", "jobs_max_bytes", "jobs_retention_s"):
        if getattr(settings, name) is not None and not getattr(settings, name) > 0:
            raise ConfigError(f"{name} must be above 0, got {getattr(settings, name)}")
    for name in ("max_waiting", "drain_s", "max_restarts"):
        if not getattr(settings, name) >= 0:
            raise ConfigError(f"{name} must be 0 or more, got {getattr(settings, name)}")
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise ConfigError("tls_cert and tls_key go together: give both files, or neither")
    for name in ("tls_cert", "tls_key", "chat_template"):
        path = getattr(settings, name)
        if path is not None and not path.is_file():
            raise ConfigError(f"{name}={path} is no file")
    if settings.tls_cert is not None and settings.tls_key is not None:
        _check_tls(settings.tls_cert, settings.tls_key)
    if any(not name.strip() for name in settings.names):
        raise ConfigError("served_model_name must not be empty; leave it out for the model's own name")
    if any(not key.isascii() or not key or key != key.strip() for key in settings.api_keys):
        raise ConfigError("api_key must be a text of ASCII characters without spaces around it, as header lines are")
    if settings.root_path and not settings.root_path.startswith("/"):
        raise ConfigError(f"root_path must begin with /, got {settings.root_path!r}")
    if settings.log_format not in ("json", "text"):
        raise ConfigError(f"log_format must be json or text, got {settings.log_format!r}")
    if settings.tool_call_parser not in ("auto", *FORMATS):
        raise ConfigError(f"tool_call_parser must be auto, {', '.join(FORMATS)}, got {settings.tool_call_parser!r}")
