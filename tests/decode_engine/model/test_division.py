"""Which models several ranks can share is known before their weights are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode_engine.model.divided_model import check_division
from index_store.errors import InvalidArgumentError, ModelUnsupportedError
from index_store.models.resolve import resolve_model
from tests.support.models import FAMILIES, LAYER_KINDS, write_model_folder


def check(folder: Path, family: str, settings: dict[str, object], ranks: int = 2) -> None:
    """Of a model without weights."""
    write_model_folder(folder, family, layers=3, **settings)  # type: ignore[arg-type]
    for each in folder.glob("*.safetensors"):
        each.write_bytes(b"")
    check_division(resolve_model(str(folder)), ranks)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_can_be_divided_is_not_refused(tmp_path: Path, family: str) -> None:
    check(tmp_path / "model", family, {})


def test_heads_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="2 KV heads cannot be divided among 3 GPUs"):
        check(tmp_path / "model", "llama", {}, ranks=3)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("states", "has states"),
        ("experts", "its layer model.layers.0.mlp.experts"),
        ("latents", "cannot be divided"),
        ("learnt index", "has an index of its own"),
    ],
)
def test_what_is_not_divided_is_refused_by_its_name(tmp_path: Path, kind: str, said: str) -> None:
    family, settings = LAYER_KINDS[kind]
    with pytest.raises((InvalidArgumentError, ModelUnsupportedError), match=said):
        check(tmp_path / "model", family, dict(settings))
