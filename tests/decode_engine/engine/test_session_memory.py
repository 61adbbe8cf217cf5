"""The memory that a request is said to need, against what sessions really hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decode_engine.engine.session_memory import fitting_tokens, session_bytes
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from index_store.indexes.interface.index_kind import Growth
from index_store.indexes.key_clusters.index import OnlineClusters
from index_store.indexes.key_clusters.parameters import online_bytes
from index_store.indexes.query_tables.index import QueryTables
from index_store.memory.resident import ResidentContext
from index_store.methods.method import INDEX_SPECS
from index_store.methods.presets import METHODS, get_method
from index_store.models.loading import resolve_model
from tests.support.models import write_model_folder

EXPRESSIONS = (*METHODS, "csattention+dropped", "oracle+centred", "multipole+dipole", "csattention+coarse")


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder: Path = tmp_path_factory.mktemp("memory") / "model"
    return ModelRunner(resolve_model(str(write_model_folder(folder, "llama", layers=2, head_dim=32))))


@pytest.fixture(scope="module")
def context(runner: ModelRunner) -> ResidentContext:
    also = [get_method(name) for name in EXPRESSIONS]
    return made_up_context(runner.identity, runner.kv_dtype, METHODS["full"], 300, also=also)


@pytest.mark.parametrize("block", [None, pytest.param(100, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_sessions_hold_what_was_estimated(
    runner: ModelRunner, context: ResidentContext, name: str, block: int | None
) -> None:
    """At every length of a tail, whatever pieces it was read in: all of it, and never more."""
    method = get_method(name)
    if block is not None and method.sparse:
        method = replace(method, append_block=block)
    fitted = method.on(context.manifest)
    session = runner.start(context, fitted)
    for piece in (1, 1, 31, 32, 33, 100, 2, 150, 163, 20, 200):
        runner.forward([session], [[session.position % 50] * piece])
        held, estimate = session.nbytes, session_bytes(fitted, session.tail_keys)
        assert held <= estimate
        # Lists take up fewer keys where these score low; clusters that are not searched never list their members; what
        # drafts search is appended when something is drafted.
        least = 0.5 if name in ("csattention-paper", "exact") else 0.95 if fitted.partition else 1.0
        assert held >= least * estimate


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_as_many_tokens_fit_as_there_is_room_for(context: ResidentContext, name: str) -> None:
    fitted = get_method(name).on(context.manifest)
    needed = [session_bytes(fitted, 40 + tokens) for tokens in range(301)]
    assert fitting_tokens(fitted, 40, 1, 300, None) == (300, needed[300])
    for room in (needed[300], needed[300] - 1, needed[77], needed[2], needed[1], needed[1] - 1):
        tokens, held = fitting_tokens(fitted, 40, 1, 300, room)
        assert held == needed[tokens] <= max(room, needed[1])
        assert tokens == 300 or needed[tokens + 1] > room
    assert fitting_tokens(fitted, 40, 90, 300, needed[10])[0] in range(90, 301)


@pytest.mark.parametrize("moments", ["none", "diagonal", "full"])
@pytest.mark.parametrize(("block", "per_cluster"), [(0, 16), (64, 16), (100, 7), (9, 4), (1, 1)])
def test_clusters_hold_what_was_estimated_over_many_blocks(
    moments: str, block: int, per_cluster: int
) -> None:
    clusters = OnlineClusters(2, 8, 0, per_cluster, "cosine", block, moments, None, seed=0)
    generator = torch.Generator().manual_seed(1)
    for piece in (1, 7, 64, 64, 1, 100, 30, 64, 5):
        clusters.append(torch.randn(2, piece, 2, 8, generator=generator))
        assert clusters.members.keys_HX.shape[1] == clusters.count
        assert clusters.nbytes == 2 * online_bytes(8, per_cluster, block, moments, clusters.count)


def test_lists_that_take_every_key_hold_what_was_estimated(context: ResidentContext) -> None:
    parameters = INDEX_SPECS["paper_tables"].parameters
    arrays = context.index("paper_tables", 0).arrays()
    lowest = {**arrays, "scores": torch.full_like(arrays["scores"], -(2**15))}
    appended = QueryTables.from_arrays(parameters, lowest, context.kv(0)).start_appending()
    for number in range(1, 9):
        appended.append(torch.randn(2, 20, 2, 32))
        growth = Growth(300, 20 * number, 20)
        assert appended.nbytes == 2 * QueryTables.appended_bytes(parameters, 32, growth)


def test_layers_that_attend_to_everything_append_nothing(runner: ModelRunner) -> None:
    method = get_method("csattention+dropped")
    manifest = made_up_context(runner.identity, runner.kv_dtype, method).manifest
    one, two, full = (
        session_bytes(method.on(replace(manifest, dense_layers=layers)), 1000)
        for layers in ((), (0,), (0, 1))
    )
    assert one - two == two - full > 0
    assert full == session_bytes(get_method("full").on(manifest), 1000)


@pytest.mark.parametrize("piece", [1, 100, 500])
def test_tails_hold_what_was_estimated_whatever_the_pieces(runner: ModelRunner, piece: int) -> None:
    method = get_method("full")
    context = made_up_context(runner.identity, runner.kv_dtype, method)
    session = runner.start(context, method.on(context.manifest))
    tail = session.layers[0].tail
    while tail.count < 4050:
        tail.reserve(min(tail.count + piece, 4050))
        tail.count = min(tail.count + piece, 4050)
    assert tail.nbytes * len(session.layers) <= session_bytes(method.on(context.manifest), 4050)


def test_the_estimate_grows_by_doubling(runner: ModelRunner) -> None:
    method = get_method("full")
    manifest = made_up_context(runner.identity, runner.kv_dtype, method).manifest
    row = 2 * manifest.model.kv_heads * 32 * 4 * manifest.model.layers
    sizes = [session_bytes(method.on(manifest), tokens) for tokens in (1, 128, 129, 256, 257, 32768)]
    assert sizes == [rows * row for rows in (128, 128, 256, 256, 512, 32768)]


def test_a_session_that_drafts_may_hold_what_its_drafts_append(context: ResidentContext) -> None:
    exact, refined, full = (
        session_bytes(get_method(name).on(context.manifest), 4000) for name in ("exact", "refined", "full")
    )
    assert exact == refined > full
