"""Options from flags, environment and file: one precedence, and nothing unknown goes through."""

from __future__ import annotations

from pathlib import Path

import pytest

from sash.server.config import PREFIX, ServeConfig, serve_config
from sash.spec.errors import ConfigError


def configured(tmp_path: Path, yaml: str = "", environ: dict[str, str] | None = None, **flags: object) -> ServeConfig:
    file = tmp_path / "serve.yaml"
    file.write_text(yaml)
    return serve_config(flags, {PREFIX + k: v for k, v in (environ or {}).items()}, file)


def test_flags_win_over_environment_and_that_over_the_file(tmp_path: Path) -> None:
    yaml = "model: from-file\nport: 1\nhost: 0.0.0.1\nmax-num-seqs: 3\n"
    got = configured(tmp_path, yaml, {"PORT": "2", "HOST": "0.0.0.2"}, host="0.0.0.3")
    assert (got.model, got.settings.port, got.settings.host) == ("from-file", 2, "0.0.0.3")
    assert got.engine == {"max_num_seqs": 3, "request_timeout_s": 300.0}
    assert got.settings.request_timeout_s == 300.0


def test_every_kind_of_value_comes_from_the_environment_and_from_the_file(tmp_path: Path) -> None:
    environ = {"MODEL": "m", "API_KEY": "a, b", "LOG_PROMPTS": "Yes", "DRAIN_S": "2.5", "JOBS_DIR": "/x", "SEED": "7"}
    environ |= {"SERVED_MODEL_NAME": "one,two", "DETERMINISTIC": "off", "MAX_MODEL_LEN": "512", "DTYPE": "float32"}
    got = configured(tmp_path, "", environ)
    yaml = """
        {model: m, api_key: [a, b], log_prompts: true, drain_s: 2.5, jobs-dir: /x, seed: 7, dtype: float32,
         served_model_name: [one, two], deterministic: false, max_model_len: 512, port: null}"""
    assert got == configured(tmp_path, yaml)
    assert got.settings.api_keys == ("a", "b") and got.settings.jobs_dir == Path("/x")
    assert (got.settings.model_name, got.settings.served_model_names) == ("one", ("two",))
    assert got.engine["deterministic"] is False


def test_sizes_are_written_as_in_flags(tmp_path: Path) -> None:
    from_file = configured(tmp_path, "{model: m, kv_cache_memory_bytes: 512MiB, max_body_bytes: 1M, jobs_max_bytes: 7}")
    environ = {"MODEL": "m", "KV_CACHE_MEMORY_BYTES": "512 MiB", "MAX_BODY_BYTES": "1000000", "JOBS_MAX_BYTES": "7"}
    assert from_file == configured(tmp_path, "", environ)
    assert from_file.engine["kv_cache_memory_bytes"] == 512 << 20 and from_file.settings.max_body_bytes == 1_000_000


@pytest.mark.parametrize(
    ("yaml", "environ", "message"),
    [
        ("model: m\nkv_cache_memory_bytes: many", {}, "kv_cache_memory_bytes in .* must be a size such as 512MiB"),
        ("", {}, "no model: name one"),
        ("model: m\nprot: 1", {}, "unknown option prot in .*; did you mean port"),
        ("model: m", {"MAX_MODEL_LENGTH": "1"}, "SASH_SERVE_MAX_MODEL_LENGTH; did you mean SASH_SERVE_MAX_MODEL_LEN"),
        ("model: m\nport: high", {}, "port in .* must be a whole number, got 'high'"),
        ("model: m\nport: true", {}, "port in .* must be a whole number, got True"),
        ("model: m\nport: 70000", {}, "port must be 0 to 65535"),
        ("model: m", {"PORT": "x"}, "SASH_SERVE_PORT must be a number"),
        ("model: m", {"DEBUG": "maybe"}, "SASH_SERVE_DEBUG must be true or false"),
        ("model: m\nmax-num-seqs: 1\nmax_num_seqs: 2", {}, "max_num_seqs stands twice"),
        ("model: m\napi_key: [{a: b}]", {}, "api_key in .* must be a text or a list of texts"),
        ("model: m\ntls_cert: /nowhere", {}, "tls_cert and tls_key go together"),
        ("model: m\nchat_template: /nowhere", {}, "chat_template=/nowhere is no file"),
        ("model: m\nmax_waiting: -1", {}, "max_waiting must be 0 or more"),
        ("model: m\nrequest_timeout_s: 0", {}, "request_timeout_s must be above 0"),
        ("model: m\nheartbeat_s: 0", {}, "heartbeat_s must be above 0"),
        ("model: m\nroot_path: x", {}, "root_path must begin with /"),
        ("model: m\nlog_format: xml", {}, "log_format must be json or text"),
        ("model: m\ntool_call_parser: own", {}, "tool_call_parser must be auto, hermes, mistral, llama3, gemma"),
        ("model: m\napi_key: [é]", {}, "api_key must be a text of ASCII"),
        ("model: m\napi_key: ['a ']", {}, "api_key must be a text of ASCII characters without spaces around it"),
        ("model: m\nserved_model_name: ''", {}, "served_model_name must not be empty"),
        ("model: m\njobs_dir: ''", {}, "jobs_dir in .* is empty: name a path"),
        ("model: m", {"JOBS_DIR": ""}, "SASH_SERVE_JOBS_DIR is empty: name a path"),
        ("model: m", {"API_KEY": ""}, "SASH_SERVE_API_KEY is empty: give it a value, or leave it out"),
        ("model: m", {"API_KEY": " , "}, "SASH_SERVE_API_KEY is empty"),
        ("model: m\napi_key: []", {}, "api_key in .* is empty"),
        ("model: m\nseed: 99999999999999999999", {}, "seed must lie between"),
        ("model: m", {"PAGE_SIZE": "9" * 30}, "page_size must lie between"),
        ("- a", {}, "must hold names and values"),
        ("a: [", {}, "is not valid YAML"),
        ("!!python/object/apply:os.system ['false']", {}, "is not valid YAML"),
    ],
)
def test_what_can_not_work_is_refused(tmp_path: Path, yaml: str, environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(tmp_path, yaml, environ)


def test_certificates_that_can_not_be_used_are_refused_before_the_model_loads(tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    for content in ("", "no certificate"):
        junk.write_text(content)
        with pytest.raises(ConfigError, match=r"tls_cert=.*tls_key=.*can't be used .*: give a certificate in PEM"):
            configured(tmp_path, model="m", tls_cert=junk, tls_key=junk)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        serve_config({}, {}, tmp_path / "none.yaml")


def test_a_path_gives_the_model_its_name(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"")
    assert configured(tmp_path, model=str(tmp_path / "tiny.gguf")).settings.model_name == "tiny"
    assert configured(tmp_path, model="org/name").settings.model_name == "org/name"


def test_jobs_are_kept_in_the_users_folder_unless_said_otherwise(tmp_path: Path) -> None:
    assert configured(tmp_path, model="m").settings.jobs_dir == Path.home() / ".local/state/sash/jobs/8000"
    elsewhere = serve_config({"model": "m", "port": 9000}, {"XDG_STATE_HOME": "/state"}, None).settings
    assert elsewhere.jobs_dir == Path("/state/sash/jobs/9000")
    assert configured(tmp_path, model="m", port=0).settings.jobs_dir is None
    assert configured(tmp_path, model="m", jobs_dir=Path("none")).settings.jobs_dir is None
    with pytest.raises(ConfigError, match="jobs_concurrency must be above 0"):
        configured(tmp_path, "jobs_concurrency: 0", model="m")
