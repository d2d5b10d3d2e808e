"""Through litellm: sash serve smollm2-135m, then python examples/litellm_chat.py

Needs litellm, which calls such a server hosted_vllm.
"""

from __future__ import annotations

import os

import litellm

answer = litellm.completion(
    model=f"hosted_vllm/{os.environ.get('MODEL', 'smollm2-135m')}",
    api_base=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    max_tokens=30,
    temperature=0,
    stream=True,
)
for chunk in answer:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
