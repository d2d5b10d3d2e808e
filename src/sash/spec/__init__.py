"""What a model and an engine are, as data. Never imports torch."""
