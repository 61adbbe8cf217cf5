"""Whether the capture sees what the model itself computes: compared once for every model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from index_store.models.loading import LoadedModel
from index_store.models.self_check import Examination, Verdict, differ, rotation_differs
from prefill_worker.reading.capture import Capture
from prefill_worker.reading.prefill import run_context
from prefill_worker.reading.query_sample import plan_sample

_CHUNK = 40


def check_capture(loaded: LoadedModel) -> Tensor | None:
    """Raises ModelUnsupportedError unless the capture gets the keys and values of the model's own attention.

    Returns the inverse frequencies [d/2] float32 of the rotary embedding of the layers whose queries see all keys,
    where it turns dimensions i and i + d/2 at position p by p * inverse_frequencies[i] in all of them; otherwise None.
    """
    candidates = list(_frequencies(loaded.model, loaded.identity.head_dim))

    def check(seen: Examination) -> Verdict:
        layers = seen.identity.full_layers
        fitting = (
            number
            for number, own in enumerate(candidates)
            if rotation_differs(loaded.model, seen, own, layers) is None
        )
        found = next(fitting, None)
        return {"prefill": _compare(loaded.model, seen), "rotary": None if found is None else str(found)}

    found = loaded.verify("prefill", check).get("rotary")
    return None if found is None else candidates[int(found)]


def _frequencies(model: Any, head_dim: int) -> Iterator[Tensor]:
    """Those of the model's rotary embeddings that are made for all dimensions."""
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2].endswith("inv_freq") and 2 * len(buffer) == head_dim:
            yield buffer.float().cpu()


@torch.inference_mode()
def _compare(model: Any, seen: Examination) -> str | None:
    """Why keys and values that a capture in chunks gets differ from those of the plain pass; None when they do not."""
    weights = next(model.parameters())
    count = len(seen.ids)
    capture = Capture(seen.identity, count, weights.dtype, plan_sample(count, (), count, 0), weights.device)
    run_context(model, capture, seen.ids, _CHUNK)
    for layer in range(seen.identity.layers):
        found = capture.kv(layer)
        expected = seen.plain.kv[layer][:, count - found.shape[1] :]
        why = differ(expected.transpose(0, 1), found.transpose(0, 1), weights.dtype)
        if why is not None:
            return f"(keys and values of layer {layer}) {why}"
    return None
