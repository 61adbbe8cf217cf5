"""The official `openai` package against the gateway: make a context of a file, ask it, read the answer as it comes.

    python docs/examples/openai_client.py http://127.0.0.1:8000/v1 notes.txt "Who lit the lamp?"

OPENAI_API_KEY is the token, where the gateway asks for one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI


def main(url: str, document: str, question: str) -> None:
    """Makes a context of the document and asks it."""
    client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    file = client.files.create(file=Path(document), purpose="user_data")
    operation: Any = client.post("/contexts", body={"file_id": file.id}, cast_to=dict[str, Any])
    while not operation["done"]:
        operation = client.get(f"/operations/{operation['id']}", cast_to=dict[str, Any])
    context = operation["context"]["id"]
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        stop="\n",
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"context": context},
    )
    for chunk in stream:
        if chunk.choices:
            sys.stdout.write(chunk.choices[0].delta.content or "")
        elif chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            cached, asked = chunk.usage.prompt_tokens_details.cached_tokens, chunk.usage.prompt_tokens
            sys.stdout.write(f"\n{cached} of {asked} prompt tokens were stored\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
