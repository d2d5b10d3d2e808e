"""Names that look dead to vulture and are not; each group says who uses them. Reviewed when it grows."""

from __future__ import annotations

from typing import Any

_: Any = None

# Option sets of the command line: their fields are read by name (dataclasses.fields).
_.deterministic
_.request_timeout_s
_.debug
_.include_stop_str_in_output
_.ignore_eos
_.skip_special_tokens

# Attributes of tokenizers' objects that its library reads; jinja reads an extension's.
_.encode_special_tokens
_.pre_tokenizer
_.post_processor
_.ignore_merges
_.tags
_.parse

# transformers reads it from a config.
_._attn_implementation

# http.server calls them by name.
_.log_message
_.do_GET
_.do_POST

# typer reads it from an option when it writes help.
_.metavar

# Settings of other engines, which read them: llama.cpp's structures, OpenVINO's scheduler, transformers' model.
_.n_ctx
_.n_batch
_.n_ubatch
_.n_seq_max
_.n_threads
_.n_threads_batch
_.swa_full
_.n_tokens
_.cache_size
_.enable_prefix_caching
_.hf_quantizer

# The C++ step reads it.
_.kv_type

# Fields of answers, which clients read, and attributes that pydantic and Starlette look for.
_.cached_tokens
_.total_tokens
_.prompt_tokens_details
_.text_offset
_.token_strs
_.server_load
_.owned_by
_.model_config
_.media_type
_.background
_.should_exit

# Fields of /stats, which its readers and the page read.
_.longest_pages
_.cpu_ratio
_.busy_ratio
_.p95
_.p99
_.per_token_s
_.whole_s
_.prompt_10s
_.prompt_60s
_.generated_10s
_.generated_60s
_.prompt_by_second
_.received_bytes
_.sent_bytes
_.time_s
_.engine_restarts
_.engine_age_s

# Callbacks of asyncio, uvicorn and the interpreter, and options that typer fills.
_.connection_made
_.data_received
_.connection_lost
_.exc
_._close_all
_.handlers
_.capture_signals
_.api_key
_.served_model_name
_.cors_origin

# Older names of the forms that answers can be held to, and what a script names.
_.guided_json
_.guided_regex
_.guided_choice
_.guided_grammar
_.Bench

# Fields of jobs and of /v1/responses, which clients read or bring.
_.first_id
_.last_id
_.has_more
_.description
_.schema_
_.strict
_.verbosity
_.annotations
_.cache_write_tokens
_.reasoning_tokens
_.input_tokens
_.input_tokens_details
_.output_tokens
_.output_tokens_details
_.completed_at
_.incomplete_details
_.reasoning
_.tools

# hypothesis calls it.
_.teardown

# Fields of requests, read by name, and of chat's answers.
_.guided_json
_.guided_regex
_.guided_choice
_.guided_grammar
_.tool_calls

# Experiments of the lab, found by name.
_.MASK
_.GROWTH
_.SPEED
_.TOY

# Commands, found by name.
_.chat
_.generate
_.inspect
_.doctor
_.lab
_.plan
_.serve
_.export_tokenizer
_.offline
_.peers
_.ops
_.render
