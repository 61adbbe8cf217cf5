"""Typed clients of the services: `Client`, and `AsyncClient` with the same verbs.

    with Client("127.0.0.1:50051") as client:
        with client.generate("contexts/...", question="Who lit the lamp?", stop=["\\n"]) as generation:
            for piece in generation:
                print(piece.text, end="")
        print(generation.summary)

Errors are the classes of index_store.errors and decode_engine.errors, as if the work were done in this process: a
context that is not there raises ContextNotFoundError. `reason` and `metadata` are those that the server sent.
"""

from decode_engine.rpc.client.answers import AsyncGeneration, Generation
from decode_engine.rpc.client.asynchronous import AsyncClient
from decode_engine.rpc.client.batch_results import AsyncBatch, Batch
from decode_engine.rpc.client.blocking import Client
from decode_engine.rpc.client.connection import ServerHealth
from decode_engine.rpc.client.replies import BatchItem, OperationInfo, OperationPage, ServerStatus, calls_of
from decode_engine.rpc.client.verbs import NEVER, ContextChanges, CreateOptions, GenerateOptions, Keep, Never
from decode_engine.rpc.door.options import Credentials
from sparsekv.v1.values import (
    Alternative,
    ContextInfo,
    ContextPage,
    Explanation,
    IndexInfo,
    LayersLooked,
    Look,
    MethodInfo,
    MethodList,
    Piece,
    SelectionFigures,
    Summary,
    Timings,
    TokenizedText,
    TokenLogprob,
    ToolCallPart,
    UploadInfo,
    Usage,
    Waiting,
    WarmResult,
)

__all__ = [
    "NEVER",
    "Alternative",
    "AsyncBatch",
    "AsyncClient",
    "AsyncGeneration",
    "Batch",
    "BatchItem",
    "Client",
    "ContextChanges",
    "ContextInfo",
    "ContextPage",
    "CreateOptions",
    "Credentials",
    "Explanation",
    "GenerateOptions",
    "Generation",
    "IndexInfo",
    "Keep",
    "LayersLooked",
    "Look",
    "MethodInfo",
    "MethodList",
    "Never",
    "OperationInfo",
    "OperationPage",
    "Piece",
    "SelectionFigures",
    "ServerHealth",
    "ServerStatus",
    "Summary",
    "Timings",
    "TokenLogprob",
    "TokenizedText",
    "ToolCallPart",
    "UploadInfo",
    "Usage",
    "Waiting",
    "WarmResult",
    "calls_of",
]
