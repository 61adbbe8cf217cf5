"""Benchmarks of whole models: their paths over tiny ones on a CPU, what they count, and no wrong step is timed."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from harness.made_up import contexts, trained_rows
from harness.made_up.trained_rows import asked
from harness.steps import captured_steps
from harness.steps.general_steps import first_tokens, forward, start_sessions
from safetensors.torch import load_file, save_file
from torch._dynamo.backends.common import aot_autograd
from transformers import AttentionInterface, LlamaConfig, Qwen3NextConfig

from decode_engine.engine.drafting import USUAL_ROW, Allowance, Costs
from decode_engine.engine.session_memory import session_bytes
from decode_engine.model.decode_attention import ATTENTION_NAME
from decode_engine.model.method_choice import StepCosts, StepTime, label
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.step_graph import step_model
from index_store.memory.context_loading import placed_bytes
from index_store.memory.placement import SLOT_SHARE, MemoryBytes, Placement
from index_store.methods.presets import METHODS, get_method
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.dtypes import AS_DTYPE
from tests.ops.bench.conftest import FOLDER, Run, load_bench
from tests.support.models import STATEFUL
from tests.support.tiny_model import IDENTITY, make_model

WIDE = replace(IDENTITY, layers=2, query_heads=2, kv_heads=1, head_dim=64)
KERNELS = FOLDER.parents[1] / "decode_engine" / "kernels"


@pytest.fixture
def steps(without_gpu: None) -> ModuleType:
    return load_bench("whole_model/decode_gpu")


def test_every_kernel_has_a_kind(steps: ModuleType) -> None:
    texts = (file.read_text() for file in KERNELS.rglob("*.py"))
    kernels = {name for text in texts for name in re.findall(r"^def (\w+_kernel)\(", text, re.M)}
    assert len(kernels) > 10
    kinds = {
        name: [kind for kind, pattern in steps.KINDS.items() if re.fullmatch(pattern, name)]
        for name in kernels
    }
    assert {name: found for name, found in kinds.items() if len(found) != 1} == {}


@pytest.fixture
def lines(steps: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command over a tiny model, all but what only a GPU's clocks tell; returns its lines and exit code."""
    for name, value in {
        "make_model": lambda layers: (make_model(WIDE), WIDE),
        "copy_bandwidth": lambda: 1e9,
        "event_ms": lambda work: 1.0,
        "eager_ms": lambda graph: 2.0,
        "split_us": lambda graph: {},
    }.items():
        monkeypatch.setattr(steps, name, value)

    def of(methods: str, placement: Placement, trained: bool = False) -> tuple[list[dict[str, Any]], int]:
        found, code, _ = run(
            steps, methods=methods, shapes="400x2" if trained else "400x1", layers=2,
            placement=placement, host_gb=1e-3, turns=2, trained=trained,
        )  # fmt: skip
        return found, code

    return of


def test_every_method_has_its_line(lines: Any) -> None:
    found, code = lines("none,full,streamed,refined+dropped:0.05,quest", Placement.DEVICE)
    nothing, full, streamed, coarse, pages = found
    assert nothing["rest_over_weights"] > 0
    assert full["logits_difference"] < 1e-3
    assert "speedup" not in full
    assert (full["steps"], streamed["captured"], pages["captured"]) == (2, False, False)
    assert (full["flight_alike"], coarse["flight_alike"], "flight_ms" in pages) == (1.0, 1.0, False)
    assert full["flight_ms"] > 0
    assert coarse["speedup"] > 0
    assert coarse["attended"] < 1
    assert "host_mb" not in coarse
    assert code == 0


@pytest.mark.usefixtures("prefilled_here")
def test_a_trained_models_keys_and_queries(lines: Any) -> None:
    """Logits of captured steps are compared with those of the general path, which gets the same queries."""
    (full, refined), code = lines("full,refined:0.05", Placement.DEVICE, True)
    assert (code, full["trained"], full["batch"]) == (0, True, 2)
    assert full["logits_difference"] < 1e-3
    assert refined["logits_difference"] < 1e-3
    assert refined["attended"] < 1


def test_contexts_in_host_memory(lines: Any) -> None:
    (line,), code = lines("refined+dropped:0.05", Placement.HYBRID)
    assert (code, line["placement"]) == (0, "hybrid")
    assert line["host_mb"] > 0
    assert 0 <= line["reused"] <= 1
    assert line["logits_difference"] < 1e-3


