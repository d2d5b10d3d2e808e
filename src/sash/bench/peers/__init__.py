"""sash beside other engines: each in an environment and a process of its own, asked in JSON lines."""
