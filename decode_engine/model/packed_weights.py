"""A model's matrices on a CPU as decoding reads them: in 32, 16 or 8 bits, multiplied in float32 row by row.

A decode step takes as long as reading its weights. Those of a checkpoint in 16 bits are kept in 16 bits, which changes
no bit of any product; 8 bits round. Everything else of the model stays in float32, and nothing is kept twice.

Shape legend: I inputs, O outputs, V vocabulary, E hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear, pad

from decode_engine.model.row_products_numba import LEAST_OUTPUTS, Numbers, multiply_rows
from decode_engine.settings.command_options import WEIGHTS
from index_store.attention.vectors.code import LANES
from index_store.attention.vectors.weight_rows_numba import GROUP
from index_store.cli.options import AUTO
from index_store.compiled.launch import get_num_threads, set_num_threads
from index_store.compiled.loop_cache import environment
from index_store.memory.devices import processor_name
from index_store.models.digests import keep, recall
from index_store.models.fused.joined import give_together

_MOST_ROWS = 48
"""Rows up to which products row by row take less time than torch's, whose weights are widened first."""

_TIMED_WEIGHTS = 2**24
_TIMES = 5
_KIND = "products"  # of records
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that modules give the same input: a step takes one product for all of them, which has the same bits
and takes less time, since threads are woken once."""

_DTYPES = {name: getattr(torch, name) for name in WEIGHTS if name != AUTO}
_AS_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.uint16}


Arrays = tuple[Numbers, NDArray[np.float32]]
"""Numbers and scales of a matrix, as loops read them."""


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """How matrices are kept. name: of their dtype. told: with the reason, for the log. rounded: were any changed."""

    name: str
    told: str
    rounded: bool = False


class PackedMatrix(nn.Module):
    """A matrix [O, I] in fewer bits.

    numbers: [O, I rounded up] float32, bfloat16, float16, or int8, which count in scales [O, groups] float32, one for
    GROUP inputs. whole: the arrays of the joined matrix that it begins or goes on.
    """

    numbers: Tensor
    scales: Tensor

    def __init__(self, weight_OI: Tensor, dtype: torch.dtype) -> None:
        """Rounds float32 weights to the nearest."""
        super().__init__()
        outputs, self.inputs = weight_OI.shape
        more = -self.inputs % (GROUP if dtype == torch.int8 else LANES)
        whole = pad(weight_OI, (0, more)) if more else weight_OI  # padding always copies
        scales = weight_OI.new_empty(0, 0)
        if dtype == torch.int8:
            groups = whole.view(outputs, -1, GROUP)
            scales = groups.abs().amax(2) / 127
            whole = (groups / scales.clamp(min=1e-30)[..., None]).round_().view(outputs, -1)
        self.register_buffer("numbers", None, persistent=False)
        self.register_buffer("scales", None, persistent=False)
        self.whole: Arrays | None = None
        self._keep(whole.detach().to(dtype).contiguous(), scales)

    def _keep(self, numbers: Tensor, scales: Tensor) -> None:
        self.numbers, self.scales = numbers, scales
        bits = _AS_BITS.get(numbers.dtype, numbers.dtype)
        self.arrays: Arrays = (numbers.view(bits).numpy(), scales.numpy())

    @staticmethod
    def joined(matrices: Sequence[PackedMatrix]) -> PackedMatrix:
        """All of one input and dtype below each other; their own numbers become views of it."""
        whole = copy(matrices[0])
        whole._buffers = dict(whole._buffers)
        whole._keep(
            torch.cat([each.numbers for each in matrices]), torch.cat([each.scales for each in matrices])
        )
        sizes = [len(each.numbers) for each in matrices]
        of_scales = sizes if len(whole.scales) else [0] * len(sizes)
        parts = zip(torch.split(whole.numbers, sizes), torch.split(whole.scales, of_scales), strict=True)
        for each, (numbers, scales) in zip(matrices, parts, strict=True):
            each._keep(numbers, scales)
            each.whole = whole.arrays
        return whole

    def widened(self, outputs: Tensor | None = None) -> Tensor:
        """[O, I] float32, or of these outputs."""
        numbers, scales = self.numbers, self.scales
        if outputs is not None:
            numbers, scales = numbers[outputs], scales[outputs] if len(scales) else scales
        wide = numbers.float()
        if len(scales):
            wide.view(*scales.shape, GROUP).mul_(scales[..., None])
        return wide[:, : self.inputs]


class RowLinear(nn.Module):
    """A linear layer of a packed matrix. Rows of decode steps, and others that are few, are multiplied each alone."""

    def __init__(self, matrix: PackedMatrix, bias: Tensor | None) -> None:
        super().__init__()
        self.matrix, self.bias = matrix, bias
        self.out_features, self.in_features = len(matrix.numbers), matrix.inputs

    def takes(self, rows: Tensor) -> bool:
        """Whether each of the rows is multiplied by itself."""
        count = rows.numel() // self.in_features
        return count > 0 and (count <= _MOST_ROWS or (rows.dim() == 3 and rows.shape[1] == 1))

    @property
    def weight(self) -> Tensor:
        """[O, I] float32, made anew: for layers that look at it."""
        return self.matrix.widened()

    def forward(self, rows: Tensor) -> Tensor:
        if not self.takes(rows):
            return linear(rows, self.weight, self.bias)
        count = rows.numel() // self.in_features
        numbers, scales = self.matrix.arrays
        flat = rows.reshape(count, self.in_features)
        if numbers.shape[1] > self.in_features:
            flat = pad(flat, (0, numbers.shape[1] - self.in_features))
        product = multiply_rows(flat, numbers, scales).view(*rows.shape[:-1], self.out_features)
        return product if self.bias is None else product + self.bias


class RowEmbedding(nn.Module):
    """An embedding, of any kind, whose rows are a packed matrix's."""

    def __init__(self, matrix: PackedMatrix, other: nn.Embedding) -> None:
        super().__init__()
        self.matrix, self.other = matrix, other
        other.padding_idx = None  # counts for gradients alone, and in rows that are not there
        other.weight = nn.Parameter(other.weight.new_empty(0, matrix.inputs), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """[V, E] float32, made anew."""
        return self.matrix.widened()

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.matrix.widened(ids.flatten())
        places = torch.arange(len(rows), device=ids.device).view(ids.shape)
        found: Tensor = functional_call(self.other, {"weight": rows}, (places,))
        return found


def pack_weights(model: nn.Module, wanted: str, checkpoint: torch.dtype) -> KeptWeights:
    """Packs the linear layers, and the embedding of tokens, of a model in float32 on the host.

    wanted: one of `command_options.WEIGHTS`. checkpoint: the dtype that the weights are stored in. Models with experts
    keep float32.
    """
    places = [place for place in _linear_layers(model) if _takes(place[2].weight)]
    dtype, why = _choose(model, [layer.weight for _, _, layer in places], wanted, checkpoint)
    packed: dict[int, PackedMatrix] = {}
    rounding: list[bool] = []

    def pack(weight: Tensor, into: torch.dtype) -> PackedMatrix:
        if id(weight) not in packed:
            exact = into != torch.int8 and torch.equal(weight.to(into).float(), weight)
            rounding.append(not exact and wanted != AUTO)
            packed[id(weight)] = PackedMatrix(weight, into if exact or wanted != AUTO else torch.float32)
        return packed[id(weight)]

    for parent, name, layer in places:
        setattr(parent, name, RowLinear(pack(layer.weight, dtype), layer.bias))
    for parent in model.modules():
        for names in _TOGETHER:
            _join([getattr(parent, name, None) for name in names])
    if dtype != torch.float32:
        for parent, name, embedding in list(_embeddings(model)):
            # A lookup reads a row: where it is no linear layer's matrix, rounding it would win nothing.
            tied = id(embedding.weight) in packed
            matrix = pack(embedding.weight, checkpoint if dtype == torch.int8 and not tied else dtype)
            setattr(parent, name, RowEmbedding(matrix, embedding))
    return KeptWeights(_name(dtype), f"weights {_name(dtype)} ({why})", any(rounding))


def _join(found: Sequence[nn.Module | None]) -> None:
    """Has linear layers of one input give what they give to few rows by one product, where they can."""
    layers = [each for each in found if isinstance(each, RowLinear)]
    alike = {(each.in_features, each.matrix.numbers.dtype, each.bias is None) for each in layers}
    matrices = [each.matrix for each in layers]
    if len(layers) < len(found) or len(alike) > 1 or len(set(matrices)) < len(matrices):
        return
    alone = [each.forward for each in layers]
    biases = [each.bias for each in layers if each.bias is not None]
    whole = RowLinear(PackedMatrix.joined(matrices), torch.cat(biases) if biases else None)
    sizes = [each.out_features for each in layers]

    def give(rows: Tensor) -> Sequence[Tensor]:
        return whole(rows).split(sizes, -1) if whole.takes(rows) else [each(rows) for each in alone]

    give_together(layers, give)


def _choose(
    model: nn.Module, weights: Sequence[Tensor], wanted: str, checkpoint: torch.dtype
) -> tuple[torch.dtype, str]:
    if any(parameter.dim() > 2 for parameter in model.parameters()):
        return torch.float32, "the model has experts or convolutions, which are not packed"
    if wanted != AUTO:
        return _DTYPES[wanted], "as told"
    if checkpoint == torch.float32 or not weights:
        return torch.float32, "those of the checkpoint"
    ratio = _gain(max(weights, key=Tensor.numel), checkpoint)
    if ratio < 1:
        return torch.float32, f"{_name(checkpoint)} has {ratio:.1f} times its speed on this processor"
    return checkpoint, f"exact, {ratio:.1f} times the speed of float32 on this processor"


def _gain(weight_OI: Tensor, dtype: torch.dtype) -> float:
    """How many times as fast a row is multiplied by the matrix, or its first rows, in another dtype.

    It is measured once for each shape on a processor, so that every start chooses alike.
    """
    part = weight_OI[: max(LEAST_OUTPUTS, _TIMED_WEIGHTS // weight_OI.shape[1])]
    key = [processor_name(), environment(), _name(dtype), *part.shape]
    known = (recall(_KIND, key) or {}).get("ratio")
    if known is None:
        known = f"{_measure(part, dtype):.3f}"
        keep(_KIND, key, {"ratio": known})
    return float(known)


def _measure(weight_OI: Tensor, dtype: torch.dtype) -> float:
    """By the processor's time of one thread, which counts nothing that runs beside it."""
    row = torch.ones(1, 1, weight_OI.shape[1])
    layers = [RowLinear(PackedMatrix(weight_OI, each), None) for each in (torch.float32, dtype)]
    seconds: list[list[float]] = [[], []]
    threads = get_num_threads()
    set_num_threads(1)
    try:
        for _ in range(1 + _TIMES):  # the first ones compile
            for layer, taken in zip(layers, seconds, strict=True):
                begin = time.thread_time()
                layer(row)
                taken.append(time.thread_time() - begin)
    finally:
        set_num_threads(threads)
    return min(seconds[0]) / min(seconds[1])


def _takes(weight: Tensor) -> bool:
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    return on_cpu and weight.shape[0] >= LEAST_OUTPUTS


def _linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Those whose class is torch's own, with the modules that hold them, and their names there."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                yield parent, name, child


def _embeddings(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Embedding]]:
    """That of tokens, wherever it is held."""
    find: Callable[[], nn.Module] = getattr(model, "get_input_embeddings", lambda: model)
    own = find()
    for parent in model.modules():
        for name, child in parent.named_children():
            if child is own and isinstance(child, nn.Embedding):
                yield parent, name, child


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
