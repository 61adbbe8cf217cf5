"""Models with recurrent and convolution states: those behind a text's last token are part of what is stored.

And models whose mixers read single tokens alone behind a state, that attend in chunks, by latents, to what an index of
their own selects, or several times in a layer, in every way in which tokens may come to stand behind a text.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from decode_engine.model.runner import ModelRunner
from decode_engine.model.unstored import unstored_manifest
from decode_engine.steps.batch_kinds import BatchKinds
from index_store.errors import (
    ContextCorruptError,
    InvalidArgumentError,
    ManifestError,
    ModelUnsupportedError,
)
from index_store.family.children import read_own_rows
from index_store.memory.arena import Arena
from index_store.memory.placement import Placement
from index_store.methods.presets import METHODS
from index_store.models.loading import identify, resolve_model
from index_store.store.catalog import Store
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.json_fields import plain
from index_store.store.description.manifest import (
    FORMAT_VERSION,
    INDEX_VERSION,
    LAYERS_VERSION,
    MANIFESTS,
    Manifest,
)
from index_store.store.zarr_io import CHECKSUM_BYTES, chunk_path
from prefill_worker.build.checkpoint import Checkpoint
from prefill_worker.build.stages import Clock
from prefill_worker.jobs.document_layers import load_for_reading
from prefill_worker.jobs.job import carry_out
from prefill_worker.reading.capture import Capture
from prefill_worker.reading.prefill import run_context
from prefill_worker.reading.query_sample import plan_sample
from tests.support.models import LAYER_KINDS, generated, write_model_folder, write_tokenizer
from tests.support.store import raising
from tests.support.ways import QUIET, WAYS, Served, served

TEXT = torch.randint(3, 259, (300,), generator=torch.Generator().manual_seed(1)).tolist()
PROMPT = list(range(70, 82))
NEW_TOKENS = 24
KINDS = ("states", "convolutions")
with_states = pytest.mark.parametrize("own", KINDS, indirect=True)


OTHERS = ("single tokens", "chunks", "latents", "learnt index", "several times", "nothing handed on")


@pytest.fixture(scope="module", params=(*KINDS, *OTHERS))
def own(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A served model, and what it answers by itself."""
    path = tmp_path_factory.mktemp("states")
    family, settings = LAYER_KINDS[request.param]
    folder = write_model_folder(path / "model", family, layers=3, **settings)
    answer = generated(folder, [*TEXT, *PROMPT], NEW_TOKENS)
    assert len(set(answer)) > 4
    with served(folder, path / "store", TEXT, chunk=70) as found:
        yield found, answer


@pytest.mark.parametrize("way", WAYS)
def test_the_answer_is_that_of_generate_in_every_way(own: tuple[Served, list[int]], way: str) -> None:
    found, answer = own
    assert WAYS[way](found, PROMPT, NEW_TOKENS) == answer


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", WAYS)
def test_a_gpu_answers_as_a_cpu(own: tuple[Served, list[int]], tmp_path: Path, way: str) -> None:
    found, answer = own
    folder = Path(found.config.model)
    runner = ModelRunner(resolve_model(found.config.model), "cuda")
    with served(folder, tmp_path / "store", TEXT, 70, runner) as on_gpu:
        assert WAYS[way](on_gpu, PROMPT, NEW_TOKENS) == answer


@with_states
def test_a_pass_that_fails_may_be_made_again(own: tuple[Served, list[int]]) -> None:
    found, answer = own
    with found.session(found.manifest) as (session, _):
        failing = found.runner.model.get_output_embeddings().register_forward_hook(
            raising(RuntimeError("half way"))
        )
        for _ in range(2):
            with pytest.raises(RuntimeError, match="half way"):
                found.runner.forward([session], [PROMPT])
        failing.remove()
        assert found.answer(session, [PROMPT], NEW_TOKENS) == answer


@with_states
def test_a_reading_that_was_interrupted_ends_as_one_in_one_go(
    own: tuple[Served, list[int]], tmp_path: Path
) -> None:
    """What a pass left is kept in the dtype in which the model computes, so that no bit is another one."""
    found, _ = own
    loaded, _ = load_for_reading(resolve_model(found.config.model), torch.device("cpu"))
    whole, first, second = (_capture(loaded.identity) for _ in range(3))
    run_context(loaded.model, whole, TEXT, 90)
    checkpoint = Checkpoint(tmp_path, "0" * 64, lambda note: None)

    def interrupt(start: int, count: int) -> None:
        checkpoint.keep(first, start, count)
        if start == 90:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_context(loaded.model, first, TEXT, 90, passed=interrupt)
    at = Checkpoint(tmp_path, "0" * 64, lambda note: None).restore(second)
    assert at == 180
    run_context(loaded.model, second, TEXT, 90, first=at)
    expected, again = (capture.packed_state(torch.bfloat16) for capture in (whole, second))
    assert torch.equal(again, expected)
    marks = zip(second.marked_states(), whole.marked_states(), strict=True)
    assert [torch.equal(one, other) for one, other in marks] == [True] * 3


