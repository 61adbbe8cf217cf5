"""FlashInfer as a baseline of many sessions on one context: with a stand-in that computes in plain torch, it is given
the right queries, keys and tails, wrong outputs are not timed, and nothing imports it unasked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from harness import flashinfer_baseline, layer
from harness.report import CheckFailedError
from torch import Tensor

from tests.ops.bench.conftest import Run, load_bench

LENGTH, KV_HEADS = 192, 2
TIMES = ("flashinfer_single_us", "flashinfer_cascade_us")
FIELDS = {*TIMES, "flashinfer"}


def attention(q_RQD: Tensor, keys_HND: Tensor, values_HND: Tensor) -> tuple[Tensor, Tensor]:
    """[R, Q, d], and log-sum-exps [R, Q]: of query heads that share KV heads in groups."""
    group = q_RQD.shape[1] // len(keys_HND)
    keys, values = (part.repeat_interleave(group, 0).double() for part in (keys_HND, values_HND))
    logits = torch.einsum("rqd,qnd->rqn", q_RQD.double(), keys) * q_RQD.shape[2] ** -0.5
    out = torch.einsum("rqn,qnd->rqd", logits.softmax(-1), values).to(q_RQD.dtype)
    return out, logits.logsumexp(-1)


def single_prefill(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, kv_layout: str, backend: str) -> Tensor:
    assert (causal, kv_layout, backend) == (False, "HND", "fa2")
    return attention(q, k, v)[0]


def merge_state_in_place(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    weight = torch.sigmoid(lse - other_lse)[..., None].to(out.dtype)
    out.mul_(weight).add_(other_out * (1 - weight))


class Level:
    """One level's keys, found by its pages."""

    def __init__(self) -> None:
        self._backend = "auto"

    def run(self, q: Tensor, cache: Tensor, *, out: Tensor, lse: Tensor, return_lse: bool) -> None:
        heads, kv_heads, head_dim, page = self.sizes
        assert return_lse
        assert self._backend == "fa2"
        assert q.shape[1:] == (heads, head_dim)
        assert cache.shape[1:] == (2, kv_heads, page, head_dim)
        for row in range(len(q)):
            out[row : row + 1], lse[row : row + 1] = attention(q[row, None], *self.keys(cache, row))

    def keys(self, cache: Tensor, row: int) -> Tensor:
        """[2, H, N, d]"""
        rows, starts, pages, last = self.tables
        request = int(torch.searchsorted(rows, row, right=True)) - 1
        listed = cache[pages[starts[request] : starts[request + 1]].long()]
        kv = listed.permute(1, 2, 0, 3, 4).flatten(2, 3)
        return kv[:, :, : kv.shape[2] - cache.shape[3] + int(last[request])]


class Cascade:
    level: type[Level] = Level

    def __init__(self, levels: int, workspace: Tensor, layout: str) -> None:
        assert (levels, layout, workspace.dtype) == (2, "HND", torch.uint8)
        self._batch_prefill_wrappers = [self.level() for _ in range(levels)]

    def plan(
        self,
        rows: list[Tensor],
        starts: list[Tensor],
        pages: list[Tensor],
        last: list[Tensor],
        *sizes: int,
        causal: bool,
        q_data_type: torch.dtype,
    ) -> None:
        assert all(level._backend == "fa2" for level in self._batch_prefill_wrappers)
        assert all(part.dtype == torch.int32 for parts in (rows, starts, pages, last) for part in parts)
        assert (causal, q_data_type) == (False, layer.DTYPE)
        tables = zip(rows, starts, pages, last, strict=True)
        for level, of_level in zip(self._batch_prefill_wrappers, tables, strict=True):
            level.tables, level.sizes = of_level, sizes


class Paged(Level):
    """Attention of packed rows of queries to requests' pages in float8."""

    def __init__(self, workspace: Tensor, layout: str, backend: str) -> None:
        assert (layout, backend, workspace.dtype) == ("HND", "fa2", torch.uint8)

    def plan(self, *given: Any, causal: bool, q_data_type: torch.dtype, kv_data_type: torch.dtype) -> None:
        assert (causal, q_data_type) == (False, layer.DTYPE)
        assert kv_data_type in (torch.float8_e4m3fn, layer.DTYPE)
        self.tables, self.sizes = given[:4], given[4:]
        assert all(part.dtype == torch.int32 for part in self.tables)

    def run(self, q: Tensor, cache: Tensor, *, out: Tensor) -> None:  # type: ignore[override]
        assert (q.shape[1:], cache.shape[2:]) == (
            (self.sizes[0], self.sizes[2]),
            (self.sizes[1], *self.sizes[3:], q.shape[2]),
        )
        for row in range(len(q)):
            out[row : row + 1] = attention(q[row, None], *self.keys(cache.to(q.dtype), row))[0]


