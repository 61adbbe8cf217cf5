"""What `refined` costs in predictions, on the packaged reader and a text that it was not trained on."""

from __future__ import annotations

import io
from pathlib import Path

from decode_engine.evaluation.scoring import Segment, reference_log_probs, score_segment
from decode_engine.evaluation.tasks.documents import held_out_text
from decode_engine.model.runner import ModelRunner
from index_store.cli.progress import LineReporter
from index_store.memory.arena import Arena
from index_store.methods.presets import METHODS, get_method
from index_store.models.loading import load_tokenizer, resolve_model
from index_store.store.catalog import Store
from prefill_worker.config import PrefillConfig
from prefill_worker.jobs.job import run_job

CHARACTERS = 6_000


def test_refined_predicts_the_text_that_follows_as_full_attention_does(tmp_path: Path) -> None:
    """With one key in a hundred attended exactly: closer by far than clusters for the rest of the keys."""
    text, folder = held_out_text(), resolve_model("reader")
    (tmp_path / "text.txt").write_text(text[:CHARACTERS])
    compared = ("refined", "refined-3", "pq+centred")
    config = PrefillConfig(
        model="reader",
        input=(tmp_path / "text.txt",),
        store=tmp_path / "store",
        method=compared,
        index=("product_codes:iterations=2", "remainder_clusters:iterations=2"),
        query_sample=512,
    )
    manifest = run_job(config, LineReporter(io.StringIO()), io.BytesIO()).manifest
    following = load_tokenizer(folder).encode(text[CHARACTERS : CHARACTERS + 250])
    segment, runner = Segment(tuple(following)), ModelRunner(folder)
    with Arena(1 << 28).acquire(Store(config.store), manifest.id) as context:
        reference = reference_log_probs(runner, context, METHODS["full"], segment)
        divergence = {
            name: float(
                score_segment(runner, context, get_method(name, 0.01), segment, reference).kl_T.mean()
            )
            for name in compared
        }
    assert divergence["refined"] < 4e-4
    assert divergence["refined"] < divergence["refined-3"] < 3e-3
    assert 10 * divergence["refined"] < divergence["pq+centred"]
