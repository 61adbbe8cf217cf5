"""Models: found, identified by content, compared with plain attention, refused with a sentence, loaded."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention

from index_store.attention.attention_state import PLAIN, LogitForm
from index_store.errors import InvalidArgumentError, ModelUnsupportedError
from index_store.models import loading, self_check
from index_store.models.attention_reading import LayerReading
from index_store.models.fused.kernels_triton import (
    Gate,
    gated,
    gated_reference,
    rms_norm,
    rms_norm_reference,
    rotate,
    rotate_reference,
)
from index_store.models.fused.layers import fuse_layers
from index_store.models.loading import (
    LoadedModel,
    check_positions,
    checkpoint_dtype,
    identify,
    load_model,
    load_tokenizer,
    resolve_model,
)
from index_store.models.model_folder import ModelFolder
from index_store.models.self_check import Examination, Verdict, differ, examine, rotation_differs
from index_store.store.description.context_id import WindowLayers
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
def test_weights_come_to_a_gpu_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_STAGED_BYTES", 1000)
    folder = resolve_model(str(write_model_folder(tmp_path, dtype=torch.bfloat16)))
    expected, sent = (load_model(folder, "sdpa", torch.bfloat16).model for _ in range(2))
    loading._send_weights(sent, torch.device("cuda"))
    for name, weight in sent.named_parameters():
        assert weight.is_cuda
        assert torch.equal(weight.cpu(), expected.get_parameter(name))


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
            "deepseek_v32",
            {"num_key_value_heads": 4, **LATENT},
            "keys of its own index have 128 numbers, more than",
        ),
        (
            "dory",
            {"recurrent_kv_cache_mode": "last_loop", "num_hidden_layers": 18},
            "its earlier loops read keys",
        ),
        ("doge", {"num_key_value_heads": 2}, "layer 0 makes an attention mask of its own"),
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


def test_what_only_rounding_changes_is_compared_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and forwards are as before then, and what is read wrongly is refused in float32, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loaded = load(tmp_path / "model", "experts")
    loaded.model.bfloat16()
    norm = loaded.model.model.norm
    norm.forward = types.MethodType(lambda self, x: x * self.weight, norm)  # as fused layers are
    before = {name: weight.clone() for name, weight in loaded.model.named_parameters()}
    seen: list[torch.dtype] = []

    def check(found: Examination) -> Verdict:
        seen.append(found.plain.kv[1].dtype)
        return {"decoding": None if seen[-1] == torch.float32 else "differ by 30%"}

    assert loaded.verify("decoding", check)["decoding"] is None
    assert seen == [torch.bfloat16, torch.float32]
    assert isinstance(norm.__dict__["forward"], types.MethodType)
    for name, weight in loaded.model.named_parameters():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, before[name])
    wrong = replace(loaded, readings=[with_another_scale(own) for own in loaded.readings])
    assert wrong.readings != loaded.readings
    monkeypatch.setattr(self_check, "_COARSE_TOLERANCE", 0.0)
    with pytest.raises(ModelUnsupportedError, match="attention as its layers describe it differ by"):
        wrong.verify("prefill", lambda found: {})


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


Change = Callable[[Path], object]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def write(name: str, content: str | bytes) -> Change:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def without(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def setting(name: str, **changes: object) -> Change:
    """Replaces entries of a JSON file."""

    def change(folder: Path) -> None:
        found = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(found | changes))

    return change


def tensors(**changed: torch.Tensor | None) -> Change:
    """Replaces weights, adds them, or leaves them out. Names have `__` for dots."""

    def change(folder: Path) -> None:
        named = {name.replace("__", "."): tensor for name, tensor in changed.items()}
        found = {
            name: each for name, each in (load_file(folder / WEIGHTS) | named).items() if each is not None
        }
        save_file(found, folder / WEIGHTS, metadata={"format": "pt"})

    return change


def listed(weight_map: str) -> Change:
    """Weights that a list names, with none under the usual name."""
    return lambda folder: (without(WEIGHTS)(folder), write(INDEX, weight_map)(folder))


def listed_outside(name: str) -> Change:
    """The weights lie beside the folder as well, where a list may not look."""
    return lambda folder: (
        shutil.copy(folder / WEIGHTS, folder.parent / "other.safetensors"),
        write(INDEX, json.dumps({"weight_map": {"a": name}}))(folder),
    )


def twice(folder: Path) -> None:
    shutil.copy(folder / WEIGHTS, folder / "part-0.safetensors")
    write(INDEX, '{"weight_map": {"a": "part-0.safetensors"}}')(folder)


def loaded(folder: ModelFolder) -> None:
    load_model(folder, "sdpa")


OUTSIDE, NO_WEIGHTS = "weights must lie in the model's own folder", r"model\.safetensors.*copy the file anew"
UNREADABLE, BROKEN = r"config\.json cannot be read", "anew from where the model comes from"
REFUSED: list[tuple[Change, Callable[[ModelFolder], object], str]] = [
    (without(WEIGHTS), identify, r"weights model\.safetensors are missing"),
    (without("tokenizer.json"), load_tokenizer, "it has no tokenizer"),
    *((write("config.json", text), identify, UNREADABLE) for text in ("{", "[]", "{}")),
    (write("config.json", '{"model_type": "llama", "vocab_size": "many"}'), identify, UNREADABLE),
    *((listed(text), identify, r"index\.json cannot be read") for text in ("{", "{}")),
    (listed('{"weight_map": {"a": "gone.safetensors"}}'), identify, r"gone\.safetensors are missing"),
    *(
        (listed_outside(name), identify, OUTSIDE)
        for name in ("../other.safetensors", "/etc/passwd", "sub/model.safetensors", "")
    ),
    *(
        (write(WEIGHTS, content), identify, NO_WEIGHTS)
        for content in (b"", b"\0" * 7, b"\xff" * 100, b"\2" + b"\0" * 7 + b"[]")
    ),
    (
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100]),
        loaded,
        r"has \d+ bytes, its header promises \d+; copy the file anew",
    ),
    (
        lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
        identify,
        r"only pytorch_model\.bin, .*convert them to safetensors",
    ),
    (tensors(model__layers__1__mlp__up_proj__weight=None), loaded, r"model\.layers\.1\.mlp\.up_proj\.weight"),
    (
        tensors(model__embed_tokens__weight=torch.zeros(300, 64)),
        loaded,
        r"its weights have \[300, 64\] for model\.embed_tokens\.weight, its config\.json, whose vocab_size is 259, "
        r"means \[259, 64\]; they belong to different models: copy both",
    ),
    (
        tensors(model__norm__weight=torch.zeros(32)),
        loaded,
        r"its weights have \[32\] for model\.norm\.weight, its config\.json means \[64\]; they belong",
    ),
    (
        tensors(model__layers__0__self_attn__q_proj__bias=torch.zeros(64)),
        loaded,
        r"its weights have 'model\.layers\.0\.self_attn\.q_proj\.bias' \(1 such tensors\), for which a "
        r"LlamaForCausalLM of its config\.json has no place; the config\.json .*copy both",
    ),
    (
        setting("config.json", vocab_size=100),
        load_tokenizer,
        r"tokenizer has \d+ tokens, its config.json says 100",
    ),
    *(
        (write("tokenizer.json", text), load_tokenizer, f"{said}.*{BROKEN}")
        for text, said in (
            ("{", "its tokenizer.json is not JSON"),
            ("[]", "its tokenizer.json is not a JSON object"),
            ("{}", "its tokenizer.json has no field 'model'"),
            ('{"model": {}, "added_tokens": []}', "its tokenizer cannot be loaded from tokenizer.json"),
        )
    ),
    *((twice, use, r"weights twice: model\.safetensors, and .*remove") for use in (identify, loaded)),
    *(
        (
            write("adapter_config.json", '{"base_model_name_or_path": "."}'),
            use,
            r"has an adapter \(adapter_config\.json\) beside its weights; merge",
        )
        for use in (identify, loaded)
    ),
    *(
        (
            setting("config.json", transformers_weights="part-0.safetensors"),
            use,
            r"names the weights 'part-0\.safetensors' \(transformers_weights\); rename",
        )
        for use in (identify, loaded)
    ),
]


@pytest.mark.parametrize(("change", "use", "message"), REFUSED)
def test_a_folder_that_is_no_model_is_refused(
    llama: Path,
    tmp_path: Path,
    change: Change,
    use: Callable[[ModelFolder], object],
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "model"))
    change(folder)
    with pytest.raises(ModelUnsupportedError, match=message):
        use(resolve_model(str(folder)))
    assert capfd.readouterr().err == ""


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupportedError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_weights_that_belong_to_nothing_are_told(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "model"))
    tensors(score__weight=torch.zeros(2), v_head__bias=torch.zeros(1))(folder)
    load_model(resolve_model(str(folder)), "sdpa")
    assert (
        "2 tensors of its weights belong to no part of a LlamaForCausalLM and are not used, the first is score.weight"
        in caplog.text
    )
    assert capfd.readouterr().err == ""


SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 96, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
DEVICES = [
    *(("cpu", dtype) for dtype in (torch.float16, torch.float32)),
    *(
        pytest.param("cuda", dtype, marks=pytest.mark.gpu)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ),
]
WHOLE = {"norms": 5, "gates": 2, "rotations": 2, "projections": 2}
EXPECTED = {
    "llama": WHOLE,
    "qwen2": WHOLE,  # biases
    "qwen3": {**WHOLE, "norms": 9},  # of heads, too
    "gemma": WHOLE,  # weights that count from one, another gate
    "phi": {**WHOLE, "norms": 0, "gates": 0},  # half of a head is turned
    "phi3": {**WHOLE, "gates": 0, "projections": 0},  # joined already
    "glm": {**WHOLE, "gates": 0, "rotations": 0},  # turned in pairs
    "cohere": {**WHOLE, "norms": 0, "rotations": 0},  # norms with a mean
}


def made(kind: str, dtype: torch.dtype, device: str) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES), dtype=dtype)
    model.requires_grad_(False).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.to(device)


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(ids).logits.float()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("kind", EXPECTED)
def test_a_model_says_the_same(kind: str, device: str, dtype: torch.dtype) -> None:
    model = made(kind, dtype, device)
    ids = torch.arange(48, device=device).view(2, 24)
    before, weights = logits(model, ids), copy.deepcopy(model.state_dict())
    assert fuse_layers(model) == EXPECTED[kind]
    scale = float(before.abs().max())
    torch.testing.assert_close(logits(model, ids), before, rtol=0, atol=scale * 4 * torch.finfo(dtype).eps)
    for name, found in model.state_dict().items():
        assert torch.equal(found, weights[name])
    model.double()  # who gives it other weights gets what they say
    own = made(kind, dtype, device).double()
    torch.testing.assert_close(logits(model, ids), logits(own, ids), rtol=0, atol=scale * 1e-5)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_kernels_give_what_their_references_give(device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    near = torch.finfo(dtype).eps
    x, weight = numbers(3, 5, 200)[:, :, ::2], numbers(100)
    for form in itertools.product((False, True), repeat=2):
        wanted = rms_norm_reference(x, weight, 1e-5, *form)
        torch.testing.assert_close(rms_norm(x, weight, 1e-5, *form), wanted, rtol=near, atol=1e-6)
    both = numbers(2, 3, 2 * 1100)
    for kind in Gate:
        wanted = gated_reference(both, kind)
        torch.testing.assert_close(gated(both, kind), wanted, rtol=near * 2, atol=4e-6)
    q, k = numbers(2, 7, 9, 24).transpose(1, 2), numbers(2, 7, 3, 24).transpose(1, 2)
    for rotated in (24, 12):
        cos, sin = numbers(2, 7, rotated), numbers(1, 7, rotated)
        found, expected = rotate(q, k, cos, sin), rotate_reference(q, k, cos, sin)
        for each, own in zip(found, expected, strict=True):
            torch.testing.assert_close(each, own, rtol=near, atol=1e-6)
    assert rms_norm(x[:0], weight, 1e-5, False, True).shape == (0, 5, 100)
    assert gated(both[:0], Gate.SILU).shape == (0, 3, 1100)


class Doubling(nn.Module):
    """Looks like a norm, and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(32)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 * self.weight


