"""The benchmark of checkpoints on a GPU: its whole path on a CPU, with tiny models of the same kinds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen3NextConfig

from tests.ops.bench.conftest import Run, load_bench
from tests.support.models import STATEFUL

TINY = {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4}
SAME = {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096, "eos_token_id": None}
SETTINGS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def tiny_config(shape: str, layers: int) -> Any:
    if shape == "qwen3-next":
        return Qwen3NextConfig(**{**TINY, **SAME, **STATEFUL["qwen3_next"], "num_hidden_layers": layers})
    return LlamaConfig(**TINY, **SAME, num_hidden_layers=layers, bos_token_id=None)


def write_float8(folder: Path, source: Path) -> None:
    """Without the quantizer of transformers, which asks for a GPU."""
    shutil.copytree(source, folder)
    stored = load_file(folder / "model.safetensors")
    for name, weight in dict(stored).items():
        if name.endswith("proj.weight"):
            scale = weight.abs().max().float() / 448
            stored[name] = (weight / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale.view(1, 1).repeat(*(-(-each // 128) for each in weight.shape))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": SETTINGS}))


def test_folders_are_stored_checked_and_timed(
    without_gpu: None, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = load_bench("whole_model/checkpoints_gpu")
    monkeypatch.setattr(bench, "config_of", tiny_config)
    monkeypatch.setattr(bench, "write_float8", write_float8)
    found, code, said = run(
        bench, shapes="qwen3-next,8b,8b-float8", tokens=600, layers=3, sessions="1,2", answer=6, folder=None,
        methods="full,refined:0.05",
    )  # fmt: skip
    assert code == 0, said
    stored = {line["shape"]: line for line in found if line["figure"] == "stored"}
    assert stored["qwen3-next"]["states_mb"] > 0 == stored["8b"]["states_mb"]
    steps = [line for line in found if line["figure"] == "step"]
    assert len(steps) == 3 * 2 * 2
    weights = [line for line in found if line["figure"] == "weights"]
    attention = [line["kl_attention"] for line in weights if "kl_attention" in line]
    assert len(attention) == 2
    assert 0 < weights[-1]["kl_weights"] < 1
