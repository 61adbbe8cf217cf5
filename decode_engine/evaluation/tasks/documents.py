"""Documents with facts in them, and questions about the facts: made from any text, for any tokenizer.

A document is a real text of an exact number of tokens into which statements such as " The access code of the silver
falcon is 48213." are put at stratified random depths. Whoever can answer the questions has found the statements.
Names and values come from words that were never used for names when the embedded reader was trained.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from decode_engine.evaluation.tasks.body import Body, Encoder, characters_per_token, too_short, word_end
from decode_engine.evaluation.tasks.family import ANSWER_END, PROMPT_FORM, Asked
from decode_engine.evaluation.tasks.registry import get_family
from decode_engine.evaluation.tasks.texts import held_out_words
from index_store.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a document.

    prompt: the question as a text to be completed, ending before the answer; a model without a chat template can
    be asked with it. token: where the first statement begins that has to be read for the answer. depth: the same as
    a fraction of the document. opening: the end of the prompt, with which the answer's sentence begins. family: name
    of the task. evidence: where every statement begins that has to be read, in the order of the answer. ending: what
    follows the answer in the text that a model is judged by.
    """

    question: str
    answer: str
    prompt: str
    token: int
    depth: float
    opening: str = ""
    family: str = "single"
    evidence: tuple[int, ...] = ()
    ending: str = ANSWER_END


@dataclass(frozen=True, slots=True)
class Document:
    """A text of `token_count` tokens with facts in it.

    continuation: what follows in the source text, for measuring predictions of plain text. stretch: of several, which
    stretch of the source text this is of: documents of different stretches have no text in common.
    """

    text: str
    token_count: int
    questions: tuple[Question, ...]
    continuation: str
    family: str = "single"
    stretch: int = 0


@dataclass(frozen=True, slots=True)
class DocumentSet:
    """`count` documents of one family, with `facts` questions in each.

    distractors: statements per document that resemble others; the family's own number when None.
    """

    count: int
    facts: int
    family: str = "single"
    distractors: int | None = None


def make_document(
    encoder: Encoder,
    text: str,
    tokens: int,
    *,
    facts: int,
    seed: int,
    questions: int | None = None,
    distractors: int | None = None,
    start: int = 0,
    family: str = "single",
) -> Document:
    """A document of exactly `tokens` tokens: `text` from character `start` on, with facts put in.

    facts: how many questions it could be asked. questions: how many of them are returned, evenly over the depths; all
    by default. distractors: further statements that nearly equal one that is asked about; the family's own number
    by default. Raises InvalidArgumentError when the text is too short or the statements do not fit.
    """
    import numpy as np  # not above: the command line reads the families

    task = get_family(family)
    asked = facts if questions is None else questions
    extra = task.distractors * facts if distractors is None else distractors
    if not 0 < asked <= facts or extra < 0:
        raise InvalidArgumentError(
            f"{asked} questions about {facts} facts with {extra} distractors: expected at least one question, "
            "at most one per fact, and no negative number"
        )
    rng = np.random.default_rng(seed)
    draft = task.draft(rng, held_out_words(), facts, extra)
    count = len(draft.statements)
    room = tokens - len(encoder.encode("".join(draft.statements)))
    if room < 2 * tokens // 3:
        raise InvalidArgumentError(
            f"{facts} facts of task {family!r} take {tokens - room} of {tokens} tokens, expected at most a third; "
            "ask for fewer facts or a longer document"
        )
    depths = (np.arange(count) + rng.random(count)) / count
    body = Body(encoder, text, start, draft.statements, depths, room)
    end = body.fit(tokens)
    places = body.statement_tokens(end)
    by_depth = sorted(draft.asked, key=lambda one: min(one.evidence))
    chosen = [by_depth[i] for i in np.linspace(0, len(by_depth) - 1, asked).round().astype(int)]
    return Document(
        text=body.assemble(end),
        token_count=tokens,
        questions=tuple(_question(one, places, tokens, family) for one in chosen),
        continuation=text[end:],
        family=family,
    )


def _question(asked: Asked, places: Sequence[int], tokens: int, family: str) -> Question:
    evidence = tuple(places[i] for i in asked.evidence)
    return Question(
        question=asked.question,
        answer=asked.answer,
        prompt=PROMPT_FORM.format(question=asked.question, opening=asked.opening),
        token=min(evidence),
        depth=min(evidence) / tokens,
        opening=asked.opening,
        family=family,
        evidence=evidence,
    )


def make_documents(
    encoder: Encoder, text: str, tokens: int, sets: Sequence[DocumentSet], *, seed: int, spare: int = 0
) -> list[Document]:
    """Documents over different parts of the text, which overlap only when the text is too short for that.

    spare: characters that must remain after each document, for its continuation. Documents that overlap, or overlap
    with the same ones, are of one stretch.
    Raises InvalidArgumentError when the text is too short for a single document.
    """
    import numpy as np

    needed = round(tokens * characters_per_token(encoder, text) * 1.05) + 1_000 + spare
    if needed > len(text):
        raise too_short(len(text), needed)
    each = [one for one in sets for _ in range(one.count)]
    stride = len(text) // len(each)
    if stride >= needed:
        offsets = np.random.default_rng(seed).integers(0, stride - needed + 1, len(each))
        starts = [i * stride + int(offset) for i, offset in enumerate(offsets)]
    else:
        starts = [int(start) for start in np.linspace(0, len(text) - needed, len(each))]
    documents: list[Document] = []
    stretch, used = -1, 0
    for i, (one, near) in enumerate(zip(each, starts, strict=True)):
        start = word_end(text, near) if near else 0
        document = make_document(
            encoder,
            text,
            tokens,
            facts=one.facts,
            seed=seed + i,
            distractors=one.distractors,
            start=start,
            family=one.family,
        )
        stretch += start >= used
        documents.append(replace(document, stretch=stretch))
        used = len(text) - len(document.continuation) + spare
    return documents


def chat_question(question: Question, asked: str) -> Question:
    """The question with the opening as the beginning of the model's turn, which is all that its prompt holds then.

    asked: the question in the model's chat template. The answer ends with its full stop: how a chat model goes on after
    that is its template's business.
    """
    space = "" if asked[-1:].isspace() or asked.endswith(">") else " "
    return replace(question, prompt=f"{space}{question.opening}", ending=".")


def write_questions(path: Path, questions: Sequence[Question]) -> None:
    """Writes one JSON object per line."""
    path.write_text("".join(json.dumps(asdict(question)) + "\n" for question in questions))
