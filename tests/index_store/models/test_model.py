"""Models: found, identified by content, refused with a sentence, loaded; and their tokenizers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from index_store.errors import InvalidArgumentError, ModelUnsupportedError
from index_store.models.loading import (
    check_positions,
    checkpoint_dtype,
    identify,
    load_model,
    load_tokenizer,
    resolve_model,
)
from tests.support.models import BEGIN_TOKEN, FAMILIES, write_model_folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "llama")


def copy_with(folder: Path, target: Path, file: str = "config.json", **changes: object) -> Path:
    """A copy of a model folder with some entries of a JSON file replaced."""
    shutil.copytree(folder, target)
    settings = json.loads((target / file).read_text())
    settings.update(changes)
    (target / file).write_text(json.dumps(settings))
    return target


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_and_is_identified(tmp_path: Path, family: str) -> None:
    folder = resolve_model(str(write_model_folder(tmp_path / family, family, dtype=torch.bfloat16)))
    identity = identify(folder)
    assert (identity.layers, identity.query_heads, identity.kv_heads, identity.head_dim) == (2, 4, 2, 16)
    assert identity.max_positions == 4096
    loaded = load_model(folder, "sdpa")
    assert loaded.kv_dtype == checkpoint_dtype(folder) == "bfloat16"
    assert next(loaded.model.parameters()).dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert not loaded.model.training


def test_packaged_reader_answers_about_its_context() -> None:
    folder = resolve_model("reader")
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, "sdpa").model
    text = (
        "He walked to the harbour. The access code of the silver falcon is 48213. The wind had risen again."
    )
    question = tokenizer.format_question("What is the access code of the silver falcon?")
    assert question == "\nQuestion: What is the access code of the silver falcon?\nAnswer:"
    ids = tokenizer.encode(text + question)
    out = model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :].tolist()
    assert tokenizer.decode(out).startswith(" The access code of the silver falcon is 48213.")


def test_fingerprint_follows_content_not_place(llama: Path, tmp_path: Path) -> None:
    original = identify(resolve_model(str(llama)))
    moved = copy_with(
        llama, tmp_path / "elsewhere", transformers_version="1.2.3", _name_or_path="x", use_cache=False
    )
    assert identify(resolve_model(str(moved))).fingerprint == original.fingerprint
    theta = copy_with(llama, tmp_path / "theta", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert identify(resolve_model(str(theta))).fingerprint != original.fingerprint

    weights = tmp_path / "weights"
    shutil.copytree(llama, weights)
    tensors = load_file(weights / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(tensors, weights / "model.safetensors", metadata={"format": "pt"})
    changed = identify(resolve_model(str(weights)))
    assert changed.fingerprint != original.fingerprint
    assert changed.tokenizer_fingerprint == original.tokenizer_fingerprint


def test_changed_weights_in_the_same_place_are_noticed(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    before = identify(resolve_model(str(folder))).fingerprint
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert identify(resolve_model(str(folder))).fingerprint != before


def test_tokenizer_fingerprint_ignores_only_the_chat_template(llama: Path, tmp_path: Path) -> None:
    original = identify(resolve_model(str(llama))).tokenizer_fingerprint
    worded = copy_with(llama, tmp_path / "worded", "tokenizer_config.json", chat_template="{{ 'hello' }}")
    assert identify(resolve_model(str(worded))).tokenizer_fingerprint == original
    cut = copy_with(llama, tmp_path / "cut", "tokenizer_config.json", eos_token="<|pad|>")
    assert identify(resolve_model(str(cut))).tokenizer_fingerprint != original


@pytest.mark.parametrize("name", ["no-such-model", "meta-llama/Llama-3.1-8B"])
def test_unknown_names_are_not_downloaded(name: str) -> None:
    with pytest.raises(ModelUnsupportedError, match="models are not downloaded"):
        resolve_model(name)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupportedError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_missing_files_are_named(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "model")
    folder = resolve_model(str(tmp_path / "model"))
    (folder.path / "model.safetensors").unlink()
    (folder.path / "tokenizer.json").unlink()
    with pytest.raises(ModelUnsupportedError, match=r"weights model\.safetensors are missing"):
        identify(folder)
    with pytest.raises(ModelUnsupportedError, match="it has no tokenizer"):
        load_tokenizer(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "llama", "vocab_size": "many"}', "{}"])
def test_unreadable_configurations_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelUnsupportedError, match=r"config\.json cannot be read"):
        identify(resolve_model(str(tmp_path)))


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": {"a": "gone.safetensors"}}'])
def test_unusable_weight_lists_are_refused(llama: Path, tmp_path: Path, text: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(
        ModelUnsupportedError, match=r"index\.json cannot be read|gone\.safetensors are missing"
    ):
        identify(resolve_model(str(folder)))


def test_weights_that_lack_a_parameter_are_refused(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelUnsupportedError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(resolve_model(str(folder)), "sdpa")


def test_truncated_weights_are_refused(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelUnsupportedError, match="cannot be loaded"):
        load_model(resolve_model(str(folder)), "sdpa")


def test_sliding_window_limits_the_positions(tmp_path: Path) -> None:
    active = write_model_folder(tmp_path / "active", "mistral", sliding_window=512)
    identity = identify(resolve_model(str(active)))
    assert identity.max_positions == 512
    check_positions(identity, 512)
    with pytest.raises(InvalidArgumentError, match="513 tokens are more than the 512 positions"):
        check_positions(identity, 513)
    unused = write_model_folder(tmp_path / "unused", "qwen2", sliding_window=512, use_sliding_window=False)
    assert identify(resolve_model(str(unused))).max_positions == 4096


def write_config(folder: Path, family: str, **settings: object) -> Path:
    """A folder with a small configuration of another architecture, and files that only have to exist."""
    small = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    AutoConfig.for_model(family, **{**small, **settings}).save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "num_key_value_heads": 2}, "softcap"),
        ("bloom", {"max_position_embeddings": 512}, "attention interface"),
        ("stablelm", {"intermediate_size": 64, "num_key_value_heads": 2}, "attention interface"),
        ("granite", {"attention_multiplier": 0.5, "num_key_value_heads": 2}, "scales logits by 0.5"),
        ("t5", {}, "encoder-decoder"),
        ("vit", {}, "not a causal language model"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "dynamic position encoding",
        ),
        (
            "qwen3",
            {"layer_types": ["full_attention", "chunked_attention"]},
            "layers of kind chunked_attention",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_before_weights_are_read(
    tmp_path: Path, family: str, settings: dict[str, object], message: str
) -> None:
    folder = resolve_model(str(write_config(tmp_path / family, family, **settings)))
    with pytest.raises(ModelUnsupportedError, match=message):
        load_model(folder, "sdpa")


def test_code_in_a_model_folder_is_not_run(llama: Path, tmp_path: Path) -> None:
    folder = copy_with(
        llama, tmp_path / "remote", model_type="homemade", auto_map={"AutoConfig": "evil.Config"}
    )
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelUnsupportedError, match=r"config\.json cannot be read"):
        identify(resolve_model(str(folder)))
    assert not (tmp_path / "ran").exists()


def test_tokenizer_round_trip_and_special_ids(llama: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve_model(str(llama)))
    assert tokenizer.decode(tokenizer.encode("Grüße, 東京!\n ok")) == "Grüße, 東京!\n ok"
    assert tokenizer.encode("") == []
    assert tokenizer.prefix_ids == ()
    assert tokenizer.eos_ids == (0,)
    assert tokenizer.decode([0, *tokenizer.encode("end"), 0]) == "end"

    several = tmp_path / "several"
    shutil.copytree(llama, several)
    (several / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))
    assert load_tokenizer(resolve_model(str(several))).eos_ids == (0, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "its tokenizer.json is not JSON"),
        ("[]", "its tokenizer.json is not a JSON object"),
        ("{}", "its tokenizer.json has no field 'model'"),
        ('{"model": {}, "added_tokens": []}', "its tokenizer cannot be loaded from tokenizer.json"),
    ],
)
def test_a_broken_tokenizer_is_named(llama: Path, tmp_path: Path, text: str, message: str) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "broken"))
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ModelUnsupportedError, match=f"{message}.*anew from where the model comes from"):
        load_tokenizer(resolve_model(str(folder)))


def test_begin_token_is_for_the_context_not_for_questions(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for message in messages %}Q: {{ message['content'] }} A:{% endfor %}"
    folder = write_model_folder(tmp_path / "model", add_begin=True, chat_template=template)
    tokenizer = load_tokenizer(resolve_model(str(folder)))
    assert tokenizer.prefix_ids == (2,)
    assert 2 not in tokenizer.encode("text")
    assert tokenizer.format_question("Why?") == "Q: Why? A:"
    assert BEGIN_TOKEN not in tokenizer.format_question("Why?")


def test_a_model_without_chat_template_says_so(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model", chat_template=None)
    with pytest.raises(InvalidArgumentError, match="no chat template"):
        load_tokenizer(resolve_model(str(folder))).format_question("Why?")


def test_a_broken_chat_template_says_so(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model", chat_template="{{ raise_exception('only in French') }}")
    with pytest.raises(InvalidArgumentError, match="only in French"):
        load_tokenizer(resolve_model(str(folder))).format_question("Why?")
