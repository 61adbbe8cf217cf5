"""Attention on a CUDA device, fused and general, beside the CPU's."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decode_engine.layers.figures import Figures
from decode_engine.layers.partial_attention import attend_shared
from decode_engine.layers.selected_attention import Observation
from decode_engine.layers.sparse_layer import LayerSearch, SparseLayer
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context, warm_method
from index_store.indexes.classes import INDEX_CLASSES
from index_store.indexes.query_tables.search_numba import TableReads, softmax_sum_rows
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.methods.presets import METHODS, get_method
from index_store.models.resolve import resolve_model
from index_store.selection.top_k_numba import top_k
from tests.decode_engine.model.devices.test_explicit_devices import (
    BUDGETS,
    EXPRESSIONS,
    GROUP,
    run_layer,
    small,
    some_context,
    some_tokens,
)
from tests.support.layers import build_search, moved
from tests.support.memory import copy_padded
from tests.support.models import write_model_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coarse copies are searched on the host as on a device: its own loops round queries and weights to 8 bits."""
    monkeypatch.setattr("index_store.indexes.coarse_rows.index.on_host", lambda _: False)


def check_layer(method: Method) -> None:
    kv_HN2D, inputs = some_context(), some_tokens()
    search = build_search(method, kv_HN2D, GROUP)
    expected, expected_seen = run_layer(SparseLayer(kv_HN2D, search, method, Figures()), inputs)
    kv_gpu = kv_HN2D.cuda()
    queries, keys, values = (tensor.cuda() for tensor in inputs)
    out, seen = run_layer(
        SparseLayer(kv_gpu, moved(search, method, kv_gpu, "cuda"), method, Figures()), (queries, keys, values)
    )
    assert out.is_cuda
    assert overlap(expected_seen, seen) > 0.97
    close = torch.isclose(out.cpu(), expected, rtol=1e-3, atol=1e-4).all(-1)
    assert close.float().mean() > 0.97


def overlap(expected: list[Observation], seen: list[Observation]) -> float:
    """How many of the selected keys were selected in both runs."""
    both = total = 0
    for left, right in zip(expected, seen, strict=True):
        for row, kept in enumerate(left.selection.counts_HT.flatten().tolist()):
            found = int(right.selection.counts_HT.flatten()[row])
            here = set(left.selection.ids_HTK.flatten(0, 1)[row, :kept].tolist())
            there = set(right.selection.ids_HTK.flatten(0, 1)[row, :found].tolist())
            both += 2 * len(here & there)
            total += kept + found
    return both / total if total else 1.0


@pytest.mark.parametrize("expression", [name for name in EXPRESSIONS if get_method(name).index is not None])
def test_layers_of_every_method(expression: str) -> None:
    check_layer(small(get_method(expression)))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("preset", ["oracle", "csattention", "multipole-tree", "multipole-windowed"])
