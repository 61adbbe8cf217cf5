"""Models with layers of every kind, sessions that begin with stored rows, prompts without a context beside streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from decode_engine.engine.engine import Engine
from decode_engine.engine.requests import Work
from decode_engine.engine.session_memory import session_bytes
from decode_engine.layers.session import Session
from decode_engine.model.decode_attention import ATTENTION_NAME, register_attention
from decode_engine.model.runner import ModelRunner
from decode_engine.model.unstored import check_decoding
from decode_engine.model.warm_up import made_up_context
from decode_engine.orders.events import Says
from decode_engine.orders.order import Order
from index_store.errors import InvalidArgumentError
from index_store.memory.arena import Arena
from index_store.memory.context_loading import placed_bytes
from index_store.memory.placement import MemoryBytes, Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.default import DEFAULT_METHOD
from index_store.methods.method import Method
from index_store.methods.presets import METHODS, get_method
from index_store.models.loading import load_model, resolve_model
from tests.decode_engine.engine.fake_runner import Stream
from tests.support.devices import nightly
from tests.support.layers import ALL_METHODS, with_everything
from tests.support.models import LAYER_KINDS, generated, write_model_folder
from tests.support.serving.served import Served, serving

TEXT = "The lamp of the grey harbour was lit by a keeper who counted ships. " * 4
PROMPT = [70, 71, 72, 73, 74]
NEW_TOKENS = 12


def serve(path: Path, kind: str, methods: tuple[str, ...]) -> AbstractContextManager[Served]:
    return serving(path, kind, methods, TEXT, dense_layers="none")


def greedy(kept: Served, method: Method, prompts: list[list[int]], again: int = 0) -> list[int]:
    session = kept.runner.start(kept.context, method.on(kept.context.manifest), again=again)
    for prompt in filter(None, prompts):
        logits = kept.runner.read([session], [prompt])[0]
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < NEW_TOKENS:
        tokens.append(int(kept.runner.forward([session], [tokens[-1:]])[0][-1].argmax()))
    return tokens


@pytest.fixture(scope="module", params=LAYER_KINDS)
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("kind"), request.param, (DEFAULT_METHOD, "csattention")) as found:
        yield found


def test_tokens_are_those_of_generate(kept: Served) -> None:
    """Over a context longer than the window, with a prompt in one piece or two, and a budget of all keys."""
    wanted = generated(kept.folder, [*kept.context.tokens().tolist(), *PROMPT], NEW_TOKENS)
    assert len(set(wanted)) > 3
    assert greedy(kept, METHODS["full"], [PROMPT]) == wanted
    assert greedy(kept, METHODS["full"], [PROMPT[:2], PROMPT[2:]]) == wanted
    assert greedy(kept, with_everything(METHODS[DEFAULT_METHOD]), [PROMPT]) == wanted


def test_prompts_without_a_context_are_answered_as_by_generate(kept: Served) -> None:
    """In one piece or several, alone or beside others, shorter than the window or longer."""
    runner = kept.runner
    prompts = [list(TEXT.encode())[:length] for length in (1, 20, 61)]
    wanted = [generated(kept.folder, ids, NEW_TOKENS) for ids in prompts]
    bare = replace(kept, context=runner.no_context)
    for ids, expected in zip(prompts, wanted, strict=True):
        assert greedy(bare, METHODS["full"], [ids[:7], ids[7:30], ids[30:]]) == expected
    fitted = METHODS["full"].on(runner.no_context.manifest)
    sessions = [runner.start(runner.no_context, fitted) for _ in prompts]
    tokens = [[int(logits[-1].argmax())] for logits in runner.read(sessions, prompts)]
    while len(tokens[0]) < NEW_TOKENS:
        logits = runner.forward(sessions, [answer[-1:] for answer in tokens])
        for answer, each in zip(tokens, logits, strict=True):
            answer.append(int(each[-1].argmax()))
    assert tokens == wanted


def test_a_context_with_nothing_behind_it_is_answered(kept: Served) -> None:
    """Its last token is read again, by full attention and by methods that search."""
    ids = kept.context.tokens().tolist()
    if kept.context.manifest.model.states is not None:  # behind which it cannot be read again
        with pytest.raises(InvalidArgumentError, match="give a token that follows it"):
            greedy(kept, METHODS["full"], [ids[-1:]], again=1)
        return
    wanted = generated(kept.folder, ids, NEW_TOKENS)
    for name in ("full", DEFAULT_METHOD, "csattention"):
        method = METHODS[name]
        method = with_everything(method) if method.sparse else method
        assert greedy(kept, method, [ids[-1:]], again=1) == wanted


@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_rounding_to_16_bits_is_no_difference(tmp_path: Path, kind: str) -> None:
    """To the check of a model that computes in them, as on a GPU."""
    family, settings = LAYER_KINDS[kind]
    sizes = {"layers": 3, "head_dim": 64, "dtype": torch.bfloat16, **settings}
    folder = write_model_folder(tmp_path, family, **sizes)
    register_attention()
    loaded = load_model(resolve_model(str(folder)), ATTENTION_NAME, compute_dtype=torch.bfloat16)
    assert next(loaded.model.parameters()).dtype == torch.bfloat16
    check_decoding(loaded)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["windows", "states", *nightly("sinks", "caps", "experts")])
def test_every_method_with_a_budget_of_all_keys_is_full_attention(tmp_path: Path, kind: str) -> None:
    unturned = {"multipole-windowed"} if kind == "states" else set[str]()  # keys without positions
    stored = tuple(name for name in METHODS if name not in {"oracle", *unturned})
    with serve(tmp_path, kind, stored) as kept:
        runner, context = kept.runner, kept.context

        def logits(method: Method, **how: bool) -> torch.Tensor:
            session = runner.start(context, method.on(context.manifest))
            found = runner.forward([session], [PROMPT * 20], **how)[
                0
            ]  # longer than recent window and append block
            return torch.cat([found, runner.forward([session], [[80]])[0]])

        expected = logits(METHODS["full"])
        for name, method in ALL_METHODS.items():
            if name not in unturned:
                for shared in (False, True):
                    found = logits(with_everything(method), shared=shared)
                    error = float((found - expected).abs().max() / expected.std())
                    assert error < 2e-3, f"{name}, {shared=}: {error}"


def test_windows_take_their_share_of_memory_and_stay_on_the_device(tmp_path: Path) -> None:
    with serve(tmp_path, "windows", ("csattention",)) as kept:
        manifest, model = kept.context.manifest, kept.context.manifest.model
        row = model.kv_heads * 2 * model.head_dim * 4
        assert manifest.window is not None
        assert manifest.kv_bytes == (manifest.token_count + 2 * 24) * row
        cpu = torch.device("cpu")
        needed = placed_bytes(manifest, cpu, Placement.HYBRID)
        arena = Arena(MemoryBytes(2**30, 2**30), device=cpu, placement=Placement.HYBRID)
        with arena.acquire(kept.store, manifest.id) as beside:
            beside.gate.wait_for_all()
            assert arena.stats().used == needed
            for layer in range(3):
                assert torch.equal(beside.kv(layer), kept.context.kv(layer))
                assert beside.kv(layer).shape[1] == model.shape(layer).kept(manifest.token_count)
        assert needed.host < manifest.token_count * (row + 8) + 2**13  # the full layer alone
        fitted = METHODS["full"].on(manifest)
        session = kept.runner.start(kept.context, fitted)
        kept.runner.forward([session], [PROMPT * 40])
        assert session.nbytes <= session_bytes(fitted, len(PROMPT) * 40)


def test_sessions_on_one_context_decode_together_as_alone(tmp_path: Path) -> None:
    with serve(tmp_path, "sinks", ("csattention",)) as kept:
        prompts = [PROMPT, PROMPT[::-1]]
        sessions = [
            kept.runner.start(kept.context, METHODS["full"].on(kept.context.manifest)) for _ in prompts
        ]
        together = kept.runner.forward(sessions, prompts)
        for prompt, found in zip(prompts, together, strict=True):
            alone = kept.runner.start(kept.context, METHODS["full"].on(kept.context.manifest))
            torch.testing.assert_close(found, kept.runner.forward([alone], [prompt])[0], rtol=1e-4, atol=1e-4)


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
    assert found == generated(folder, prompt, 24)


CONTINUED = ("full", "csattention", "csattention-paper", "multipole-tree")


@pytest.mark.parametrize("kind", ["windows", "sinks", *nightly("windows only")])
def test_a_restored_session_goes_on_as_the_one_before(tmp_path: Path, kind: str) -> None:
    """Bit for bit, whatever pieces the rows come in, also where windows have passed the first of them."""
    with serve(tmp_path, kind, CONTINUED[1:]) as kept:
        runner, context = kept.runner, kept.context
        tokens = runner.tokenizer.encode("\nQuestion: who lit it?\nAnswer: the keeper of the harbour " * 2)
        for name in CONTINUED:
            options = "" if name == "full" else "@append_block=16@recent=16"
            fitted = get_method(name + options).on(context.manifest)
            first, again = (runner.start(context, fitted) for _ in range(2))
            for start in range(0, len(tokens), 10):
                runner.read([first], [tokens[start : start + 10]])
            rows = [layer.clone() for layer in first.tail_rows()]
            for start, end in ((0, 1), (1, 17), (17, 40), (40, len(tokens))):
                runner.restore(again, [layer[:, start:end] for layer in rows])
            assert again.position == first.position
            for token in tokens[:10]:
                expected = runner.forward([first], [[token]])[0]
                assert runner.forward([again], [[token]])[0].equal(expected), (kind, name)
            assert all(a.equal(b) for a, b in zip(again.tail_rows(), first.tail_rows(), strict=True))
