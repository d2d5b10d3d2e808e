"""Tools in chat: how models are told of them, how they write calls, and how calls are read."""
