"""Tokenizers, chat templates, incremental detokenizing."""
