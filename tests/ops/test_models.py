"""Scripts of models in small: a reader that is trained can be served, tiny architectures answer alike in every way."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from decode_engine.model.runner import ModelRunner
from index_store.models.loading import identify, load_model, load_tokenizer, resolve_model
from tests.ops.scripts import load_script
from tests.support.forking import ran
from tests.support.models import write_tokenizer

SCRIPTS = Path(__file__).parents[2] / "ops" / "reader"


def run_script(name: str, *arguments: str) -> None:
    done = ran([sys.executable, str(SCRIPTS / name), *arguments], env={**os.environ, "OMP_NUM_THREADS": "2"})
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


ROOT = Path(__file__).resolve().parents[2]
KINDS = [
    *("bailing_hybrid", "bamba", "axk2", "deepseek_v2", "deepseek_v32", "dots3_note_text", "falcon_h1"),
    *("glm_moe_dsa", "granitemoehybrid", "hy_v4", "jamba", "kimi_linear", "lara_mini", "lfm2", "lfm2_moe"),
    *("lfm3", "llama4_text", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_text", "qwen3_5_moe_text"),
    *("qwen3_next", "zamba", "zamba2", "zaya"),
]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_gives_the_tokens_of_generate(tmp_path: Path, kind: str) -> None:
    script = load_script(ROOT / "ops" / "models" / "check_architectures.py")
    write_tokenizer(tmp_path)
    model = script.make_model(script.tiny_config(kind))
    model.save_pretrained(tmp_path)
    found = script._ways(ModelRunner(resolve_model(str(tmp_path))), tmp_path, model, script.LENGTHS[0])
    assert set(found.values()) == {script.NEW_TOKENS}
