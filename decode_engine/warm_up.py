"""Runs every method once on a made-up context, so that no request waits while kernels compile.

Shape legend: H KV heads, G group heads, N tokens of the context, P sampled query positions, d head dim.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import torch

from decode_engine.runner import ModelRunner
from index_store.context import ResidentContext
from index_store.dtypes import dtype_name, stored_dtype
from index_store.errors import InvalidArgumentError
from index_store.index_specs import IndexSpec
from index_store.indexes.base import LayerIndex, LayerSource, QuerySample
from index_store.indexes.registry import INDEX_KINDS
from index_store.manifest import (
    IndexEntry,
    Manifest,
    ModelIdentity,
    index_array_entry,
    kv_entry,
    tokens_entry,
)
from index_store.methods import METHODS, Method
from index_store.threshold_curve import KEEP_GRID

_TOKENS = 512
_DECODE_STEPS = 2

logger = logging.getLogger(__name__)


def warm_up(runner: ModelRunner) -> list[str]:
    """Runs a prompt and decode steps with every method that fits the model; returns their names.

    The prompt is longer than recent window and append block together, so that appending to indexes runs too.
    """
    ran = []
    for method in METHODS.values():
        prompt = method.recent + method.append_block + 1
        if _TOKENS + prompt + _DECODE_STEPS > runner.identity.max_positions:
            logger.info("method %s is not warmed up: the model has too few positions", method.name)
            continue
        try:
            context = made_up_context(runner.identity, runner.kv_dtype, method)
        except InvalidArgumentError as error:
            logger.info("method %s does not fit the model and is not warmed up: %s", method.name, error)
            continue
        session = runner.start(context, method)
        runner.forward([session], [[0] * prompt])
        for _ in range(_DECODE_STEPS):
            runner.forward([session], [[0]])
        session.close()
        ran.append(method.name)
    return ran


def made_up_context(
    identity: ModelIdentity, dtype: str, method: Method, tokens: int = _TOKENS
) -> ResidentContext:
    """A context of random keys and values, the same in all layers, with the index that the method needs.

    Raises InvalidArgumentError when the index cannot be built for the model's head dim.
    """
    generator = torch.Generator().manual_seed(0)
    heads, group, head_dim = identity.kv_heads, identity.query_heads // identity.kv_heads, identity.head_dim
    kv_HN2D = torch.randn(heads, tokens, 2, head_dim, generator=generator).to(stored_dtype(dtype).torch_dtype)
    queries_HPGD = torch.randn(heads, tokens, group, head_dim, generator=generator)
    entries: list[IndexEntry] = []
    arrays: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
    layers = tuple(range(identity.layers))
    source = LayerSource(kv_HN2D, QuerySample(queries_HPGD, torch.arange(tokens)), torch.ones(head_dim // 2))
    for spec in method.index_specs():
        index = INDEX_KINDS[spec.kind].build(spec.parameters, source, seed=0)
        arrays |= {(spec.name, layer): index.arrays() for layer in layers}
        entries.append(_index_entry(spec, index, layers, tokens))
    manifest = Manifest(
        id="0" * 64,
        name="warm-up",
        created_at=datetime.now(UTC),
        expires_at=None,
        model=identity,
        dtype=dtype,
        token_count=tokens,
        salt="",
        methods=(method.name,),
        dense_layers=(),
        selection_errors=(),
        tokens=tokens_entry(tokens),
        kv=kv_entry(identity, tokens, dtype),
        indexes=tuple(entries),
        prefill={},
        seconds={},
    )
    return ResidentContext(
        manifest, torch.zeros(tokens, dtype=torch.int64), dict.fromkeys(layers, kv_HN2D), arrays
    )


def _index_entry(spec: IndexSpec, index: LayerIndex, layers: tuple[int, ...], tokens: int) -> IndexEntry:
    arrays = tuple(
        index_array_entry(spec.name, array, len(layers), tensor.shape, dtype_name(tensor.dtype))
        for array, tensor in index.arrays().items()
    )
    # A threshold that nothing was calibrated for; warming up needs one that can be read.
    thresholds = (1.0 / tokens,) * len(KEEP_GRID) if INDEX_KINDS[spec.kind].partitions else ()
    return IndexEntry(spec.name, spec.kind, spec.parameters, layers, arrays, thresholds)
