"""Whether decoding gives what the model itself computes: once a model."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from decode_engine.layers.session import Session
from decode_engine.model.decode_attention import ATTENTION_NAME, packed
from decode_engine.model.unstored import unstored_manifest
from index_store.memory.resident import ResidentContext
from index_store.methods.presets import METHODS
from index_store.models.loading import LoadedModel
from index_store.models.self_check import CONTEXT, Examination, Verdict, differ, using_attention
from index_store.models.state_cache import TextStates
from index_store.store.description.dtypes import dtype_name

_STEPS = 8
"""Tokens at the end that are fed one by one."""


def check_decoding(loaded: LoadedModel) -> None:
    """Raises ModelUnsupportedError unless decoding gives the logits of the model's own attention."""

    def check(seen: Examination) -> Verdict:
        with using_attention(loaded.model, ATTENTION_NAME):
            found = _compare(loaded, seen)
            if (
                found is not None
                and seen.identity.states is not None
                and _compare(loaded, seen, True) is None
            ):
                found += ": behind a state its layers read single tokens alone, so no text can come in pieces"
            return {"decoding": found}

    loaded.verify("decoding", check)


@torch.inference_mode()
def _compare(loaded: LoadedModel, seen: Examination, singly: bool = False) -> str | None:
    """Why logits after a context, read as a prompt and token by token, differ from the model's own.

    singly: the prompt as well.
    """
    weights = next(loaded.model.parameters())
    ids = torch.tensor(seen.ids, device=weights.device)
    states = seen.identity.states
    kept = min(CONTEXT, len(ids) - _STEPS - 1)
    context = _context(seen, kept if states is None else 0)
    own = None if states is None else TextStates(states, weights.dtype, weights.device)
    session = Session(context, METHODS["full"].on(context.manifest), loaded.forms, states=own)
    last = len(ids) - _STEPS
    # With states the context is read as well: as a prompt, behind which another one follows.
    cuts = [*([] if states is None else [0]), kept, *range(kept + 1 if singly else last, len(ids) + 1)]
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
    out = model(**inputs)
    inputs["decode_step"].advance()
    return out.logits[0].float()  # type: ignore[no-any-return]
