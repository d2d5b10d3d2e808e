"""Asynchronous jobs: many requests at once, kept on disk, run while interactive requests leave room."""
