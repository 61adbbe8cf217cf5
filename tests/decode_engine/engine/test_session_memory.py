"""The memory that a request is said to need, against what sessions really hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from decode_engine.engine.session_memory import session_bytes
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from index_store.methods.presets import METHODS, get_method
from index_store.models.loading import resolve_model
from tests.support.models import write_model_folder

_PIECE = 256


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder: Path = tmp_path_factory.mktemp("memory") / "model"
    return ModelRunner(resolve_model(str(write_model_folder(folder, "llama", layers=2, head_dim=32))))


@pytest.mark.parametrize("name", [*METHODS, "csattention+dropped", "oracle+centred", "multipole+dipole"])
@pytest.mark.parametrize("tokens", [1, 100, 700])
def test_sessions_hold_what_was_estimated(runner: ModelRunner, name: str, tokens: int) -> None:
    method = get_method(name)
    context = made_up_context(runner.identity, runner.kv_dtype, method)
    session = runner.start(context, method.on(context.manifest))
    for done in range(0, tokens, _PIECE):
        runner.forward([session], [[0] * min(_PIECE, tokens - done)])
    estimate = session_bytes(method.on(context.manifest), tokens)
    assert session.nbytes <= 1.02 * estimate  # clusters count their members and a few vectors besides
    appended = session.nbytes - runner.identity.layers * session.layers[0].tail.nbytes
    if appended and name != "csattention-paper":  # lists take up fewer keys where these score low
        # keys of the recent window are not appended yet, which may save one doubling
        assert session.nbytes > 0.45 * estimate


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
