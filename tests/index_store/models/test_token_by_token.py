"""Mixers that begin anew behind a state, fed with single tokens there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from index_store.models.loading import identify, resolve_model
from index_store.models.state_cache import StateCache, TextStates
from index_store.models.token_by_token import noting_readers, read_singly
from tests.support.models import LAYER_KINDS, write_model_folder, write_tokenizer


def test_pieces_leave_what_the_whole_leaves(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    family, settings = LAYER_KINDS["single tokens"]
    folder = write_model_folder(tmp_path / "model", family, layers=3, **settings)
    write_tokenizer(folder)
    states = identify(resolve_model(str(folder))).states
    assert states is not None
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mixer = model.model.layers[0].mamba
    hidden_BTD = torch.randn(2, 9, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    calls: list[int] = []
    mixer.in_proj.register_forward_pre_hook(lambda _, args: calls.append(args[0].shape[1]))

    @torch.inference_mode()
    def read(sizes: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """In pieces of so many tokens: what comes out, and the states then."""
        texts = [TextStates(states, torch.float32) for _ in range(2)]
        found = []
        for piece in hidden_BTD.split(list(sizes), dim=1):
            cache = StateCache.over(texts)
            found.append(mixer(piece, cache=cache))
            cache.commit()
        return torch.cat(found, dim=1), [rows[0] for text in texts for rows in text.parts]

    whole, left = read([9])
    assert not torch.allclose(read([4, 5])[0], whole, atol=1e-3)
    with noting_readers(model) as names:
        read([4, 5])
    assert names == ["model.layers.0.mamba"]
    calls.clear()
    undo = read_singly(model, names)
    read_singly(model, names)  # once is enough
    found, states_found = read([4, 5])
    assert calls == [4, *[1] * 5]
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states_found, left, atol=1e-5, rtol=1e-5)
    undo()
    assert not torch.allclose(read([4, 5])[0], whole, atol=1e-3)
