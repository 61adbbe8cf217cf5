"""A model compared with itself: its own attention as transformers runs it, and attention as it was read.

A few tokens go through the loaded model twice, in eager mode and with the plain attention of this file, which does what
`attention_reading` says and nothing else. Logits that differ mean that the reading misses something. What the pass
leaves (queries, keys, values, logits) is what prefill and decoding are compared with in turn. Results are remembered
by the model's fingerprint.

Shape legend: Hq query heads, H KV heads, T tokens, V vocabulary, d head dim.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface

from index_store.attention.attention_state import LogitForm
from index_store.attention.fused import narrow, widen
from index_store.models.attention_reading import LayerReading
from index_store.models.digests import keep, recall
from index_store.models.state_cache import (
    IndexCache,
    StateCache,
    TextStates,
    passed,
    passing,
    without_index_head,
)
from index_store.store.description.context_id import ModelIdentity

TOKENS, CONTEXT = 96, 48
"""Tokens of the text, and how many of them are the context where it is cut in two."""

_WINDOW = 24
"""Windows, and lists of a model's own index, are made this small for the check, so that a short text is longer."""

_SHIFT = 1000
"""Positions by which the text is moved, at most, to see how keys are rotated."""

_PLAIN = "sparsekv_plain"
_KIND = "checks"
_VERSION = 3  # of what is checked: what was remembered by another one is found out anew
_LARGE = 5e8  # parameters from which on a check is announced
_TOLERANCE = {torch.float32: 2e-3, torch.float64: 2e-3}
_COARSE_TOLERANCE = 0.2  # of halves, in which experts are chosen otherwise here and there
_ALLOWED = 0.1  # share of the positions that may differ more: an expert chosen otherwise changes one of them

