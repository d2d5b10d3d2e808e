"""Bodies of requests and answers, as pydantic models."""
