"""FlashInfer's exact decode attention of many sessions on one context, for benchmarks to compare with.

The package is imported when it is asked for: nothing else of the project needs it. Its backend fa2 takes all groups,
and heads of 64, 128 and 256 channels, as our kernels do.

Shape legend: L layers, B sessions, H KV heads, G query heads per KV head, N keys, T keys of a tail, P pages,
d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import typer
from torch import Tensor

from decode_engine.steps.attention.step_attention import StepAttention, StepPlan
from harness.report import check_close
from harness.timing import graph_us
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.store.description.manifest import Manifest

PAGE = 64
WORKSPACE_BYTES = 512 * 2**20
"""For the outputs of parts of a context; four times what FlashInfer recommends."""

FLOAT8_TOLERANCE = 0.1
"""Of outputs, relative: XQA rounds queries and weights to float8, too."""

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


class Float8Cache:
    """Contexts' keys and values of one layer in pages of float8, read by rows of queries; without tails.

    Rows of queries are divided evenly among the contexts, those of one next to each other.
    """

    def __init__(self, kv_BHN2D: Tensor) -> None:
        self.contexts, self._heads, self.length, _, self._head_dim = kv_BHN2D.shape
        self._pages = pages(kv_BHN2D).to(torch.float8_e4m3fn)

    def reference(self, q_HGD: Tensor, context: int) -> Tensor:
        """What a row of queries gets of the rounded keys and values, [H, G, d] in float64."""
        some = self._pages.view(self.contexts, -1, *self._pages.shape[1:])[context]
        keys_HND, values_HND = some.permute(1, 2, 0, 3, 4).flatten(2, 3).double()
        weights = (q_HGD.double() @ keys_HND.mT * self._head_dim**-0.5).softmax(-1)
        out_HGD: Tensor = weights @ values_HND
        return out_HGD

    def fa2(self, q_BHGD: Tensor) -> Callable[[Tensor], Tensor]:
        """A planned attention to rows of queries of that shape and dtype, those of one context packed."""
        rows, heads, group = q_BHGD.shape[:3]
        share, per_context = rows // self.contexts, self.length // PAGE

        def ints(last: int, step: int) -> Tensor:
            return torch.arange(0, last + 1, step, dtype=torch.int32, device=q_BHGD.device)

        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q_BHGD.device)
        wrapper = load_flashinfer().BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa2")
        page_count = self.contexts * per_context
        full_pages = torch.full((self.contexts,), PAGE, dtype=torch.int32, device=q_BHGD.device)
        wrapper.plan(
            ints(rows, share),
            ints(page_count, per_context),
            ints(page_count - 1, 1),
            full_pages,
            heads * group,
            heads,
            self._head_dim,
            PAGE,
            causal=False,
            q_data_type=q_BHGD.dtype,
            kv_data_type=self._pages.dtype,
        )
        out = torch.empty(rows, heads * group, self._head_dim, dtype=q_BHGD.dtype, device=q_BHGD.device)

        def attend(q_BHGD: Tensor) -> Tensor:
            wrapper.run(q_BHGD.flatten(1, 2), self._pages, out=out)
            return out.view(q_BHGD.shape)

        return attend

    def xqa(self, q_BHGD: Tensor) -> Callable[[Tensor], Tensor]:
        """The same by XQA, a row on every context."""
        device, per_context = q_BHGD.device, self.length // PAGE
        decode = load_flashinfer().decode.xqa_batch_decode_with_kv_cache
        table = torch.arange(self.contexts * per_context, dtype=torch.int32, device=device)
        lengths = torch.full((self.contexts,), self.length, dtype=torch.uint32, device=device)
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        out = torch.empty_like(q_BHGD.flatten(1, 2))

        def attend(q_BHGD: Tensor) -> Tensor:
            decode(
                q_BHGD.flatten(1, 2), self._pages, workspace, table.view(self.contexts, -1), lengths, self.length,
                bmm1_scale=self._head_dim**-0.5, bmm2_scale=1.0, kv_layout="HND", out=out,
            )  # fmt: skip
            return out.view(q_BHGD.shape)

        return attend

    def ways(self, q_BHGD: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
        """The attentions that such rows of queries can have, by name, each compared with the reference beforehand.

        Raises CheckFailedError for a wrong output.
        """
        found = {"fa2": self.fa2(q_BHGD)}
        if len(q_BHGD) == self.contexts:
            found["xqa"] = self.xqa(q_BHGD)
        for name, attend in found.items():
            out_BHGD = attend(q_BHGD)
            for row in {0, len(q_BHGD) - 1}:
                expected = self.reference(q_BHGD[row], row * self.contexts // len(q_BHGD))
                check_close(f"{name} over float8, row {row}", out_BHGD[row], expected, FLOAT8_TOLERANCE)
        return found


def float8_us(q_LBHGD: Tensor, kv_LCHN2D: Tensor) -> dict[str, float]:
    """Microseconds per layer of full attention over contexts in float8, by way.

    The rows of queries of one context, B / C of them, stand next to each other.
    """
    caches = [Float8Cache(kv) for kv in kv_LCHN2D]
    found: dict[str, float] = {}
    ways = [cache.ways(q) for cache, q in zip(caches, q_LBHGD, strict=True)]
    for name in ways[0]:
        steps = [partial(each[name], q) for each, q in zip(ways, q_LBHGD, strict=True)]
        found[name] = graph_us(steps, max(1, 8 // len(steps)))
    return found


def pages(kv_BHN2D: Tensor) -> Tensor:
    """[B x P, 2, H, PAGE, d], for one B after another; a view where it can be."""
    return torch.unflatten(kv_BHN2D, 2, (-1, PAGE)).permute(0, 2, 4, 1, 3, 5).flatten(0, 1)


def float8_steps(contexts: Sequence[ResidentContext]) -> type[StepAttention]:
    """Steps of sessions on these contexts, all on one or each on its own, by the faster way, without their tails.

    Layers of one content share a copy. Raises CheckFailedError for a wrong output of any layer's attention, and
    ValueError where some sessions share a context.
    """
    own = list({id(context): context for context in contexts}.values())
    if len(own) not in (1, len(contexts)):
        raise ValueError(f"{len(contexts)} sessions are on {len(own)} contexts, expected one or as many")
    copies: dict[int, Float8Cache] = {}
    caches = []
    for layer in range(contexts[0].manifest.model.layers):
        stored = [context.stored_rows(layer) for context in own]
        content = stored[0].data_ptr()
        if content not in copies:
            copies[content] = Float8Cache(torch.stack(stored))
        caches.append(copies[content])

    class Float8Steps(StepAttention):
        @classmethod
        def refusal(cls, method: Method, manifest: Manifest) -> str | None:
            return None

        @classmethod
        def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
            return {}

        def __init__(self, plan: StepPlan) -> None:
            super().__init__(plan)
            heads, head_dim = plan.model.kv_heads, plan.model.head_dim
            q_BHGD = torch.randn(
                len(contexts), heads, plan.group, head_dim, dtype=plan.dtype, device=plan.device
            )
            ways = {id(cache): cache.ways(q_BHGD) for cache in copies.values()}
            times = {
                name: graph_us([lambda way=way: way(q_BHGD)], 8)  # type: ignore[misc]
                for name, way in next(iter(ways.values())).items()
            }
            fastest = min(times, key=lambda name: times[name])
            self._layers = [ways[id(cache)][fastest] for cache in caches]
            self._out_BHGD = torch.zeros(
                plan.size, heads, plan.group, head_dim, dtype=plan.dtype, device=plan.device
            )

        def attend(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> Tensor:
            count = len(contexts)
            self._out_BHGD[:count].copy_(self._layers[layer](q_BHGD[:count]))
            return self._out_BHGD

        def kept_B(self) -> Tensor:
            return torch.zeros(self.plan.size, dtype=torch.int64, device=self.plan.device)

    return Float8Steps
