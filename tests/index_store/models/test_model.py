"""Models: found, identified by content, compared with plain attention, refused with a sentence, loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.llama.modeling_llama import LlamaAttention

from index_store.attention.layer_shape import WindowLayers
from index_store.attention.logit_form import PLAIN, LogitForm
from index_store.errors import InvalidArgumentError, ModelUnsupportedError
from index_store.models import loading
from index_store.models.attention_reading import LayerReading
from index_store.models.loading import (
    LoadedModel,
    check_positions,
    checkpoint_dtype,
    identify,
    load_model,
    load_tokenizer,
    resolve_model,
)
from index_store.models.self_check import Examination, Verdict, differ, examine, rotation_differs
from tests.support.models import FAMILIES, LAYER_KINDS, write_model_folder


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_come_to_a_gpu_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_STAGED_BYTES", 1000)
    folder = resolve_model(str(write_model_folder(tmp_path, dtype=torch.bfloat16)))
    expected = dict(load_model(folder, "sdpa", torch.bfloat16).model.named_parameters())
    found = dict(load_model(folder, "sdpa", torch.bfloat16, "cuda", fused=False).model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(weight.is_cuda and torch.equal(weight.cpu(), expected[name]) for name, weight in found.items())


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


def test_tokenizer_fingerprint_ignores_only_the_chat_template(llama: Path, tmp_path: Path) -> None:
    original = identify(resolve_model(str(llama))).tokenizer_fingerprint
    worded = copy_with(llama, tmp_path / "worded", "tokenizer_config.json", chat_template="{{ 'hello' }}")
    assert identify(resolve_model(str(worded))).tokenizer_fingerprint == original
    cut = copy_with(llama, tmp_path / "cut", "tokenizer_config.json", eos_token="<|pad|>")
    assert identify(resolve_model(str(cut))).tokenizer_fingerprint != original


@pytest.mark.parametrize("name", ["no-such-model", "meta-llama/Llama-3.1-8B"])
def test_unknown_names_are_not_downloaded(name: str) -> None:
    with pytest.raises(ModelUnsupportedError, match="fetch-model"):
        resolve_model(name)


def test_windows_are_read_layer_by_layer(tmp_path: Path) -> None:
    every = identify(
        resolve_model(str(write_model_folder(tmp_path / "every", "mistral", sliding_window=512)))
    )
    assert every.window == WindowLayers((0, 1), 512, 4, 2, 16)
    assert (every.full_layers, every.max_positions) == ((), 4096)
    check_positions(every, 4096)
    with pytest.raises(InvalidArgumentError, match="4097 tokens are more than the 4096 positions"):
        check_positions(every, 4097)
    kinds = ["sliding_attention", "full_attention"]
    some = write_model_folder(
        tmp_path / "some", "qwen2", sliding_window=64, use_sliding_window=True, layer_types=kinds
    )
    identity = identify(resolve_model(str(some)))
    assert (identity.window_layers, identity.full_layers) == ((0,), (1,))
    assert [identity.shape(layer).window for layer in range(2)] == [64, None]
    for family, size in (("qwen2", 512), ("mistral", 4096)):  # not used, and as long as all positions
        folder = write_model_folder(tmp_path / f"none-{family}", family, sliding_window=size)
        assert identify(resolve_model(str(folder))).window is None


def test_positions_end_where_rotations_change(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    for family, rope, expected in (
        ("phi3", {"rope_type": "longrope", "rope_theta": 1e4, **factors}, 128),
        ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 4096),
        ("llama", {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, 4096),
        # As model cards have it: the positions left alone, at the original number or at one between.
        ("qwen2", {**yarn, "original_max_position_embeddings": 4096}, 16384),
        ("qwen3", {**yarn, "original_max_position_embeddings": 3072}, 12288),
        ("llama", {**yarn, "original_max_position_embeddings": 1024}, 4096),
        ("mistral", yarn, 16384),
    ):
        name = f"{family}-{rope['rope_type']}"
        original = {"original_max_position_embeddings": 128} if family == "phi3" else {}
        folder = write_model_folder(tmp_path / name, family, rope_parameters=rope, **original)
        assert identify(resolve_model(str(folder))).max_positions == expected


def test_positions_beyond_those_of_the_configuration_are_computed_as_transformers_does(
    tmp_path: Path,
) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    folder = write_model_folder(tmp_path, "qwen2", rope_parameters=rope, max_positions=64)
    loaded = load_model(resolve_model(str(folder)), "sdpa")
    assert loaded.identity.max_positions == 256
    check_positions(loaded.identity, 256)
    whole = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.randint(3, 258, (1, 256), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(ids).logits, whole(ids).logits)


def test_the_text_part_of_a_larger_model_is_served_without_the_rest(tmp_path: Path) -> None:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    text = {"vocab_size": 259, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    text |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
    }
    config = AutoConfig.for_model(
        "mistral3", text_config={"model_type": "mistral", **text}, vision_config=vision
    )
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config)
    whole.save_pretrained(tmp_path)
    loaded = load_model(resolve_model(str(tmp_path)), "eager")
    assert (loaded.identity.layers, loaded.identity.max_positions) == (2, 512)
    assert not any("vision" in name for name, _ in loaded.model.named_parameters())
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(ids).logits, whole.eval()(input_ids=ids).logits)


def write_config(folder: Path, family: str, **settings: object) -> Path:
    """A folder with a small configuration of another architecture, and files that only have to exist."""
    small = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    AutoConfig.for_model(family, **{**small, **settings}).save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"")
    return folder


LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("bloom", {}, "its decoder takes no position_ids"),
        ("bart", {"is_encoder_decoder": False}, "its decoder takes no position_ids"),
        ("t5", {}, "encoder-decoder"),
        ("vit", {}, "not a causal language model"),
        ("bert", {"max_position_embeddings": 512}, "layer 0 is not causal"),
        (
            "stablelm",
            {"intermediate_size": 64, "num_key_value_heads": 2},
            "do not hand on to the attention function",
        ),
        ("deepseek_v3", {"num_key_value_heads": 4, **LATENT}, "multi-head latent attention.*kv_lora_rank 16"),
        ("doge", {"num_key_value_heads": 2}, "layer 0 makes an attention mask of its own"),
        ("diffllama", {"num_key_value_heads": 2}, "its 2 layers attend 4 times in a pass"),
    ],
)
def test_what_cannot_be_served_is_refused_before_weights_are_read(
    tmp_path: Path, family: str, settings: dict[str, object], message: str
) -> None:
    folder = resolve_model(str(write_config(tmp_path / family, family, **settings)))
    with pytest.raises(ModelUnsupportedError, match=message):
        load_model(folder, "sdpa")


def test_attention_of_its_own_is_refused(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Families that attend so change from one transformers release to the next.
    def attend_alone(
        self: LlamaAttention, hidden_states: torch.Tensor, **_: object
    ) -> tuple[torch.Tensor, None]:
        return self.o_proj(self.q_proj(hidden_states)), None

    monkeypatch.setattr(LlamaAttention, "forward", attend_alone)
    with pytest.raises(ModelUnsupportedError, match="does not go through transformers' attention interface"):
        load_model(resolve_model(str(copy_with(llama, tmp_path / "own", rms_norm_eps=1e-3))), "sdpa")


def test_code_in_a_model_folder_is_not_run(llama: Path, tmp_path: Path) -> None:
    folder = copy_with(
        llama, tmp_path / "remote", model_type="homemade", auto_map={"AutoConfig": "evil.Config"}
    )
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelUnsupportedError, match=r"names code .*auto_map.* is never run"):
        identify(resolve_model(str(folder)))
    known = copy_with(llama, tmp_path / "known", auto_map={"AutoModelForCausalLM": "evil.Model"})
    shutil.copy(folder / "evil.py", known)
    assert load_model(resolve_model(str(known)), "sdpa").identity.layers == 2
    tokenizer = copy_with(
        llama,
        tmp_path / "tokenizer",
        "tokenizer_config.json",
        tokenizer_class="Homemade",
        auto_map={"AutoTokenizer": ["evil.Tokenizer", None]},
    )
    shutil.copy(folder / "evil.py", tokenizer)
    with suppress(ModelUnsupportedError):
        load_tokenizer(resolve_model(str(tokenizer)))
    assert not (tmp_path / "ran").exists()


def load(folder: Path, kind: str) -> LoadedModel:
    family, settings = LAYER_KINDS[kind]
    return load_model(resolve_model(str(write_model_folder(folder, family, layers=3, **settings))), "eager")


def examined(loaded: LoadedModel) -> Examination:
    return examine(loaded.model, loaded.identity, loaded.readings, loaded.forms)


@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_attention_as_it_was_read_is_the_models_own(tmp_path: Path, kind: str) -> None:
    seen = examined(load(tmp_path, kind))
    assert seen.difference is None
    assert len(seen.ids) == 96
    assert seen.logits_TV.std() > 0.1


def without_window(own: LayerReading) -> LayerReading:
    return replace(own, window=None)


def with_another_scale(own: LayerReading) -> LayerReading:
    return replace(own, scale=own.scale * 1.1)


@pytest.mark.parametrize(
    ("kind", "read", "form"),
    [
        ("windows", without_window, None),
        ("windows", with_another_scale, None),
        ("sinks", None, PLAIN),
        ("caps", None, PLAIN),
        ("caps", None, LogitForm(2.2)),
    ],
)
def test_what_is_read_wrongly_is_found(
    tmp_path: Path, kind: str, read: Callable[[LayerReading], LayerReading] | None, form: LogitForm | None
) -> None:
    loaded = load(tmp_path, kind)
    readings = loaded.readings if read is None else [read(own) for own in loaded.readings]
    forms = loaded.forms if form is None else [form] * len(loaded.forms)
    seen = examine(loaded.model, loaded.identity, readings, forms)
    assert seen.difference is not None
    assert "differ by" in seen.difference


def test_a_window_longer_than_the_text_is_made_smaller_for_it(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, "mistral", layers=2, sliding_window=1000)
    loaded = load_model(resolve_model(str(folder)), "eager")
    seen = examined(loaded)
    assert seen.difference is None
    assert seen.identity.window is not None
    assert seen.identity.window.size < 96
    assert loaded.model.config.sliding_window == 1000
    without = [replace(own, window=None) for own in loaded.readings]
    assert examine(loaded.model, loaded.identity, without, loaded.forms).difference is not None


def test_keys_show_how_they_are_rotated(tmp_path: Path) -> None:
    for kind, turned in (("experts", None), ("no positions", "keys of layer 1 are not rotated")):
        loaded = load(tmp_path / kind, kind)
        frequencies = loaded.model.model.rotary_emb.inv_freq
        why = rotation_differs(loaded.model, examined(loaded), frequencies, range(3))
        assert why is None if turned is None else turned in str(why)
        assert rotation_differs(loaded.model, examined(loaded), frequencies * 1.01, [0]) is not None


def test_verdicts_are_remembered_by_what_the_model_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loaded = load(tmp_path / "model", "sinks")
    asked = []

    def check(seen: Examination) -> Verdict:
        asked.append(seen)
        return {"decoding": None, "also": "a reason"}

    for _ in range(2):
        assert loaded.verify("decoding", check)["also"] == "a reason"
    assert len(asked) == 1
    (file,) = (tmp_path / "cache" / "sparsekv" / "checks").iterdir()
    file.write_text("[]")  # damaged: found out anew
    loaded.verify("decoding", check)
    assert len(asked) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")  # where nothing can be written
    loaded.verify("decoding", check)
    loaded.verify("decoding", check)
    assert len(asked) == 4


def test_a_model_that_differs_is_refused_by_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loaded = load(tmp_path / "model", "windows")
    wrong = replace(loaded, readings=[without_window(own) for own in loaded.readings])
    for _ in range(2):  # found out, and remembered
        with pytest.raises(ModelUnsupportedError, match="attention as its layers describe it differ by"):
            wrong.verify("prefill", lambda seen: {})
    with pytest.raises(ModelUnsupportedError, match="logits of decoding here are wrong"):
        loaded.verify("decoding", lambda seen: {"decoding": "are wrong"})


def test_a_few_positions_may_differ_and_none_may_be_nan() -> None:
    expected = torch.randn(40, 7, generator=torch.Generator().manual_seed(0))
    found = expected.clone()
    found[3] += 1.0
    assert differ(expected, found) is None
    found[10:20] += 1.0
    assert "from position 3 of 40 on" in str(differ(expected, found))
    assert differ(expected, expected * 1.02, torch.bfloat16) is None
    assert differ(expected, expected * 1.02) is not None
    found[0, 0] = torch.nan
    assert differ(expected, found) == "are not finite"
