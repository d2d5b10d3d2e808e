"""Answers and streams as bytes."""
