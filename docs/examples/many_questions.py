"""Many questions on one handbook in one call: the server reads the context's indexes for all of them.

    python docs/examples/many_questions.py 127.0.0.1:50051 handbook questions.jsonl

questions.jsonl: an object with `question`, and perhaps `answer`, on each line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from decode_engine.rpc.client import Client


def main(server: str, handbook: str, path: str) -> None:
    """Asks all questions and counts the answers that are as expected."""
    asked = [json.loads(line) for line in Path(path).read_text().splitlines()]
    with Client(server) as client:
        context = client.find_context(handbook)
        with client.batch_generate(
            context.name, [{"question": entry["question"], "stop": ["\n"]} for entry in asked]
        ) as batch:
            right = sum(
                item.error is None and str(asked[item.index].get("answer")) in item.texts[0] for item in batch
            )
    sys.stdout.write(f"{right} of {len(asked)} answers are as expected\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
