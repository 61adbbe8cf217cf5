"""Weights in few bits, and layers that are computed in few calls: the same numbers, for each row by itself."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from numba import get_num_threads
from torch import nn

from decode_engine.layers.session import Session
from decode_engine.model import packed_weights
from decode_engine.model import row_layers as module
from decode_engine.model.continuing import Ground, SessionKeeper
from decode_engine.model.packed_weights import PackedMatrix, RowEmbedding, RowLinear, pack_weights
from decode_engine.model.row_layers import RowLayers
from decode_engine.model.row_products_numba import multiply_rows, multiply_rows_reference
from decode_engine.model.runner import ModelRunner
from decode_engine.orders.order import KeepOptions
from decode_engine.settings.command_options import check_weights
from index_store.errors import InvalidArgumentError
from index_store.methods.presets import METHODS, get_method
from index_store.models.loading import ModelFolder, load_model, resolve_model
from index_store.store.clean_up import StoreRoom
from tests.support.devices import nightly
from tests.support.models import LAYER_KINDS, write_model_folder
from tests.support.serving.served import Served, serve


class Small(nn.Module):
    """A tied embedding that scales its rows, a head, a layer, and what is no plain layer."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embedding = Scaled(70, 72, padding_idx=3)
        self.inner = nn.ModuleDict({"layer": nn.Linear(72, 72), "few": nn.Linear(72, 2), "own": Own(72, 8)})
        self.head = nn.Linear(72, 70, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            parameter.requires_grad_(False).copy_(parameter.bfloat16().float())

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner["layer"](self.embedding(ids)))  # type: ignore[no-any-return]


