"""A server that answers what a test of the client needs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc

from decode_engine.rpc.client import Client
from sparsekv.v1 import context_pb2, context_pb2_grpc, generation_pb2, generation_pb2_grpc

IDS = ("a" * 64, "a" * 40 + "b" * 24, "c" * 64)


class Scripted(
    context_pb2_grpc.ContextServiceServicer,
    generation_pb2_grpc.GenerationServiceServicer,
    operations_pb2_grpc.OperationsServicer,  # type: ignore[misc]
):
    """Answers what a test needs, and counts calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refusals = 0
        self.warm = threading.Event()
        self.begun, self.ended = threading.Event(), threading.Event()
        """A generation has come; it has ended, whoever ended it."""

    def GetContext(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.calls.append("GetContext")
        if len(self.calls) < 3:
            context.abort(grpc.StatusCode.UNAVAILABLE, "starting")
        name = request.name or f"contexts/{IDS[2]}"
        return context_pb2.Context(name=name, display_name=request.reference)

    def ListContexts(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.calls.append("ListContexts")
        start = int(request.page_token or 0)
        page = [
            context_pb2.Context(name=f"contexts/{id_}", display_name=f"book {id_[0]}")
            for id_ in IDS[start : start + 1]
        ]
        token = str(start + 1) if start + 1 < len(IDS) else ""
        return context_pb2.ListContextsResponse(contexts=page, next_page_token=token)

    def DeleteContext(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.calls.append("DeleteContext")
        context.abort(grpc.StatusCode.UNAVAILABLE, "starting")

    def WarmContext(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.calls.append("WarmContext")
        self.warm.wait(60)
        return context_pb2.WarmContextResponse()

    def ListMethods(self, request: Any, context: grpc.ServicerContext) -> Any:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "not for you")

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        self.calls.append("Generate")
        context.add_callback(self.ended.set)
        self.begun.set()
        if request.text in ("waits first", "stays silent"):
            yield generation_pb2.GenerateResponse(waiting=generation_pb2.Waiting(cause=2))
        if request.text == "stays silent":
            self.ended.wait(60)
            return
        if self.refusals:
            self.refusals -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "starting")
        yield generation_pb2.GenerateResponse(token_ids=[1, 2], text="hel")
        if request.text == "breaks off":
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        yield generation_pb2.GenerateResponse(token_ids=[3])
        summary = generation_pb2.GenerationSummary(
            finish_reason=generation_pb2.GenerationSummary.STOP,
            usage=generation_pb2.Usage(context_tokens=7, prompt_tokens=2, completion_tokens=3),
            timings=generation_pb2.Timings(search_ns=5, total_ns=9),
            selection=generation_pb2.SelectionFigures(keys_kept=4, fraction_all=0.5),
            method="refined",
            seed=2**64 - 1,
            budget="2.00%",
            remainder="centred",
        )
        yield generation_pb2.GenerateResponse(text="lo", summary=summary)

    def WaitOperation(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.calls.append("WaitOperation")
        return operations_pb2.Operation(name=request.name, done=self.calls.count("WaitOperation") == 2)

    def GetOperation(self, request: Any, context: grpc.ServicerContext) -> Any:
        return operations_pb2.Operation(name=request.name)

    def BatchGenerate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        self.calls.append("BatchGenerate")
        if self.refusals:
            self.refusals -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "starting")
        summary = generation_pb2.GenerationSummary(finish_reason=generation_pb2.GenerationSummary.STOP)
        told = [generation_pb2.TokenLogprob(token_id=id_, logprob=-0.5) for id_ in (3, 4)]
        call = {"id": "c", "name": "look", "arguments_json": '{"at":'}
        for response in (
            generation_pb2.GenerateResponse(prompt_logprobs=told),
            generation_pb2.GenerateResponse(token_ids=[3], logprobs=told[:1], tool_calls=[call]),
            generation_pb2.GenerateResponse(tool_calls=[{"arguments_json": "1}"}]),  # and no text or tokens
            generation_pb2.GenerateResponse(text="hello", token_ids=[4], logprobs=told[1:], summary=summary),
        ):
            yield generation_pb2.BatchGenerateResponse(response=response)


@pytest.fixture
def scripted() -> Iterator[tuple[Scripted, Client]]:
    servicer = Scripted()
    server = grpc.server(ThreadPoolExecutor(8))
    context_pb2_grpc.add_ContextServiceServicer_to_server(servicer, server)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    operations_pb2_grpc.add_OperationsServicer_to_server(servicer, server)
    server.start()
    with Client(f"127.0.0.1:{port}", timeout_s=60) as client:
        yield servicer, client
    servicer.warm.set()
    servicer.ended.set()
    server.stop(0)