def xqa(
    q: Tensor,
    cache: Tensor,
    workspace: Tensor,
    table: Tensor,
    lengths: Tensor,
    longest: int,
    *,
    bmm1_scale: float,
    bmm2_scale: float,
    kv_layout: str,
    out: Tensor,
) -> None:
    assert (bmm1_scale, bmm2_scale, kv_layout) == (q.shape[2] ** -0.5, 1.0, "HND")
    assert (table.dtype, lengths.dtype, workspace.dtype) == (torch.int32, torch.uint32, torch.uint8)
    for row, pages in enumerate(table):
        kv = cache[pages.long()].permute(1, 2, 0, 3, 4).flatten(2, 3).to(q.dtype)
        assert kv.shape[2] == longest == int(lengths[row])
        out[row : row + 1] = attention(q[row, None], *kv)[0]


class Decode(Paged):
    """Attention of a row on every context."""

    def __init__(self, workspace: Tensor, layout: str, use_tensor_cores: bool) -> None:
        super().__init__(workspace, layout, "fa2")

    def plan(self, *given: Any, q_data_type: torch.dtype, kv_data_type: torch.dtype) -> None:  # type: ignore[override]
        rows = torch.arange(len(given[0]), dtype=torch.int32)
        super().plan(rows, *given, causal=False, q_data_type=q_data_type, kv_data_type=kv_data_type)


class TailOfTheFirstLevel(Level):
    def keys(self, cache: Tensor, row: int) -> Tensor:
        return super().keys(cache, 0)


class TailOfTheFirst(Cascade):
    level = TailOfTheFirstLevel


class NoBackend:
    """A wrapper of some other release."""


class AnotherRelease(Cascade):
    level = NoBackend  # type: ignore[assignment]


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The stand-in."""
    fake = ModuleType("flashinfer")
    members = {
        "__version__": "1.2.3",
        "single_prefill_with_kv_cache": single_prefill,
        "MultiLevelCascadeAttentionWrapper": Cascade,
        "merge_state_in_place": merge_state_in_place,
        "BatchPrefillWithPagedKVCacheWrapper": Paged,
        "BatchDecodeWithPagedKVCacheWrapper": Decode,
        "decode": SimpleNamespace(xqa_batch_decode_with_kv_cache=xqa),
    }
    vars(fake).update(members)
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setattr(flashinfer_baseline, "WORKSPACE_BYTES", 16)
    return fake


@pytest.fixture
def bench(without_gpu: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark with small figures of few heads; every step takes a microsecond."""
    found = load_bench("one_layer/shared_gpu")
    for module in (layer, found):
        monkeypatch.setattr(module, "KV_HEADS", KV_HEADS)
    monkeypatch.setattr(found, "COLD_BYTES", 2)
    for module in (found, flashinfer_baseline):
        monkeypatch.setattr(module, "graph_us", lambda steps, turns: [step() for step in steps] and 1.0)
    monkeypatch.setattr(found, "packed_attention_us", lambda q, kv: {"flash": 2.0})
    monkeypatch.setattr(found, "copy_bandwidth", lambda: 1e12)
    names = (("one-small", (1,)), ("one-small", (3,)), ("mixed", (2, 1)))
    monkeypatch.setattr(found, "FIGURES", tuple(found.Figure(name, LENGTH, groups) for name, groups in names))
    return found


def parts(
    bench: ModuleType, head_dim: int = 64, group: int = 4
) -> tuple[Any, Callable[..., None], list[Tensor]]:
    """Three sessions' memory of two layers, how they are checked, and what FlashInfer is given."""
    figure, memory = bench.Figure("small", LENGTH, (3,)), bench.SharedMemory(LENGTH, 1, 4, head_dim, group)

    def check(what: str, out: Tensor, tails: bool, layer: int = 0) -> None:
        bench.check_sessions(memory, figure, what, out, tails, layer)

    return memory, check, [memory.q[:, :3], memory.kv[:, 0], memory.tail[:3]]


@pytest.mark.parametrize(("head_dim", "group"), [(64, 4), (128, 1), (256, 3)])
def test_flashinfer_gets_queries_keys_and_tails(
    bench: ModuleType, flashinfer: ModuleType, head_dim: int, group: int
) -> None:
    memory, check, (q, kv, tail) = parts(bench, head_dim, group)
    single, cascade = flashinfer_baseline.single_prefill(q, kv), flashinfer_baseline.cascade(q, kv, tail)
    for number in range(memory.layers):
        check("single", single(number), False, number)
        check("cascade", cascade(number), True, number)
        with pytest.raises(CheckFailedError, match=r"single \d: relative error"):
            check("single", single(number), True, number)
    with pytest.raises(CheckFailedError, match=r"cascade \d: relative error"):
        check("cascade", cascade(0), True, 1)


