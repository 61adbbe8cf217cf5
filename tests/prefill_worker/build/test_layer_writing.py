"""Layers built and written side by side: the same bytes as one after the other, and errors of any stage as they are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import google_crc32c
import pytest
import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError, StoreFullError
from index_store.indexes.interface.layer_index import LayerSource, QuerySample
from index_store.indexes.key_clusters.index import KeyClusters
from index_store.methods.method import INDEX_SPECS
from index_store.selection.budgets import Threshold, ThresholdCurve
from index_store.selection.calibration import ThresholdCalibrator
from index_store.selection.cutting import cut
from index_store.selection.ranking import Step
from index_store.store.catalog import Store
from index_store.store.description.context_id import ModelIdentity
from index_store.store.writer import ContextWriter
from prefill_worker.build import layer_writing, stages
from prefill_worker.build.layer_writing import UNDER_WAY, LayerWriting, WrittenLayers, calibrate
from prefill_worker.build.stages import BuildStream, ChunkWriting, Clock, Stage
from prefill_worker.reading.capture import Capture
from prefill_worker.reading.query_sample import (
    SampledPositions,
    late_rows,
    plan_sample,
)
from tests.support.store import raising

LAYERS, TOKENS, DIM = 5, 200, 16
IDENTITY = ModelIdentity("tiny", "llama", "0", "0", LAYERS, 4, 2, DIM, 100, 4096)
ID = "0" * 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]


def make_capture(device: str = "cpu", spoiled: int | None = None) -> Capture:
    """What a model might leave; `spoiled` is a layer with a value that is not finite."""
    positions = torch.arange(50, TOKENS)
    capture = Capture(IDENTITY, TOKENS, torch.float32, SampledPositions(positions), device)
    capture.begin_context_chunk(0, TOKENS)
    generator = torch.Generator().manual_seed(0)
    for layer in range(LAYERS):
        query, key, value = (
            torch.randn(heads, TOKENS, DIM, generator=generator).to(device) for heads in (4, 2, 2)
        )
        if layer == spoiled:
            value[1, 7, 3] = torch.inf
        capture.attend(layer, query, key, value)
    return capture


def write(
    store: Path,
    capture: Capture,
    overlap: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
    early: bool = False,
    pass_tokens: int = TOKENS,
) -> tuple[WrittenLayers, dict[str, str], Clock]:
    """What was written, the checksums of every array, and the time it took."""
    clock = Clock()
    indexes = [
        INDEX_SPECS["query_tables"].with_parameters(centroids=4, subspaces=4),
        INDEX_SPECS["remainder_clusters"].with_parameters(block=64),
        INDEX_SPECS["pages"],
    ]
    with (
        Store(store, create=True).writer(ID) as writer,
        LayerWriting(writer, capture, None, 3, clock, overlap) as writing,
    ):
        writing.begin(indexes, capture, measure=True)
        for start in range(0, TOKENS, pass_tokens):
            for layer in range(LAYERS):
                writing.passed(layer, start, min(pass_tokens, TOKENS - start))
        if early:
            for layer in range(LAYERS):
                writing.add(layer)
        written = writing.finish(progress)
        assert written.queries is not None
        arrays = [written.queries, *(array for index in written.indexes for array in index.arrays)]
        sums = {entry.path: writer.checksums(entry.path) for entry in arrays}
        sums["kv"] = writer.checksums("kv")
    return written, sums, clock


@pytest.mark.parametrize("device", DEVICES)
def test_side_by_side_and_one_after_the_other_write_the_same_bytes(tmp_path: Path, device: str) -> None:
    results = [
        write(tmp_path / str(number), make_capture(device), overlap, early=early, pass_tokens=pass_tokens)
        for number, (overlap, early, pass_tokens) in enumerate(
            [(True, False, 200), (False, False, 77), (True, True, 1), (True, True, 199)]
        )
    ]
    for written, sums, clock in results:
        assert sums == results[0][1]
        assert written == results[0][0]
        copied = {"copy"} if device == "cuda" else set()
        assert set(clock.seconds) == {"index", "thresholds", "dense_layers", "write"} | copied
        assert all(seconds > 0 for seconds in clock.seconds.values())
        assert len(written.selectivity) == LAYERS
        assert {index.layers for index in written.indexes} == {tuple(range(LAYERS))}
        assert len(written.indexes[1].thresholds) == 28


def test_all_that_is_written_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What threads copy with streams of their own comes from the stream that the building waits for."""
    running = False

    @contextmanager
    def mark_running(stream: BuildStream) -> Iterator[None]:
        nonlocal running
        running = True
        yield
        running = False

    made = []
    for owner in (layer_writing.CapturedWriting, layer_writing.IndexWriting):

        def chunks(self: Any, *given: Any, original: Any = owner.chunks) -> Any:
            made.append(running)
            return original(self, *given)

        monkeypatch.setattr(owner, "chunks", chunks)
    monkeypatch.setattr(BuildStream, "running", mark_running)
    write(tmp_path, make_capture())
    assert made == [True] * (4 * LAYERS)


