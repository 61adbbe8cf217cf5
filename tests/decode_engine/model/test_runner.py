"""The unpatched model over sessions: equal to transformers' own generation, batched, sparse, and safe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoTokenizer

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.layers.dense_layer import DenseLayer
from decode_engine.layers.session import Session
from decode_engine.model.row_layers import RowLayers
from decode_engine.model.runner import ModelRunner
from decode_engine.settings.command_options import Prompts
from index_store.attention.attention_state import AttentionState
from index_store.errors import (
    DtypeMismatchError,
    InvalidArgumentError,
    MethodUnsupportedError,
    ModelMismatchError,
)
from index_store.methods.method import Method
from index_store.methods.presets import METHODS, get_method
from index_store.models.loading import resolve_model
from index_store.selection.budgets import Ratio
from tests.support.layers import with_budget, with_everything
from tests.support.models import generated, write_model_folder
from tests.support.serving.served import PROMPT, TEXT, Served, serve


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "mistral"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(tmp_path_factory.mktemp("one"), "llama")


def greedy(runner: ModelRunner, session: Session, prompt: list[int], count: int) -> list[int]:
    tokens: list[int] = []
    fed = prompt
    for _ in range(count):
        logits = runner.forward([session], [fed])[0]
        fed = [int(logits[-1].argmax())]
        tokens += fed
    return tokens


def test_loading_says_how_far_hashing_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path / "cache"))
    folder = resolve_model(str(write_model_folder(tmp_path / "model", "llama", layers=2)))

    def phases() -> list[str]:
        told: list[str] = []
        ModelRunner(folder, say=lambda what, how_far: told.append(f"{what}: {how_far}")).close()
        return told

    load, compare = "load weights: model", "compare decoding with the model's own attention: "
    assert phases() == [load, "hash weights: 0.0 of 0.0 GB", load, compare]
    assert phases() == [load, load, compare]  # they are known


def test_full_equals_transformers_generate_token_by_token(served: Served) -> None:
    tokenizer = AutoTokenizer.from_pretrained(served.folder)
    ids = tokenizer(TEXT + PROMPT, add_special_tokens=False).input_ids
    expected = generated(served.folder, ids, 20)
    session = served.start(METHODS["full"])
    assert session.position == served.context.manifest.token_count
    assert greedy(served.runner, session, ids[session.position :], 20) == expected
    assert len(set(expected)) > 3  # a constant continuation would prove little


@pytest.mark.parametrize("name", ["csattention", "csattention+dropped", "oracle", "oracle+centred"])
def test_a_budget_of_everything_equals_full(served: Served, name: str) -> None:
    prompt = served.runner.tokenizer.encode(PROMPT)
    full = served.start(METHODS["full"])
    sparse = served.start(replace(get_method(name, 1.0), recent=8, append_block=8))
    one = served.runner.forward([full], [prompt], all_logits=True)[0]
    two = served.runner.forward([sparse], [prompt], all_logits=True)[0]
    torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-3)
    for token in (5, 77, 130):
        torch.testing.assert_close(
            served.runner.forward([sparse], [[token]])[0],
            served.runner.forward([full], [[token]])[0],
            rtol=1e-3,
            atol=1e-3,
        )
    assert sparse.figures.fraction == 1.0


@pytest.mark.parametrize(
    "method",
    [
        replace(METHODS["csattention"], budget=Ratio(0.05), recent=8, append_block=8),
        replace(METHODS["csattention-paper"], budget=Ratio(0.05), recent=8),
        replace(METHODS["oracle"], budget=Ratio(0.05), recent=8, append_block=5),
        replace(METHODS["multipole-tree"], budget=Ratio(0.05), recent=8, append_block=7),
    ],
    ids=lambda method: method.name,
)
def test_it_makes_no_difference_how_a_prompt_is_cut(llama: Served, method: Method) -> None:
    prompt = llama.runner.tokenizer.encode(PROMPT * 3)
    one_by_one = llama.start(method)
    expected = torch.cat([llama.runner.forward([one_by_one], [[token]])[0] for token in prompt])
    for size in (len(prompt), 7, 20):
        session = llama.start(method)
        pieces = [
            llama.runner.forward([session], [prompt[start : start + size]], all_logits=True)[0]
            for start in range(0, len(prompt), size)
        ]
        torch.testing.assert_close(torch.cat(pieces), expected, rtol=1e-3, atol=1e-3)
        before, after = asdict(one_by_one.figures), asdict(session.figures)
        assert {k: v for k, v in after.items() if not k.endswith("_ns")} == {
            k: v for k, v in before.items() if not k.endswith("_ns")
        }


def test_a_batch_of_sessions_equals_one_by_one(llama: Served) -> None:
    methods = [
        METHODS["full"],
        get_method("csattention", 0.1),
        METHODS["full"],
        get_method("csattention-paper", 0.1),
    ]
    together = [llama.start(method) for method in methods]
    apart = [llama.start(method) for method in methods]
    prompts = [[10, 20, 30], [40, 50, 60, 61, 62], [70, 80], [90, 91, 92]]
    for session, other, prompt in zip(together, apart, prompts, strict=True):
        llama.runner.forward([session], [prompt])
        llama.runner.forward([other], [prompt])
    for step in range(4):
        fed = [[100 + step], [110 + step], [120 + step], [130 + step]]
        batched = llama.runner.forward(together, fed)
        for row, session, tokens in zip(batched, apart, fed, strict=True):
            torch.testing.assert_close(
                row, llama.runner.forward([session], [tokens])[0], rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("name", ["full", "csattention", "multipole-tree"])
def test_a_session_with_a_seed_gets_the_same_bits_alone_and_beside_others(llama: Served, name: str) -> None:
    method = get_method(name, None if name == "full" else 0.1)

    def start(number: int) -> Session:
        session = llama.start(method)
        llama.runner.read([session], [[10 + number, 20]])
        return session

    def step(sessions: list[Session], tokens: list[int], samplers: list[Sampler]) -> list[int]:
        found = llama.runner.decode(sessions, tokens, samplers)
        return [token for token in found if isinstance(token, int)]

    def seeded(number: int) -> Sampler:
        return Sampler(SamplingParameters(temperature=1.0, seed=number))

    alone, sampler, said = start(0), seeded(0), [7]
    for _ in range(6):
        said += step([alone], said[-1:], [sampler])
    sessions = [start(number) for number in range(16)]
    samplers = [seeded(number) if number < 3 else Sampler(SamplingParameters(1.0)) for number in range(16)]
    tokens, beside = [7 + number for number in range(16)], [7]
    for turn in range(6):
        here = [0, *range(1 + turn, 16 - turn)]
        here.insert(turn, here.pop(0))
        found = step([sessions[i] for i in here], [tokens[i] for i in here], [samplers[i] for i in here])
        for number, token in zip(here, found, strict=True):
            tokens[number] = token
        beside.append(tokens[0])
    assert beside == said
    # Keys and values of the last layer come from all that was computed before, in all layers and steps.
    assert torch.equal(sessions[0].layers[-1].tail.rows, alone.layers[-1].tail.rows)


def test_sparse_methods_touch_less_and_say_how_much(llama: Served) -> None:
    for name in ("csattention", "csattention+dropped"):
        session = llama.start(get_method(name, 0.05))
        llama.runner.forward([session], [llama.runner.tokenizer.encode(PROMPT)])
        figures = session.figures
        assert 0.05 < figures.sparse_fraction < 0.6
        if name == "csattention":  # with a remainder every layer searches
            assert figures.fraction == figures.sparse_fraction
        else:
            assert figures.sparse_fraction < figures.fraction < 1.0
        assert min(figures.search_ns, figures.attend_ns) > 0
        # A CPU attends to rows where they are, unless clusters need them, too.
        assert (figures.gather_ns > 0) == (name == "csattention")
        assert session.nbytes > 0


def test_a_context_that_does_not_fit_is_refused(llama: Served, tmp_path: Path) -> None:
    other = ModelRunner(
        resolve_model(str(write_model_folder(tmp_path / "other", "llama", layers=3, head_dim=32, seed=9)))
    )
    with pytest.raises(ModelMismatchError):
        other.check(llama.context.manifest)
    half = ModelRunner(resolve_model(str(llama.folder)), dtype="bfloat16")
    with pytest.raises(DtypeMismatchError):
        half.check(llama.context.manifest)
    without = next(serve(tmp_path, "llama", methods=("full",)))
    with pytest.raises(MethodUnsupportedError, match="--method csattention"):
        without.start(METHODS["csattention"])
    foreign = replace(llama.context.manifest, id="e" * 64)
    with pytest.raises(InvalidArgumentError, match="was fitted to context"):
        without.runner.start(without.context, METHODS["full"].on(foreign))


def test_bad_tokens_are_refused_and_change_nothing(llama: Served) -> None:
    session = llama.start(METHODS["csattention"])
    position = session.position
    wrong: list[list[list[int]]] = [[[]], [[1], [2]], [[-1]], [[llama.runner.identity.vocab_size]]]
    for tokens in wrong:
        with pytest.raises(InvalidArgumentError):
            llama.runner.forward([session], tokens)
    other = llama.start(METHODS["full"])
    with pytest.raises(InvalidArgumentError, match=r"lengths \[1, 0\]"):
        llama.runner.forward([session, other], [[1], []])
    assert session.position == other.position == position


@pytest.mark.parametrize(
    ("name", "prompts"),
    [
        ("full", Prompts.EACH),
        ("csattention", Prompts.EXACT),
        ("csattention", Prompts.SPARSE),
        ("csattention", Prompts.EACH),
    ],
)
def test_prompts_of_any_lengths_are_read_together_as_alone(
    llama: Served, name: str, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = llama.runner
    monkeypatch.setattr(runner, "prompts", prompts)
    method = METHODS[name] if name == "full" else get_method(name, 0.1)
    together, apart = ([llama.start(method) for _ in range(5)] for _ in range(2))
    for session in (together[0], apart[0]):  # it is behind the others
        runner.read([session], [[9, 8, 7]])
    fed = [list(range(3, 3 + length)) for length in (11, 1, 5, 11, 7)]
    expected = [runner.read([session], [ids])[0] for session, ids in zip(apart, fed, strict=True)]
    torch.testing.assert_close(runner.read(together, fed), expected, rtol=1e-4, atol=1e-4)
    assert [session.tail_keys for session in together] == [14, 1, 5, 11, 7]
    told = runner.forward(together[:2], [[1, 2, 3], [4]], all_logits=True)
    assert [len(logits) for logits in told] == [3, 1]


def test_prompts_on_one_context_read_it_once(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    reads = DenseLayer.read_context

    def noting(layer: DenseLayer, q_HTGD: torch.Tensor, rows: bool) -> AttentionState:
        read.append(q_HTGD.shape[1])
        return reads(layer, q_HTGD, rows)

    monkeypatch.setattr(DenseLayer, "read_context", noting)
    monkeypatch.setattr(llama.runner, "prompts", Prompts.EXACT)
    sessions = [llama.start(get_method("csattention", 0.1)) for _ in range(3)]
    llama.runner.read(sessions, [[1] * 9, [2] * 4, [3] * 20])
    assert read == [33] * llama.runner.identity.layers


@contextmanager
def failing_once(runner: ModelRunner, layer: int) -> Iterator[None]:
    """The model's next pass through that layer raises, after the layer's attention has seen the new tokens."""
    calls = 0

    def fail(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("the layer failed")

    def attend(self: RowLayers, step: Any, number: int, out: torch.Tensor) -> Any:
        found = own(self, step, number, out)
        if number == layer:
            fail(runner.model, None, None)
        return found

    own = RowLayers._attend
    handle = runner.model.get_submodule(f"model.layers.{layer}").register_forward_hook(fail)
    try:
        with patch.object(RowLayers, "_attend", attend):
            yield
    finally:
        handle.remove()
    assert calls > 1, "nothing failed, or nothing was repeated"


@pytest.mark.parametrize("name", ["full", "oracle", "csattention", "csattention-paper", "multipole-tree"])
@pytest.mark.parametrize("period", [1, 3])
def test_a_step_that_failed_midway_can_be_repeated(llama: Served, name: str, period: int) -> None:
    """Steps that search, that use a selection again and that move tail keys into the index, and the prompt."""
    method = METHODS["full"]
    if name != "full":
        method = replace(get_method(name, 0.1), recent=8, append_block=4, period=period)
    runner = llama.runner
    prompt = runner.tokenizer.encode(PROMPT)
    undisturbed, disturbed = (
        runner.start(llama.context, method.on(llama.context.manifest)) for _ in range(2)
    )
    fed = prompt
    for step in range(12):
        expected = runner.forward([undisturbed], [fed])[0]
        position = disturbed.position
        with failing_once(runner, layer=step % 3):
            with pytest.raises(RuntimeError, match="the layer failed"):
                runner.forward([disturbed], [fed])
            assert disturbed.position == position
            repeated = runner.forward([disturbed], [fed])[0]
        torch.testing.assert_close(repeated, expected, rtol=0, atol=0)
        fed = [int(expected[-1].argmax())]


def test_a_batch_that_failed_midway_can_be_repeated_one_by_one(llama: Served) -> None:
    methods = [METHODS["full"], get_method("csattention", 0.1), get_method("csattention-paper", 0.1)]
    runner = llama.runner
    disturbed = [runner.start(llama.context, method.on(llama.context.manifest)) for method in methods]
    undisturbed = [runner.start(llama.context, method.on(llama.context.manifest)) for method in methods]
    prompt = runner.tokenizer.encode(PROMPT)
    for session in (*disturbed, *undisturbed):
        runner.forward([session], [prompt])
    for step in range(4):
        fed = [[100 + step], [110 + step], [120 + step]]
        with failing_once(runner, 1):
            with pytest.raises(RuntimeError, match="the layer failed"):
                runner.forward(disturbed, fed)
            repeated = [runner.forward([s], [ids])[0] for s, ids in zip(disturbed, fed, strict=True)]
        expected = [runner.forward([s], [ids])[0] for s, ids in zip(undisturbed, fed, strict=True)]
        torch.testing.assert_close(repeated, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["csattention", "csattention+dropped", "multipole-tree"])
def test_prompts_may_be_read_with_exact_attention(llama: Served, name: str) -> None:
    runner = ModelRunner(resolve_model(str(llama.folder)), prompts=Prompts.EXACT)
    prompt = runner.tokenizer.encode(PROMPT)
    full = runner.start(llama.context, METHODS["full"].on(llama.context.manifest))
    sparse = runner.start(llama.context, get_method(name, 0.05).on(llama.context.manifest))
    (expected,) = runner.forward([full], [prompt])
    for cut in (prompt[:3], prompt[3:]):
        (got,) = runner.read([sparse], [cut])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert sparse.figures.fraction == 1.0
    # From here on it selects, in the prompt as well, whose keys it holds.
    twin = llama.start(get_method(name, 1.0))
    llama.runner.read([twin], [prompt])
    runner.forward([sparse], [[7]])
    assert 0 < sparse.figures.sparse_fraction < 0.9
    assert twin.figures.sparse_available > 0  # on a CPU prompts are searched for by default


@pytest.mark.parametrize("name", ["csattention", "multipole-tree", "full"])
def test_the_tokens_of_a_prompt_may_share_a_selection(llama: Served, name: str) -> None:
    runner = ModelRunner(resolve_model(str(llama.folder)), prompts=Prompts.SPARSE)
    prompt = runner.tokenizer.encode(PROMPT)
    method = METHODS[name]
    full = runner.start(llama.context, METHODS["full"].on(llama.context.manifest))
    everything = with_everything(method) if method.sparse else method
    whole = runner.start(llama.context, everything.on(llama.context.manifest))
    (expected,) = runner.forward([full], [prompt])
    (got,) = runner.read([whole], [prompt])
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    if method.sparse:
        few, each = (
            runner.start(llama.context, with_budget(method, 0.05).on(llama.context.manifest))
            for _ in range(2)
        )
        (shared,), (alone,) = runner.read([few], [prompt]), runner.forward([each], [prompt])
        assert few.figures.fraction < 1.0
        assert few.figures.searches < each.figures.searches
        assert not torch.equal(shared, alone)
