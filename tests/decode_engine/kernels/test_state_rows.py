"""States are copied between the sessions of a batch and its rows, of any sizes, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch

from decode_engine.kernels.state_rows import _TILE, StateChunks, copy_states, copy_states_reference
from index_store.models.state_cache import TextStates, state_parts
from index_store.store.description.context_id import ModelStates, StatePart
from tests.support.devices import DEVICE

IDLE = 1


def parts_of(*sizes: int) -> ModelStates:
    """Of three layers: float32 of the first sizes in two of them, the model's dtype of the last in one."""
    fixed = [StatePart("recurrent", n, (0, 2), (size,), "float32") for n, size in enumerate(sizes[:-1])]
    return ModelStates(3, (1,), (*fixed, StatePart("conv", 0, (1,), (sizes[-1],), "")))


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("sizes", [(1, 1), (63, 100), (500, 8), (64, _TILE // 2 + 8, 2 * _TILE + 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_go_to_the_batch_and_back(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """A row of the batch is idle."""
    model = parts_of(*sizes)
    texts = [TextStates(model, dtype, DEVICE) for _ in range(3)]
    for text in texts:
        text.begun = True
        for own in text.parts:
            own.normal_()
    addresses_B2 = torch.tensor([text.addresses(0) for text in texts], device=DEVICE)
    addresses_B2[IDLE] = 0
    chunks = StateChunks.of(model, dtype, torch.device(DEVICE))
    nbytes = 3 * texts[0].nbytes // 2
    block, expected = (torch.full((nbytes,), 7, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    copy_states(addresses_B2[:, 0], block, chunks, back=False)
    seated = [None if row == IDLE else text.parts for row, text in enumerate(texts)]
    copy_states_reference(seated, state_parts(model, expected, dtype, 3), back=False)
    assert torch.equal(block, expected)

    block.random_(100)
    twins = [text.copy() for text in texts]
    for text, twin in zip(texts, twins, strict=True):
        text.advance()
        for own, other in zip(text.parts, twin.parts, strict=True):
            own.fill_(3)
            other.fill_(3)
    copy_states(addresses_B2[:, 1], block, chunks, back=True)
    seated = [None if row == IDLE else twin.parts for row, twin in enumerate(twins)]
    copy_states_reference(seated, state_parts(model, block, dtype, 3), back=True)
    for text, twin in zip(texts, twins, strict=True):
        for own, other in zip(text.parts, twin.parts, strict=True):
            assert torch.equal(own.view(torch.uint8), other.view(torch.uint8))