ONE_LAYER = replace(IDENTITY, layers=1, query_heads=2, kv_heads=1, head_dim=64)
PLACED = 400
HOST_TABLES = "csattention+dropped@group=pooled:0.05"


@pytest.fixture
def placed(without_gpu: None) -> ModuleType:
    return load_bench("whole_model/placements_gpu")


def figures(
    placed: ModuleType,
    cases: str,
    batch: int,
    gigabytes: float = 2**22 * 1e-9,
    *,
    count: int | None = None,
    rows: str = AS_DTYPE,
) -> list[dict[str, Any]]:
    """count: of contexts, one for each session by default."""
    model = make_model(ONE_LAYER)
    listed = [placed.Case.parse(text) for text in cases.split(",")]
    methods = placed.methods_of(listed)
    ranges = contexts.make_ranges(gigabytes, methods)
    runs = placed.Bench(model, step_model(model), 1, 2, 60.0)

    def make() -> Any:
        return contexts.PlacedContexts(
            ONE_LAYER, methods, PLACED, count or batch, model.device, ranges, SLOT_SHARE, rows
        )

    return list(placed.shape_figures(runs, make, listed, batch))


@pytest.mark.parametrize(
    ("cases", "batch"),
    [
        ("full@device,full@hybrid,full@streamed,refined+dropped:0.05@hybrid", 1),
        (f"full@device,refined+dropped:0.05@hybrid,{HOST_TABLES}@host", 2),
    ],
)
def test_every_case_has_its_figures(placed: ModuleType, cases: str, batch: int) -> None:
    small = get_method("refined+dropped", 0.05)
    rows = figures(placed, cases, batch)
    assert [row["error"] for row in rows if "error" in row] == []
    wheres = [row["placement"] for row in rows]
    assert wheres == [text.rpartition("@")[2] for text in cases.split(",")]
    kv_mb = batch * ONE_LAYER.layers * ONE_LAYER.kv_heads * PLACED * 2 * 64 * 4 * 1e-6
    at_most = kv_mb * (0.05 * PLACED + small.sinks + small.recent + small.append_block) / PLACED
    for row, where in zip(rows, wheres, strict=True):
        assert row["steps"] == 2
        assert 0 < row["step_ms"] <= row["p99_ms"]
        assert row["to_full"] > 0
        assert 0 <= row["reused"] <= 1
        if where.startswith("host"):  # whose lists were compared instead
            assert row["logits_difference"] is None
        else:
            assert row["logits_difference"] < 1e-3
        if where in ("device", "streamed"):
            assert row["host_mb"] == (0 if where == "device" else pytest.approx(kv_mb, rel=1e-3))
        elif row["method"] == "full":
            assert row["host_mb"] == pytest.approx(kv_mb, rel=0.05)
        else:
            assert 0 < row["host_mb"] < at_most
            assert row["wait"] >= 0


