import datetime

from google.api import client_pb2 as _client_pb2
from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.api import resource_pb2 as _resource_pb2
from google.longrunning import operations_pb2 as _operations_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import empty_pb2 as _empty_pb2
from google.protobuf import field_mask_pb2 as _field_mask_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from sparsekv.v1 import conversation_pb2 as _conversation_pb2
from sparsekv.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Context(_message.Message):
    __slots__ = ("name", "display_name", "model", "architecture", "token_count", "dtype", "kv_bytes", "index_bytes", "state", "state_message", "create_time", "expire_time", "resident", "methods", "default_method", "indexes", "dense_layers", "default_budget", "tuned", "placement", "labels", "pinned", "is_conversation", "parent", "parent_token_count", "children", "owner", "rows", "tenant", "readers", "renew")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Context.State]
        READY: _ClassVar[Context.State]
        EXPIRED: _ClassVar[Context.State]
        CORRUPT: _ClassVar[Context.State]
        UNSUPPORTED: _ClassVar[Context.State]
        UNAVAILABLE: _ClassVar[Context.State]
    STATE_UNSPECIFIED: Context.State
    READY: Context.State
    EXPIRED: Context.State
    CORRUPT: Context.State
    UNSUPPORTED: Context.State
    UNAVAILABLE: Context.State
    class Index(_message.Message):
        __slots__ = ("name", "kind", "parameters", "bytes_per_token", "layers")
        class ParametersEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: str
            def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
        NAME_FIELD_NUMBER: _ClassVar[int]
        KIND_FIELD_NUMBER: _ClassVar[int]
        PARAMETERS_FIELD_NUMBER: _ClassVar[int]
        BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
        LAYERS_FIELD_NUMBER: _ClassVar[int]
        name: str
        kind: str
        parameters: _containers.ScalarMap[str, str]
        bytes_per_token: float
        layers: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., parameters: _Optional[_Mapping[str, str]] = ..., bytes_per_token: _Optional[float] = ..., layers: _Optional[_Iterable[int]] = ...) -> None: ...
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    INDEX_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STATE_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_METHOD_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    DENSE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_BUDGET_FIELD_NUMBER: _ClassVar[int]
    TUNED_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    IS_CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PARENT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    name: str
    display_name: str
    model: str
    architecture: str
    token_count: int
    dtype: str
    kv_bytes: int
    index_bytes: int
    state: Context.State
    state_message: str
    create_time: _timestamp_pb2.Timestamp
    expire_time: _timestamp_pb2.Timestamp
    resident: bool
    methods: _containers.RepeatedScalarFieldContainer[str]
    default_method: str
    indexes: _containers.RepeatedCompositeFieldContainer[Context.Index]
    dense_layers: _containers.RepeatedScalarFieldContainer[int]
    default_budget: str
    tuned: bool
    placement: str
    labels: _containers.ScalarMap[str, str]
    pinned: bool
    is_conversation: bool
    parent: str
    parent_token_count: int
    children: int
    owner: str
    rows: str
    tenant: str
    readers: _containers.RepeatedScalarFieldContainer[str]
    renew: _duration_pb2.Duration
    def __init__(self, name: _Optional[str] = ..., display_name: _Optional[str] = ..., model: _Optional[str] = ..., architecture: _Optional[str] = ..., token_count: _Optional[int] = ..., dtype: _Optional[str] = ..., kv_bytes: _Optional[int] = ..., index_bytes: _Optional[int] = ..., state: _Optional[_Union[Context.State, str]] = ..., state_message: _Optional[str] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., resident: bool = ..., methods: _Optional[_Iterable[str]] = ..., default_method: _Optional[str] = ..., indexes: _Optional[_Iterable[_Union[Context.Index, _Mapping]]] = ..., dense_layers: _Optional[_Iterable[int]] = ..., default_budget: _Optional[str] = ..., tuned: bool = ..., placement: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., pinned: bool = ..., is_conversation: bool = ..., parent: _Optional[str] = ..., parent_token_count: _Optional[int] = ..., children: _Optional[int] = ..., owner: _Optional[str] = ..., rows: _Optional[str] = ..., tenant: _Optional[str] = ..., readers: _Optional[_Iterable[str]] = ..., renew: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetContextRequest(_message.Message):
    __slots__ = ("name", "reference")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    reference: str
    def __init__(self, name: _Optional[str] = ..., reference: _Optional[str] = ...) -> None: ...

class ListContextsRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "filter", "order_by", "name_prefix", "labels", "state")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    ORDER_BY_FIELD_NUMBER: _ClassVar[int]
    NAME_PREFIX_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    filter: str
    order_by: str
    name_prefix: str
    labels: _containers.ScalarMap[str, str]
    state: Context.State
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., filter: _Optional[str] = ..., order_by: _Optional[str] = ..., name_prefix: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., state: _Optional[_Union[Context.State, str]] = ...) -> None: ...

