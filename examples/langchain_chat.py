"""Through LangChain: sash serve smollm2-135m, then python examples/langchain_chat.py

Needs langchain-openai.
"""

from __future__ import annotations

import os

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

model = ChatOpenAI(
    model=os.environ.get("MODEL", "smollm2-135m"),
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
    max_tokens=30,
    temperature=0,
)
chain = ChatPromptTemplate.from_messages([("system", "Answer in one short sentence."), ("user", "{question}")]) | model
for piece in chain.stream({"question": "What is the capital of France?"}):
    print(piece.content, end="", flush=True)
print()
print(chain.invoke({"question": "What is the capital of Italy?"}).usage_metadata)
