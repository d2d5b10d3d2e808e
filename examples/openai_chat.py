"""A conversation with a served model, streamed: sash serve smollm2-135m, then python examples/openai_chat.py

Needs openai. OPENAI_BASE_URL and OPENAI_API_KEY are read from the environment, as that package does.
"""

from __future__ import annotations

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id
messages = [
    {"role": "system", "content": "Answer in one short sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]
stream = client.chat.completions.create(
    model=model, messages=messages, max_tokens=40, temperature=0, stream=True, stream_options={"include_usage": True}
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f"\n[{chunk.usage.prompt_tokens} tokens read, {chunk.usage.completion_tokens} written]")