class UpdateContextRequest(_message.Message):
    __slots__ = ("context", "update_mask", "move_name")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    MOVE_NAME_FIELD_NUMBER: _ClassVar[int]
    context: Context
    update_mask: _field_mask_pb2.FieldMask
    move_name: bool
    def __init__(self, context: _Optional[_Union[Context, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ..., move_name: bool = ...) -> None: ...

class ListContextsResponse(_message.Message):
    __slots__ = ("contexts", "next_page_token")
    CONTEXTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    contexts: _containers.RepeatedCompositeFieldContainer[Context]
    next_page_token: str
    def __init__(self, contexts: _Optional[_Iterable[_Union[Context, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeleteContextRequest(_message.Message):
    __slots__ = ("name", "allow_missing", "force")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ALLOW_MISSING_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    allow_missing: bool
    force: bool
    def __init__(self, name: _Optional[str] = ..., allow_missing: bool = ..., force: bool = ...) -> None: ...

class WarmContextRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class WarmContextResponse(_message.Message):
    __slots__ = ("context", "already_resident", "load_ns", "first_layer_ns", "all_layers_ns")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    ALREADY_RESIDENT_FIELD_NUMBER: _ClassVar[int]
    LOAD_NS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_NS_FIELD_NUMBER: _ClassVar[int]
    ALL_LAYERS_NS_FIELD_NUMBER: _ClassVar[int]
    context: Context
    already_resident: bool
    load_ns: int
    first_layer_ns: int
    all_layers_ns: int
    def __init__(self, context: _Optional[_Union[Context, _Mapping]] = ..., already_resident: bool = ..., load_ns: _Optional[int] = ..., first_layer_ns: _Optional[int] = ..., all_layers_ns: _Optional[int] = ...) -> None: ...

class CreateContextRequest(_message.Message):
    __slots__ = ("text", "token_ids", "messages", "upload", "again", "display_name", "ttl", "methods", "request_id", "priority", "parent", "labels", "rows", "move_name", "renew")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    MOVE_NAME_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _generation_pb2.TokenIds
    messages: _conversation_pb2.Conversation
    upload: str
    again: str
    display_name: str
    ttl: _duration_pb2.Duration
    methods: _containers.RepeatedScalarFieldContainer[str]
    request_id: str
    priority: int
    parent: str
    labels: _containers.ScalarMap[str, str]
    rows: str
    move_name: bool
    renew: _duration_pb2.Duration
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[_generation_pb2.TokenIds, _Mapping]] = ..., messages: _Optional[_Union[_conversation_pb2.Conversation, _Mapping]] = ..., upload: _Optional[str] = ..., again: _Optional[str] = ..., display_name: _Optional[str] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., methods: _Optional[_Iterable[str]] = ..., request_id: _Optional[str] = ..., priority: _Optional[int] = ..., parent: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., rows: _Optional[str] = ..., move_name: bool = ..., renew: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class CreateContextMetadata(_message.Message):
    __slots__ = ("phase", "tokens_done", "tokens_total", "bytes_written", "remaining", "create_time", "jobs_ahead", "context", "layers_done", "layers_total", "notes", "owner", "waiting_reason")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PHASE_UNSPECIFIED: _ClassVar[CreateContextMetadata.Phase]
        QUEUED: _ClassVar[CreateContextMetadata.Phase]
        PREPARING: _ClassVar[CreateContextMetadata.Phase]
        READING: _ClassVar[CreateContextMetadata.Phase]
        INDEXING: _ClassVar[CreateContextMetadata.Phase]
        VERIFYING: _ClassVar[CreateContextMetadata.Phase]
        ENDED: _ClassVar[CreateContextMetadata.Phase]
    PHASE_UNSPECIFIED: CreateContextMetadata.Phase
    QUEUED: CreateContextMetadata.Phase
    PREPARING: CreateContextMetadata.Phase
    READING: CreateContextMetadata.Phase
    INDEXING: CreateContextMetadata.Phase
    VERIFYING: CreateContextMetadata.Phase
    ENDED: CreateContextMetadata.Phase
    PHASE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DONE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    JOBS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_DONE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    WAITING_REASON_FIELD_NUMBER: _ClassVar[int]
    phase: CreateContextMetadata.Phase
    tokens_done: int
    tokens_total: int
    bytes_written: int
    remaining: _duration_pb2.Duration
    create_time: _timestamp_pb2.Timestamp
    jobs_ahead: int
    context: str
    layers_done: int
    layers_total: int
    notes: _containers.RepeatedScalarFieldContainer[str]
    owner: str
    waiting_reason: str
    def __init__(self, phase: _Optional[_Union[CreateContextMetadata.Phase, str]] = ..., tokens_done: _Optional[int] = ..., tokens_total: _Optional[int] = ..., bytes_written: _Optional[int] = ..., remaining: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., jobs_ahead: _Optional[int] = ..., context: _Optional[str] = ..., layers_done: _Optional[int] = ..., layers_total: _Optional[int] = ..., notes: _Optional[_Iterable[str]] = ..., owner: _Optional[str] = ..., waiting_reason: _Optional[str] = ...) -> None: ...

class UploadDocumentRequest(_message.Message):
    __slots__ = ("data", "sha256")
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    sha256: str
    def __init__(self, data: _Optional[bytes] = ..., sha256: _Optional[str] = ...) -> None: ...

class Upload(_message.Message):
    __slots__ = ("name", "size_bytes", "sha256", "expire_time")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    sha256: str
    expire_time: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[str] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...
