"""Folders that are no whole model, or more than one: each is refused in one sentence that says what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from index_store.errors import ModelUnsupportedError
from index_store.models.files.folder import ModelFolder
from index_store.models.loading import identify, load_model, load_tokenizer, resolve_model

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
