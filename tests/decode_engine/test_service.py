"""The real server on a free port, over a toy model and really stored contexts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from decode_engine.client import Client
from decode_engine.errors import (
    AddressError,
    CancelledError,
    DeadlineExceededError,
    EngineCrashedError,
    NotReadyError,
    PromptTooLongError,
    TooManyRequestsError,
)
from decode_engine.requests import Request
from decode_engine.rpc.server import SERVICES, DecodeServer
from decode_engine.rpc.status import error_info
from decode_engine.sampler import SamplingParameters
from decode_engine.text import TextStream
from index_store.errors import (
    ContextCorruptError,
    ContextExpiredError,
    ContextNotFoundError,
    DtypeMismatchError,
    InvalidArgumentError,
    MemoryBudgetError,
    MethodUnsupportedError,
    ModelMismatchError,
)
from index_store.methods import get_method
from sparsekv.v1 import context_pb2, generation_pb2
from tests.decode_engine.conftest import MAX_POSITIONS, Library, Stubs
from tests.support_models import write_model_folder

ABSENT = "contexts/" + "0" * 64
LONG = 3000  # tokens: seconds of work


def wait_until(condition: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def leases(server: DecodeServer) -> int:
    return server.backend.arena.stats().leases


def test_tokens_equal_those_of_the_runner(server: DecodeServer, client: Client, lamp: str) -> None:
    prompt = list(b"Who lit the lamp?")
    backend = server.backend
    with backend.arena.acquire(backend.store, lamp.removeprefix("contexts/")) as resident:
        for name in ("full", "csattention"):
            session = backend.runner.start(resident, get_method(name))
            logits = backend.runner.forward([session], [prompt])[0]
            expected = []
            for _ in range(12):
                expected.append(int(logits[-1].argmax()))
                logits = backend.runner.forward([session], [[expected[-1]]])[0]
            generation = client.generate(lamp, token_ids=prompt, max_tokens=12, method=name)
            assert [id_ for piece in generation for id_ in piece.token_ids] == expected


def test_the_last_message_has_the_summary(server: DecodeServer, client: Client, lamp: str) -> None:
    generation = client.generate(lamp, text="Who?", max_tokens=20, method="csattention", keep_ratio=0.1)
    tokens = [id_ for piece in generation for id_ in piece.token_ids]
    summary = generation.summary
    context = client.get_context(lamp)
    assert summary.finish_reason == "length"
    assert (summary.context_tokens, summary.prompt_tokens) == (context.token_count, 4)
    assert summary.completion_tokens == len(tokens) == 20
    assert summary.method == "csattention"
    times, keys = summary.timings, summary.selection
    assert times.decode_steps == 19
    parts = (
        times.load_ns,
        times.queue_ns,
        times.prompt_ns,
        times.search_ns,
        times.gather_ns,
        times.attend_ns,
    )
    assert all(0 < part < times.total_ns for part in parts)
    assert times.prompt_ns < times.first_token_ns < times.total_ns
    assert times.search_ns + times.gather_ns + times.attend_ns < times.total_ns
    # one searching layer of two KV heads, 4 prompt and 19 decode positions
    assert keys.searches > 0
    assert keys.keys_available == 2 * sum(context.token_count + position + 1 for position in range(23))
    assert keys.fraction_sparse == pytest.approx(keys.keys_attended / keys.keys_available)
    assert 0.1 < keys.fraction_sparse < 0.5
    assert keys.fraction_all == pytest.approx((1 + keys.fraction_sparse) / 2)


def test_full_attention_touches_everything(client: Client, lamp: str) -> None:
    generation = client.generate(lamp, text="Who?", max_tokens=3, method="full")
    generation.read()
    assert generation.summary.selection.fraction_sparse is None
    assert generation.summary.selection.fraction_all == 1.0


def test_text_and_tokens_say_the_same(server: DecodeServer, client: Client, lamp: str) -> None:
    pieces = list(client.generate(lamp, text="Who lit the lamp?", max_tokens=40, temperature=1.0, seed=4))
    tokens = [id_ for piece in pieces for id_ in piece.token_ids]
    text = "".join(piece.text for piece in pieces)
    decoded = server.backend.runner.tokenizer.decode(tokens)
    assert decoded.startswith(text)
    assert decoded[len(text) :] in ("", "\ufffd", "\ufffd" * 2, "\ufffd" * 3)


def test_question_is_worded_by_the_chat_template(client: Client, lamp: str) -> None:
    asked = client.generate(lamp, question="Who?", max_tokens=5)
    written = client.generate(lamp, text="\nQuestion: Who?\nAnswer:", max_tokens=5)
    assert asked.read() == written.read()
    assert asked.summary.prompt_tokens == len("\nQuestion: Who?\nAnswer:")


def test_stop_string_ends_the_text_before_it(client: Client, lamp: str) -> None:
    whole = client.generate(lamp, text="Who?", max_tokens=40, temperature=0.7, seed=11)
    text = whole.read()
    stop = text[10:13]
    stopped = client.generate(
        lamp, text="Who?", max_tokens=40, temperature=0.7, seed=11, stop=["never", stop]
    )
    assert stopped.read() == text[: text.index(stop)]
    assert stopped.summary.finish_reason == "stop"
    assert stopped.summary.completion_tokens < whole.summary.completion_tokens


def test_same_seed_same_tokens_and_the_seed_is_reported(client: Client, lamp: str) -> None:
    first = client.generate(lamp, text="Who?", max_tokens=30, temperature=2.0)
    text = first.read()
    again = client.generate(lamp, text="Who?", max_tokens=30, temperature=2.0, seed=first.summary.seed)
    other = client.generate(lamp, text="Who?", max_tokens=30, temperature=2.0)
    assert again.read() == text
    assert other.read() != text


def test_without_a_limit_the_answer_fits_the_model(library: Library, client: Client) -> None:
    name = "contexts/" + library.prefill("almost-full", text="x" * (MAX_POSITIONS - 20))
    generation = client.generate(name, text="12345", temperature=1.0, seed=1)
    generation.read()
    assert generation.summary.completion_tokens <= 15
    with pytest.raises(PromptTooLongError):
        client.generate(name, text="12345", max_tokens=16).read()


def test_sixteen_streams_at_once_equal_one_at_a_time(server: DecodeServer, client: Client, lamp: str) -> None:
    def run(number: int) -> str:
        method = ("full", "csattention", "csattention-paper")[number % 3]
        prompt = f"{number} " * (number + 1)
        return client.generate(
            lamp, text=prompt, max_tokens=16, method=method, temperature=0.5, seed=number
        ).read()

    alone = [run(number) for number in range(16)]
    loads = server.backend.arena.stats().loads
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(run, range(16)))
    assert together == alone
    wait_until(lambda: leases(server) == 0)
    assert server.backend.arena.stats().loads == loads, "the context is shared, not loaded per session"


def test_a_second_request_is_answered_while_a_long_first_one_runs(client: Client, lamp: str) -> None:
    with client.generate(lamp, text="Who?", max_tokens=LONG, temperature=1.0, seed=1) as long:
        first = iter(long)
        next(first)
        short = client.generate(lamp, text="Where?", max_tokens=5)
        assert short.read() is not None
        assert short.summary.completion_tokens <= 5
        next(first)
        with pytest.raises(InvalidArgumentError, match="no summary"):
            _ = long.summary


def test_cancelling_ends_the_work(server: DecodeServer, client: Client, lamp: str) -> None:
    generation = client.generate(lamp, text="Who?", max_tokens=LONG, temperature=1.0, seed=1)
    pieces = iter(generation)
    for _ in range(3):
        next(pieces)
    assert leases(server) == 1
    generation.cancel()
    with pytest.raises(CancelledError):
        list(pieces)
    wait_until(lambda: leases(server) == 0, 1.0)


def test_a_client_that_goes_away_ends_the_work(server: DecodeServer, lamp: str) -> None:
    with Client(server.address) as leaving:
        next(iter(leaving.generate(lamp, text="Who?", max_tokens=LONG, temperature=1.0, seed=1)))
    wait_until(lambda: leases(server) == 0, 1.0)


def test_a_deadline_ends_the_work(server: DecodeServer, client: Client, lamp: str) -> None:
    generation = client.generate(lamp, text="Who?", max_tokens=LONG, temperature=1.0, seed=1, timeout_s=0.3)
    before = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        generation.read()
    assert time.monotonic() - before < 2
    wait_until(lambda: leases(server) == 0, 1.0)


def test_too_many_requests_are_refused(library: Library, lamp: str) -> None:
    with (
        DecodeServer(library.config(max_sessions=1, max_waiting=1)) as small,
        Client(small.address) as client,
    ):
        small.load()
        with client.generate(lamp, text="Who?", max_tokens=LONG, temperature=1.0, seed=1) as running:
            next(iter(running))
            waiting = client.generate(lamp, text="Who?", max_tokens=2)
            wait_until(lambda: leases(small) == 2)
            with pytest.raises(TooManyRequestsError):
                client.generate(lamp, text="Who?", max_tokens=2).read()
        assert waiting.read() is not None
        assert waiting.summary.timings.queue_ns > 0


@pytest.fixture
def crowded(library: Library, server: DecodeServer, lamp: str) -> Iterator[tuple[DecodeServer, Client, str]]:
    """A server with memory for one of two contexts, and the other one's name."""
    other = "contexts/" + library.prefill("crowd", method=("csattention", "csattention-paper"))
    backend = server.backend
    with backend.arena.acquire(backend.store, lamp.removeprefix("contexts/")) as resident:
        memory = resident.nbytes + resident.nbytes // 2
    settings = library.config(memory=memory, max_sessions=1, max_waiting=1)
    with DecodeServer(settings) as small, Client(small.address) as client:
        small.load()
        yield small, client, other


