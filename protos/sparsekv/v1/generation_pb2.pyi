import datetime

from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.api import resource_pb2 as _resource_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.rpc import status_pb2 as _status_pb2
from sparsekv.v1 import conversation_pb2 as _conversation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Keep(_message.Message):
    __slots__ = ("display_name", "ttl", "prompt_only", "move_name")
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ONLY_FIELD_NUMBER: _ClassVar[int]
    MOVE_NAME_FIELD_NUMBER: _ClassVar[int]
    display_name: str
    ttl: _duration_pb2.Duration
    prompt_only: bool
    move_name: bool
    def __init__(self, display_name: _Optional[str] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prompt_only: bool = ..., move_name: bool = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("context", "text", "token_ids", "question", "messages", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "method", "keep_ratio", "target_mass", "token_budget", "search_period", "n", "top_logprobs", "prompt_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop_token_ids", "constraint", "min_tokens", "tool_choice", "explain", "map_every", "keep", "priority", "ignore_eos")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    KEEP_RATIO_FIELD_NUMBER: _ClassVar[int]
    TARGET_MASS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    SEARCH_PERIOD_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    MAP_EVERY_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    context: str
    text: str
    token_ids: TokenIds
    question: str
    messages: _conversation_pb2.Conversation
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    method: str
    keep_ratio: float
    target_mass: float
    token_budget: int
    search_period: int
    n: int
    top_logprobs: int
    prompt_logprobs: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    constraint: Constraint
    min_tokens: int
    tool_choice: _conversation_pb2.ToolChoice
    explain: bool
    map_every: int
    keep: Keep
    priority: int
    ignore_eos: bool
    def __init__(self, context: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., question: _Optional[str] = ..., messages: _Optional[_Union[_conversation_pb2.Conversation, _Mapping]] = ..., max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., method: _Optional[str] = ..., keep_ratio: _Optional[float] = ..., target_mass: _Optional[float] = ..., token_budget: _Optional[int] = ..., search_period: _Optional[int] = ..., n: _Optional[int] = ..., top_logprobs: _Optional[int] = ..., prompt_logprobs: bool = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., min_tokens: _Optional[int] = ..., tool_choice: _Optional[_Union[_conversation_pb2.ToolChoice, _Mapping]] = ..., explain: bool = ..., map_every: _Optional[int] = ..., keep: _Optional[_Union[Keep, _Mapping]] = ..., priority: _Optional[int] = ..., ignore_eos: bool = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_schema", "regex", "choices")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    choices: Choices
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., choices: _Optional[_Union[Choices, _Mapping]] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "text", "logprob", "alternatives")
    class Alternative(_message.Message):
        __slots__ = ("token_id", "text", "logprob")
        TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
        TEXT_FIELD_NUMBER: _ClassVar[int]
        LOGPROB_FIELD_NUMBER: _ClassVar[int]
        token_id: int
        text: bytes
        logprob: float
        def __init__(self, token_id: _Optional[int] = ..., text: _Optional[bytes] = ..., logprob: _Optional[float] = ...) -> None: ...
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    text: bytes
    logprob: float
    alternatives: _containers.RepeatedCompositeFieldContainer[TokenLogprob.Alternative]
    def __init__(self, token_id: _Optional[int] = ..., text: _Optional[bytes] = ..., logprob: _Optional[float] = ..., alternatives: _Optional[_Iterable[_Union[TokenLogprob.Alternative, _Mapping]]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("token_ids", "text", "summary", "usage", "waiting", "logprobs", "index", "prompt_logprobs", "tool_calls", "looks")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    LOOKS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    summary: GenerationSummary
    usage: Usage
    waiting: Waiting
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    index: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    tool_calls: _containers.RepeatedCompositeFieldContainer[_conversation_pb2.ToolCallPart]
    looks: _containers.RepeatedCompositeFieldContainer[Look]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., summary: _Optional[_Union[GenerationSummary, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., index: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., tool_calls: _Optional[_Iterable[_Union[_conversation_pb2.ToolCallPart, _Mapping]]] = ..., looks: _Optional[_Iterable[_Union[Look, _Mapping]]] = ...) -> None: ...

class Look(_message.Message):
    __slots__ = ("token", "layers")
    class Layers(_message.Message):
        __slots__ = ("first", "last", "positions", "weights")
        FIRST_FIELD_NUMBER: _ClassVar[int]
        LAST_FIELD_NUMBER: _ClassVar[int]
        POSITIONS_FIELD_NUMBER: _ClassVar[int]
        WEIGHTS_FIELD_NUMBER: _ClassVar[int]
        first: int
        last: int
        positions: _containers.RepeatedScalarFieldContainer[int]
        weights: _containers.RepeatedScalarFieldContainer[float]
        def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ..., positions: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[float]] = ...) -> None: ...
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    token: int
    layers: _containers.RepeatedCompositeFieldContainer[Look.Layers]
    def __init__(self, token: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[Look.Layers, _Mapping]]] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("cause", "requests_ahead")
    class Cause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CAUSE_UNSPECIFIED: _ClassVar[Waiting.Cause]
        CONTEXT: _ClassVar[Waiting.Cause]
        SESSION: _ClassVar[Waiting.Cause]
    CAUSE_UNSPECIFIED: Waiting.Cause
    CONTEXT: Waiting.Cause
    SESSION: Waiting.Cause
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    cause: Waiting.Cause
    requests_ahead: int
    def __init__(self, cause: _Optional[_Union[Waiting.Cause, str]] = ..., requests_ahead: _Optional[int] = ...) -> None: ...

class GenerationSummary(_message.Message):
    __slots__ = ("finish_reason", "usage", "timings", "selection", "method", "seed", "budget", "remainder", "kept_context", "method_reason", "context", "explanation")
    class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        FINISH_REASON_UNSPECIFIED: _ClassVar[GenerationSummary.FinishReason]
        STOP: _ClassVar[GenerationSummary.FinishReason]
        LENGTH: _ClassVar[GenerationSummary.FinishReason]
        END_OF_SEQUENCE: _ClassVar[GenerationSummary.FinishReason]
        TOOL_CALLS: _ClassVar[GenerationSummary.FinishReason]
    FINISH_REASON_UNSPECIFIED: GenerationSummary.FinishReason
    STOP: GenerationSummary.FinishReason
    LENGTH: GenerationSummary.FinishReason
    END_OF_SEQUENCE: GenerationSummary.FinishReason
    TOOL_CALLS: GenerationSummary.FinishReason
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    REMAINDER_FIELD_NUMBER: _ClassVar[int]
    KEPT_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    METHOD_REASON_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    finish_reason: GenerationSummary.FinishReason
    usage: Usage
    timings: Timings
    selection: SelectionFigures
    method: str
    seed: int
    budget: str
    remainder: str
    kept_context: str
    method_reason: str
    context: str
    explanation: Explanation
    def __init__(self, finish_reason: _Optional[_Union[GenerationSummary.FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., selection: _Optional[_Union[SelectionFigures, _Mapping]] = ..., method: _Optional[str] = ..., seed: _Optional[int] = ..., budget: _Optional[str] = ..., remainder: _Optional[str] = ..., kept_context: _Optional[str] = ..., method_reason: _Optional[str] = ..., context: _Optional[str] = ..., explanation: _Optional[_Union[Explanation, _Mapping]] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("lookup", "context", "cached_tokens", "missed", "missed_context", "missed_tokens", "tier", "method", "method_reason", "door_ms", "load_ms", "queue_ms", "prompt_ms", "decode_ms", "audited_steps", "audited_kl")
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    MISSED_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MISSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    METHOD_REASON_FIELD_NUMBER: _ClassVar[int]
    DOOR_MS_FIELD_NUMBER: _ClassVar[int]
    LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    AUDITED_STEPS_FIELD_NUMBER: _ClassVar[int]
    AUDITED_KL_FIELD_NUMBER: _ClassVar[int]
    lookup: str
    context: str
    cached_tokens: int
    missed: str
    missed_context: str
    missed_tokens: int
    tier: str
    method: str
    method_reason: str
    door_ms: float
    load_ms: float
    queue_ms: float
    prompt_ms: float
    decode_ms: float
    audited_steps: int
    audited_kl: float
    def __init__(self, lookup: _Optional[str] = ..., context: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., missed: _Optional[str] = ..., missed_context: _Optional[str] = ..., missed_tokens: _Optional[int] = ..., tier: _Optional[str] = ..., method: _Optional[str] = ..., method_reason: _Optional[str] = ..., door_ms: _Optional[float] = ..., load_ms: _Optional[float] = ..., queue_ms: _Optional[float] = ..., prompt_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ..., audited_steps: _Optional[int] = ..., audited_kl: _Optional[float] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("context_tokens", "prompt_tokens", "completion_tokens", "cached_tokens", "max_tokens", "drafted_tokens", "accepted_tokens", "cache_write_tokens")
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_WRITE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    context_tokens: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    max_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    cache_write_tokens: int
    def __init__(self, context_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., cache_write_tokens: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("load_ns", "queue_ns", "prompt_ns", "first_token_ns", "search_ns", "gather_ns", "attend_ns", "append_ns", "decode_steps", "decode_ns", "total_ns", "device_wait_for_host_ns", "host_bytes_read", "rows_reused")
    LOAD_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_NS_FIELD_NUMBER: _ClassVar[int]
    SEARCH_NS_FIELD_NUMBER: _ClassVar[int]
    GATHER_NS_FIELD_NUMBER: _ClassVar[int]
    ATTEND_NS_FIELD_NUMBER: _ClassVar[int]
    APPEND_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_WAIT_FOR_HOST_NS_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    ROWS_REUSED_FIELD_NUMBER: _ClassVar[int]
    load_ns: int
    queue_ns: int
    prompt_ns: int
    first_token_ns: int
    search_ns: int
    gather_ns: int
    attend_ns: int
    append_ns: int
    decode_steps: int
    decode_ns: int
    total_ns: int
    device_wait_for_host_ns: int
    host_bytes_read: int
    rows_reused: int
    def __init__(self, load_ns: _Optional[int] = ..., queue_ns: _Optional[int] = ..., prompt_ns: _Optional[int] = ..., first_token_ns: _Optional[int] = ..., search_ns: _Optional[int] = ..., gather_ns: _Optional[int] = ..., attend_ns: _Optional[int] = ..., append_ns: _Optional[int] = ..., decode_steps: _Optional[int] = ..., decode_ns: _Optional[int] = ..., total_ns: _Optional[int] = ..., device_wait_for_host_ns: _Optional[int] = ..., host_bytes_read: _Optional[int] = ..., rows_reused: _Optional[int] = ...) -> None: ...

class SelectionFigures(_message.Message):
    __slots__ = ("searches", "keys_kept", "keys_attended", "keys_available", "fraction_sparse", "fraction_all")
    SEARCHES_FIELD_NUMBER: _ClassVar[int]
    KEYS_KEPT_FIELD_NUMBER: _ClassVar[int]
    KEYS_ATTENDED_FIELD_NUMBER: _ClassVar[int]
    KEYS_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    FRACTION_SPARSE_FIELD_NUMBER: _ClassVar[int]
    FRACTION_ALL_FIELD_NUMBER: _ClassVar[int]
    searches: int
    keys_kept: int
    keys_attended: int
    keys_available: int
    fraction_sparse: float
    fraction_all: float
    def __init__(self, searches: _Optional[int] = ..., keys_kept: _Optional[int] = ..., keys_attended: _Optional[int] = ..., keys_available: _Optional[int] = ..., fraction_sparse: _Optional[float] = ..., fraction_all: _Optional[float] = ...) -> None: ...

class BatchGenerateRequest(_message.Message):
    __slots__ = ("context", "requests")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    context: str
    requests: _containers.RepeatedCompositeFieldContainer[GenerateRequest]
    def __init__(self, context: _Optional[str] = ..., requests: _Optional[_Iterable[_Union[GenerateRequest, _Mapping]]] = ...) -> None: ...

class BatchGenerateResponse(_message.Message):
    __slots__ = ("index", "response", "error")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    index: int
    response: GenerateResponse
    error: _status_pb2.Status
    def __init__(self, index: _Optional[int] = ..., response: _Optional[_Union[GenerateResponse, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "messages")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    text: str
    messages: _conversation_pb2.Conversation
    def __init__(self, text: _Optional[str] = ..., messages: _Optional[_Union[_conversation_pb2.Conversation, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("ids", "texts")
    IDS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    texts: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., texts: _Optional[_Iterable[bytes]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class CountTokensRequest(_message.Message):
    __slots__ = ("text", "messages")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    text: str
    messages: _conversation_pb2.Conversation
    def __init__(self, text: _Optional[str] = ..., messages: _Optional[_Union[_conversation_pb2.Conversation, _Mapping]] = ...) -> None: ...

class CountTokensResponse(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    def __init__(self, tokens: _Optional[int] = ...) -> None: ...

class ListMethodsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListMethodsResponse(_message.Message):
    __slots__ = ("methods", "head_dim", "dtype", "kv_bytes_per_token")
    METHODS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    methods: _containers.RepeatedCompositeFieldContainer[Method]
    head_dim: int
    dtype: str
    kv_bytes_per_token: float
    def __init__(self, methods: _Optional[_Iterable[_Union[Method, _Mapping]]] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., kv_bytes_per_token: _Optional[float] = ...) -> None: ...

class Method(_message.Message):
    __slots__ = ("name", "summary", "source", "indexes", "keep_ratio", "target_mass", "token_budget", "budget", "remainder", "remainder_optional", "parameters", "index", "partition", "bytes_per_token")
    class ParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    KEEP_RATIO_FIELD_NUMBER: _ClassVar[int]
    TARGET_MASS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    REMAINDER_FIELD_NUMBER: _ClassVar[int]
    REMAINDER_OPTIONAL_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    summary: str
    source: str
    indexes: _containers.RepeatedScalarFieldContainer[str]
    keep_ratio: float
    target_mass: float
    token_budget: int
    budget: str
    remainder: str
    remainder_optional: bool
    parameters: _containers.ScalarMap[str, str]
    index: str
    partition: str
    bytes_per_token: float
    def __init__(self, name: _Optional[str] = ..., summary: _Optional[str] = ..., source: _Optional[str] = ..., indexes: _Optional[_Iterable[str]] = ..., keep_ratio: _Optional[float] = ..., target_mass: _Optional[float] = ..., token_budget: _Optional[int] = ..., budget: _Optional[str] = ..., remainder: _Optional[str] = ..., remainder_optional: bool = ..., parameters: _Optional[_Mapping[str, str]] = ..., index: _Optional[str] = ..., partition: _Optional[str] = ..., bytes_per_token: _Optional[float] = ...) -> None: ...

class GetServerStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: _duration_pb2.Duration
    def __init__(self, limit: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTenantsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTenantsResponse(_message.Message):
    __slots__ = ("tenants", "quotas_problem")
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[Tenant]
    quotas_problem: str
    def __init__(self, tenants: _Optional[_Iterable[_Union[Tenant, _Mapping]]] = ..., quotas_problem: _Optional[str] = ...) -> None: ...

class Tenant(_message.Message):
    __slots__ = ("name", "weight", "limits", "requests", "prompt_tokens", "generated_tokens", "refused")
    class Limit(_message.Message):
        __slots__ = ("name", "used", "allowed")
        NAME_FIELD_NUMBER: _ClassVar[int]
        USED_FIELD_NUMBER: _ClassVar[int]
        ALLOWED_FIELD_NUMBER: _ClassVar[int]
        name: str
        used: int
        allowed: int
        def __init__(self, name: _Optional[str] = ..., used: _Optional[int] = ..., allowed: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    name: str
    weight: float
    limits: _containers.RepeatedCompositeFieldContainer[Tenant.Limit]
    requests: int
    prompt_tokens: int
    generated_tokens: int
    refused: int
    def __init__(self, name: _Optional[str] = ..., weight: _Optional[float] = ..., limits: _Optional[_Iterable[_Union[Tenant.Limit, _Mapping]]] = ..., requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., refused: _Optional[int] = ...) -> None: ...

class ServerStatus(_message.Message):
    __slots__ = ("model", "waiting", "prompting", "decoding", "requests", "session_bytes", "session_limit_bytes", "context_bytes", "context_used_bytes", "context_limit_bytes", "contexts", "context_loads", "context_hits", "context_evictions", "steps", "prompt_tokens", "decode_steps", "decode_tokens", "decode_batch", "context_device_bytes", "context_device_used_bytes", "context_device_limit_bytes", "host_bytes_read", "rows_reused", "device_wait_for_host_ns", "open_calls", "unfinished_calls", "unread_answers", "plain_requests", "found_beginnings", "found_tokens", "kept_beginnings", "removed_beginnings", "method_choices", "max_positions", "template_reads", "objects_pending", "objects_pending_bytes", "objects_fetching", "objects_problem", "audit_lines_lost", "objects_mended")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PROMPTING_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SESSION_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTEXTS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LOADS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_HITS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_BATCH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_DEVICE_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_DEVICE_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    ROWS_REUSED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_WAIT_FOR_HOST_NS_FIELD_NUMBER: _ClassVar[int]
    OPEN_CALLS_FIELD_NUMBER: _ClassVar[int]
    UNFINISHED_CALLS_FIELD_NUMBER: _ClassVar[int]
    UNREAD_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FOUND_BEGINNINGS_FIELD_NUMBER: _ClassVar[int]
    FOUND_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEPT_BEGINNINGS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_BEGINNINGS_FIELD_NUMBER: _ClassVar[int]
    METHOD_CHOICES_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_READS_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_PENDING_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_PENDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FETCHING_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    AUDIT_LINES_LOST_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_MENDED_FIELD_NUMBER: _ClassVar[int]
    model: str
    waiting: int
    prompting: int
    decoding: int
    requests: int
    session_bytes: int
    session_limit_bytes: int
    context_bytes: int
    context_used_bytes: int
    context_limit_bytes: int
    contexts: int
    context_loads: int
    context_hits: int
    context_evictions: int
    steps: int
    prompt_tokens: int
    decode_steps: int
    decode_tokens: int
    decode_batch: int
    context_device_bytes: int
    context_device_used_bytes: int
    context_device_limit_bytes: int
    host_bytes_read: int
    rows_reused: int
    device_wait_for_host_ns: int
    open_calls: int
    unfinished_calls: int
    unread_answers: int
    plain_requests: int
    found_beginnings: int
    found_tokens: int
    kept_beginnings: int
    removed_beginnings: int
    method_choices: _containers.RepeatedScalarFieldContainer[str]
    max_positions: int
    template_reads: _containers.RepeatedScalarFieldContainer[str]
    objects_pending: int
    objects_pending_bytes: int
    objects_fetching: int
    objects_problem: str
    audit_lines_lost: int
    objects_mended: int
    def __init__(self, model: _Optional[str] = ..., waiting: _Optional[int] = ..., prompting: _Optional[int] = ..., decoding: _Optional[int] = ..., requests: _Optional[int] = ..., session_bytes: _Optional[int] = ..., session_limit_bytes: _Optional[int] = ..., context_bytes: _Optional[int] = ..., context_used_bytes: _Optional[int] = ..., context_limit_bytes: _Optional[int] = ..., contexts: _Optional[int] = ..., context_loads: _Optional[int] = ..., context_hits: _Optional[int] = ..., context_evictions: _Optional[int] = ..., steps: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., decode_steps: _Optional[int] = ..., decode_tokens: _Optional[int] = ..., decode_batch: _Optional[int] = ..., context_device_bytes: _Optional[int] = ..., context_device_used_bytes: _Optional[int] = ..., context_device_limit_bytes: _Optional[int] = ..., host_bytes_read: _Optional[int] = ..., rows_reused: _Optional[int] = ..., device_wait_for_host_ns: _Optional[int] = ..., open_calls: _Optional[int] = ..., unfinished_calls: _Optional[int] = ..., unread_answers: _Optional[int] = ..., plain_requests: _Optional[int] = ..., found_beginnings: _Optional[int] = ..., found_tokens: _Optional[int] = ..., kept_beginnings: _Optional[int] = ..., removed_beginnings: _Optional[int] = ..., method_choices: _Optional[_Iterable[str]] = ..., max_positions: _Optional[int] = ..., template_reads: _Optional[_Iterable[str]] = ..., objects_pending: _Optional[int] = ..., objects_pending_bytes: _Optional[int] = ..., objects_fetching: _Optional[int] = ..., objects_problem: _Optional[str] = ..., audit_lines_lost: _Optional[int] = ..., objects_mended: _Optional[int] = ...) -> None: ...
