"""What a context's id follows from, and entries of arrays."""

from __future__ import annotations

from typing import Any

import google_crc32c
import numpy as np
import pytest
import torch

from index_store.errors import (
    InvalidArgumentError,
    ManifestError,
)
from index_store.store.description.array_entry import ArrayEntry
from index_store.store.description.context_id import context_id
from index_store.store.description.manifest import MANIFESTS
from tests.index_store.store.test_manifest import WHERE
from tests.support.store import MODEL, SyntheticContext, other_model


def test_context_id_follows_content_only() -> None:
    ids = [5, 6, 7]
    first = context_id(MODEL, "bfloat16", {"a": 1, "b": {"c": [2]}}, "", ids)
    assert len(first) == 64
    same = [
        context_id(MODEL, "bfloat16", {"b": {"c": [2]}, "a": 1}, "", ids),
        context_id(MODEL, "bfloat16", {"a": 1, "b": {"c": [2]}}, "", np.array(ids)),
        context_id(MODEL, "bfloat16", {"a": 1, "b": {"c": [2]}}, "", torch.tensor(ids)),
        context_id(other_model(name="renamed"), "bfloat16", {"a": 1, "b": {"c": [2]}}, "", ids),
    ]
    assert set(same) == {first}
    different = [
        context_id(other_model(fingerprint="c"), "bfloat16", {"a": 1, "b": {"c": [2]}}, "", ids),
        context_id(other_model(tokenizer_fingerprint="c"), "bfloat16", {"a": 1, "b": {"c": [2]}}, "", ids),
        context_id(MODEL, "float16", {"a": 1, "b": {"c": [2]}}, "", ids),
        context_id(MODEL, "bfloat16", {"a": 2, "b": {"c": [2]}}, "", ids),
        context_id(MODEL, "bfloat16", {"a": 1, "b": {"c": [2]}}, "salt", ids),
        context_id(MODEL, "bfloat16", {"a": 1, "b": {"c": [2]}}, "", [5, 6]),
        context_id(MODEL, "bfloat16", {"a": 1, "b": {"c": [2]}}, "", [5, 6, 8]),
    ]
    assert len({first, *different}) == 1 + len(different)


@pytest.mark.parametrize("tokens", [[], [-1], [1000], [1.5], [[1]]])
def test_context_id_refuses_bad_tokens(tokens: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="token ids"):
        context_id(MODEL, "bfloat16", {}, "", tokens)


def test_context_id_refuses_parameters_that_are_not_json() -> None:
    for value in (float("nan"), object()):
        with pytest.raises(InvalidArgumentError, match="options of the reading"):
            context_id(MODEL, "bfloat16", {"a": value}, "", [1])


def test_checksums_follow_the_chunks(context: SyntheticContext) -> None:
    kv = context.manifest.kv
    assert kv.layout == context.draft.kv
    assert kv.layout.checksums is None
    assert len(kv.checksums or "") == 8 * 3 * 2
    for layer, head, *_ in kv.chunk_indices():
        raw = context.kv[layer, head].view(torch.int16).numpy().tobytes()
        assert kv.checksum((layer, head)) == kv.checksum((layer, head, 0, 0, 0)) == google_crc32c.value(raw)
    assert kv.checksum((1,)) == kv.checksum((1, 0))
    assert MANIFESTS.parse(MANIFESTS.render(context.manifest), WHERE).kv.checksums == kv.checksums


@pytest.mark.parametrize("path", ["", "/kv", "a//b", "../x", "a/../b", "a/.hidden", "a\\b", "a b", "ä"])
def test_array_paths_stay_inside(path: str) -> None:
    with pytest.raises(ManifestError, match="'path'"):
        ArrayEntry(path, (1,), (1,), "int8")