def test_a_request_waits_while_others_use_the_memory(
    crowded: tuple[DecodeServer, Client, str], lamp: str
) -> None:
    server, client, other = crowded
    with client.generate(lamp, text="Who?", max_tokens=LONG, temperature=1.0, seed=1) as running:
        next(iter(running))
        with ThreadPoolExecutor(1) as pool:
            waiting = client.generate(other, text="Who?", max_tokens=2)
            answer = pool.submit(waiting.read)
            wait_until(lambda: server.backend.engine.places == 2)
            with pytest.raises(TooManyRequestsError):
                client.generate(lamp, text="Who?", max_tokens=2).read()
            with pytest.raises(MemoryBudgetError):  # loading ahead of need does not wait
                client.warm_context(other)
            time.sleep(0.1)
            assert not answer.done()
            running.cancel()
            assert answer.result(10) is not None
    assert waiting.summary.timings.load_ns > 5e7
    assert server.backend.arena.ids() == [other.removeprefix("contexts/")]


def test_waiting_for_memory_ends_with_the_deadline_or_the_client(
    crowded: tuple[DecodeServer, Client, str], lamp: str
) -> None:
    server, client, other = crowded
    with client.generate(lamp, text="Who?", max_tokens=LONG, temperature=1.0, seed=1) as running:
        pieces = iter(running)
        next(pieces)
        for _ in range(3):  # each finds the one place in the queue free again
            with pytest.raises(DeadlineExceededError):
                client.generate(other, text="Who?", max_tokens=2, timeout_s=0.2).read()
            wait_until(lambda: server.backend.engine.places == 1, 1.0)
        with client.generate(other, text="Who?", max_tokens=2):
            wait_until(lambda: server.backend.engine.places == 2)
        wait_until(lambda: server.backend.engine.places == 1, 1.0)
        next(pieces)
    assert lamp.removeprefix("contexts/") in server.backend.arena.ids()


