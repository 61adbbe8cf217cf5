"""LangChain (`langchain-openai`) against the gateway: an answer as it comes, and a call of a tool.

    python docs/examples/langchain_client.py http://127.0.0.1:8000/v1 notes "Who lit the lamp?"

OPENAI_API_KEY is the token, where the gateway asks for one.
"""

from __future__ import annotations

import os
import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import SecretStr


@tool
def note_down(mood: Literal["calm", "stormy"]) -> str:
    """Notes how the sea is."""
    return f"the sea is {mood}"


def main(url: str, context: str, question: str) -> None:
    """Asks the context, then has the model call a tool."""
    key = os.environ.get("OPENAI_API_KEY", "none")
    model = OpenAI(base_url=url, api_key=key).models.list().data[0].id
    chat = ChatOpenAI(
        base_url=url, api_key=SecretStr(key), model=model, temperature=0, extra_body={"context": context}
    )
    for piece in chat.stream(question, stop=["\n"]):
        sys.stdout.write(str(piece.content))
    usage = chat.invoke(question, stop=["\n"]).usage_metadata
    if usage is not None:
        cached = usage.get("input_token_details", {}).get("cache_read")
        sys.stdout.write(f"\n{cached} of {usage['input_tokens']} prompt tokens were stored\n")
    called = chat.bind_tools([note_down], tool_choice="note_down").invoke("How is the sea?")
    for call in called.tool_calls:
        sys.stdout.write(f"{call['name']}: {note_down.invoke(call['args'])}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
