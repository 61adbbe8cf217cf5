"""An agent with a tool: the model calls a look-up, the program carries it out, and the model answers by what was found.

    python docs/examples/agent_with_tool.py http://127.0.0.1:8000/v1 notes "What is the code of the safe?" more.txt

The tool finds what a text file says about the question. The first answer has to be a call; models whose chat template
has tools may be left to choose (`tool_choice="auto"`), the packaged reader is not told of any.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI


def look_up(file: str, question: str) -> str:
    """The sentence of the file that has most words of the question."""
    words = set(re.findall(r"\w+", question.lower()))
    sentences = re.split(r"(?<=\.)\s+", Path(file).read_text())
    return max(sentences, key=lambda sentence: len(words & set(re.findall(r"\w+", sentence.lower())))).strip()


def main(url: str, context: str, question: str, *files: str) -> None:
    """Asks, carries out what the model calls, and asks again."""
    client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    parameters = {
        "type": "object",
        "properties": {"file": {"enum": list(files)}},
        "required": ["file"],
        "additionalProperties": False,
    }
    function = {"name": "look_up", "description": "Looks into a file.", "parameters": parameters}
    options: Any = {
        "model": model,
        "temperature": 0,
        "tools": [{"type": "function", "function": function}],
        "extra_body": {"context": context},
    }
    messages: list[Any] = [{"role": "user", "content": question}]
    called = client.chat.completions.create(
        messages=messages, tool_choice="required", parallel_tool_calls=False, **options
    )
    messages.append(called.choices[0].message.model_dump(exclude_none=True))
    for call in called.choices[0].message.tool_calls or []:
        found = look_up(json.loads(call.function.arguments)["file"], question)
        sys.stdout.write(f"{call.function.name}({call.function.arguments}): {found}\n")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    answer = client.chat.completions.create(messages=messages, tool_choice="none", stop="\n", **options)
    sys.stdout.write(f"{answer.choices[0].message.content}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