def _capture(identity: ModelIdentity) -> Capture:
    return Capture(identity, len(TEXT), torch.bfloat16, plan_sample(len(TEXT), (), 100, 0), state_marks=90)


@with_states
@pytest.mark.parametrize("change", ["flipped", "cut", "gone"])
def test_damaged_states_are_found_and_never_decoded_with(
    own: tuple[Served, list[int]], tmp_path: Path, change: str
) -> None:
    """Of a context, and of a child."""
    found, _ = own
    made = WAYS["kept"](found, PROMPT, 1)
    assert made
    store = Store(shutil.copytree(found.store.path, tmp_path / "store"))
    child = next(manifest for manifest in store.list() if manifest.parent is not None)
    for manifest in (found.manifest, child):
        path = chunk_path(store.path / "contexts" / manifest.id, manifest.state, (0,))
        data = bytearray(path.read_bytes())
        assert len(data) == manifest.state.nbytes + CHECKSUM_BYTES
        if change == "gone":
            path.unlink()
        else:
            data[len(data) // 2] ^= 1
            path.write_bytes(data if change == "flipped" else data[:-7])
        (error,) = store.verify(manifest.id)
        assert error.metadata["array"] == "state"
        with pytest.raises(ContextCorruptError, match="state"):
            _load(store, manifest)


def _load(store: Store, manifest: Manifest) -> None:
    if manifest.parent is not None:
        read_own_rows(store, manifest)
        return
    with Arena(2**30).acquire(store, manifest.id):
        pass


@pytest.mark.parametrize("own", [*KINDS, "chunks", "learnt index"], indirect=True)
def test_a_manifest_with_more_than_rows_has_a_version_of_its_own(own: tuple[Served, list[int]]) -> None:
    """So that a program that knows of none refuses it by that; of other models everything is as it was."""
    manifest = own[0].manifest
    document = json.loads((own[0].store.path / "contexts" / manifest.id / "manifest.json").read_text())
    version = INDEX_VERSION if manifest.model.index_keys else LAYERS_VERSION
    assert document["format_version"] == manifest.format_version == version
    assert MANIFESTS.parse(MANIFESTS.render(manifest), "here") == manifest
    other = unstored_manifest(replace(manifest.model, states=None, window=None, index_keys=0), "float32", 3)
    assert (other.state, other.written_version) == (None, FORMAT_VERSION)
    assert not {"states", "index_keys"} & set(plain(other)["model"])
    if manifest.state is not None:
        with pytest.raises(ManifestError, match="state"):
            replace(manifest, state=None)


@pytest.mark.parametrize("own", ["learnt index"], indirect=True)
def test_what_a_model_selects_is_attended_to_whatever_the_method(
    own: tuple[Served, list[int]], tmp_path: Path
) -> None:
    """No index of ours is built over it, rows stay as they are, nothing approximates it, and no graph holds it."""
    found, _ = own
    config = replace(found.config, store=tmp_path, method=("refined",))
    manifest = _prefill(replace(found, config=config))
    assert [entry.arrays for entry in manifest.indexes] == [()]
    with Arena(2**30).acquire(Store(tmp_path), manifest.id) as context:
        sessions = [found.runner.start(context, METHODS[name].on(manifest)) for name in ("full", "refined")]
        for session in sessions:
            found.runner.read([session], [PROMPT])
        one, other = found.runner.forward(sessions, [[5], [5]])
        assert torch.equal(one, other)
        assert (sessions[0].figures.fraction, sessions[1].figures.sparse_fraction) == (
            pytest.approx(0.13, abs=0.01),
            0,
        )
    reason = BatchKinds(torch.float32).sort(METHODS["full"].on(manifest), Placement.DEVICE)
    assert reason == "the model selects keys by an index of its own"
    for settings, why in (
        ({"rows": "int8"}, "index of their own"),
        ({"attention": "muse"}, "an index of its own"),
    ):
        refused = replace(found, config=replace(config, store=tmp_path / "none", **settings))
        with pytest.raises(InvalidArgumentError, match=why):
            _prefill(refused)


def _prefill(own: Served) -> Manifest:
    return carry_out(own.job(own.text), QUIET, Clock()).manifest


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("lfm2", {"layer_types": ["conv"] * 3}, "none of its layers attends"),
        (
            "recurrent_gemma",
            {"lru_width": 64, "num_attention_heads": 4},
            "keep a state that is not in transformers' cache",
        ),
        ("rwkv", {"attention_hidden_size": 64}, "keeps a recurrent state that is not in transformers' cache"),
    ],
)
def test_what_has_no_place_in_the_cache_is_refused(
    tmp_path: Path, family: str, settings: dict[str, object], why: str
) -> None:
    write_tokenizer(tmp_path)
    AutoConfig.for_model(
        family, num_hidden_layers=3, vocab_size=259, hidden_size=64, **settings
    ).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelUnsupportedError, match=why):
        identify(resolve_model(str(tmp_path)))
