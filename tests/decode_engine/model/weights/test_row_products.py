"""On a CPU a session's logits have the same bits alone and beside any others, in any place among them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from decode_engine.layers.session import Session
from decode_engine.model.packed_weights import PackedMatrix, RowLinear
from decode_engine.model.row_products_numba import multiply_rows, multiply_rows_reference
from index_store.methods.presets import METHODS, get_method
from tests.support.serving.served import Served, serve

KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


@pytest.fixture(scope="module", params=["auto", "float32", "int8"])
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
    for step in range(14):
        here = generator.sample(range(7), generator.randint(1, 7))
        fed = [[30 + 7 * number + step] for number in here]
        found = served.runner.forward([together[number] for number in here], fed)
        for number, token, logits in zip(here, fed, found, strict=True):
            assert torch.equal(served.runner.forward([alone[number]], [token])[0], logits)
