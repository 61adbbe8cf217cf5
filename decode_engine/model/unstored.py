"""Contexts in memory alone, which were never stored; and, on one, whether decoding gives what the model computes."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from decode_engine.layers.session import Session
from decode_engine.model.decode_attention import ATTENTION_NAME, packed
from index_store.memory.resident import ResidentContext
from index_store.methods.presets import METHODS
from index_store.models.loading import LoadedModel
from index_store.models.self_check import CONTEXT, Examination, Verdict, differ, using_attention
from index_store.models.state_cache import TextStates, passing
from index_store.store.description.array_entry import (
    kv_entry,
    plane_entry,
    state_entry,
    tokens_entry,
    window_entry,
)
from index_store.store.description.context_id import UNSTORED, ModelIdentity
from index_store.store.description.dtypes import AS_DTYPE, INT8, dtype_name, stored_dtype
from index_store.store.description.manifest import IndexEntry, Manifest


def unstored_manifest(
    model: ModelIdentity,
    dtype: str,
    tokens: int,
    method: str = "full",
    indexes: tuple[IndexEntry, ...] = (),
    rows: str = AS_DTYPE,
) -> Manifest:
    """Of a context of so many tokens, perhaps none, that is nowhere on disk. rows: one of `ROW_CODINGS`."""
    described = max(1, tokens)
    return Manifest(
        id=UNSTORED,
        name="unstored",
        created_at=datetime.now(UTC),
        expires_at=None,
        model=model,
        dtype=dtype,
        token_count=tokens,
        methods=(method,),
        dense_layers=(),
        selection_errors=(),
        tokens=tokens_entry(described),
        kv=plane_entry(model, described) if rows == INT8 else kv_entry(model, described, dtype),
        window=window_entry(model, described, dtype),
        state=state_entry(model, dtype),
        indexes=indexes,
        prefill={},
        seconds={},
    )


def no_context(model: ModelIdentity, dtype: str, device: torch.device) -> ResidentContext:
    """The context of no tokens, on which sessions of prompts run that continue none. It takes no memory."""
    like = stored_dtype(dtype).torch_dtype
    shapes = {layer: model.shape(layer) for layer in range(model.layers)}
    return ResidentContext(
        unstored_manifest(model, dtype, 0),
        torch.zeros(0, dtype=torch.int64, device=device),
        {
            layer: torch.zeros(shape.kv_heads, 0, 2, shape.head_dim, dtype=like, device=device)
            for layer, shape in shapes.items()
        },
        {},
        device=device,
    )


_STEPS = 8
"""Tokens at the end that are fed one by one."""


def check_decoding(loaded: LoadedModel) -> None:
    """Raises ModelUnsupportedError unless decoding gives the logits of the model's own attention."""

    def check(seen: Examination) -> Verdict:
        with using_attention(loaded.model, ATTENTION_NAME):
            return {"decoding": _compare(loaded, seen)}

    loaded.verify("decoding", check)


@torch.inference_mode()
def _compare(loaded: LoadedModel, seen: Examination) -> str | None:
    """Why logits after a context, read as a prompt and token by token, differ from the model's own."""
    weights = next(loaded.model.parameters())
    ids = torch.tensor(seen.ids, device=weights.device)
    states = seen.identity.states
    kept = min(CONTEXT, len(ids) - _STEPS - 1)
    context = _context(seen, kept if states is None else 0)
    own = None if states is None else TextStates(states, weights.dtype, weights.device)
    session = Session(context, METHODS["full"].on(context.manifest), loaded.forms, states=own)
    last = len(ids) - _STEPS
    # With states the context is read as well: as a prompt, behind which another one follows.
    cuts = [*([] if states is None else [0]), kept, *range(last, len(ids) + 1)]
    found = [_feed(loaded.model, session, ids[start:end]) for start, end in itertools.pairwise(cuts)]
    session.close()
    return differ(seen.logits_TV[cuts[0] :], torch.cat(found), weights.dtype)


def _context(seen: Examination, tokens: int) -> ResidentContext:
    """The first tokens as a context, with the keys and values that the plain pass left."""
    kv = {}
    for layer in range(seen.identity.layers):
        kept = seen.identity.shape(layer).kept(tokens)
        kv[layer] = seen.plain.kv[layer][:, tokens - kept : tokens].contiguous()
    manifest = unstored_manifest(seen.identity, dtype_name(kv[0].dtype), tokens)
    return ResidentContext(manifest, torch.tensor(seen.ids[:tokens]), kv, {})


def _feed(model: Any, session: Session, ids_T: Tensor) -> Tensor:
    """Logits [T, V] float32 after each of the tokens."""
    inputs = packed([session], [ids_T.tolist()], ids_T.device, exact=True)
    with passing(inputs["decode_step"]):
        out = model(**inputs)
    inputs["decode_step"].advance()
    return out.logits[0].float()  # type: ignore[no-any-return]