@pytest.mark.parametrize("case", ["full@streamed", "full@device"])
def test_a_wrong_step_is_not_timed(placed: ModuleType, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    right = placed.compare
    for module in (placed, captured_steps):
        monkeypatch.setattr(module, "compare", lambda got, expected: right(got.flip(-1), expected))
    (row,) = figures(placed, case, 1)
    assert "logits differ" in row["error"]
    assert "step_ms" not in row


def test_wrong_lists_are_not_timed(placed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right = captured_steps.best_keys
    monkeypatch.setattr(captured_steps, "best_keys", lambda ranking, keep: right(ranking, keep - 1))
    (row,) = figures(placed, f"{HOST_TABLES}@host", 1)
    assert row["error"] == "the list of KV head 0 is not the general path's"


LARGE = ModelIdentity("large", "llama", "0" * 64, "0" * 64, 32, 32, 8, 128, 128256, 2**17)
NARROW = replace(LARGE, layers=2, query_heads=2, kv_heads=2, head_dim=32)
GPU = torch.device("cuda")


@pytest.fixture(scope="module")
def counting() -> ModuleType:
    return load_bench("whole_model/sessions_gpu")


@pytest.mark.parametrize("name", ["full", "csattention", "squeezed-tree", "quest"])
def test_a_context_that_is_described_is_as_large_as_one_that_is_made(counting: ModuleType, name: str) -> None:
    made = made_up_context(NARROW, "bfloat16", METHODS[name], 3 * 8192).manifest
    described = counting.describe_context(NARROW, METHODS[name], 3 * 8192)
    assert described.arrays == made.arrays
    assert [index.layers for index in described.indexes] == [index.layers for index in made.indexes]


def test_sessions_take_what_the_engine_counts(counting: ModuleType) -> None:
    method = METHODS["full"]
    manifest = counting.describe_context(LARGE, method, 131072)
    for placement in Placement:
        served = counting.Served(manifest, method, placement, 512)
        context = placed_bytes(manifest, GPU, placement)
        needed = served.needed(5, 2)
        rows = 8 * 8 * 131072 * 13  # eight rows for five sessions
        assert needed.device == 2 * context.device + 5 * session_bytes(method.on(manifest), 512) + rows
        assert needed.host == 2 * context.host
    assert served.batches(33).device == 64 * 8 * 131072 * 13


def test_the_largest_number_fits_and_one_more_does_not(counting: ModuleType) -> None:
    method = METHODS["full"]
    manifest = counting.describe_context(LARGE, method, 131072)
    served = counting.Served(manifest, method, Placement.HYBRID, 512)
    for room, limit in ((MemoryBytes(2**37, 2**40), "host"), (MemoryBytes(2**42, 2**34), "device")):
        count, found = counting.most_sessions(served, room, shared=False)
        assert (found, count > 0) == (limit, True)
        assert served.needed(count, count).fits(room)
        assert not served.needed(count + 1, count + 1).fits(room)
    shared, _ = counting.most_sessions(served, MemoryBytes(2**37, 2**34), shared=True)
    assert shared > count
    assert counting.most_sessions(served, MemoryBytes(2**37, 0), shared=True) == (0, "device")


def test_a_line_for_each_placement(counting: ModuleType, run: Run) -> None:
    options = {"layers": 2, "session_tokens": 512, "device": "2GB", "hosts": "1GiB"}
    rows, code, _ = run(counting, methods="full,refined+dropped:0.01", tokens=8192, **options)
    assert (code, len(rows)) == (0, 2 * len(Placement))
    # Of these two layers alone the embeddings leave nothing.
    assert (rows[0]["own_1GiB"], rows[0]["limit_1GiB"]) == (0, "device")


@pytest.fixture
def capacity(without_gpu: None) -> ModuleType:
    return load_bench("whole_model/capacity_gpu")


def test_cases_that_make_no_sense_are_refused(capacity: ModuleType) -> None:
    for text in ("full", "full@hybrid", "float8@hybrid", "pq@host", "refined:0.01@device/int4"):
        with pytest.raises(typer.BadParameter):
            capacity.Case.parse(text)


def test_sessions_are_timed_until_memory_is_full(
    capacity: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an H200: a cache in float8 holds twice as many as one in bfloat16, and coarse copies alone more."""
    monkeypatch.setattr("harness.made_up.sessions.DTYPE", "bfloat16")
    cases = [capacity.Case.parse(text) for text in capacity.CASES.split(",")]
    room = MemoryBytes(2**40, 118 * 10**9)
    figures = capacity.planned(cases, LARGE, 131072, room, [1, 4, 16, 64], 128)
    most = {figure.case.name: figure.most for figure in figures}
    assert most["full@device"] == 6
    assert most["float8@device"] == 13
    assert most["full@device/int8"] == most["refined:0.01@device/int8"] == 13
    assert most["refined:0.0025/2bits@hybrid"] > 2 * most["float8@device"]
    counts = [figure.sessions for figure in figures if figure.case.name == "float8@device"]
    assert counts == [1, 4, 13]
    kinds = [capacity.made_of(figure) for figure in figures]
    assert kinds == sorted(kinds)


def figure(case: str, sessions: int, token_ms: float) -> dict[str, Any]:
    rate = sessions / token_ms * 1e3
    return {"case": case, "sessions": sessions, "tokens": 8192, "token_ms": token_ms, "tokens_per_s": rate}


def test_bars(capacity: ModuleType) -> None:
    base = [figure("float8@device", 1, 8.0), figure("float8@device", 10, 40.0)]
    good = [figure("refined:0.01@device", 10, 20.0), figure("refined:0.0025@hybrid", 30, 99.0)]
    assert capacity.falls_short([*base, *good]) == []
    assert capacity.falls_short(good) == []
    slow = [figure("refined:0.01@device", 10, 30.0), figure("refined:0.0025@hybrid", 30, 101.0)]
    missed = capacity.falls_short([*base, *slow])
    assert len(missed) == 2
    assert "1.33x of float8@device with 10 sessions" in missed[0]
    assert "0 sessions in hybrid" in missed[1]


def test_a_picture_and_a_table(
    capacity: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = make_model(WIDE)
    monkeypatch.setattr(capacity, "make_model", lambda layers: (model, WIDE))
    options: dict[str, Any] = {"lengths": "8192", "counts": "1", "turns": 1, "host_gb": 0.02, "out": tmp_path}
    cases = "full@device,refined:0.05@device/int8,refined:0.05@hybrid"
    found, code, _ = run(capacity, cases=cases, device="20MB", host="1GiB", most=2, **options)
    assert (code, [line for line in found if "error" in line]) == (0, [])
    assert {line["case"] for line in found} == set(cases.split(","))
    for line in found:
        assert line["token_ms"] > 0
        assert line["sessions"] <= line["most"]
    checked = [line for line in found if line["sessions"] == 1]
    assert all(line["logits_difference"] < 1e-2 for line in checked)
    text = (tmp_path / "capacity.md").read_text()
    assert text.count("`full@device`") == 1
    assert (tmp_path / "capacity.png").read_bytes().startswith(b"\x89PNG")
    earlier = tmp_path / "capacity_8192.jsonl"
    assert [json.loads(line)["case"] for line in earlier.read_text().splitlines()] == [
        line["case"] for line in found
    ]


def test_told_answers_are_said_with_about_as_many_right_drafts(
    without_gpu: None, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = load_bench("whole_model/exact_gpu")
    model = replace(WIDE, max_positions=4096)
    monkeypatch.setattr(bench, "make_model", lambda layers: (make_model(model), model))
    monkeypatch.setattr(Allowance, "pays", lambda self, cost: 1)  # drafts of this model lose on a CPU
    note = Costs.note_step
    monkeypatch.setattr(
        Costs, "note_step", lambda self, _, drafted: note(self, 0.01 * (1 + USUAL_ROW * drafted), drafted)
    )
    found, code, _ = run(
        bench, shapes="400x2@1", kinds="copied:1,method:1,method:0,bad", tokens=24, turns=1, layers=2,
    )  # fmt: skip
    assert code == 0
    copied, right, wrong, bad = found
    assert copied["accepted"] == 1.0
    assert copied["drafted"] > 12
    assert right["accepted"] == 1.0
    assert wrong["accepted"] == 0
    assert bad["drafted"] <= 1  # to see whether they are right now


def test_what_was_chosen_is_compared_with_the_faster_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load_bench("whole_model/choice")
    context = SimpleNamespace(
        manifest=SimpleNamespace(token_count=1000, rows="bfloat16"), release=lambda: None
    )
    monkeypatch.setattr(bench, "made_up_context", lambda *_, **__: context)
    monkeypatch.setattr(
        bench, "step_times", lambda runner, context, methods, count, turns: [8.0, 4.0 * count]
    )
    own = get_method("refined")
    times = {"full": StepTime(0.004, 0.0, 0.0, 0.0), label(own): StepTime(0.005, 0.0, 0.0, 0.0)}
    costs = StepCosts({(name, Placement.DEVICE): each for name, each in times.items()})
    runner = SimpleNamespace(identity=None, kv_dtype=None, device=None)
    one, many = bench.figures(runner, costs, own, [1000], [1, 4], 1)
    assert one == {
        "tokens": 1000, "sessions": 1, "method": label(own), "full_ms": 8.0, "own_ms": 4.0, "chosen": "full",
        "ratio": 2.0, "told_ms": pytest.approx(4.0),
    }  # fmt: skip
    assert (many["sessions"], many["own_ms"], many["ratio"]) == (4, 16.0, 1.0)


def test_rows_of_fewer_bits_are_farther_from_float32(run: Run) -> None:
    bench = load_bench("whole_model/rows_quality")
    cases = "full@float32,full@bfloat16,full@int8,full@float8,refined:0.05@bfloat16"
    found, code, _ = run(bench, context_length="1k", documents=2, facts=2, text_tokens=24, cases=cases)
    assert code == 0
    text = {line["case"]: line["kl_text"] for line in found}
    assert text["full@float32"] < 1
    assert text["full@bfloat16"] < text["full@float8"] / 4
    assert text["full@int8"] < text["full@float8"] / 4
    assert text["refined:0.05@bfloat16"] < text["full@float8"]
    assert all(line["questions"] == 4 and line["kl_text_se"] >= 0 for line in found)


def test_rows_that_nobody_keeps_are_refused() -> None:
    with pytest.raises(typer.BadParameter, match="expected METHOD@ROWS"):
        load_bench("whole_model/rows_quality").parse_case("full@int4")


@pytest.fixture(scope="module")
def generation() -> ModuleType:
    return load_bench("whole_model/long_generation")


@pytest.mark.usefixtures("prefilled_here")
def test_a_line_per_stretch_and_one_per_method(generation: ModuleType, run: Run, tmp_path: Path) -> None:
    options = {"tokens": 400, "stretch": 200, "observe": 40, "picture": False}
    methods = "multipole:0.3,refined:1"
    rows, _, _ = run(generation, out=tmp_path, methods=methods, context_length="1k", **options)
    assert [(row["method"], row["from"], row["to"]) for row in rows] == [
        (name, *span) for name in methods.split(",") for span in ((0, 200), (200, 400), (0, 400))
    ]
    for row in rows:
        assert row["context"] == 1024
        assert 0.0 <= row["recall_all"] <= 1.0
        assert 0.0 < row["step_ms"]["p50"] <= row["step_ms"]["p99"] <= row["step_ms"]["max"]
        assert 0.0 < row["append_us"]["p50"] <= row["append_us"]["p99"]
        assert 0.5 < row["agreement"] <= 1.0
        assert -1e-6 < row["kl"] < 1.0
    # With all keys exactly it is full attention, but for roundings, which decide between equally likely tokens.
    assert all(row["agreement"] > 0.95 for row in rows[3:])
    assert all(row["kl"] < 1e-4 for row in rows[3:])
    for first, second, whole in (rows[:3], rows[3:]):
        # Told to five digits each.
        assert whole["kl"] == pytest.approx((first["kl"] + second["kl"]) / 2, abs=1.1e-5)
        assert first["new_share"] <= second["new_share"]
        assert first["session_bytes"] < second["session_bytes"] == whole["session_bytes"]
    # Recent windows hold all new ones of the first stretch.
    assert [row["recall_new"] is None for row in rows] == [True, False, False] * 2


INTERPRETED = """
import runpy, sys
import index_store
from tests.support.interpreter.speed import patch_once, remember_types, round_sums_once
patch_once(); remember_types(); round_sums_once()
from decode_engine.steps import batch_kinds
batch_kinds._LEAST_KEYS = 256
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def divided(without_gpu: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = load_bench("whole_model/tensor_parallel_gpu")
    file = str(FOLDER / "whole_model" / "tensor_parallel_gpu.py")
    monkeypatch.setattr(made, "PROGRAM", (sys.executable, "-c", INTERPRETED, file))
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parents[1]))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return made


def test_two_ranks_say_what_one_says(divided: ModuleType, run: Run) -> None:
    lines, code, _ = run(
        divided, ranks="1,2", shape="toy", layers=2, tokens=300, sessions="2", methods="full", turns=1,
        device="cpu", dtype="float32", seconds=900.0,
    )  # fmt: skip
    assert [line for line in lines if "error" in line] == []
    assert code == 0
    readers = [line for line in lines if line["figure"] == "reader"]
    assert readers[0]["answer"] == readers[1]["answer"]
    one, two = (line for line in lines if line["figure"] == "step")
    assert (one["ranks"], two["ranks"]) == (1, 2)
    for line in (one, two):
        assert line["logits_difference"] < 1e-3
        assert line["tokens_alike"] == 1.0
    assert two["gb"] < 0.6 * one["gb"]
    assert (one["speedup"], two["speedup"] > 0) == (1.0, True)


def test_a_rank_that_ends_ends_all(divided: ModuleType) -> None:
    told = (sys.executable, "-c", "import sys, time; sys.argv[2] == '1' and sys.exit(3); time.sleep(600)")
    assert divided.start_ranks(2, told, 60.0) == 3
    assert divided.start_ranks(1, (sys.executable, "-c", "import time; time.sleep(600)"), 0.5) == 1


TINY = {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4}
SAME = {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096, "eos_token_id": None}
SETTINGS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def tiny_config(shape: str, layers: int) -> Any:
    if shape == "qwen3-next":
        return Qwen3NextConfig(**{**TINY, **SAME, **STATEFUL["qwen3_next"], "num_hidden_layers": layers})
    return LlamaConfig(**TINY, **SAME, num_hidden_layers=layers, bos_token_id=None)


def write_float8(folder: Path, source: Path) -> None:
    """Without the quantizer of transformers, which asks for a GPU."""
    shutil.copytree(source, folder)
    stored = load_file(folder / "model.safetensors")
    for name, weight in dict(stored).items():
        if name.endswith("proj.weight"):
            scale = weight.abs().max().float() / 448
            stored[name] = (weight / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale.view(1, 1).repeat(*(-(-each // 128) for each in weight.shape))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": SETTINGS}))


def test_folders_are_stored_checked_and_timed(
    without_gpu: None, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = load_bench("whole_model/checkpoints_gpu")
    monkeypatch.setattr(bench, "config_of", tiny_config)
    monkeypatch.setattr(bench, "write_float8", write_float8)
    found, code, said = run(
        bench, shapes="qwen3-next,8b,8b-float8", tokens=600, layers=3, sessions="1,2", answer=6, folder=None,
        methods="full,refined:0.05",
    )  # fmt: skip
    assert code == 0, said
    stored = {line["shape"]: line for line in found if line["figure"] == "stored"}
    assert stored["qwen3-next"]["states_mb"] > 0 == stored["8b"]["states_mb"]
    steps = [line for line in found if line["figure"] == "step"]
    assert len(steps) == 3 * 2 * 2
    weights = [line for line in found if line["figure"] == "weights"]
    attention = [line["kl_attention"] for line in weights if "kl_attention" in line]
    assert len(attention) == 2
    assert 0 < weights[-1]["kl_weights"] < 1


@pytest.mark.usefixtures("without_gpu")
def test_every_layer_is_asked_with_what_was_given() -> None:
    method = get_method("full")
    rows = torch.randn(1, 300, 2, 64, generator=torch.Generator().manual_seed(1))
    context = made_up_context(WIDE, "float32", method, 300, kv=lambda _: rows)
    assert torch.equal(context.kv(1), rows)
    model = make_model(WIDE)

    def logits(count: int) -> torch.Tensor:
        contexts = [context] * count
        return forward(model, start_sessions(contexts, method), first_tokens(contexts))

    own = logits(2)
    # Of very large queries a step attends to one key: the one that is nearest.
    first, second = (40.0 * rows[:, key, 0][None, :, None].expand(2, 2, 1, -1) for key in (5, 9))
    with asked([first, first]):
        near_first = logits(2)
        with pytest.raises(
            ValueError, match=r"queries \(1, 2, 1, 64\) in torch.float32, given are \(2, 2, 1, 64\)"
        ):
            logits(1)
    with asked([second, first]):
        assert not torch.allclose(logits(2), near_first)
    assert not torch.allclose(near_first, own)
    assert torch.equal(logits(2), own)


@pytest.mark.usefixtures("without_gpu")
def test_a_compiled_step_still_computes_its_own_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a step would lack the projections that a model's step has."""
    counts: list[int] = []

    def count(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        counts.append(sum("mm" in str(node.target) for node in graph.graph.nodes))
        return graph

    weights = torch.randn(8, 2 * 64)
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    monkeypatch.setattr(trained_rows, "decode_attention", lambda module, query, *_: 2.0 * query)

    def step(rows: torch.Tensor) -> torch.Tensor:
        return AttentionInterface()[ATTENTION_NAME](module, (rows @ weights).view(1, 2, 1, 64))

    queries = torch.randn(1, 2, 1, 64)
    with asked([queries]):
        compiled = torch.compile(step, backend=aot_autograd(fw_compiler=count))
        assert torch.equal(compiled(torch.randn(1, 8)), 2.0 * queries)
    assert counts == [1]
