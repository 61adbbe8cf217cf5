"""Which right every RPC and every route takes: the one table of both doors. What it does not name takes them all."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from index_store.store.description.callers import Caller, Right

_BY_RIGHT: Mapping[Right | None, str] = {
    None: """
        /grpc.health.v1.Health/Check /grpc.health.v1.Health/Watch /grpc.health.v1.Health/List
        GET:/health GET:/live GET:/ GET:/page.css GET:/page.js
    """,
    "read": """
        /sparsekv.v1.ContextService/GetContext /sparsekv.v1.ContextService/ListContexts
        /sparsekv.v1.ContextService/WarmContext
        /sparsekv.v1.GenerationService/Generate /sparsekv.v1.GenerationService/BatchGenerate
        /sparsekv.v1.GenerationService/Tokenize /sparsekv.v1.GenerationService/Detokenize
        /sparsekv.v1.GenerationService/CountTokens /sparsekv.v1.GenerationService/ListMethods
        /sparsekv.v1.GenerationService/ListTenants
        /google.longrunning.Operations/ListOperations /google.longrunning.Operations/GetOperation
        /google.longrunning.Operations/WaitOperation
        /grpc.reflection.v1.ServerReflection/ServerReflectionInfo
        /grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo
        POST:/v1/chat/completions POST:/v1/completions POST:/v1/responses POST:/v1/responses/input_tokens
        POST:/tokenize POST:/detokenize GET:/v1/models GET:/v1/models/{model:path} GET:/openapi.json
        GET:/v1/contexts GET:/v1/contexts/{context:path} GET:/v1/contexts/{context:path}/tokens
        GET:/v1/operations GET:/v1/operations/{operation}
    """,
    "create": """
        /sparsekv.v1.ContextService/CreateContext /sparsekv.v1.ContextService/UploadDocument
        /sparsekv.v1.ContextService/UpdateContext /google.longrunning.Operations/CancelOperation
        POST:/v1/contexts PATCH:/v1/contexts/{context:path} POST:/v1/files
        POST:/v1/operations/{operation}/cancel
    """,
    "delete": """
        /sparsekv.v1.ContextService/DeleteContext /google.longrunning.Operations/DeleteOperation
        DELETE:/v1/contexts/{context:path}
    """,
    "admin": """
        /sparsekv.v1.GenerationService/GetServerStatus GET:/v1/status /sparsekv.v1.GenerationService/Drain
    """,
}
"""By right, None where nobody is asked who they are. Besides: a session that is kept takes `create`, an earlier expiry
`delete`, and a pin `admin`."""

RIGHT_OF: Mapping[str, Right | None] = dict(
    chain.from_iterable(((name, right) for name in names.split()) for right, names in _BY_RIGHT.items())
)
"""By an RPC's full name, `/service/method`, or a route's method and path, `METHOD:/path`."""


def admit(caller: Caller, name: str) -> Right | None:
    """The right that an RPC or a route takes. Raises PermissionDeniedError where the caller does not have it."""
    right = RIGHT_OF.get(name, "admin")
    if right is not None:
        caller.require(right)
    return right
