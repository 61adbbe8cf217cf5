"""A prompt without a context beside streams: they get a step after every chunk of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from decode_engine.engine.engine import Engine
from decode_engine.engine.requests import Work
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.orders.events import Says
from decode_engine.orders.order import Order
from index_store.memory.resident import ResidentContext
from index_store.methods.presets import METHODS
from index_store.models.loading import resolve_model
from tests.decode_engine.engine.fake_runner import Stream
from tests.support.models import write_model_folder

CHUNK = 64
STREAMS = 8


@dataclass(kw_only=True, eq=False)
class PlainWork(Work[Session]):
    """A prompt on a context that is in memory."""

    begin: Callable[[], Session]

    def start(self) -> Session:
        return self.begin()


def submit(
    engine: Engine[Session], runner: ModelRunner, context: ResidentContext, prompt: list[int], most: int
) -> Stream:
    fitted = METHODS["full"].on(context.manifest)
    work = PlainWork(
        order=Order(),
        begin=lambda: runner.start(context, fitted),
        prompt=prompt,
        max_tokens=most,
        context=context.manifest.id,
        cost=runner.prompt_cost(fitted),
    )
    stream = Stream(engine.wake)
    engine.submit(engine.reserve(work.context), work, stream)
    return stream


def tokens(stream: Stream) -> list[int]:
    return [token for event in stream.take() if isinstance(event, Says) for token in event.token_ids]


def test_streams_get_a_token_after_every_chunk_of_it(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    runner = ModelRunner(resolve_model(str(folder)))
    engine: Engine[Session] = Engine(runner, prompt_chunk=CHUNK)
    shared = made_up_context(runner.identity, runner.kv_dtype, METHODS["full"], 300)
    with torch.inference_mode():
        streams = [submit(engine, runner, shared, [70 + number], 1000) for number in range(STREAMS)]
        engine.step()
        assert all(tokens(stream) for stream in streams)
        prompt = [(7 * number) % 250 for number in range(1000)]
        plain = submit(engine, runner, runner.no_context, prompt, 24)
        found: list[int] = []
        while len(found) < 24:
            before = engine.stats().prompt_tokens
            engine.step()
            assert engine.stats().prompt_tokens - before <= CHUNK
            assert all(tokens(stream) for stream in streams)  # some more between layers of the prompt
            found += tokens(plain)
        for stream in streams:
            stream.cancel()
        engine.step()
    # A turn reads one chunk, and one or two tokens of the answer come with the turn that ends the prompt.
    assert engine.stats().steps <= 2 + -(-len(prompt) // (CHUNK // 2)) + 24
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wanted = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0)
    assert found == wanted[0, len(prompt) :].tolist()
