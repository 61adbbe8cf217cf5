"""Long-context tasks made from any text for any tokenizer: documents with facts in them, and questions about them."""

from decode_engine.evaluation.tasks.documents import (
    Document,
    Encoder,
    Question,
    chat_question,
    held_out_text,
    held_out_words,
    make_document,
    make_documents,
    parse_length,
    read_text,
    source_text,
    write_questions,
)
from decode_engine.evaluation.tasks.family import (
    ANSWER_END,
    ATTRIBUTES,
    FAMILIES,
    PROMPT,
    STATEMENTS,
    get_family,
    make_facts,
)

__all__ = [
    "ANSWER_END",
    "ATTRIBUTES",
    "FAMILIES",
    "PROMPT",
    "STATEMENTS",
    "Document",
    "Encoder",
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
