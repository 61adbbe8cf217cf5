"""FlashInfer's exact decode attention of many sessions on one context, for benchmarks to compare with.

The package is imported when it is asked for: nothing else of the project needs it. Its backend fa2 takes all groups,
and heads of 64, 128 and 256 channels, as our kernels do.

Shape legend: L layers, B sessions, H KV heads, G query heads per KV head, N keys, T keys of a tail, P pages,
d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import typer
from torch import Tensor

from harness.timing import graph_us

PAGE = 64
WORKSPACE_BYTES = 512 * 2**20
"""For the outputs of parts of a context; four times what FlashInfer recommends."""

Attend = Callable[[int], Tensor]
"""From a layer to [B, H, G, d]."""


def load_flashinfer() -> Any:
    """The package. Raises typer.BadParameter where it cannot be imported."""
    try:
        import flashinfer
    except ImportError as error:
        raise typer.BadParameter(
            f"--flashinfer needs FlashInfer, which cannot be imported ({error}): pip install flashinfer-python"
        ) from error
    return flashinfer


def flashinfer_us(
    q_LBHGD: Tensor, kv_LHN2D: Tensor, tail_BHT2D: Tensor, check: Callable[[str, Tensor, bool], None]
) -> dict[str, float | str]:
    """What a row says of FlashInfer: microseconds per layer of both ways, and its version.

    check: of the first layer's output, with tails or without; raises CheckFailedError.
    """

    def checked_us(name: str, attend: Attend, tails: bool) -> float:
        check(f"FlashInfer's {name}, session", attend(0), tails)
        steps = [partial(attend, layer) for layer in range(len(q_LBHGD))]
        return graph_us(steps, max(1, 8 // len(steps)))

    return {
        "flashinfer_single_us": checked_us("single prefill", single_prefill(q_LBHGD, kv_LHN2D), False),
        # Nobody else keeps its pages, a copy of the context: they go when it has been timed.
        "flashinfer_cascade_us": checked_us("cascade", cascade(q_LBHGD, kv_LHN2D, tail_BHT2D), True),
        "flashinfer": load_flashinfer().__version__,
    }


def single_prefill(q_LBHGD: Tensor, kv_LHN2D: Tensor) -> Attend:
    """Without tails, over keys and values as they are stored: all sessions' queries are the rows of one sequence."""
    attention = load_flashinfer().single_prefill_with_kv_cache

    def attend(layer: int) -> Tensor:
        q, kv = q_LBHGD[layer], kv_LHN2D[layer]
        out: Tensor = attention(
            q.flatten(1, 2), kv[:, :, 0], kv[:, :, 1], causal=False, kv_layout="HND", backend="fa2"
        )
        return out.view(q.shape)

    return attend


def cascade(q_LBHGD: Tensor, kv_LHN2D: Tensor, tail_BHT2D: Tensor) -> Attend:
    """Two levels, planned here: all sessions on the context's pages, and each on its tail's.

    What the wrapper's `run` does, into outputs that are made here: it fills new ones with zeros, two launches more.
    """
    device = q_LBHGD.device
    sessions, heads, group, head_dim = q_LBHGD.shape[1:]
    caches = [torch.cat([pages(kv[None]), pages(tail_BHT2D)]) for kv in kv_LHN2D]
    shared, own = kv_LHN2D.shape[2] // PAGE, tail_BHT2D.shape[2] // PAGE

    def ints(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = load_flashinfer().MultiLevelCascadeAttentionWrapper(2, workspace, "HND")
    # The wrapper's constructor takes no backend. By itself it chooses fa3 on Hopper, which does not divide a context's
    # keys among programs, and takes 1.7 ms for 131,072 of them.
    levels = wrapper._batch_prefill_wrappers
    for level in levels:
        if not hasattr(level, "_backend"):
            raise AttributeError(
                "FlashInfer's wrappers have no _backend any more: its choice cannot be set to fa2"
            )
        level._backend = "fa2"
    wrapper.plan(
        [ints([0, sessions]), ints(range(sessions + 1))],
        [ints([0, shared]), ints(own * b for b in range(sessions + 1))],
        [ints(range(shared)), ints(range(shared, shared + sessions * own))],
        [ints([PAGE]), ints([PAGE] * sessions)],  # keys of a last page
        heads * group,
        heads,
        head_dim,
        PAGE,
        causal=False,
        q_data_type=q_LBHGD.dtype,
    )

    shape = (sessions, heads * group)
    outs = [torch.empty(*shape, head_dim, dtype=q_LBHGD.dtype, device=device) for _ in levels]
    sums = [torch.empty(shape, dtype=torch.float32, device=device) for _ in levels]
    merge = load_flashinfer().merge_state_in_place

    def attend(layer: int) -> Tensor:
        q = q_LBHGD[layer]
        for level, out, lse in zip(levels, outs, sums, strict=True):
            level.run(q.flatten(1, 2), caches[layer], out=out, lse=lse, return_lse=True)
        merge(outs[1], sums[1], outs[0], sums[0])
        return outs[1].view(q.shape)

    return attend


def pages(kv_BHN2D: Tensor) -> Tensor:
    """[B x P, 2, H, PAGE, d], for one B after another; a view where it can be."""
    return torch.unflatten(kv_BHN2D, 2, (-1, PAGE)).permute(0, 2, 4, 1, 3, 5).flatten(0, 1)
