"""The scripts that made the packaged model run, in miniature, and what they make can be served."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from index_store.models.loading import identify, load_model, load_tokenizer, resolve_model

SCRIPTS = Path(__file__).parents[2] / "ops" / "reader"


def run_script(name: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / name), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr[-3000:]


def write_books(folder: Path, count: int = 4, words: int = 6000) -> None:
    """Books of made-up words, with line breaks as in plain-text novels."""
    random = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    vocabulary = sorted({"".join(random.choice(letters, random.integers(4, 10))) for _ in range(4500)})
    folder.mkdir()
    for number in range(count):
        chosen = random.choice(vocabulary, words)
        lines = [" ".join(chosen[start : start + 9]) for start in range(0, words, 9)]
        (folder / f"{number}.txt").write_text("\r\n".join(lines) + ".\n\nThe end.\n")


@pytest.mark.nightly
def test_corpus_and_training_make_a_model_that_can_be_served(tmp_path: Path) -> None:
    write_books(tmp_path / "books")
    data, out = tmp_path / "data", tmp_path / "checkpoint"
    run_script("prep_corpus.py", str(tmp_path / "books"), str(data), "--held", "1", "--vocab", "600")
    assert len(json.loads((data / "words.json").read_text())) == 4000
    small = ["--hidden", "32", "--layers", "2", "--intermediate", "64", "--head-dim", "16"]
    run = ["--device", "cpu", "--no-compile", "--workers", "1", "--stages", "256:2:2"]
    run_script("train.py", str(data), str(out), *small, *run)

    folder = resolve_model(str(out))
    identity = identify(folder)
    assert (identity.architecture, identity.layers, identity.vocab_size) == ("LlamaForCausalLM", 2, 600)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.format_question("Who?") == "\nQuestion: Who?\nAnswer:"
    assert len(tokenizer.encode("48213")) == 5
    with torch.inference_mode():
        logits = load_model(folder, "sdpa").model(torch.tensor([tokenizer.encode("The end.")])).logits
    assert torch.isfinite(logits).all()