def test_layers_are_freed_as_they_are_written(tmp_path: Path) -> None:
    capture = make_capture()
    seen = []

    def progress(done: int, total: int) -> None:
        held = [layer for layer in range(LAYERS) if capture._kept._kv[layer] is not None]
        seen.append((done, total, held))

    write(tmp_path, capture, progress=progress)
    assert seen == [(done, LAYERS, list(range(done, LAYERS))) for done in range(1, LAYERS + 1)]


@pytest.mark.parametrize("overlap", [True, False])
def test_no_more_layers_are_under_way_than_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    capture = make_capture()
    begun: list[int] = []
    most = 0
    original = LayerWriting._build

    def build(self: LayerWriting, layer: int) -> None:
        nonlocal most
        begun.append(layer)
        most = max(most, len(begun) - self._written)
        original(self, layer)

    monkeypatch.setattr(LayerWriting, "_build", build)
    write(tmp_path, capture, overlap, early=True)
    assert begun == list(range(LAYERS))
    assert most == UNDER_WAY


def test_layers_come_in_order(tmp_path: Path) -> None:
    with (
        Store(tmp_path, create=True).writer(ID) as writer,
        LayerWriting(writer, make_capture(), None, 0, Clock()) as writing,
    ):
        writing.begin([])
        with pytest.raises(ValueError, match="layer 1 was added, expected layer 0"):
            writing.add(1)


class BrokenError(Exception):
    """What the tests let a stage fail with."""


def _fail_at(call: int, original: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    def fail(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise BrokenError(f"call {call}")
        return original(*arguments, **options)

    return fail


STAGES: dict[str, tuple[object, str]] = {
    "waiting for the model": (BuildStream, "mark"),
    "checking": (layer_writing, "check_finite"),
    "measuring": (layer_writing, "measure_selectivity"),
    "building": (KeyClusters, "build"),
    "calibrating": (layer_writing, "calibrate"),
    "creating": (ContextWriter, "create_array"),
    "writing": (ContextWriter, "write_rows"),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("overlap", [True, False])
def test_an_error_of_any_stage_surfaces_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, overlap: bool, device: str
) -> None:
    owner, name = STAGES[stage]
    capture = make_capture(device)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, _fail_at(3, getattr(owner, name)))
        with pytest.raises(BrokenError, match="call 3"):
            write(tmp_path, capture, overlap)
    assert [path.name for path in (tmp_path / "contexts").iterdir() if path.name != ".locks"] == []
    assert [
        thread.name for thread in threading.enumerate() if thread.name.startswith(("build", "write"))
    ] == []
    write(tmp_path, make_capture(device), overlap)  # the store can still be used


@pytest.mark.gpu
def test_an_error_of_the_copy_surfaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkWriting, "_fetch", _fail_at(5, ChunkWriting._fetch))
    with pytest.raises(BrokenError):
        write(tmp_path, make_capture("cuda"))
    assert [path.name for path in (tmp_path / "contexts").iterdir() if path.name != ".locks"] == []


@pytest.mark.parametrize("device", DEVICES)
def test_values_that_are_not_finite_are_named(tmp_path: Path, device: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"layer 2 are not finite in float32"):
        write(tmp_path, make_capture(device, spoiled=2))


@pytest.mark.parametrize("overlap", [True, False])
def test_an_interrupt_waits_for_what_has_begun_and_drops_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """An interrupt arrives in the main thread, which waits for the others."""
    done: list[int] = []
    original = ContextWriter.write_rows

    def slowly(self: ContextWriter, path: str, indices: Any, start: int, rows: Tensor) -> None:
        time.sleep(0.01)
        original(self, path, indices, start, rows)
        done.append(1)

    monkeypatch.setattr(ContextWriter, "write_rows", slowly)

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, make_capture(), overlap, raising(KeyboardInterrupt))
    assert done
    assert not [each for each in threading.enumerate() if each.name.startswith(("build", "write"))]
    assert [path.name for path in (tmp_path / "contexts").iterdir() if path.name != ".locks"] == []


