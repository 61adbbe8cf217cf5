"""What numbers of fewer bits cost: predictions over one context in several forms, against float32.

usage: python ops/bench/whole_model/rows_quality.py [--model smollm2 --chat --context-length 6k] [--device cuda]
       python ops/bench/whole_model/rows_quality.py --cases full@float8,refined:0.005@bfloat16

A model reads documents with facts in them, in float32 on a CPU, with full attention. Its keys and values make the
contexts of all cases, so that they differ in nothing but what is done to these. A case is `METHOD@ROWS`, methods as in
`decode_gpu.py`; ROWS is `float32`, `bfloat16`, `int8` (exact rows in 8 bits), or `float8`: numbers rounded to float8
(e4m3, no scales), as a float8 cache keeps them, and then attended to in bfloat16. A kernel that rounds queries or
weights to float8 as well costs more than that.

The reference is full attention over the float32 rows on a CPU. `kl` is the mean KL divergence of a case from it over
tokens of answers, in millionths of a nat, `kl_text` that over text that follows the document; `_se` their standard
errors over documents.
`exact_match` is the share of questions whose answer was the most probable one, token by token. With `--device cuda`
cases run as they are served there, the model in the checkpoint's dtype: `full@bfloat16` then says what that costs.

One JSON line per case.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import torch
import typer
from harness.parsing import parse_method
from harness.report import CheckFailedError, reporting
from torch import Tensor

from decode_engine.evaluation.evaluate import question_segment
from decode_engine.evaluation.scoring import Segment, SegmentScore, reference_log_probs, score_segment
from decode_engine.evaluation.tasks.documents import (
    Document,
    DocumentSet,
    make_documents,
    parse_length,
    source_text,
)
from decode_engine.model.runner import ModelRunner
from decode_engine.model.unstored import no_context
from decode_engine.model.warm_up import made_up_context
from decode_engine.settings.command_options import Prompts
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.methods.presets import METHODS
from index_store.models.loading import resolve_model
from index_store.store.description.dtypes import AS_DTYPE, INT8

CASES = (
    "full@bfloat16,full@float8,full@int8,refined:0.005@bfloat16,refined:0.01@bfloat16,refined:0.005@int8,"
    "refined:0.01@int8"
)
ROWS = ("float32", "bfloat16", "float8", INT8)
AT_ONCE = 1024


def read_document(runner: ModelRunner, token_ids: Sequence[int]) -> list[Tensor]:
    """Keys and values of every layer, [H, N, 2, d] float32, after full attention."""
    nothing = no_context(runner.identity, "float32", runner.device)
    session = runner.start(nothing, METHODS["full"].on(nothing.manifest))
    try:
        for first in range(0, len(token_ids), AT_ONCE):
            runner.read([session], [token_ids[first : first + AT_ONCE]])
        return [layer.tail.rows.clone() for layer in session.layers]
    finally:
        session.close()


def in_form(runner: ModelRunner, method: Method, rows: str, kv: Sequence[Tensor]) -> ResidentContext:
    """A context of these keys and values, with what the method searches."""

    def of(place: int) -> Tensor:
        found = kv[place].to(runner.device)
        return found.to(torch.float8_e4m3fn).float() if rows == "float8" else found

    return made_up_context(
        runner.identity,
        "float32" if rows == "float32" else "bfloat16",
        method,
        kv[0].shape[1],
        distinct=len(kv),
        device=runner.device,
        rows=INT8 if rows == INT8 else AS_DTYPE,
        kv=of,
    )


def segments_of(runner: ModelRunner, document: Document, text_tokens: int, chat: bool) -> list[Segment]:
    """Questions with their answers, and the text that follows."""
    tokenizer = runner.tokenizer
    asked = [question_segment(tokenizer, question, chat=chat) for question in document.questions]
    ids = tokenizer.encode_behind(document.continuation[: 16 * text_tokens])[:text_tokens]
    return [*asked, Segment(tuple(ids))]


def figures(by_document: Sequence[Sequence[SegmentScore]]) -> dict[str, float]:
    """Means over documents, and their standard errors."""
    found: dict[str, float] = {}
    for name, asked in (("kl", True), ("kl_text", False)):
        means = [
            float(
                torch.cat(
                    [
                        score.kl_T[score.answer_T] if asked else score.kl_T
                        for score in scores
                        if (score.exact is not None) is asked
                    ]
                ).mean()
            )
            for scores in by_document
        ]
        found[name] = 1e6 * statistics.mean(means)
        found[f"{name}_se"] = 1e6 * statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else 0.0
    exact = [score.exact for scores in by_document for score in scores if score.exact is not None]
    return found | {"exact_match": statistics.mean(exact), "questions": len(exact)}


def parse_case(text: str) -> tuple[str, Method, str]:
    """METHOD@ROWS. Raises typer.BadParameter for anything else."""
    label, _, rows = text.rpartition("@")
    if rows not in ROWS:
        raise typer.BadParameter(f"case is {text!r}, expected METHOD@ROWS with rows of {', '.join(ROWS)}")
    return text, parse_method(label), rows


def main(
    model: Annotated[str, typer.Option(help="Packaged model, a fetched one, or a folder.")] = "reader",
    context_length: Annotated[str, typer.Option(help="Tokens of a document.")] = "8k",
    cases: Annotated[str, typer.Option(help="METHOD@ROWS, comma-separated.")] = CASES,
    documents: Annotated[int, typer.Option(help="That are read.")] = 5,
    facts: Annotated[int, typer.Option(help="Questions about each.")] = 10,
    text_tokens: Annotated[int, typer.Option(help="Of the text behind each.")] = 96,
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the model's chat template.")] = False,
    device: Annotated[str, typer.Option(help="Where cases run: cpu or cuda.")] = "cpu",
) -> None:
    """Compares predictions of every case with those over float32."""
    chosen = [parse_case(text) for text in cases.split(",")]
    with reporting("rows_quality", gpu=device == "cuda") as report:
        folder = resolve_model(model)
        reader = ModelRunner(folder, weights="float32", prompts=Prompts.EACH)
        if reader.identity.window_layers or reader.identity.states is not None:
            raise CheckFailedError(f"model {model} has layers that keep something else than all keys")
        runner = reader if device == "cpu" else ModelRunner(folder, device)
        tokens = parse_length(context_length)
        prefix = reader.tokenizer.prefix_ids
        made = make_documents(
            reader.tokenizer,
            source_text(()),
            tokens - len(prefix),
            [DocumentSet(documents, facts)],
            seed=0,
            spare=16 * text_tokens,
        )
        scores: dict[str, list[list[SegmentScore]]] = {name: [] for name, _, _ in chosen}
        for document in made:
            kv = read_document(reader, [*prefix, *reader.tokenizer.encode_behind(document.text)])
            segments = segments_of(reader, document, text_tokens, chat)
            whole = in_form(reader, METHODS["full"], "float32", kv)
            expected = [reference_log_probs(reader, whole, METHODS["full"], each) for each in segments]
            whole.release()
            for name, method, rows in chosen:
                context = in_form(runner, method, rows, kv)
                scores[name].append(
                    [
                        score_segment(runner, context, method, segment, reference)
                        for segment, reference in zip(segments, expected, strict=True)
                    ]
                )
                context.release()
        for name, _, rows in chosen:
            line: dict[str, Any] = {"model": model, "tokens": tokens, "case": name, "rows": rows}
            report.add(line | {"documents": len(made), "where": device} | figures(scores[name]))


if __name__ == "__main__":
    typer.run(main)
