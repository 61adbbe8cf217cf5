"""Checkpoints in 8 and 4 bits have, once loaded, the weights that their numbers stand for, or are refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from index_store.errors import ModelUnsupportedError
from index_store.models.loading import identify, load_model, resolve_model
from index_store.models.state_cache import StateCache, TextStates
from index_store.models.token_by_token import noting_readers, read_singly
from tests.support.models import LAYER_KINDS, write_model_folder, write_tokenizer

BLOCK, WIDTH = 64, 128
FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
_OF_EIGHT = {"num_bits": 8, "type": "float", "symmetric": True}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_OF_EIGHT, "strategy": "channel", "dynamic": False},
            "input_activations": {**_OF_EIGHT, "strategy": "token", "dynamic": True},
        }
    },
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
FOUR_BITS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def write_quantized(folder: Path, settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """A Llama whose projections are float8; returns the weights that they stand for, float32."""
    write_model_folder(folder, "llama", hidden=WIDTH, head_dim=64, dtype=torch.bfloat16)
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith("proj.weight"):
            stored[name] = weight
            continue
        rows, columns = weight.shape
        high, wide = (BLOCK, BLOCK) if settings is FP8 else (1, columns)
        blocks = weight.float().view(rows // high, high, columns // wide, wide)
        scales = (blocks.abs().amax((1, 3), keepdim=True) / 448).bfloat16().float()
        coded = (blocks / scales).to(torch.float8_e4m3fn)
        scale_name = f"{name}_scale_inv" if settings is FP8 else f"{name}_scale"
        grid = scales.view(rows // high, columns // wide)
        stored |= {name: coded.view(rows, columns), scale_name: grid if settings is FP8 else grid.bfloat16()}
        meant[name] = (coded.float() * scales).view(rows, columns)
    finish(folder, stored, settings)
    return meant


def finish(folder: Path, stored: dict[str, Tensor], settings: Mapping[str, Any]) -> None:
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


@pytest.mark.skipif(
    find_spec("accelerate") is None or find_spec("compressed_tensors") is None,
    reason="needs sparsekv[quantized]",
)
@pytest.mark.parametrize("settings", [FP8, COMPRESSED], ids=["fp8", "compressed-tensors"])
def test_weights_in_8_bits_are_widened_and_fingerprinted(tmp_path: Path, settings: Mapping[str, Any]) -> None:
    meant = write_quantized(tmp_path, settings)
    folder = resolve_model(str(tmp_path))
    loaded = load_model(folder, "sdpa")
    for name, weight in meant.items():
        found = loaded.model.get_parameter(name)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.data, weight, rtol=1e-2, atol=1e-4)  # a product may be of 16 bits
    assert loaded.kv_dtype == "bfloat16"
    stored = load_file(tmp_path / "model.safetensors")
    scale = next(name for name in stored if "scale" in name)
    stored[scale].view(-1)[0] *= 2
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert identify(folder).fingerprint != loaded.identity.fingerprint


def test_experts_in_4_bits_are_widened(tmp_path: Path) -> None:
    write_model_folder(
        tmp_path,
        "gpt_oss",
        dtype=torch.bfloat16,
        num_local_experts=2,
        num_experts_per_tok=2,
        sliding_window=24,
    )
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    lut = torch.tensor([*FOUR_BITS, *(-each for each in FOUR_BITS)])
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = weight
            continue
        experts, inner, outer = weight.shape
        codes = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
        powers = torch.randint(122, 126, (experts, outer, inner // 32), dtype=torch.uint8)
        stored |= {f"{name}_blocks": codes, f"{name}_scales": powers}
        values = torch.stack([lut[(codes & 15).long()], lut[(codes >> 4).long()]], dim=-1).flatten(-2)
        scaled = values * torch.exp2(powers.float() - 127)[..., None]
        meant[name] = scaled.view(experts, outer, inner).transpose(1, 2)
    assert len(meant) == 4
    finish(tmp_path, stored, MXFP4)
    loaded = load_model(resolve_model(str(tmp_path)), "eager")
    for name, weight in meant.items():
        assert torch.equal(loaded.model.get_parameter(name).data, weight)


@pytest.mark.parametrize(
    ("settings", "absent", "why"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "",
            r"quantized \(bitsandbytes\), of which fp8,",
        ),
        ({"quant_method": "torchao", "quant_type": {}}, "", r"quantized \(torchao\)"),
        ({"bits": 4}, "", r"quantized \(of no name\)"),
        (FP8, "accelerate", r"quantized \(fp8\), which needs accelerate; install sparsekv\[quantized\]"),
        (COMPRESSED, "compressed_tensors", r"\(compressed-tensors\), which needs .*compressed_tensors"),
    ],
)
def test_what_cannot_be_widened_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Mapping[str, Any], absent: str, why: str
) -> None:
    write_model_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    if absent:
        monkeypatch.setattr(
            "index_store.models.quantized.find_spec",
            lambda name: None if name == absent else find_spec("json"),
        )
    with pytest.raises(ModelUnsupportedError, match=why):
        load_model(resolve_model(str(tmp_path)), "sdpa")


def test_pieces_leave_what_the_whole_leaves(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    family, settings = LAYER_KINDS["single tokens"]
    folder = write_model_folder(tmp_path / "model", family, layers=3, **settings)
    write_tokenizer(folder)
    states = identify(resolve_model(str(folder))).states
    assert states is not None
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mixer = model.model.layers[0].mamba
    hidden_BTD = torch.randn(2, 9, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    calls: list[int] = []
    mixer.in_proj.register_forward_pre_hook(lambda _, args: calls.append(args[0].shape[1]))

    @torch.inference_mode()
    def read(sizes: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """In pieces of so many tokens: what comes out, and the states then."""
        texts = [TextStates(states, torch.float32) for _ in range(2)]
        found = []
        for piece in hidden_BTD.split(list(sizes), dim=1):
            cache = StateCache.over(texts)
            found.append(mixer(piece, cache=cache))
            cache.commit()
        return torch.cat(found, dim=1), [rows[0] for text in texts for rows in text.parts]

    whole, left = read([9])
    assert not torch.allclose(read([4, 5])[0], whole, atol=1e-3)
    with noting_readers(model) as names:
        read([4, 5])
    assert names == ["model.layers.0.mamba"]
    calls.clear()
    undo = read_singly(model, names)
    read_singly(model, names)  # once is enough
    found, states_found = read([4, 5])
    assert calls == [4, *[1] * 5]
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states_found, left, atol=1e-5, rtol=1e-5)
    undo()
    assert not torch.allclose(read([4, 5])[0], whole, atol=1e-3)