def fails(call: Any) -> tuple[grpc.StatusCode, ErrorInfo, str]:
    """Code, ErrorInfo and message of a call that fails; the message is a sentence, not a stack trace."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call())
    error: Any = caught.value
    info = error_info(error)
    assert info is not None
    assert "Traceback" not in error.details()
    assert ".py" not in error.details()
    return error.code(), info, error.details()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"context": "lamp"}, "context"),
        ({"context": "contexts/../../etc/passwd"}, "context"),
        ({"context": ""}, "context"),
        ({"text": ""}, "text"),
        ({"text": None}, "prompt"),
        ({"text": None, "token_ids": generation_pb2.TokenIds()}, "token_ids"),
        ({"text": None, "token_ids": generation_pb2.TokenIds(ids=[5, 99999])}, "token_ids"),
        ({"text": None, "question": ""}, "question"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 32769}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x" * 257]}, "stop"),
        ({"keep_ratio": 0.0}, "keep_ratio"),
        ({"keep_ratio": 1.5}, "keep_ratio"),
        ({"search_period": -1}, "search_period"),
        ({"search_period": 65}, "search_period"),
    ],
)
def test_bad_arguments(stubs: Stubs, lamp: str, change: dict[str, Any], field: str) -> None:
    fields = {"context": lamp, "text": "Who?", **change}
    request = generation_pb2.GenerateRequest(**fields)
    code, info, message = fails(lambda: stubs.generations.Generate(request))
    assert (code, info.reason, info.domain) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        "sparsekv",
    )
    assert info.metadata["field"] == field
    assert "expected" in message


def test_unknown_context(client: Client, stubs: Stubs) -> None:
    for call in (client.get_context, client.delete_context, client.warm_context):
        with pytest.raises(ContextNotFoundError):
            call(ABSENT)
    code, info, _ = fails(
        lambda: stubs.generations.Generate(generation_pb2.GenerateRequest(context=ABSENT, text="x"))
    )
    assert (code, info.reason) == (grpc.StatusCode.NOT_FOUND, "CONTEXT_NOT_FOUND")
    client.delete_context(ABSENT, allow_missing=True)


@pytest.mark.parametrize("call", ["GetContext", "DeleteContext", "WarmContext"])
def test_malformed_names(stubs: Stubs, call: str) -> None:
    request = getattr(context_pb2, f"{call}Request")(name="contexts/ABC")
    with pytest.raises(grpc.RpcError) as caught:
        getattr(stubs.contexts, call)(request)
    info = error_info(caught.value)
    assert info is not None
    assert (info.reason, info.metadata["field"]) == ("INVALID_ARGUMENT", "name")


def test_expired_context(library: Library, client: Client, stubs: Stubs) -> None:
    name = "contexts/" + library.prefill("short-lived", ttl="1s")
    wait_until(lambda: client.get_context(name).state == "expired")
    code, info, _ = fails(
        lambda: stubs.generations.Generate(generation_pb2.GenerateRequest(context=name, text="x"))
    )
    assert (code, info.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "CONTEXT_EXPIRED")
    with pytest.raises(ContextExpiredError):
        client.warm_context(name)


def test_flipped_byte(library: Library, client: Client, stubs: Stubs) -> None:
    id_ = library.prefill("flipped")
    chunk = library.chunk(id_)
    content = bytearray(chunk.read_bytes())
    content[100] ^= 1
    chunk.write_bytes(content)
    code, info, message = fails(
        lambda: stubs.generations.Generate(
            generation_pb2.GenerateRequest(context=f"contexts/{id_}", text="x")
        )
    )
    assert (code, info.reason) == (grpc.StatusCode.DATA_LOSS, "CONTEXT_CORRUPT")
    assert info.metadata["cause"] == "CHECKSUM_MISMATCH"
    assert "kv" in message
    with pytest.raises(ContextCorruptError):
        client.warm_context(f"contexts/{id_}")


def test_unreadable_manifest(library: Library, client: Client) -> None:
    id_ = library.prefill("unreadable")
    (library.store / "contexts" / id_ / "manifest.json").write_text("{")
    context = client.get_context(f"contexts/{id_}")
    assert context.state == "corrupt"
    assert context.state_message
    assert context.name in [listed.name for listed in client.list_contexts()]
    with pytest.raises(ContextCorruptError):
        client.generate(context.name, text="x").read()
    client.delete_context(context.name)
    with pytest.raises(ContextNotFoundError):
        client.get_context(context.name)


def test_context_of_another_model_or_dtype(library: Library, client: Client, tmp_path: Path) -> None:
    other = write_model_folder(tmp_path / "other", head_dim=32, seed=1)
    foreign = "contexts/" + library.prefill("foreign", model=other)
    half = "contexts/" + library.prefill("half", dtype="float16")
    for name, error in ((foreign, ModelMismatchError), (half, DtypeMismatchError)):
        with pytest.raises(error):
            client.generate(name, text="x").read()
        with pytest.raises(error):
            client.warm_context(name)


def test_a_search_period_saves_searches(client: Client, lamp: str) -> None:
    searches = []
    for period in (0, 4):
        generation = client.generate(
            lamp, text="Who?", max_tokens=21, method="csattention-paper", search_period=period
        )
        generation.read()
        searches.append(generation.summary.selection.searches)
    # one searching layer: four prompt tokens and 20 steps, or the prompt and every fourth step
    assert searches == [24, 9]


def test_method_that_the_context_does_not_support(library: Library, client: Client, lamp: str) -> None:
    plain = "contexts/" + library.prefill("plain", method=("full",))
    assert client.get_context(plain).default_method == "full"
    for name, arguments in (
        (plain, {"method": "csattention"}),
        (lamp, {"method": "guesswork"}),
        (lamp, {"method": "full", "keep_ratio": 0.5}),
        (lamp, {"method": "full", "search_period": 2}),
    ):
        with pytest.raises(MethodUnsupportedError):
            client.generate(name, text="x", **arguments).read()  # type: ignore[arg-type]
    assert client.generate(plain, text="x", max_tokens=2).read() is not None


def test_oversized_prompt(client: Client, stubs: Stubs, lamp: str) -> None:
    with pytest.raises(PromptTooLongError) as caught:
        client.generate(lamp, text="x" * MAX_POSITIONS).read()
    tokens = client.get_context(lamp).token_count
    assert caught.value.metadata == {
        "context_tokens": str(tokens),
        "prompt_tokens": str(MAX_POSITIONS),
        "max_tokens": "1",
        "max_positions": str(MAX_POSITIONS),
    }
    with pytest.raises(PromptTooLongError):
        client.generate(lamp, text="x", max_tokens=MAX_POSITIONS).read()


def test_context_that_does_not_fit_into_memory(library: Library, lamp: str) -> None:
    with DecodeServer(library.config(memory=1000)) as small, Client(small.address) as client:
        small.load()
        with pytest.raises(MemoryBudgetError):
            client.generate(lamp, text="x").read()


def test_get_and_list_describe_a_context(library: Library, client: Client, lamp: str) -> None:
    context = client.get_context(lamp)
    assert context in list(client.list_contexts())
    assert (context.display_name, context.state, context.dtype) == ("lamp", "ready", "float32")
    assert (context.model, context.architecture) == (library.model.name, "LlamaForCausalLM")
    assert context.token_count == 8 * 68
    assert context.kv_bytes == 2 * 2 * context.token_count * 2 * 32 * 4
    assert context.methods == ("full", "oracle", "csattention", "csattention-paper")
    assert context.default_method == "csattention"
    assert context.dense_layers == (0,)
    assert {index.name for index in context.indexes} == {"query_tables", "paper_tables"}
    assert all(index.layers == (1,) for index in context.indexes)
    total = sum(index.bytes_per_token * context.token_count for index in context.indexes)
    assert total == pytest.approx(context.index_bytes)
    assert context.expire_time is None


def test_pages_cover_the_list_once(library: Library, client: Client, stubs: Stubs) -> None:
    for number in range(3):
        library.prefill(f"page-{number}", method=("full",))
    whole = [context.name for context in client.list_contexts()]
    assert len(whole) >= 4
    assert [context.name for context in client.list_contexts(page_size=1)] == whole
    first = stubs.contexts.ListContexts(context_pb2.ListContextsRequest(page_size=2))
    # what is created or deleted meanwhile does not shift the pages
    library.prefill("page-new", method=("full",))
    client.delete_context(whole[1])
    second = stubs.contexts.ListContexts(
        context_pb2.ListContextsRequest(page_size=1000, page_token=first.next_page_token)
    )
    assert [context.name for context in (*first.contexts, *second.contexts)] == whole
    assert second.next_page_token == ""


def test_page_tokens_are_opaque_and_checked(library: Library, client: Client, stubs: Stubs) -> None:
    for number in range(2):
        library.prefill(f"token-{number}", method=("full",))
    first = stubs.contexts.ListContexts(context_pb2.ListContextsRequest(page_size=1))
    token = first.next_page_token
    assert first.contexts[0].name.removeprefix("contexts/") not in token
    flipped = token[:-2] + ("A" if token[-2] != "A" else "B") + token[-1]
    for bad in (flipped, token[4:], "x", "ü", "AAAA" * 20):
        with pytest.raises(grpc.RpcError) as caught:
            stubs.contexts.ListContexts(context_pb2.ListContextsRequest(page_token=bad))
        info = error_info(caught.value)
        assert info is not None
        assert (info.reason, info.metadata["field"]) == ("INVALID_ARGUMENT", "page_token")
    with pytest.raises(InvalidArgumentError, match="page_size"):
        list(client.list_contexts(page_size=-1))


def test_warm_loads_once(library: Library, client: Client) -> None:
    name = "contexts/" + library.prefill("warm")
    assert not client.get_context(name).resident
    first = client.warm_context(name)
    assert first.context.resident
    assert not first.already_resident
    assert client.get_context(name).resident
    assert client.warm_context(name).already_resident


def test_deleting_a_context_in_use_lets_its_generation_finish(
    library: Library, server: DecodeServer, client: Client
) -> None:
    name = "contexts/" + library.prefill("doomed")
    expected = client.generate(name, text="Who?", max_tokens=200, temperature=1.0, seed=1).read()
    generation = client.generate(name, text="Who?", max_tokens=200, temperature=1.0, seed=1)
    pieces = iter(generation)
    begun = next(pieces).text
    client.delete_context(name)
    with pytest.raises(ContextNotFoundError):
        client.generate(name, text="Who?").read()
    assert begun + "".join(piece.text for piece in pieces) == expected
    wait_until(lambda: name.removeprefix("contexts/") not in server.backend.arena.ids())


def test_methods_are_listed(client: Client) -> None:
    methods = {method.name: method for method in client.list_methods()}
    assert methods["full"].keep_ratio is None
    assert methods["csattention"].keep_ratio == 0.05
    assert methods["csattention"].indexes == ("query_tables",)
    assert methods["oracle"].indexes == methods["full"].indexes == ()
    assert all(method.summary and method.source for method in methods.values())


def health_of(address: str, service: str = "") -> int:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status)


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_health_follows_the_server(library: Library, lamp: str) -> None:
    with DecodeServer(library.config()) as server, Client(server.address) as client:
        for service in ("", *SERVICES):
            assert health_of(server.address, service) == NOT_SERVING
        assert not client.is_serving()
        with pytest.raises(NotReadyError):
            client.generate(lamp, text="x").read()
        server.load()
        for service in ("", *SERVICES):
            assert health_of(server.address, service) == SERVING
        assert client.is_serving()
    assert not client_of_nobody(server.address)


def client_of_nobody(address: str) -> bool:
    with Client(address) as client:
        return client.is_serving()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_crashed_engine_is_not_serving(library: Library, lamp: str) -> None:
    def crash() -> Any:
        raise SystemExit("the scheduler's thread must not survive this")

    with DecodeServer(library.config()) as server, Client(server.address) as client:
        server.load()
        engine = server.backend.engine
        sink = TextStream(lambda ids: "")
        engine.submit(engine.reserve(), Request(crash, [1], 1, SamplingParameters(), sink))
        wait_until(lambda: not client.is_serving())
        assert health_of(server.address) == NOT_SERVING
        with pytest.raises(EngineCrashedError):
            client.generate(lamp, text="x").read()


def test_stopping_drains_running_generations(library: Library, lamp: str) -> None:
    with DecodeServer(library.config()) as server, Client(server.address) as client:
        server.load()
        generation = client.generate(lamp, text="Who?", max_tokens=100, temperature=1.0, seed=1)
        pieces = iter(generation)
        next(pieces)
        stopper = threading.Thread(target=server.stop, args=(30.0,))
        stopper.start()
        assert len(list(pieces)) >= 50
        assert generation.summary.completion_tokens <= 100
        stopper.join(20)
        assert not stopper.is_alive()


def test_reflection_lists_the_services(stubs: Stubs) -> None:
    database = ProtoReflectionDescriptorDatabase(stubs.channel)
    services = set(database.get_services())
    assert {*SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= services
    described = database.FindFileContainingSymbol("sparsekv.v1.ContextService")
    assert described.name == "sparsekv/v1/context.proto"


def test_a_taken_port_is_refused(library: Library, server: DecodeServer) -> None:
    with pytest.raises(AddressError, match="--listen"):
        DecodeServer(library.config(listen=server.address))
