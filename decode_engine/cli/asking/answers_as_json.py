"""Answers as JSON, the same of one question and of many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from decode_engine.rpc.client import Summary, TokenLogprob


def described_answers(
    texts: Iterable[str],
    token_ids: Iterable[Sequence[int]],
    logprobs: Iterable[Sequence[TokenLogprob]],
    summaries: Iterable[Summary],
    prompt_logprobs: Sequence[TokenLogprob],
) -> dict[str, object]:
    """All answers to a question: one answer's fields at the top, several in a list; log probabilities where wanted."""
    described = [
        {
            "text": text,
            "token_ids": list(ids),
            **({"logprobs": _described(told)} if told else {}),
            **asdict(summary),
        }
        for text, ids, told, summary in zip(texts, token_ids, logprobs, summaries, strict=True)
    ]
    return {
        **({"prompt_logprobs": _described(prompt_logprobs)} if prompt_logprobs else {}),
        **(described[0] if len(described) == 1 else {"answers": described}),
    }


def shown(text: bytes) -> str:
    """A token's bytes for people: those that are no text become U+FFFD."""
    return text.decode("utf-8", "replace")


def _described(logprobs: Iterable[TokenLogprob]) -> list[dict[str, object]]:
    return [
        {
            "token_id": each.token_id,
            "text": shown(each.text),
            "logprob": each.logprob,
            "alternatives": [
                {"token_id": other.token_id, "text": shown(other.text), "logprob": other.logprob}
                for other in each.alternatives
            ],
        }
        for each in logprobs
    ]