def test_a_full_disk_ends_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told at the next pass over the layer, not when all has been read."""

    monkeypatch.setattr(ContextWriter, "write_rows", raising(StoreFullError("no space is left")))
    capture = make_capture()
    with (
        Store(tmp_path, create=True).writer(ID) as writer,
        LayerWriting(writer, capture, None, 0, Clock()) as writing,
    ):
        writing.begin([], capture)
        writing.passed(0, 0, 10)
        writing._writes[0][0].exception(60)
        with pytest.raises(StoreFullError, match="no space is left"):
            writing.passed(0, 10, 10)


def test_larger_rows_than_a_buffer_and_several_buffers_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is copied from a device goes through a buffer piece by piece; here the host's memory stands for a device."""
    monkeypatch.setattr(Tensor, "is_cuda", True)
    for staging in (1, 24, 64, 1000):
        monkeypatch.setattr(stages, "STAGING_BYTES", staging)
        fetched: list[int] = []

        def fetch(self: ChunkWriting, rows: Tensor, fetched: list[int] = fetched) -> Tensor:
            fetched.append(rows.nbytes)
            return rows.clone()

        monkeypatch.setattr(ChunkWriting, "_fetch", fetch)
        data = torch.randn(2, 7, 3)
        with Store(tmp_path / str(staging), create=True).writer(ID) as writer:
            writer.create_array("a", (1, 2, 7, 3), (1, 1, 7, 3), "float32")
            with ChunkWriting(writer, 2, Clock()) as writing:
                for start, end in ((0, 5), (5, 7)):
                    chunks = [("a", (0, head), data[head, start:end]) for head in range(2)]
                    writing.submit(0, lambda: None, chunks, start).result()
            for head in range(2):
                expected = google_crc32c.value(data[head].numpy().tobytes())
                assert writer.checksum("a", (0, head)) == expected
        assert sum(fetched) == data.nbytes
        assert max(fetched) <= max(staging, 3 * 4)


def test_the_clock_adds_up_over_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where four are at work at once, while a second passes."""
    now = [0.0]
    monkeypatch.setattr(stages, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    clock, together = Clock(), threading.Barrier(4, lambda: now.__setitem__(0, 1.0))

    def work() -> None:
        with clock("work"):
            together.wait(60)

    with Stage(4, "work") as stage:
        for future in [stage.submit(work) for _ in range(4)]:
            future.result()
    assert clock.seconds == {"work": 4.0}


def make_source(tokens: int, window: bool) -> LayerSource:
    generator = torch.Generator().manual_seed(tokens)
    kv = torch.randn(2, tokens, 2, 16, generator=generator)
    plan = plan_sample(tokens, (50,), 128, seed=0)
    sampled = torch.cat([plan.context_P, plan.prompts[0] + tokens]).sort().values
    queries = 3.0 * torch.randn(2, len(sampled), 2, 16, generator=generator)
    frequencies = 0.3 ** torch.arange(8.0) if window else None
    return LayerSource(kv, QuerySample(queries, sampled), frequencies)


@pytest.mark.parametrize("window", [0, 300])
def test_the_wanted_share_is_kept_by_the_late_queries(window: int) -> None:
    """Also where the index needs every query's own position."""
    source = make_source(1500, window > 0)
    spec = INDEX_SPECS["key_clusters"].with_parameters(window=window)
    index = KeyClusters.build(spec.parameters, source, 0)
    calibrator = ThresholdCalibrator()
    calibrate(calibrator, index, source, 8)
    curve = ThresholdCurve(calibrator.thresholds)
    sample = source.queries
    shares = []
    for row in late_rows(sample.positions_P, 1500).tolist():
        position = int(sample.positions_P[row])
        queries = sample.queries_HPGD[:, row : row + 1] / 4.0
        ranking = index.rank(queries, 8, 1500, None, {}, position=position)
        step = Step(1500, curve, lambda ids: ids.float(), torch.zeros(2, 1, 2))
        shares.append(cut(Threshold(keep=0.1), ranking, step).counts_HT.float().mean() / 1492)
    assert float(torch.stack(shares).mean()) == pytest.approx(0.1, rel=0.1)


def test_a_context_of_sinks_only_calibrates_nothing() -> None:
    source = make_source(6, window=False)
    index = KeyClusters.build(INDEX_SPECS["key_clusters"].parameters, source, 0)
    calibrator = ThresholdCalibrator()
    calibrate(calibrator, index, source, 8)
    assert calibrator.thresholds == ()
