"""GGUF files of every kind: the logits of the folder that they were written from, or a refusal that names the key."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from index_store.errors import ModelUnsupportedError
from index_store.models.attention_reading import read_config
from index_store.models.loading import identify, load_model, load_tokenizer
from index_store.models.resolve import resolve_model
from tests.index_store.models.gguf_files import write_gguf
from tests.support.models import write_model_folder

TEXT = "The price of the lantern is 4821."


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "llama")


def test_a_gguf_file_is_served_as_the_model_that_it_came_from(folder: Path, tmp_path: Path) -> None:
    file = write_gguf(folder, tmp_path / "tiny.gguf")
    found = resolve_model(str(file))
    assert found.name == "tiny"
    identity = identify(found)
    assert (identity.layers, identity.query_heads, identity.kv_heads) == (2, 4, 2)
    tokenizer, original = load_tokenizer(found), load_tokenizer(resolve_model(str(folder)))
    ids = tokenizer.encode(TEXT)
    assert ids == original.encode(TEXT)
    assert tokenizer.eos_ids == original.eos_ids
    with torch.inference_mode():
        made = load_model(found, "sdpa").model(torch.tensor([ids])).logits
        expected = load_model(resolve_model(str(folder)), "sdpa").model(torch.tensor([ids])).logits
    torch.testing.assert_close(made, expected)


def test_quantised_weights_become_bfloat16(folder: Path, tmp_path: Path) -> None:
    file = write_gguf(folder, tmp_path / "tiny.gguf", kind=gguf.GGMLQuantizationType.Q8_0)
    found = resolve_model(str(file))
    settings = json.loads((found.path / "config.json").read_text())
    assert settings["dtype"] == "bfloat16"
    assert "quantization_config" not in settings
    assert load_model(found, "sdpa").kv_dtype == "bfloat16"


def test_the_cache_goes_by_content(folder: Path, tmp_path: Path, cache: Path) -> None:
    first = write_gguf(folder, tmp_path / "first.gguf")
    second = tmp_path / "second.gguf"
    shutil.copyfile(first, second)
    one, two = resolve_model(str(first)), resolve_model(str(second))
    assert one.path == two.path
    assert (one.name, two.name) == ("first", "second")
    assert identify(one).fingerprint == identify(two).fingerprint
    write_gguf(folder, first, kind=gguf.GGMLQuantizationType.Q8_0)
    assert resolve_model(str(first)).path != one.path
    assert sorted(cache.iterdir()) == sorted({one.path, resolve_model(str(first)).path})


def test_what_is_no_usable_gguf_file_is_refused(folder: Path, tmp_path: Path, cache: Path) -> None:
    text = tmp_path / "text.gguf"
    text.write_text("not a model")
    with pytest.raises(ModelUnsupportedError, match="no GGUF file"):
        resolve_model(str(text))
    whole = write_gguf(folder, tmp_path / "whole.gguf").read_bytes()
    short = tmp_path / "short.gguf"
    short.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        ModelUnsupportedError, match=r"'short' cannot be served: the GGUF file cannot be converted"
    ):
        resolve_model(str(short))
    other = write_gguf(folder, tmp_path / "other.gguf", architecture="an_unknown_one")
    with pytest.raises(ModelUnsupportedError, match="an_unknown_one"):
        resolve_model(str(other))
    assert list(cache.iterdir()) == []


def test_missing_packages_are_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(folder, tmp_path / "tiny.gguf")
    monkeypatch.setattr("index_store.models.gguf_file.find_spec", lambda name: None)
    with pytest.raises(
        ModelUnsupportedError, match=r"needs the package gguf: pip install 'sparsekv\[gguf\]'"
    ):
        resolve_model(str(file))


def test_a_model_that_was_not_fetched_says_how(cache: Path, folder: Path) -> None:
    with pytest.raises(ModelUnsupportedError, match="decode-engine fetch-model smollm2"):
        resolve_model("smollm2")
    shutil.copytree(folder, cache / "smollm2")
    assert resolve_model("smollm2").name == "smollm2"


TOKENS = 160
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LLAMA_3 |= {"original_max_position_embeddings": 64}
SHORT, LONG = [1.0, 1.1, 1.3, 1.7, 2.0, 2.5, 3.0, 4.0], [8.0] * 8
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT, "long_factor": LONG}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOWS = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA_3 = {"sliding_window": 24, "query_pre_attn_scalar": 16}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}


def linear(factor: float) -> Mapping[str, object]:
    return {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": factor}}


CASES: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "plain": ("llama", {}, {}),
    "another base": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {}),
    "rope of none": ("llama", {}, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
    "linear": ("llama", linear(4.0), {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "linear by default": ("llama", linear(4.0), {"rope.scaling.factor": 4.0}),
    "linear in old files": ("llama", linear(2.0), {"rope.scale_linear": 2.0}),
    "yarn": ("llama", {"rope_parameters": YARN}, YARN_KEYS | {"rope.scaling.finetuned": True}),
    "yarn with settings": (
        "qwen3",
        {
            "rope_parameters": {
                **YARN,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "attention_factor": 1.5 * (0.1 * math.log(4) + 1),
            }
        },
        {
            **YARN_KEYS,
            "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.yarn_beta_slow": 2.0,
            "rope.scaling.attn_factor": 1.5,
            "rope.scaling.yarn_ext_factor": 1.0,
        },
    ),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "tied": ("llama", {"tie_word_embeddings": True}, {}),
    "heads of another width": ("llama", {"head_dim": 32}, {}),
    "another epsilon": ("llama", {"rms_norm_eps": 0.1}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True, "head_dim": 32}, {}),
    "qwen3": ("qwen3", {"head_dim": 32}, {}),
    "qwen2moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 48}, {"expert_shared_count": 1}),
    "qwen3moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}, {"expert_weights_norm": True}),
    "qwen3moe by default": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}, {}),
    "phi3": ("phi3", {}, {}),
    "phi3 with a window": ("phi3", {"sliding_window": 24}, {"attention.sliding_window": 24}),
    "starcoder2": ("starcoder2", {"norm_epsilon": 1e-3, "tie_word_embeddings": True}, {}),
    "gemma2": (
        "gemma2",
        {
            **WINDOWS,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
        },
        {"attention.sliding_window": 24},
    ),
    "gemma3": (
        "gemma3_text",
        {
            **GEMMA_3,
            "tie_word_embeddings": True,
            "rope_parameters": {
                **TWO_ROPES,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {"attention.sliding_window": 24, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "gemma3 with all settings": (
        "gemma3_text",
        {**GEMMA_3, "layer_types": WINDOWS["layer_types"], "rope_parameters": TWO_ROPES},
        {
            "attention.sliding_window": 24,
            "attention.sliding_window_pattern": [True, False],
            "attention.scale": 0.25,
            "rope.freq_base_swa": 2e4,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
}


def make(tmp_path: Path, family: str, config: Mapping[str, Any]) -> Path:
    layers = 7 if family == "gemma3_text" and "layer_types" not in config else 2
    own = {"head_dim": 16, "layers": layers, **config}
    return write_model_folder(tmp_path / "folder", family, max_positions=256, **own)


def check_same(folder: Path, file: Path) -> Path:
    """Logits and greedy tokens by file and folder; returns the folder that the file became."""
    made, original = resolve_model(str(file)), resolve_model(str(folder))
    ids = torch.randint(3, 258, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        one, other = (
            load_model(made, "eager").model(ids).logits,
            load_model(original, "eager").model(ids).logits,
        )
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.std()))
    assert torch.equal(one.argmax(-1), other.argmax(-1))
    assert identify(made).max_positions == 256
    return made.path


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_folder(tmp_path: Path, case: str) -> None:
    family, config, settings = CASES[case]
    folder = make(tmp_path, family, config)
    check_same(folder, write_gguf(folder, tmp_path / "file.gguf", settings=settings))


def llama_3_factors(folder: Path) -> torch.Tensor:
    """By what llama.cpp divides the frequencies, as its converter writes it into a file."""
    config = read_config(resolve_model(str(folder)))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return 1.0 / (1e4 ** (torch.arange(0, 16, 2) / 16)) / scaled


def test_factors_of_frequencies_are_used(tmp_path: Path) -> None:
    folder = make(tmp_path, "llama", {"rope_parameters": LLAMA_3})
    factors = llama_3_factors(folder)
    assert factors.max() > 7
    file = write_gguf(folder, tmp_path / "file.gguf", tensors={"rope_freqs.weight": factors})
    made = check_same(folder, file)
    assert json.loads((made / "config.json").read_text())["rope_parameters"]["long_factor"] == pytest.approx(
        factors.tolist()
    )


def test_factors_for_short_and_long_texts_are_used(tmp_path: Path) -> None:
    rope = {**LONGROPE, "attention_factor": 1.2}
    folder = make(tmp_path, "phi3", {"rope_parameters": rope, "original_max_position_embeddings": 128})
    tensors = {
        "rope_factors_short.weight": torch.tensor(SHORT),
        "rope_factors_long.weight": torch.tensor(LONG),
    }
    settings = {
        "rope.scaling.original_context_length": 128,
        "rope.scaling.attn_factor": 1.2,
        "rope.scaling.type": "longrope",
    }
    made = resolve_model(str(write_gguf(folder, tmp_path / "file.gguf", settings=settings, tensors=tensors)))
    original = resolve_model(str(folder))
    ids = torch.randint(3, 258, (1, 200), generator=torch.Generator().manual_seed(1))
    assert identify(made).max_positions == identify(original).max_positions == 128
    for count in (100, 200):  # with the short ones, and with the long ones
        with torch.inference_mode():
            one, other = (load_model(own, "eager").model(ids[:, :count]).logits for own in (made, original))
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


UNUSABLE: list[tuple[str, Mapping[str, Any], str]] = [
    ("llama", {"rope.scaling.type": "su"}, "rope.scaling.type"),
    (
        "llama",
        {"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0},
        "rope.scaling.type",
    ),  # without factors
    ("llama", {**YARN_KEYS, "rope.scaling.yarn_log_multiplier": 0.5}, "rope.scaling.yarn_log_multiplier"),
    ("llama", {**YARN_KEYS, "rope.scaling.yarn_ext_factor": 0.5}, "rope.scaling.yarn_ext_factor"),
    ("llama", {"rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 1.5}, "rope.scaling.attn_factor"),
    ("llama", {"rope.dimension_count": 8}, "rope.dimension_count"),
    ("llama", {**YARN_KEYS, "rope.dimension_count": 8}, "rope.dimension_count"),
    ("llama", {"attention.value_length": 8}, "attention.value_length"),
    ("llama", {"attention.scale": 0.5}, "attention.scale"),
    ("llama", {"attention.sliding_window": 24}, "attention.sliding_window"),
    ("qwen2", {"attention.sliding_window": 24}, "attention.sliding_window"),  # that is not used
    ("qwen2", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping"),
    ("llama", {"expert_count": 4}, "expert_count"),
    ("qwen3", {"expert_gating_func": 2}, "expert_gating_func"),
    ("llama", {"attention.twist": 1}, "attention.twist"),  # which nobody knows
]
"""Families, settings of the architecture, and the one that a refusal names with its value."""

OTHERWISE: list[tuple[Mapping[str, Any], str]] = [
    (
        {"tensors": {"rope_freqs.weight": torch.ones(8)}, "settings": YARN_KEYS},
        "rope_freqs.weight beside llama.rope.scaling.factor",
    ),
    (
        {"tensors": {"blk.0.attn_q.bias": torch.zeros(64)}},
        "blk.0.attn_q.bias has no place",
    ),  # of queries alone
    ({"tensors": {"blk.1.attn_sinks.weight": torch.zeros(4)}}, "blk.1.attn_sinks.weight has no place"),
    ({"without": "blk.1.ffn_up.weight"}, "no tensor for model.layers.1.mlp.up_proj.weight"),
    ({"settings": {"vocab_size": 300}}, "embed_tokens.weight is [259, 64], expected [300, 64]"),
    ({"architecture": "bloom"}, "general.architecture is 'bloom'"),
    ({"more": {"split.count": 3}}, "split.count is 3"),
    ({"more": {"general.type": "adapter"}}, "general.type is 'adapter'"),
    ({"more": {"pre": "exotic"}}, "tokenizer.ggml.pre is 'exotic'"),
    ({"more": {"add_eos_token": True}}, "tokenizer.ggml.add_eos_token is True"),
    ({"more": {"model": "rwkv"}}, "rwkv"),
]
"""Arguments of `write_gguf`, and what a refusal says."""

REFUSED = [
    *(
        (family, {"settings": settings}, f"{family}.{name} is {settings[name]!r}")
        for family, settings, name in UNUSABLE
    ),
    *(("llama", arguments, message) for arguments, message in OTHERWISE),
]


@pytest.mark.parametrize(("family", "arguments", "message"), REFUSED)
def test_what_would_be_lost_is_refused_by_name(
    tmp_path: Path, family: str, arguments: Mapping[str, Any], message: str
) -> None:
    file = write_gguf(make(tmp_path, family, {}), tmp_path / "file.gguf", **arguments)
    with pytest.raises(ModelUnsupportedError, match=re.escape(message)):
        resolve_model(str(file))
    assert not list((tmp_path / "cache").rglob("config.json"))


@pytest.mark.parametrize("begins", [True, False])
def test_texts_begin_as_the_file_says(tmp_path: Path, begins: bool) -> None:
    folder = make(tmp_path, "llama", {})
    more = {"bos_token_id": 2, "add_bos_token": begins, "eot_token_id": 1}
    tokenizer = load_tokenizer(resolve_model(str(write_gguf(folder, tmp_path / "file.gguf", more=more))))
    assert tokenizer.prefix_ids == ((2,) if begins else ())
    assert tokenizer.eos_ids == (0, 1)


@pytest.mark.parametrize(("pre", "pieces"), [("gpt-2", 3), ("smollm", 4), ("llama-bpe", 3)])
def test_texts_are_cut_as_the_file_says(tmp_path: Path, pre: str, pieces: int) -> None:
    folder = make(tmp_path, "llama", {})
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    tokens[-3:] = ["12", "xx", "yz"]  # places of bytes that the texts here do not have
    more = {"pre": pre, "tokens": tokens, "merges": ["1 2", "x x"]}
    tokenizer = load_tokenizer(resolve_model(str(write_gguf(folder, tmp_path / "file.gguf", more=more))))
    assert len(tokenizer.encode("xx12x")) == pieces
    assert len(tokenizer.encode("yz")) == (1 if pre == "llama-bpe" else 2)  # a whole word, without a merge


@pytest.mark.parametrize("blank", [True, False, None])
def test_texts_begin_with_a_blank_as_the_file_says(tmp_path: Path, blank: bool | None) -> None:
    folder = make(tmp_path, "llama", {})
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    bytes_ = [f"<0x{number:02X}>" for number in range(256 - len(letters))]
    tokens = ["<unk>", "<s>", "</s>", *letters, *bytes_]
    types = [2, 3, 3, *[1] * len(letters), *[6] * len(bytes_)]
    more = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "token_type": types,
        "scores": [0.0] * len(tokens),
    }
    more |= {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "merges": None,
        "add_space_prefix": blank,
    }
    tokenizer = load_tokenizer(resolve_model(str(write_gguf(folder, tmp_path / "file.gguf", more=more))))
    assert tokenizer.prefix_ids[:1] == (1,)
    ids = list(tokenizer._backend("ab c", add_special_tokens=False)["input_ids"])
    assert [tokens[id_] for id_ in ids] == [
        *(["\u2581"] if blank is not False else []),
        "a",
        "b",
        "\u2581",
        "c",
    ]
    assert tokenizer.decode(ids) == "ab c"
