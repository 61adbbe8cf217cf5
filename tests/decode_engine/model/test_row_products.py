"""On a CPU a session's logits have the same bits alone and beside any others, in any place among them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from decode_engine.layers.session import Session
from decode_engine.model.row_products_numba import (
    RowLinear,
    keep_rows_apart,
    multiply_rows,
    multiply_rows_reference,
)
from index_store.methods.presets import METHODS, get_method
from tests.support.serving.served import Served, serve


@pytest.fixture(scope="module", params=["qwen2"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    methods = ("full", "csattention", "refined")
    yield from serve(tmp_path_factory.mktemp(request.param), request.param, methods=methods)


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 4), (63, 5), (100, 130), (500, 63)])
def test_products_equal_the_reference_and_no_row_depends_on_others(inputs: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(inputs)
    rows = torch.randn(17, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator)
    found = multiply_rows(rows, weight)
    torch.testing.assert_close(found, multiply_rows_reference(rows, weight), rtol=1e-4, atol=1e-4)
    order = torch.randperm(17, generator=generator)
    assert torch.equal(multiply_rows(rows[order], weight), found[order])
    for count in range(1, 17):
        assert torch.equal(multiply_rows(rows[:count], weight), found[:count])


def test_which_layers_keep_rows_apart() -> None:
    tied = nn.Linear(8, 6)
    model = nn.ModuleDict({"one": tied, "rounded": nn.Linear(8, 6).bfloat16(), "few": nn.Linear(8, 2)})
    keep_rows_apart(model)
    assert [type(model[name]) for name in ("one", "rounded", "few")] == [RowLinear, nn.Linear, nn.Linear]
    assert model["one"].weight is tied.weight
    rows = torch.randn(3, 1, 8)
    torch.testing.assert_close(model["one"](rows), tied(rows))
    assert torch.equal(model["one"](rows[:, 0]), tied(rows[:, 0]))  # a prompt's


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