def test_keys_and_values_are_given_as_they_are_stored(
    bench: ModuleType, flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, (q, kv, _) = parts(bench)

    def seen(q_RQD: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
        assert (keys.data_ptr(), values.data_ptr()) == (kv[1].data_ptr(), kv[1, :, :, 1].data_ptr())
        assert q_RQD.data_ptr() == q[1].data_ptr()
        return q_RQD

    monkeypatch.setattr(flashinfer, "single_prefill_with_kv_cache", seen)
    assert torch.equal(flashinfer_baseline.single_prefill(q, kv)(1), q[1])


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("single_prefill_with_kv_cache", lambda q, k, v, **options: attention(q, v, k)[0], "single prefill"),
        (
            "single_prefill_with_kv_cache",
            lambda q, k, v, **options: attention(q.flip(0), k, v)[0],
            "single prefill",
        ),
        ("merge_state_in_place", lambda out, lse, other_out, other_lse: out.copy_(other_out), "cascade"),
        ("MultiLevelCascadeAttentionWrapper", TailOfTheFirst, "cascade"),
    ],
)
def test_wrong_attention_of_flashinfer_is_not_timed(
    bench: ModuleType,
    flashinfer: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    wrong: Any,
    message: str,
) -> None:
    _, check, given = parts(bench)
    assert set(flashinfer_baseline.flashinfer_us(*given, check)) == FIELDS
    monkeypatch.setattr(flashinfer, name, wrong)
    with pytest.raises(CheckFailedError, match=rf"FlashInfer's {message}, session \d: relative error"):
        flashinfer_baseline.flashinfer_us(*given, check)


@pytest.mark.parametrize(
    ("contexts", "ways"), [(1, {"fa2"}), (2, {"fa2"}), (4, {"fa2", "decode", "decode, tensor cores", "xqa"})]
)
def test_rows_of_queries_attend_to_their_contexts_in_float8(
    flashinfer: ModuleType, contexts: int, ways: set[str]
) -> None:
    kv_CHN2D = torch.randn(contexts, KV_HEADS, LENGTH, 2, 64)
    cache = flashinfer_baseline.PagedCache(kv_CHN2D)
    q_BHGD = 3 * torch.randn(4, KV_HEADS, 2, 64)
    found = cache.ways(q_BHGD)
    assert set(found) == ways
    rounded = kv_CHN2D.to(torch.float8_e4m3fn).float()
    for row in range(4):
        keys, values = rounded[row * contexts // 4].unbind(2)
        expected = attention(q_BHGD[row].flatten(0, 1)[None], keys, values)[0].view(KV_HEADS, 2, 64)
        for attend in found.values():
            torch.testing.assert_close(attend(q_BHGD)[row], expected)


def test_wrong_attention_over_float8_is_not_timed(
    flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*given: Any, out: Tensor, **named: Any) -> None:
        out.zero_()

    cache = flashinfer_baseline.PagedCache(torch.randn(2, KV_HEADS, LENGTH, 2, 64))
    q_BHGD = 3 * torch.randn(2, KV_HEADS, 2, 64)
    monkeypatch.setattr(flashinfer.decode, "xqa_batch_decode_with_kv_cache", wrong)
    assert set(cache.ways(q_BHGD)) == {"fa2", "decode", "decode, tensor cores"}
    assert "xqa, row 0: relative error" in cache.left_out["xqa"]
    monkeypatch.setattr(Paged, "run", wrong)
    with pytest.raises(CheckFailedError, match="no way of FlashInfer attends"):
        cache.ways(q_BHGD)


def test_a_release_whose_kernels_cannot_be_chosen_is_refused(
    bench: ModuleType, flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer, "MultiLevelCascadeAttentionWrapper", AnotherRelease)
    with pytest.raises(AttributeError, match="_backend"):
        flashinfer_baseline.cascade(*parts(bench)[2])


def test_rows_of_one_context_have_times_of_flashinfer(
    bench: ModuleType, flashinfer: ModuleType, run: Run
) -> None:
    rows, code, _ = run(bench, head_dim=64, group=2, flashinfer=True)
    assert (code, [row["sessions"] for row in rows]) == (0, [1, 3, 3])
    for row in rows[:2]:
        assert {row[name] for name in (*TIMES, "flashinfer_float8_us", "flashinfer_paged_us")} == {1.0}
        assert row["flashinfer"] == "1.2.3"
    assert not FIELDS & set(rows[2])
    assert {row["ratio"] for row in rows} == {0.5, 0.25}  # of a mixed batch's two contexts


def test_flashinfer_is_imported_when_it_is_asked_for(
    bench: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # what cannot be imported
    rows, code, _ = run(bench, figures="one", head_dim=64, group=1)
    assert (code, len(rows)) == (0, 2)
    assert not any(FIELDS & set(row) for row in rows)
    with pytest.raises(typer.BadParameter, match="pip install flashinfer-python") as refused:
        run(bench, flashinfer=True)
    assert refused.value.exit_code == 2
