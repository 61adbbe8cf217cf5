"""Runs a model over a context chunk by chunk, and over calibration prompts behind it.

Whether the capture sees what the model itself computes is compared once for every model (`check_capture`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from index_store.models.attention_reading import decoder_of
from index_store.models.loading import LoadedModel
from index_store.models.self_check import Examination, Verdict, differ, rotation_differs
from index_store.models.state_cache import passing
from prefill_worker.reading.capture import Capture
from prefill_worker.reading.query_sample import plan_sample

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all)."""


def _no_progress(done: int, total: int) -> None:
    pass


@torch.inference_mode()
def run_context(
    model: torch.nn.Module,
    capture: Capture,
    token_ids: Sequence[int],
    chunk: int,
    progress: Progress = _no_progress,
    first: int = 0,
    passed: Callable[[int, int], None] | None = None,
) -> None:
    """Feeds the context to the model, `chunk` tokens a pass; the capture holds the result.

    first: token to begin with, of a capture that holds those before it. passed: told first token and number of tokens
    of every pass but the last, before `progress` is.
    Memory beyond the capture is that of one pass over `chunk` tokens, whatever the length of the context.
    """
    ids = torch.tensor(token_ids, dtype=torch.int64)
    for start in range(first, len(ids), chunk):
        part = ids[start : start + chunk]
        capture.begin_context_chunk(start, len(part))
        _forward(model, capture, part, start)
        end = start + len(part)
        if passed is not None and end < len(ids):
            passed(start, len(part))
        progress(end, len(ids))
    _wait(capture)


@torch.inference_mode()
def run_prompts(
    model: torch.nn.Module,
    capture: Capture,
    prompts: Sequence[Sequence[int]],
    chunk: int,
    progress: Progress = _no_progress,
) -> None:
    """Feeds each calibration prompt to the model as if it alone followed the context, then forgets it.

    Only the sampled queries of the prompts remain; keys and values of the context are not touched.
    """
    for number, prompt in enumerate(prompts):
        ids = torch.tensor(prompt, dtype=torch.int64)
        for start in range(0, len(ids), chunk):
            part = ids[start : start + chunk]
            capture.begin_prompt_chunk(number, start, len(part))
            _forward(model, capture, part, capture.token_count + start)
        progress(number + 1, len(prompts))
    capture.forget_prompt()
    _wait(capture)


def _wait(capture: Capture) -> None:
    """Until the device has done what it was asked for, so that the time taken is the work's; not for other streams."""
    capture.settle()
    if capture.device.type == "cuda":
        torch.cuda.current_stream(capture.device).synchronize()


def _forward(model: Any, capture: Capture, ids: Tensor, first_position: int) -> None:
    """One pass through the layers; the output head is left out, since only attention's inputs are wanted."""
    weight = next(model.parameters())
    positions = torch.arange(first_position, first_position + len(ids), device=weight.device)
    more = capture.begin_pass(weight.dtype)
    with passing(capture):
        decoder_of(model)(
            input_ids=ids.to(weight.device)[None],
            position_ids=positions[None],
            use_cache=False,
            capture=capture,
            **more,
        )
    capture.end_pass()


_CHUNK = 40


def check_capture(loaded: LoadedModel) -> Tensor | None:
    """Raises ModelUnsupportedError unless the capture gets the keys and values of the model's own attention.

    Returns the inverse frequencies [d/2] float32 of the rotary embedding of the layers whose queries see all keys,
    where it turns dimensions i and i + d/2 at position p by p * inverse_frequencies[i] in all of them; otherwise None.
    """
    candidates = list(_frequencies(loaded.model, loaded.identity.head_dim))

    def check(seen: Examination) -> Verdict:
        layers = seen.identity.full_layers
        fitting = (
            number
            for number, own in enumerate(candidates)
            if rotation_differs(loaded.model, seen, own, layers) is None
        )
        found = next(fitting, None)
        return {"prefill": _compare(loaded.model, seen), "rotary": None if found is None else str(found)}

    found = loaded.verify("prefill", check).get("rotary")
    return None if found is None else candidates[int(found)]


def _frequencies(model: Any, head_dim: int) -> Iterator[Tensor]:
    """Those of the model's rotary embeddings that are made for all dimensions."""
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2].endswith("inv_freq") and 2 * len(buffer) == head_dim:
            yield buffer.float().cpu()


@torch.inference_mode()
def _compare(model: Any, seen: Examination) -> str | None:
    """Why keys and values that a capture in chunks gets differ from those of the plain pass; None when they do not."""
    weights = next(model.parameters())
    count = len(seen.ids)
    capture = Capture(seen.identity, count, weights.dtype, plan_sample(count, (), count, 0), weights.device)
    run_context(model, capture, seen.ids, _CHUNK)
    for layer in range(seen.identity.layers):
        found = capture.kv(layer)
        expected = seen.plain.kv[layer][:, count - found.shape[1] :]
        why = differ(expected.transpose(0, 1), found.transpose(0, 1), weights.dtype)
        if why is not None:
            return f"(keys and values of layer {layer}) {why}"
    return None
