"""Tiny models with states, chunks, latents or learnt indexes, in every way in which tokens stand behind a text."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode_engine.model.runner import ModelRunner
from index_store.models.loading import resolve_model
from tests.ops.scripts import load_script
from tests.support.models import write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
KINDS = [
    "bailing_hybrid",
    "bamba",
    "axk2",
    "deepseek_v2",
    "deepseek_v32",
    "dots3_note_text",
    "falcon_h1",
    "glm_moe_dsa",
    "granitemoehybrid",
    "hy_v4",
    "jamba",
    "kimi_linear",
    "lara_mini",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "llama4_text",
    "minimax",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "zamba",
    "zamba2",
    "zaya",
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