Verdict = Mapping[str, str | None]
"""What was found out, by name: why something cannot be used, or None when it can."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PlainPass:
    """One pass with plain attention. queries: [Hq, T, d] of every layer as the model gives them. kv: [H, T, 2, d].

    cache: where a model with states puts them, which nobody reads. index: of a model with an index of its own. calls:
    numbers those of attention.
    """

    identity: ModelIdentity
    readings: Sequence[LayerReading]
    forms: Sequence[LogitForm]
    queries: dict[int, Tensor] = field(default_factory=dict)
    kv: dict[int, Tensor] = field(default_factory=dict)
    cache: StateCache | None = None
    index: IndexCache | None = None
    calls: Iterator[int] = field(default_factory=itertools.count)


@dataclass(frozen=True, slots=True)
class Examination:
    """What a text left in a model.

    identity: the model's, with the windows that the text was read with. ids: the text. logits_TV: after each of its
    tokens, by the model's own attention. plain: what plain attention saw on the way. difference: why the two differ.
    """

    identity: ModelIdentity
    ids: Sequence[int]
    logits_TV: Tensor
    plain: PlainPass
    difference: str | None


def examine(
    model: Any, identity: ModelIdentity, readings: Sequence[LayerReading], forms: Sequence[LogitForm]
) -> Examination:
    """Runs a made-up text through the model, with its own attention and with plain attention."""
    count = min(TOKENS, identity.max_positions)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(identity.vocab_size, (count,), generator=generator)
    with _small_windows(model, identity) as small:
        size = None if small.window is None else small.window.size
        own = _logits(model, ids, "eager")
        plain = PlainPass(identity, [replace(r, window=size if r.window else None) for r in readings], forms)
        AttentionInterface.register(_PLAIN, _attend_plainly)
        found = _logits(model, ids, _PLAIN, plain_pass=plain)
    difference = differ(own, found, next(model.parameters()).dtype)
    return Examination(small, ids.tolist(), own, plain, difference)


def differ(expected: Tensor, found: Tensor, dtype: torch.dtype = torch.float32) -> str | None:
    """Why two tensors [T, ...] of the same positions are not about equal, as a clause; None when they are.

    dtype: in which the coarser of the two was computed.
    """
    wide = tuple(range(1, expected.dim()))
    expected, found = expected.double(), found.to(expected.device).double()
    scale = expected.pow(2).mean(wide).sqrt().clamp(min=1e-12)
    errors = (expected - found).pow(2).mean(wide).sqrt() / scale
    if not bool(torch.isfinite(errors).all()):
        return "are not finite"
    wrong = errors > _TOLERANCE.get(dtype, _COARSE_TOLERANCE)
    if float(wrong.double().mean()) <= _ALLOWED:
        return None
    first = int(wrong.nonzero()[0])
    return f"differ by {float(errors.max()):.0%} from position {first} of {len(errors)} on"


def agrees(verdict: Verdict, what: str) -> bool:
    """Whether a model agrees with itself, in its attention and in `what`."""
    return verdict.get("attention") is None and verdict.get(what) is None


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """The model as transformers wrote it, computing in float32: the weights of each layer are while it runs.

    Embeddings are from the beginning to the end, by which everybody tells what the model computes in.
    """
    own: dict[torch.nn.Parameter, Tensor] = {}

    def widen_weights(module: torch.nn.Module, *_: object) -> None:
        for weight in module.parameters():
            if weight.is_floating_point() and weight.dtype != torch.float32:
                own[weight], weight.data = weight.data, weight.data.float()

    def give_back(module: torch.nn.Module, *_: object) -> None:
        for weight in module.parameters():
            if weight is not first and weight in own:
                weight.data = own.pop(weight)

    base = model.get_decoder()
    first, *_ = model.parameters()
    parts = [each for each in model.children() if each is not base]
    for each in base.children():
        parts += each if isinstance(each, torch.nn.ModuleList) else [each]
    replaced = {each: each.__dict__.pop("forward") for each in model.modules() if "forward" in each.__dict__}
    handles = [each.register_forward_pre_hook(widen_weights) for each in parts]
    handles += [each.register_forward_hook(give_back) for each in parts]
    try:
        own[first], first.data = first.data, first.data.float()
        yield
    finally:
        for handle in handles:
            handle.remove()
        for weight, numbers in own.items():
            weight.data = numbers
        for module, forward in replaced.items():
            module.__dict__.setdefault("forward", forward)


def rotation_differs(
    model: Any, seen: Examination, frequencies_F: Tensor, layers: Sequence[int]
) -> str | None:
    """Why the keys of these layers are not rotated by these frequencies, as a clause; None when they are.

    Moved by some positions, the same text has the same keys, turned by so many times the frequencies.
    """
    shift = min(_SHIFT, seen.identity.max_positions - len(seen.ids))
    if shift < 1:
        return "there are too few positions to see how keys are rotated"
    moved = PlainPass(seen.identity, seen.plain.readings, seen.plain.forms)
    _logits(model, torch.tensor(seen.ids), _PLAIN, first=shift, plain_pass=moved)
    angles = shift * frequencies_F.double()
    for layer in layers:
        keys, expected = seen.plain.kv[layer][:, :, 0].double().cpu(), moved.kv[layer][:, :, 0].double().cpu()
        low, high = keys.chunk(2, dim=-1)
        turned = torch.cat(
            [low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], dim=-1
        )
        dtype = seen.plain.kv[layer].dtype
        if differ(expected.transpose(0, 1), turned.transpose(0, 1), dtype) is not None:
            return f"keys of layer {layer} are not rotated like those of a rotary embedding of all dimensions"
    return None


@contextmanager
def using_attention(model: Any, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _logits(
    model: Any, ids: Tensor, attention: str, first: int = 0, plain_pass: PlainPass | None = None
) -> Tensor:
    """[T, V] float32 after every token of a text that begins at position `first`.

    plain_pass: notes of plain attention.
    """
    weight = next(model.parameters())
    positions = torch.arange(first, first + len(ids), device=weight.device)
    more: dict[str, Any] = {} if plain_pass is None else {"plain_pass": plain_pass}
    if plain_pass is not None and plain_pass.identity.states is not None:
        texts = [TextStates(plain_pass.identity.states, weight.dtype, weight.device)]
        more["cache"] = plain_pass.cache = StateCache.over(texts)
    elif plain_pass is not None and plain_pass.identity.index_keys:
        plain_pass.index = IndexCache(plain_pass.identity.layers)
        more |= plain_pass.index.inputs(len(ids), weight.device)
    with torch.inference_mode(), using_attention(model, attention), passing(plain_pass):
        out = model(
            input_ids=ids.to(weight.device)[None], position_ids=positions[None], use_cache=False, **more
        )
    return out.logits[0].float()  # type: ignore[no-any-return]


def _attend_plainly(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    plain_pass: PlainPass | None = None,
    indices: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention of one text to itself, as the reading has it: query [1, Hq, T, d] -> [1, T, Hq, d].

    indices: positions [1, T, K] that the model selected by an index of its own.
    """
    plain_pass = plain_pass or cast(PlainPass, passed())
    layer = next(plain_pass.calls)
    reading, form = plain_pass.readings[layer], plain_pass.forms[layer]
    width, own_heads = value.shape[-1], query.shape[1]
    query, key, value = widen(query, key, value)
    if plain_pass.index is not None and reading.index_keys:
        query, key, value = plain_pass.index.join(layer, query, key, value)
    query_HqTD, key_HTD, value_HTD = query[0], key[0], value[0]
    plain_pass.queries[layer] = query_HqTD
    plain_pass.kv[layer] = torch.stack([key_HTD, value_HTD], dim=2)
    heads, tokens, dim = key_HTD.shape
    q_HGTD = query_HqTD.float().view(heads, -1, tokens, dim)
    logits = form.capped(torch.einsum("hgtd,hsd->hgts", q_HGTD * reading.scale, key_HTD.float()))
    places = torch.arange(tokens, device=query.device)
    ages = places[:, None] - places
    unseen = ages < 0
    if reading.window is not None and reading.chunked:
        unseen |= places[:, None] // reading.window != places // reading.window
    elif reading.window is not None:
        unseen |= ages >= reading.window
    if indices is not None:
        unseen |= torch.ones_like(unseen).scatter_(1, indices[0].long(), False)
    logits.masked_fill_(unseen, -torch.inf)
    lse_HGT = logits.logsumexp(-1)
    if form.sink_HG is not None:
        lse_HGT = torch.logaddexp(lse_HGT, form.sink_HG[:, :, None])
    weights = torch.exp(logits - lse_HGT[..., None])
    out = torch.einsum("hgts,hsd->thgd", weights, value_HTD.float()).flatten(1, 2)
    return narrow(without_index_head(out[None], own_heads), width).to(query.dtype).contiguous(), None


