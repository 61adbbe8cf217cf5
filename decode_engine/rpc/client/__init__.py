"""Typed clients of the services: `Client`, and `AsyncClient` with the same verbs.

    with Client("127.0.0.1:50051") as client:
        with client.generate("contexts/...", question="Who lit the lamp?", stop=["\\n"]) as generation:
            for piece in generation:
                print(piece.text, end="")
        print(generation.summary)

Errors are the classes of index_store.errors and decode_engine.errors, as if the work were done in this process: a
context that is not there raises ContextNotFoundError. `reason` and `metadata` are those that the server sent.
"""

from decode_engine.rpc.client.answers import AsyncGeneration, Batch, Generation
from decode_engine.rpc.client.clients import AsyncClient, Client
from decode_engine.rpc.client.connection import ServerHealth
from decode_engine.rpc.client.replies import BatchItem, OperationInfo, ServerStatus, calls_of
from decode_engine.rpc.client.servers import Servers
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
    TenantLimit,
    TenantList,
    TenantUse,
    Timings,
    TokenizedText,
    TokenLogprob,
    ToolCallPart,
    UploadInfo,
    Usage,
    Waiting,
    WarmResult,
)

AsyncBatch = Batch
"""The same for coroutines: `async with` and `async for`."""

__all__ = ["NEVER", "Alternative", "AsyncBatch", "AsyncClient", "AsyncGeneration", "Batch", "BatchItem"]
__all__ += ["Client", "ContextChanges", "ContextInfo", "ContextPage", "CreateOptions", "Credentials"]
__all__ += ["Explanation", "GenerateOptions", "Generation", "IndexInfo", "Keep", "LayersLooked", "Look"]
__all__ += ["MethodInfo", "MethodList", "Never", "OperationInfo", "Piece", "SelectionFigures", "ServerHealth"]
__all__ += ["ServerStatus", "Servers", "Summary", "TenantLimit", "TenantList", "TenantUse", "Timings"]
__all__ += ["TokenLogprob", "TokenizedText", "ToolCallPart"]
__all__ += ["UploadInfo", "Usage", "Waiting", "WarmResult", "calls_of"]
