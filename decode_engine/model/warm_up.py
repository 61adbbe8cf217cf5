"""Runs a method once on a made-up context, so that no request waits while kernels compile.

Shape legend: H KV heads, G group heads, N tokens of the context, P sampled query positions, d head dim.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.engine.stepping import decode_by_forward
from decode_engine.model.runner import ModelRunner
from decode_engine.model.unstored import unstored_manifest
from index_store.errors import InvalidArgumentError
from index_store.indexes.classes import INDEX_CLASSES
from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.indexes.coarse_rows.two_planes import find_low_plane
from index_store.indexes.interface.layer_index import LayerIndex, LayerSource
from index_store.memory.placement import HOST_SEARCHED, Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import INDEX_SPECS, IndexSpec, Method
from index_store.selection.budgets import KEEP_GRID
from index_store.selection.calibration import ThresholdCalibrator
from index_store.store.description.array_entry import index_array_entry
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.dtypes import AS_DTYPE, INT8, dtype_name, stored_dtype
from index_store.store.description.manifest import HIGH_PLANE, IndexEntry
from index_store.store.stored_context import QuerySample

_TOKENS = 512
_DECODE_STEPS = 2
_SAMPLE = 1024
_CALIBRATED = 16

logger = logging.getLogger(__name__)


def warm_method(
    runner: ModelRunner, method: Method, placement: Placement = Placement.DEVICE, *, rows: str = AS_DTYPE
) -> bool:
    """Runs a prompt and decode steps of the general path with the method; whether it fits the model.

    The prompt is longer than recent window and append block together, so that appending to indexes runs too.
    placement, rows: of contexts that will come.
    """
    prompt = method.recent + method.append_block + 1
    if _TOKENS + prompt + _DECODE_STEPS > runner.identity.max_positions:
        logger.info("method %s is not warmed up: the model has too few positions", method.name)
        return False
    try:
        context = made_up_context(
            runner.identity, runner.kv_dtype, method, device=runner.device, placement=placement, rows=rows
        )
    except InvalidArgumentError as error:
        logger.info("method %s does not fit the model and is not warmed up: %s", method.name, error)
        return False
    fitted = method.on(context.manifest)
    session = runner.start(context, fitted)
    runner.read([session], [[0] * prompt])
    for _ in range(0 if runner.steps_kind(fitted, placement) else _DECODE_STEPS):
        for result in decode_by_forward(runner.forward, [session], [0], [Sampler(SamplingParameters())]):
            if isinstance(result, Exception):
                raise result
    session.close()
    context.release()
    return True


def placements_of(method: Method, placements: Sequence[Placement]) -> list[Placement]:
    """Those that differ for the method: what the host does not search lies in `host` as in `hybrid`."""
    searched = method.index is not None and method.index.kind in HOST_SEARCHED
    return [
        placement
        for placement in placements
        if searched or placement is not Placement.HOST or Placement.HYBRID not in placements
    ]


def made_up_context(
    identity: ModelIdentity,
    dtype: str,
    method: Method,
    tokens: int = _TOKENS,
    *,
    also: Sequence[Method] = (),
    distinct: int = 1,
    device: torch.device | str = "cpu",
    seed: int = 0,
    placement: Placement = Placement.DEVICE,
    calibrated_for: float | None = None,
    rows: str = AS_DTYPE,
    kv: Callable[[int], torch.Tensor] | None = None,
) -> ResidentContext:
    """A context of random keys and values with the indexes that the method needs.

    also: methods whose indexes it has too. distinct: layers with keys, values and indexes of their own, which the
    model's layers use in turn. placement: keys and values in host memory are page-locked beside a GPU. calibrated_for:
    standard deviation of the queries that thresholds are calibrated for; None where any threshold will do. rows: one of
    `ROW_CODINGS`; in 8 bits it has the index of their high plane, too. kv: keys and values [H, tokens, 2, d] of the
    full layer of that number instead of random ones, in any float dtype.
    Raises InvalidArgumentError when an index cannot be built for the model's head dim.
    """
    generator = torch.Generator(device).manual_seed(seed)
    group, head_dim = identity.query_heads // identity.kv_heads, identity.head_dim
    sampled = min(tokens, _SAMPLE)
    positions = torch.linspace(0, tokens - 1, sampled, device=device).long()
    layers = identity.full_layers
    methods = (method, *also) if identity.searched_layers else ()
    wanted = [spec for each in methods for spec in each.index_specs()]
    wanted += [INDEX_SPECS[HIGH_PLANE]] if rows == INT8 else []
    specs = {spec.name: spec for spec in wanted}.values()
    stored: dict[int, torch.Tensor] = {}
    built: dict[tuple[str, int], LayerIndex] = {}
    calibrators = {
        spec.name: ThresholdCalibrator()
        for spec in specs
        if INDEX_CLASSES[spec.kind].divides_into is not None
    }
    for place, layer in enumerate(layers[:distinct]):
        made = _random_rows(identity, layer, tokens, dtype, generator)
        stored[layer] = made if kv is None else made.copy_(kv(place))
        queries_HPGD = torch.randn(
            identity.kv_heads, sampled, group, head_dim, generator=generator, device=device
        )
        frequencies = torch.ones(head_dim // 2, device=device)
        source = LayerSource(stored[layer], QuerySample(queries_HPGD, positions), frequencies)
        for spec in specs:
            index = built[spec.name, layer] = INDEX_CLASSES[spec.kind].build(spec.parameters, source, seed)
            if calibrated_for is not None and spec.name in calibrators:
                late_HTGD = queries_HPGD[:, -_CALIBRATED:] * (calibrated_for * head_dim**-0.5)
                sinks = min(int(spec.parameters.get("sinks", 0)), tokens)
                position = tokens - late_HTGD.shape[1]
                calibrators[spec.name].add(index.rank(late_HTGD, sinks, tokens, None, {}, position=position))
        if rows == INT8:
            stored[layer] = _low_plane(stored[layer], built[HIGH_PLANE, layer])
        if placement.kv_on_host:
            stored[layer] = _to_host(stored[layer])
    arrays = {
        (spec.name, layer): _place_arrays(built[spec.name, layer], placement)
        for spec in specs
        for layer in layers[:distinct]
    }
    windows = {
        layer: _random_rows(identity, layer, tokens, dtype, generator) for layer in identity.window_layers
    }
    # Thresholds that nothing was calibrated for will do to warm up, which needs some that can be read.
    thresholds = {
        name: found.thresholds or (1.0 / tokens,) * len(KEEP_GRID) for name, found in calibrators.items()
    }
    entries = [
        _index_entry(spec, built[spec.name, layers[0]], layers, thresholds.get(spec.name, ()))
        for spec in specs
        if layers
    ]
    like = {layer: layers[place % distinct] for place, layer in enumerate(layers)}
    manifest = unstored_manifest(identity, dtype, tokens, method.name, tuple(entries), rows)
    return ResidentContext(
        manifest,
        torch.zeros(tokens, dtype=torch.int64),
        {**windows, **{layer: stored[like[layer]] for layer in layers}},
        {(spec.name, layer): arrays[spec.name, like[layer]] for spec in specs for layer in layers},
        placement=placement,
        device=torch.device(device),
    )


def _random_rows(
    identity: ModelIdentity, layer: int, tokens: int, dtype: str, generator: torch.Generator
) -> torch.Tensor:
    """Keys and values of a layer, as many as it keeps of so many tokens."""
    own = identity.shape(layer)
    shape = (own.kv_heads, own.kept(tokens), 2, own.head_dim)
    like = stored_dtype(dtype).torch_dtype
    return torch.randn(shape, generator=generator, dtype=like, device=generator.device)


def _low_plane(kv_HN2D: torch.Tensor, high: LayerIndex) -> torch.Tensor:
    """Of rows whose high plane is a coarse copy."""
    if not isinstance(high, CoarseRows):
        raise TypeError(f"index {HIGH_PLANE} is a {type(high).__name__}")
    return find_low_plane(kv_HN2D, high.rows)


def _place_arrays(index: LayerIndex, placement: Placement) -> dict[str, torch.Tensor]:
    """The index's arrays where the placement has them."""
    on_host = placement.index_on_host(index.kind)
    return {name: array.cpu() if on_host else array for name, array in index.arrays().items()}


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, page-locked where the tensor is in a GPU's."""
    on_gpu = tensor.is_cuda
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=on_gpu).copy_(tensor)


def _index_entry(
    spec: IndexSpec, index: LayerIndex, layers: tuple[int, ...], thresholds: tuple[float, ...]
) -> IndexEntry:
    arrays = tuple(
        index_array_entry(spec.name, array, len(layers), tensor.shape, dtype_name(tensor.dtype))
        for array, tensor in index.arrays().items()
    )
    return IndexEntry(spec.name, spec.kind, spec.parameters, layers, arrays, thresholds)
