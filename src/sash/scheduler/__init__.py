"""Which requests run, how many of their tokens, on which pages. Never imports torch."""