@contextmanager
def _small_windows(model: Any, identity: ModelIdentity) -> Iterator[ModelIdentity]:
    """The model with windows shorter than the text, and its identity then."""
    window = identity.window
    if window is None or window.size <= _WINDOW:
        yield identity
        return
    name = "attention_chunk_size" if window.chunked else "sliding_window"
    holders: list[Any] = []
    for module in model.modules():
        config = getattr(module, "config", None)
        holders += [each for each in (module, config) if getattr(each, name, None) == window.size]
    holders = list({id(holder): holder for holder in holders}.values())
    try:
        for holder in holders:
            setattr(holder, name, _WINDOW)
        yield replace(identity, window=replace(window, size=_WINDOW))
    finally:
        for holder in holders:
            setattr(holder, name, window.size)


@contextmanager
def short_lists(model: Any) -> Iterator[None]:
    """The model with lists of its own index that are shorter than the text of the check."""
    sizes = {module: module.index_topk for module in model.modules() if hasattr(module, "index_topk")}
    try:
        for module, size in sizes.items():
            module.index_topk = min(size, _WINDOW)
        yield
    finally:
        for module, size in sizes.items():
            module.index_topk = size


def remembered(
    identity: ModelIdentity, model: Any, name: str, find_out: Callable[[], Verdict], kept: str = ""
) -> Verdict:
    """What was found out about the model under that name, now or at an earlier time, in the same versions.

    kept: how its weights are kept, where that is not in the dtype that is computed in.
    """
    weights = next(model.parameters())
    versions = [_VERSION, torch.__version__, transformers.__version__]
    key = [name, identity.fingerprint, str(weights.dtype), weights.device.type, kept, *versions]
    known = recall(_KIND, key)
    if known is not None:
        return known
    size = sum(each.numel() for each in (*model.parameters(), *model.buffers()))
    if size > _LARGE:
        logger.warning(
            "comparing the %s of model %s with its own, once: as long as reading %d tokens takes",
            name, identity.name, 4 * TOKENS,
        )  # fmt: skip
    begin = time.perf_counter()
    found = find_out()
    logger.info(
        "compared the %s of model %s with its own in %.1f s", name, identity.name, time.perf_counter() - begin
    )
    if agrees(found, name):  # who is refused is looked at anew every time
        keep(_KIND, key, found)
    return found