def test_layers_with_every_budget(preset: str, budget: str) -> None:
    check_layer(replace(small(METHODS[preset]), budget=BUDGETS[budget]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"), head_dim=64, max_positions=8192)


@pytest.fixture(scope="module")
def runners(folder: Path) -> tuple[ModelRunner, ModelRunner]:
    model = resolve_model(str(folder))
    return ModelRunner(model), ModelRunner(model, "cuda")


def moved_context(context: ResidentContext, method: Method) -> ResidentContext:
    manifest = context.manifest
    layers = range(manifest.model.layers)
    return ResidentContext(
        manifest,
        context.tokens().cuda(),
        {layer: context.kv(layer).cuda() for layer in layers},
        {
            (spec.name, layer): {
                name: copy_padded(array, "cuda")
                for name, array in context.index(spec.name, layer).arrays().items()
            }
            for spec in method.index_specs()
            for layer in layers
        },
    )


@pytest.mark.parametrize(
    "expression",
    [*METHODS, "csattention@period=3", "oracle+centred"],
)
def test_logits_of_a_model(runners: tuple[ModelRunner, ModelRunner], expression: str) -> None:
    """A prompt whose first tokens leave the recent window, then decode steps, of two sessions at once."""
    method = replace(get_method(expression), recent=32, partition_optional=False)
    host, gpu = runners
    context = made_up_context(host.identity, host.kv_dtype, method, 1500, distinct=2)
    logits = []
    for runner, resident in ((host, context), (gpu, moved_context(context, method))):
        sessions = [runner.start(resident, method.on(resident.manifest)) for _ in range(2)]
        prompt = [[(7 * i + 3 * row) % 250 for i in range(200)] for row in range(2)]
        found = runner.forward(sessions, prompt, all_logits=True)
        for step in range(3):
            found += runner.forward(sessions, [[5 + step], [9 + step]])
        assert all(each.device.type == runner.device.type for each in found)
        logits.append(torch.cat([each.cpu() for each in found]))
        for session in sessions:
            session.close()
    kl = torch.nn.functional.kl_div(
        logits[1].log_softmax(-1), logits[0].log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    # Keys of nearly equal rank may be exchanged in single rows.
    assert float(kl.median()) < 1e-5
    assert float(kl.mean()) < 2e-3
    assert float((logits[0].argmax(-1) == logits[1].argmax(-1)).float().mean()) > 0.98


@pytest.mark.parametrize("remainder", ["dropped", "monopole", "centred"])
def test_long_contexts_take_bounded_memory(remainder: str) -> None:
    """A step over 128K keys, and a prompt of 64 tokens, with the heads of a model of 8 billion parameters."""
    method = get_method(f"multipole+{remainder}", 0.01)
    heads, group, head_dim, count = 8, 4, 128, 131072
    generator = torch.Generator("cuda").manual_seed(0)
    kv = torch.randn(heads, count, 2, head_dim, generator=generator, device="cuda", dtype=torch.bfloat16)
    clusters = count // 16
    assignment = torch.arange(count, device="cuda", dtype=torch.int32).expand(heads, -1) // 16
    blocks = kv.unflatten(1, (clusters, 16)).float()
    arrays = {
        "counts": torch.full((heads, clusters), 16.0, device="cuda"),
        "means": blocks[:, :, :, 0].mean(2),
        "value_sums": blocks[:, :, :, 1].sum(2),
        "variances": blocks[:, :, :, 0].var(2, correction=0),
        "assignment": assignment.contiguous(),
        "offsets": torch.arange(clusters + 1, device="cuda", dtype=torch.int32).mul_(16).repeat(heads, 1),
        "members": torch.arange(count, device="cuda", dtype=torch.int32).repeat(heads, 1),
    }
    del blocks
    spec = method.index.with_parameters(moments="diagonal")
    index = INDEX_CLASSES[spec.kind].from_arrays(spec.parameters, arrays, kv)
    layer = SparseLayer(kv, LayerSearch(index), replace(method, index=spec, partition=None), Figures())
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    position = count
    for tokens in (64, 1, 1):
        q = torch.randn(heads, tokens, group, head_dim, generator=generator, device="cuda") / head_dim**0.5
        k, v = torch.randn(2, heads, tokens, head_dim, generator=generator, device="cuda")
        assert layer.attend(q, k, v, position).isfinite().all()
        position += tokens
    assert torch.cuda.max_memory_allocated() - before < 4 * 2**30


def test_kernels_over_long_contexts_take_bounded_memory() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    tables = torch.randint(-127, 128, (8, 512, 131072), dtype=torch.int8, device="cuda")
    rows = torch.randint(0, 512, (8, 4, 4, 16), dtype=torch.int32, device="cuda")
    weights = torch.rand(8, 4, 4, 16, generator=generator, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    scores = softmax_sum_rows(TableReads(tables, tables[..., :0], rows, weights, 0, 131072))
    ids, counts = top_k(scores, 1311)
    assert (counts == 1311).all()
    assert (ids.diff(dim=-1) > 0).all()
    assert torch.cuda.max_memory_allocated() - before < 2 * 2**30


def test_every_method_is_warmed_up(runners: tuple[ModelRunner, ModelRunner]) -> None:
    assert all(warm_method(runners[1], method) for method in METHODS.values())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("keys", "positions", "group", "dim"),
    [(700, 40, 4, 128), (9, 9, 1, 64), (33, 8, 8, 64), (20_000, 1600, 4, 128)],
)
def test_fused_states_equal_plain_ones(causal: bool, keys: int, positions: int, group: int, dim: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    made = torch.randn(2, positions, group, dim, generator=generator, device="cuda").bfloat16()
    q_HTGD = made.float() * dim**-0.5
    kv_HN2D = torch.randn(2, keys, 2, dim, generator=generator, device="cuda").bfloat16()
    fused = attend_shared(q_HTGD, kv_HN2D, causal=causal)
    plain = attend_shared(q_HTGD, kv_HN2D.float(), causal=causal)
    torch.testing.assert_close(fused.out, plain.out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(fused.lse, plain.lse, atol=1e-2, rtol=1e-2)