class Unwilling(Doubling):
    """Takes texts of tokens alone."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 3:
            raise ValueError("expected [B, T, D]")
        return super().forward(x)


class Shifted(modeling_llama.LlamaMLP):  # type: ignore[misc]
    """Looks like a gated layer, and adds something."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1  # type: ignore[no-any-return]


class Projecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, size, bias=False) for size in (8, 4, 4))


def test_what_only_looks_alike_stays_as_it_is() -> None:
    doubling, shifted = Doubling(), Shifted(AutoConfig.for_model("llama", **SIZES))
    x, y = torch.randn(2, 32), torch.randn(1, 2, 96)
    with torch.no_grad():
        before = doubling(x), shifted(y)
        assert not any(fuse_layers(nn.ModuleList([doubling, Unwilling(), shifted])).values())
        assert torch.equal(doubling(x), before[0])
        assert torch.equal(shifted(y), before[1])


def test_projections_of_other_inputs_and_in_another_order() -> None:
    module = Projecting()
    x, other = torch.randn(3, 8), torch.randn(3, 8)
    with torch.no_grad():
        before = [[part(each) for part in module.children()] for each in (x, other)]
        assert fuse_layers(module)["projections"] == 1
        torch.testing.assert_close(module.v_proj(x), before[0][2])  # before anything was asked for
        torch.testing.assert_close(module.q_proj(x), before[0][0])
        torch.testing.assert_close(module.k_proj(other), before[1][1])
        torch.testing.assert_close(module.v_proj(x), before[0][2])
        torch.testing.assert_close(module.k_proj(x), before[0][1])
        torch.testing.assert_close(module.q_proj(other), before[1][0])
