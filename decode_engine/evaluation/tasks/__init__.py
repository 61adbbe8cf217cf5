"""Long-context tasks made from any text for any tokenizer: documents with facts in them, and questions about them."""

from decode_engine.evaluation.tasks.body import Encoder
from decode_engine.evaluation.tasks.documents import (
    Document,
    DocumentSet,
    Question,
    chat_question,
    make_document,
    make_documents,
    write_questions,
)
from decode_engine.evaluation.tasks.facts import ATTRIBUTES, PROMPT, STATEMENTS, make_facts
from decode_engine.evaluation.tasks.family import ANSWER_END, Family
from decode_engine.evaluation.tasks.registry import FAMILIES, get_family
from decode_engine.evaluation.tasks.texts import (
    held_out_text,
    held_out_words,
    parse_length,
    read_text,
    source_text,
)

__all__ = [
    "ANSWER_END",
    "ATTRIBUTES",
    "FAMILIES",
    "PROMPT",
    "STATEMENTS",
    "Document",
    "DocumentSet",
    "Encoder",
    "Family",
    "Question",
    "chat_question",
    "get_family",
    "held_out_text",
    "held_out_words",
    "make_document",
    "make_documents",
    "make_facts",
    "parse_length",
    "read_text",
    "source_text",
    "write_questions",
]