class Scaled(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 3.0 * super().forward(ids)


class Own(nn.Linear):
    pass


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times say what the tests need."""
    monkeypatch.setattr(packed_weights, "_gain", lambda weight, dtype: 0 * measured(weight, dtype) + 1.9)


measured = packed_weights._gain
IDS = torch.tensor([[3, 0, 69, 5]])


def test_which_parts_are_packed() -> None:
    model = Small()
    layer = model.inner["layer"].weight.clone()
    expected = model(IDS)
    kept = pack_weights(model, "auto", torch.bfloat16)
    assert not kept.rounded
    assert kept.told == "weights bfloat16 (exact, 1.9 times the speed of float32 on this processor)"
    kinds = [type(each) for each in (model.embedding, model.inner["layer"], model.head)]
    assert kinds == [RowEmbedding, RowLinear, RowLinear]
    assert [type(model.inner[name]) for name in ("few", "own")] == [nn.Linear, Own]
    assert model.head.matrix is model.embedding.matrix
    assert torch.equal(model.inner["layer"].weight, layer)
    torch.testing.assert_close(model(IDS), expected)


class Projecting(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        for name, outputs in (("q_proj", 96), ("k_proj", 32), ("v_proj", 36)):
            setattr(self, name, nn.Linear(72, outputs, bias=bias))
        for parameter in self.parameters():
            parameter.requires_grad_(False).copy_(parameter.bfloat16().float())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("wanted", ["bfloat16", "int8"])
def test_layers_of_one_input_give_the_same_bits_by_one_product(
    wanted: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, alone = Projecting(bias), Projecting(bias)
    alone.load_state_dict(together.state_dict())
    pack_weights(together, wanted, torch.bfloat16)
    monkeypatch.setattr(packed_weights, "_TOGETHER", ())
    pack_weights(alone, wanted, torch.bfloat16)
    products: list[int] = []

    def multiply(*given: torch.Tensor) -> torch.Tensor:
        products.append(len(given[0]))
        return multiply_rows(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(packed_weights, "multiply_rows", multiply)
    for rows in (torch.randn(3, 1, 72), torch.randn(1, 60, 72)):
        expected = [layer(rows) for layer in alone.children()]
        products.clear()
        found = [layer(rows) for layer in together.children()]
        assert products == ([3] if rows.shape[1] == 1 else [])
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert torch.equal(together.k_proj(2 * rows), alone.k_proj(2 * rows))  # another input
    held = {
        each.numbers.untyped_storage().data_ptr() for each in together.modules() if hasattr(each, "numbers")
    }
    assert len(held) == 1


@pytest.mark.parametrize(("wanted", "bytes_each"), [("float32", 4), ("bfloat16", 2), ("int8", 1)])
def test_nothing_is_kept_in_more_bits_beside(wanted: str, bytes_each: int) -> None:
    model = Small()
    pack_weights(model, wanted, torch.bfloat16)
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in [*model.parameters(), *model.buffers()]
    }
    inputs = {"float32": 80, "bfloat16": 80, "int8": 128}[wanted]
    scales = (70 + 72) * 2 * 4 if wanted == "int8" else 0
    rest = 4 * (72 + (2 * 72 + 2) + (8 * 72 + 8))
    rest += (
        4 * 70 * 72 if wanted == "float32" else 0
    )  # 72 is filled up to 80: the lookup's rows stay as they are
    assert sum(held.values()) == (70 + 72) * inputs * bytes_each + scales + rest


def test_eight_bits_round_by_groups() -> None:
    weight = torch.randn(8, 130, generator=torch.Generator().manual_seed(0))
    weight[:, :64] *= 100
    weight[2, 64:128] = 0
    errors = (PackedMatrix(weight, torch.int8).widened() - weight).abs()
    for begin in (0, 64, 128):
        group = slice(begin, begin + 64)
        assert (errors[:, group].amax(1) <= weight[:, group].abs().amax(1) / 253).all()


def test_a_lookup_that_is_no_matrix_is_not_rounded() -> None:
    model = Small(tied=False)
    expected = model.embedding(IDS)
    assert pack_weights(model, "int8", torch.bfloat16).rounded
    assert torch.equal(model.embedding(IDS), expected)
    assert model.embedding.matrix.numbers.dtype == torch.bfloat16
    assert model.head.matrix.numbers.dtype == torch.int8


def test_what_16_bits_do_not_hold_stays_as_it_is() -> None:
    model = Small()
    model.inner["layer"].weight[5, 7] = 1 / 3
    pack_weights(model, "auto", torch.bfloat16)
    assert model.inner["layer"].matrix.numbers.dtype == torch.float32
    assert model.head.matrix.numbers.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("ratio", "checkpoint", "expected"),
    [
        (0.7, torch.bfloat16, "weights float32 (bfloat16 has 0.7 times its speed on this processor)"),
        (1.9, torch.float32, "weights float32 (those of the checkpoint)"),
        (1.9, torch.float16, "weights float16 (exact, 1.9 times the speed of float32 on this processor)"),
    ],
)
def test_what_is_chosen(
    ratio: float, checkpoint: torch.dtype, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "_gain", lambda weight, dtype: ratio)
    assert pack_weights(Small(), "auto", checkpoint).told == expected


def test_what_was_measured_once_is_known_for_the_processor_and_the_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path))
    ratios = iter([1.25, 0.5, 3.0, 2.0])
    monkeypatch.setattr(packed_weights, "_measure", lambda weight, dtype: next(ratios))
    square, flat = torch.zeros(32, 32), torch.zeros(16, 64)
    assert [measured(square, torch.bfloat16) for _ in range(2)] == [1.25, 1.25]
    assert [measured(each, torch.bfloat16) for each in (flat, square)] == [0.5, 1.25]
    assert [measured(square, torch.float16) for _ in range(2)] == [3.0, 3.0]
    monkeypatch.setattr(packed_weights, "processor_name", lambda: "another one")
    assert measured(square, torch.bfloat16) == 2.0


def test_measuring_leaves_the_threads_as_they_were() -> None:
    most = get_num_threads()
    assert 0 < packed_weights._measure(torch.zeros(64, 64), torch.bfloat16) < 100
    assert get_num_threads() == most


def test_models_with_experts_keep_float32() -> None:
    model = Small()
    model.experts = nn.Parameter(torch.zeros(2, 3, 4))
    assert pack_weights(model, "int8", torch.bfloat16).name == "float32"
    assert model.head.matrix.numbers.dtype == torch.float32


@pytest.mark.parametrize("weights", ["auto", "int8"])
@pytest.mark.parametrize("kind", ["llama", "caps", "sinks", "another scale", "experts"])
def test_models_decode_as_they_compute_with_the_same_weights(
    kind: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path / "cache"))
    family, settings = LAYER_KINDS.get(kind, (kind, {}))
    path = write_model_folder(tmp_path / "model", family, layers=3, dtype=torch.bfloat16, **settings)
    folder = resolve_model(str(path))
    runner = ModelRunner(folder, weights=weights)  # compares itself
    try:
        expected = load_model(folder, "eager").model.get_output_embeddings().weight
        head = runner.model.get_output_embeddings()
        name = "float32" if kind in ("sinks", "experts") else "bfloat16" if weights == "auto" else "int8"
        assert isinstance(head, RowLinear)
        assert str(head.matrix.numbers.dtype) == f"torch.{name}"
        error = (head.weight - expected).abs().amax(1)
        assert (error <= (expected.abs().amax(1) / 250 if name == "int8" else 0)).all()
    finally:
        runner.close()


@pytest.mark.parametrize(("weights", "note"), [("auto", "exact"), ("int8", "exact, weights int8")])
def test_what_is_kept_of_a_session_says_which_weights_made_it(
    weights: str, note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path / "cache"))
    for served in serve(tmp_path, "llama", dtype=torch.bfloat16, weights=weights):
        session = served.start(METHODS["full"])
        tokens = [10, 20, 30]
        served.runner.read([session], [tokens])
        fitted = METHODS["full"].on(served.context.manifest)
        ground = Ground(served.context.manifest, served.context.manifest)
        store, runner = served.store, served.runner
        options, room = KeepOptions(), StoreRoom(store)
        keeper = SessionKeeper(store, runner, ground, fitted, served.context, None, tokens, options, room)
        keeper.check()
        made = keeper.take(session, [])()
        assert store.manifest(made).prefill["attention"] == note


def test_a_gpu_has_them_as_the_checkpoint_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("index_store.memory.devices.pick_device", lambda name: torch.device("cuda"))
    check_weights("auto", "cuda")
    with pytest.raises(InvalidArgumentError, match="--weights is int8, but a GPU computes here"):
        check_weights("int8", "cuda")


KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


@pytest.fixture(scope="module", params=["auto", "int8", *nightly("float32")])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    methods = ("full", "csattention", "refined")
    folder = tmp_path_factory.mktemp(request.param)
    yield from serve(folder, "qwen2", methods=methods, dtype=torch.bfloat16, weights=request.param)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 4), (63, 5), (100, 130), (500, 63), (64, 501)])
def test_products_equal_the_reference_and_no_row_depends_on_others(
    inputs: int, outputs: int, kind: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(inputs)
    rows = torch.randn(17, inputs, generator=generator)
    matrix = PackedMatrix(torch.randn(outputs, inputs, generator=generator), kind)
    whole = torch.nn.functional.pad(rows, (0, matrix.numbers.shape[1] - inputs))
    found = multiply_rows(whole, *matrix.arrays)
    expected = multiply_rows_reference(rows, matrix.widened())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    order = torch.randperm(17, generator=generator)
    assert torch.equal(multiply_rows(whole[order], *matrix.arrays), found[order])
    for count in range(1, 17):
        assert torch.equal(multiply_rows(whole[:count], *matrix.arrays), found[:count])


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_weights_that_16_bits_hold_give_the_same_bits_as_in_32(kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(130, 100, generator=generator).to(kind).float()
    rows = torch.randn(9, 1, 100, generator=generator)
    narrow, wide = (RowLinear(PackedMatrix(weight, each), None) for each in (kind, torch.float32))
    assert torch.equal(narrow(rows), wide(rows))
    assert torch.equal(narrow.weight, weight)


@pytest.mark.parametrize("name", ["full", "csattention", "refined"])
def test_sessions_get_the_same_bits_alone_and_in_changing_groups(served: Served, name: str) -> None:
    method = METHODS["full"] if name == "full" else get_method(name, 0.05)
    method = replace(method, recent=8, append_block=4)

    def start(number: int) -> Session:
        session = served.start(method)
        served.runner.read([session], [[10 + number, 20][: 1 + number % 2]])
        return session

    together, alone = [start(number) for number in range(7)], [start(number) for number in range(7)]
    generator = random.Random(3)
    for step in range(8):
        here = generator.sample(range(7), generator.randint(1, 7))
        fed = [[30 + 7 * number + step] for number in here]
        found = served.runner.forward([together[number] for number in here], fed)
        for number, token, logits in zip(here, fed, found, strict=True):
            assert torch.equal(served.runner.forward([alone[number]], [token])[0], logits)


def _folder(path: Path, family: str, **settings: Any) -> ModelFolder:
    return resolve_model(str(write_model_folder(path, family, **settings)))


@pytest.mark.parametrize(
    ("family", "weights"), [("llama", "bfloat16"), ("qwen2", "float32"), ("mistral", "int8")]
)
def test_few_calls_give_what_the_models_own_forward_gives(tmp_path: Path, family: str, weights: str) -> None:
    runner = ModelRunner(_folder(tmp_path, family), weights=weights)
    steps = [[[7], [200], [3]], [[9], [8], [60]], [[1], [2], [3]]]

    def logits() -> torch.Tensor:
        fitted = METHODS["full"].on(runner.no_context.manifest)
        sessions = [runner.start(runner.no_context, fitted) for _ in range(3)]
        runner.read(sessions, [[5] * 40, [6], [1, 2, 3]])
        found = [torch.cat(runner.forward(sessions, step, rows=True)) for step in steps]
        found += runner.forward(sessions, [[4, 5, 6, 7, 8], [9], [1, 2]], all_logits=True, rows=True)
        assert [session.position for session in sessions] == [48, 5, 8]
        return torch.cat(found)

    few, runner._row_layers = runner._row_layers, None
    expected = logits()
    assert isinstance(few, RowLayers)
    runner._row_layers = few
    torch.testing.assert_close(logits(), expected, rtol=1e-3, atol=1e-4)
    runner.close()


def test_a_rows_bits_do_not_depend_on_those_beside_it(tmp_path: Path) -> None:
    runner = ModelRunner(_folder(tmp_path, "llama"))
    assert runner._row_layers is not None
    fitted = METHODS["full"].on(runner.no_context.manifest)

    def last(count: int) -> torch.Tensor:
        sessions = [runner.start(runner.no_context, fitted) for _ in range(count)]
        for token in (5, 6, 7):
            found = runner.forward(sessions, [[token + 11 * n] for n in range(count)], rows=True)
        return found[0]

    alone = last(1)
    for count in (4, 7):
        assert torch.equal(last(count), alone)
    runner.close()


@pytest.mark.parametrize(
    ("family", "settings"), [("granite", {"residual_multiplier": 0.5}), LAYER_KINDS["no positions"]]
)
def test_a_trial_finds_layers_that_do_something_else(
    tmp_path: Path, family: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    runner = ModelRunner(_folder(tmp_path, family, layers=3, **settings))
    with caplog.at_level("INFO", module.__name__):
        assert RowLayers.of(runner.model) is not None
        assert runner._row_layers is None
        assert module.row_layers(runner.model, runner.no_context, runner.forms) is None
    assert "go the general way: in fewer calls logits differ by" in caplog.text
    runner.close()


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_other_layers_go_the_general_way(tmp_path: Path, family: str) -> None:
    runner = ModelRunner(_folder(tmp_path, family))
    assert RowLayers.of(runner.model) is None
    runner.close()
