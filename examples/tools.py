"""A model that calls a function: sash serve smollm2-135m, then python examples/tools.py

Needs openai. tool_choice names the function, so that even a small model calls it with arguments of the right form.
"""

from __future__ import annotations

import json
import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
place = {"type": "string", "enum": ["Paris", "London", "Rome"]}
parameters = {"type": "object", "properties": {"place": place}, "required": ["place"], "additionalProperties": False}
weather = {"name": "weather", "description": "The weather in a place.", "parameters": parameters}
answer = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "What is the weather in Paris?"}],
    tools=[{"type": "function", "function": weather}],
    tool_choice={"type": "function", "function": {"name": "weather"}},
    max_tokens=60,
    temperature=0,
)
call = answer.choices[0].message.tool_calls[0]
print(f"{call.function.name}({json.loads(call.function.arguments)})")
