"""Many texts at once: they share the server's steps. sash serve gemma3-270m, then python examples/openai_many.py

Needs openai.
"""

from __future__ import annotations

import asyncio
import os

from openai import AsyncOpenAI

PROMPTS = ["The capital of France is", "Water boils at", "The opposite of hot is", "One, two, three,"]


async def main() -> None:
    """Ask for all, and print each as soon as it is there."""
    base_url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    async with AsyncOpenAI(base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "none")) as client:
        model = (await client.models.list()).data[0].id

        async def one(prompt: str) -> None:
            answer = await client.completions.create(model=model, prompt=prompt, max_tokens=12, temperature=0)
            print(f"{prompt}|{answer.choices[0].text!r}")

        await asyncio.gather(*map(one, PROMPTS))


if __name__ == "__main__":
    asyncio.run(main())
