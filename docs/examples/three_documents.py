"""A loop over documents: each is a context of its own, all are asked, and the surest answer counts.

    python docs/examples/three_documents.py 127.0.0.1:50051 "Who lit the lamp?" one.txt two.txt three.txt

How sure an answer is, the log probabilities of its tokens tell.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from decode_engine.rpc.client import AsyncClient


async def ask(client: AsyncClient, document: str, question: str) -> tuple[float, str, str]:
    """How sure the answer is (the least likely of its tokens, 0 is certain), the answer, and the document."""
    operation = await client.create_context(Path(document).read_text(), display_name=Path(document).stem)
    async with client.generate(
        operation.result().name, question=question, stop=["\n"], top_logprobs=0, max_tokens=32
    ) as generation:
        pieces = [piece async for piece in generation]
    surest = min((token.logprob for piece in pieces for token in piece.logprobs), default=0.0)
    return surest, "".join(piece.text for piece in pieces).strip(), document


async def main(server: str, question: str, *documents: str) -> None:
    """Asks all documents at once."""
    async with AsyncClient(server) as client:
        answers = await asyncio.gather(*(ask(client, document, question) for document in documents))
    for surest, answer, document in sorted(answers, reverse=True):
        sys.stdout.write(f"{surest:8.3f}  {Path(document).name}: {answer}\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
