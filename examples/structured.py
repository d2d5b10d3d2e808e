"""An answer that fits a JSON schema, whatever the model: sash serve smollm2-135m, then python examples/structured.py

Needs openai, which brings pydantic.
"""

from __future__ import annotations

import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class City(BaseModel):
    """What is asked for."""

    name: str = Field(max_length=20)
    country: str = Field(max_length=20)
    size: Literal["small", "large"]


client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
answer = client.chat.completions.parse(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Tell me about Paris as JSON with name, country and size."}],
    response_format=City,
    max_tokens=120,
    temperature=0,
)
print(answer.choices[0].message.parsed)
