"""Messages of the API as plain values. Made from the protos by `ops/protos`; not to be changed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypedDict


@dataclass(frozen=True, slots=True)
class IndexInfo:
    """One index over the keys of the context."""

    name: str = ""
    """Name of the index in the store, unique within the context (for example "query_tables")."""
    kind: str = ""
    """Kind of index, which tells what the parameters mean (for example "query_tables")."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Parameters it was built with, as text (for example "subspaces": "16")."""
    bytes_per_token: float = 0.0
    """Bytes of this index per token of the context, summed over layers and KV heads."""
    layers: tuple[int, ...] = ()
    """Layers that have this index, ascending. Methods that drop what they do not select attend to the others
    fully."""


@dataclass(frozen=True, slots=True)
class ContextInfo:
    """A fixed prefix of tokens that a model has read once: its keys and values, and the indexes that search them.
    Immutable and addressed by its content."""

    name: str = ""
    """Resource name, `contexts/{context}`; the id is the SHA-256 of the content in 64 hexadecimal digits."""
    display_name: str = ""
    """Name for people, 1 to 500 printable characters. A name belongs to one context of a model that has not expired:
    who gives it to another one says so (`move_name`), or gets NAME_TAKEN."""
    model: str = ""
    """Name of the model that read the context."""
    architecture: str = ""
    """Architecture of that model (for example "LlamaForCausalLM")."""
    token_count: int = 0
    """Number of tokens of the context."""
    dtype: str = ""
    """Number type in which keys and values are stored: "float32", "float16" or "bfloat16"."""
    kv_bytes: int = 0
    """Bytes of keys and values; of a child its own, of rows in 8 bits the half that is in no index."""
    index_bytes: int = 0
    """Bytes of all indexes together; 0 of a child, whose parent has them."""
    state: str = ""
    """Whether the context can be decoded against."""
    state_message: str = ""
    """Why the state is neither READY nor EXPIRED, why there is no `default_method`, or that a child has outgrown its
    parent and what to do; empty otherwise."""
    create_time: datetime = datetime.fromtimestamp(0, UTC)
    """When the context was published in the store."""
    expire_time: datetime | None = None
    """When it expires; unset for a context that never does. A pinned context does not expire while it is pinned."""
    resident: bool = False
    """Whether it is in memory now."""
    methods: tuple[str, ...] = ()
    """Names of the methods that can decode against this context."""
    default_method: str = ""
    """Method that a request gets when it names none, possibly with a remainder and a period (GenerateRequest.method).
    Empty when what the context was tuned to cannot be read: `state_message` says why, and requests that name no
    method get CONTEXT_CORRUPT."""
    indexes: tuple[IndexInfo, ...] = ()
    """The indexes of the context."""
    dense_layers: tuple[int, ...] = ()
    """Layers whose attention is too flat to be cut; methods that drop what they do not select attend to them fully.
    Ascending."""
    default_budget: str = ""
    """Budget that a request gets when it names neither method nor budget, for people to read (for example "5.00%");
    empty when that attends to every key."""
    tuned: bool = False
    """Whether `default_method` and `default_budget` were chosen for this context by tuning, rather than by its
    prefill."""
    placement: str = ""
    """Where the context is in memory, or would be if it were loaded now: "device" when all of it is in memory of the
    device that computes (of the host, where that is the CPU), "hybrid" when keys and values are in host memory and
    only the indexes in the device's, "host" when query tables are in host memory too and searched by the host's
    cores."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """What its owner notes of it; at most 64. Keys are 1 to 63 characters, small letters, digits, '_', '-' and '.',
    and begin with a letter; values are up to 63 printable characters."""
    pinned: bool = False
    """Whether it is kept: a pinned context does not expire, and leaves memory only where it is not in use and the
    memory of those that are not pinned does not suffice. It can be deleted by name."""
    is_conversation: bool = False
    """Whether it was made of messages. New messages follow these then."""
    parent: str = ""
    """Name of the context that this one continues, `contexts/{context}`; empty where it stands alone. Such a child
    stores the keys and values of its own tokens alone and needs its parent, whose methods and indexes it has. It
    becomes empty when a worker makes a child whole that has outgrown its parent."""
    parent_token_count: int = 0
    """Tokens of that context, with which `token_count` begins; 0 without one."""
    children: int = 0
    """How many contexts continue this one."""
    owner: str = ""
    """Who made it: the name of the token that the first request for it showed; empty where no tokens were asked for.
    It opens and closes nothing."""
    rows: str = ""
    """How exact keys and values are stored: "dtype", in `dtype`, or "int8", in 8 bits a number, four of which are in
    the index "coarse_rows"."""
    tenant: str = ""
    """Whose it is: the tenant of the first request for it; empty where no tenants are told apart."""
    readers: tuple[str, ...] = ()
    """Tenants that may read it, too, at most 64: they find it and ask about it, and no more; `*` stands for all.
    Others than its tenant are not told of them."""
    renew_s: float | None = None
    """Time to live that every use begins anew: a request that names it or begins with it, or that loads it, moves
    `expire_time` to at least so long after itself, and at most a sixteenth of that later, so that few uses write.
    Unset: its expiry stays where it is. Set on a context that never expires, it begins now."""


@dataclass(frozen=True, slots=True)
class ContextPage:
    """Response of ListContexts."""

    contexts: tuple[ContextInfo, ...] = ()
    """One page of contexts. Contexts created or deleted between two pages never shift the others."""
    next_page_token: str = ""
    """Token of the next page; empty when this is the last one."""


@dataclass(frozen=True, slots=True)
class WarmResult:
    """Response of WarmContext."""

    context: ContextInfo = field(default_factory=lambda: ContextInfo())
    """The context, now in memory."""
    already_resident: bool = False
    """Whether it was in memory before this call, so that nothing had to be read."""
    load_ns: int = 0
    """Time that this call spent until everything was loaded and verified, in nanoseconds."""
    first_layer_ns: int = 0
    """Of the load that brought the context into memory, which may have begun before this call: time from its
    beginning until the first layer was there, in nanoseconds."""
    all_layers_ns: int = 0
    """Time from the beginning of that load until every layer was there, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class OperationState:
    """What an operation of CreateContext has come to, or one by which a worker makes a child whole that has outgrown
    its parent (`notes` says so)."""

    name: str = ""
    """`operations/{operation}`."""
    done: bool = False
    """Whether it has ended."""
    phase: str = ""
    """What is being done now."""
    tokens_done: int = 0
    """Tokens that the model has read."""
    tokens_total: int = 0
    """Tokens of the document."""
    bytes_written: int = 0
    """Bytes of the context that have been written."""
    remaining_s: float | None = None
    """Time that the present phase is going to take yet, as far as it went so far; unset where nobody knows."""
    create_time: datetime | None = None
    """When the operation was created."""
    jobs_ahead: int = 0
    """Operations that are to be taken before this one while it is QUEUED; 0 otherwise."""
    context_name: str = ""
    """Name of the context that the operation makes, `contexts/{context}`; there only when the operation is done."""
    layers_done: int = 0
    """Layers whose indexes have been written."""
    layers_total: int = 0
    """Layers of the model; 0 before a worker has the job."""
    notes: tuple[str, ...] = ()
    """Who asked about the operation should know these, for example that it was begun again; at most 20 sentences."""
    owner: str = ""
    """Who created the operation, as Context.owner."""
    waiting_reason: str = ""
    """Why it would stay QUEUED for ever, as a sentence: no worker takes contexts of its model now. Empty where one
    does, and in other phases."""


@dataclass(frozen=True, slots=True)
class UploadInfo:
    """An uploaded document that waits to be used."""

    name: str = ""
    """`uploads/{upload}`."""
    size_bytes: int = 0
    """Bytes of the document."""
    sha256: str = ""
    """SHA-256 of the document in hexadecimal digits."""
    expire_time: datetime = datetime.fromtimestamp(0, UTC)
    """When it is removed if nobody has used it."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that was likely in its place."""

    token_id: int = 0
    """The token."""
    text: bytes = b""
    """Its bytes, which may be a part of a character."""
    logprob: float = 0.0
    """Natural logarithm of its probability."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its probability."""

    token_id: int = 0
    """The token."""
    text: bytes = b""
    """Its bytes, which may be a part of a character."""
    logprob: float = 0.0
    """Natural logarithm of its probability."""
    alternatives: tuple[Alternative, ...] = ()
    """The likeliest tokens in its place, the likeliest first, as many as `top_logprobs` says; the token itself is one
    of them where it is as likely."""


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """A part of a call that a model makes."""

    index: int = 0
    """Which of the answer's calls it is of, from 0."""
    id: str = ""
    """Id of the call, in its first part alone: nine letters and digits, new for every call."""
    name: str = ""
    """Name of the tool, in the first part alone."""
    arguments_json: str = ""
    """The next characters of its arguments. Those of all parts joined are a JSON object, unless the answer was cut
    off."""


@dataclass(frozen=True, slots=True)
class LayersLooked:
    """What a group of neighbouring layers found. Those that attend to everything are left out."""

    first: int = 0
    """The first layer of the group."""
    last: int = 0
    """The last one."""
    positions: tuple[int, ...] = ()
    """Positions of the context that were selected, at most 24, those with most attention first."""
    weights: tuple[float, ...] = ()
    """Share of the attention that went to each of them, of that to all keys which are attended to exactly; a mean
    over the group's layers and their heads."""


@dataclass(frozen=True, slots=True)
class Look:
    """Where in its context a token of an answer was looked for."""

    token: int = 0
    """Which token of the answer, from 0."""
    layers: tuple[LayersLooked, ...] = ()
    """The groups, at most 4."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One message of the stream. The last of each answer carries its summary, and text that had been held back where
    there is some. Those before it carry tokens, except that a request which has none for a while is told how it
    stands. A client that reads slowly gets several tokens in one message."""

    token_ids: tuple[int, ...] = ()
    """Tokens generated since the previous message, including an end-of-sequence token and tokens that spell a stop
    string."""
    text: str = ""
    """Text that became certain with these tokens. It may lag behind the tokens, because it never ends inside a
    character and is held back while it could be the beginning of a stop string. All texts joined are the answer."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids`, where the request has `top_logprobs`."""
    index: int = 0
    """Which of the request's `n` answers the message is of, from 0."""
    tool_calls: tuple[ToolCallPart, ...] = ()
    """Parts of the calls that the model makes, in order. They are no part of `text`."""
    looks: tuple[Look, ...] = ()
    """Where tokens were looked for, these or earlier ones, where the request has `map_every`."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a request waits for."""

    cause: str = ""
    """What it is."""
    requests_ahead: int = 0
    """With SESSION: requests that will be admitted before it. Some may pass it where its memory is not free yet."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one generation."""

    context_tokens: int = 0
    """Tokens of the stored context, named or found, as far as they were not read again."""
    prompt_tokens: int = 0
    """Tokens of the prompt, as fed to the model (a question counts with its template), without those of a context
    that was found. At least one is read, for what follows it."""
    completion_tokens: int = 0
    """Tokens generated."""
    cached_tokens: int = 0
    """Tokens that were not computed, because their keys and values are stored: the context's."""
    max_tokens: int = 0
    """Tokens that may be generated: `max_tokens` of the request or its default, cut to what the model has positions
    for."""
    drafted_tokens: int = 0
    """Tokens that were drafted and verified (method `exact`). Known at the end of an answer."""
    accepted_tokens: int = 0
    """Of these, tokens of the answer: each saved a step."""
    cache_write_tokens: int = 0
    """Tokens of prompt and answer that were stored, with `keep`: later requests do not compute them. Known at the end
    of an answer."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Wall-clock times of one generation, in nanoseconds. Search, gather, attend and append are the session's own
    parts of its prompt and decode steps; a decode step that was batched with other sessions counts in full for
    each."""

    load_ns: int = 0
    """Bringing the context into memory, from disk if it was not resident, and waiting for memory before. While nobody
    else can be served, the prompt is read behind the loading: then only what passed until that began, the rest is in
    `prompt_ns`."""
    queue_ns: int = 0
    """Waiting for a free session and for the memory that it may need, after loading."""
    prompt_ns: int = 0
    """From admission until the whole prompt was processed, including turns of other sessions."""
    first_token_ns: int = 0
    """From the arrival of the request to its first generated token."""
    search_ns: int = 0
    """Searching the indexes for important keys."""
    gather_ns: int = 0
    """Collecting the selected keys and values."""
    attend_ns: int = 0
    """Attending to them, and to sinks, recent window and tail."""
    append_ns: int = 0
    """Making prompt and generated tokens searchable."""
    decode_steps: int = 0
    """Decode steps taken (the prompt's are not counted)."""
    decode_ns: int = 0
    """Time of those decode steps; divided by their number, the time per token."""
    total_ns: int = 0
    """From the arrival of the request to the end of the generation."""
    device_wait_for_host_ns: int = 0
    """How long a GPU stood still in decode steps because the host had not yet found which keys to attend to; 0 where
    the GPU searches itself."""
    host_bytes_read: int = 0
    """Bytes of the context's keys and values that a GPU read from host memory in its captured decode steps."""
    rows_reused: int = 0
    """Keys, with their values, that such steps found in the GPU's memory, where earlier steps had left them; summed
    over steps, layers and KV heads."""


@dataclass(frozen=True, slots=True)
class SelectionFigures:
    """How much of the context was touched. Sums run over prompt and decode positions, layers and KV heads."""

    searches: int = 0
    """Searches made."""
    keys_kept: int = 0
    """Keys chosen by those searches."""
    keys_attended: int = 0
    """Keys attended to in layers that search: the chosen ones, sinks, recent window, prompt and generated tokens."""
    keys_available: int = 0
    """Keys that full attention would have read in those layers."""
    fraction_sparse: float | None = None
    """keys_attended / keys_available; unset when no layer searched."""
    fraction_all: float = 0.0
    """The same fraction over all layers, with those that are attended to fully."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why an answer came as it did. The same stands in the log line of the request."""

    lookup: str = ""
    """How the context that was continued was found: "named" by the request, "found" by the prompt's tokens, or
    "none"."""
    context: str = ""
    """Id of that context; empty with "none"."""
    cached_tokens: int = 0
    """Tokens that were not computed, because their keys and values are stored."""
    missed: str = ""
    """Why no longer context was used, of a request that names none: "not_stored", where none has more of the prompt's
    first tokens; "partial", where one has, but goes on in another way or is longer than the prompt; "expired";
    "too_large", for the memory; "unreadable", or damaged; "not_looked_for", where log probabilities of the whole
    prompt are wanted. Empty where all of the prompt is stored."""
    missed_context: str = ""
    """Id of the context that `missed` is about; empty where it is about none."""
    missed_tokens: int = 0
    """Tokens of the prompt that this context begins with; with "partial" whole blocks of 256 alone."""
    tier: str = ""
    """Where the context's keys and values were when the request came: in memory of a "device" or of the "host", or on
    "disk" and perhaps being loaded, or in "objects", an object store. Empty without a context."""
    method: str = ""
    """Method that was used."""
    method_reason: str = ""
    """Why this method was used, for people to read."""
    door_ms: float = 0.0
    """Milliseconds until the prompt was cut into tokens and the engine had the request."""
    load_ms: float = 0.0
    """Milliseconds until the context was in memory and the method ready (`Timings.load_ns`)."""
    queue_ms: float = 0.0
    """Milliseconds that a session was waited for."""
    prompt_ms: float = 0.0
    """Milliseconds that the prompt was read, turns of other sessions among them."""
    decode_ms: float = 0.0
    """Milliseconds from then on until the end of the answer."""
    audited_steps: int = 0
    """Decode steps that were computed with full attention, too (`serve --audit-share`)."""
    audited_kl: float = 0.0
    """Of these, the mean KL divergence of the method's distribution from full attention's, in nats; 0 without any."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a finished generation was and took."""

    finish_reason: str = ""
    """Why it ended."""
    context_tokens: int = 0
    """Tokens of the stored context, named or found, as far as they were not read again."""
    prompt_tokens: int = 0
    """Tokens of the prompt, as fed to the model (a question counts with its template), without those of a context
    that was found. At least one is read, for what follows it."""
    completion_tokens: int = 0
    """Tokens generated."""
    cached_tokens: int = 0
    """Tokens that were not computed, because their keys and values are stored: the context's."""
    max_tokens: int = 0
    """Tokens that may be generated: `max_tokens` of the request or its default, cut to what the model has positions
    for."""
    drafted_tokens: int = 0
    """Tokens that were drafted and verified (method `exact`). Known at the end of an answer."""
    accepted_tokens: int = 0
    """Of these, tokens of the answer: each saved a step."""
    cache_write_tokens: int = 0
    """Tokens of prompt and answer that were stored, with `keep`: later requests do not compute them. Known at the end
    of an answer."""
    timings: Timings = field(default_factory=lambda: Timings())
    """Where the time went."""
    selection: SelectionFigures = field(default_factory=lambda: SelectionFigures())
    """How much of the context was touched."""
    method: str = ""
    """Method that was used, with the remainder and period that the request gave it."""
    seed: int = 0
    """Seed that was used, also when the request set none; 0 when nothing was sampled. A request that set none ran
    without the promise of `GenerateRequest.seed`: one that sets this seed draws by the same numbers, and samples the
    same tokens but where the first was beside others whose number changed a rounding."""
    budget: str = ""
    """Budget that was used, for people to read (for example "2.00%", "0.9 of the mass", "512 keys"); empty when every
    key was attended."""
    remainder: str = ""
    """What became of the keys that were not selected: "dropped", "monopole", "centred" or "coarse". A method that
    approximates them where it can says "dropped" over a context without the clusters for it. Empty when every key was
    attended."""
    kept_context: str = ""
    """Name of the context that the session was kept as, `contexts/{context}`; empty without
    `GenerateRequest.keep`."""
    method_reason: str = ""
    """Why this method was used, for people to read, where the server chose it (`GenerateRequest.method`); empty
    otherwise."""
    context: str = ""
    """Name of the context whose keys and values were used, `contexts/{context}`: the one that the request names, or
    the one that was found. Empty where all of the prompt was read."""
    explanation: Explanation | None = None
    """Why the answer came as it did; set where the request has `explain`."""


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Response of Tokenize."""

    ids: tuple[int, ...] = ()
    """The tokens."""
    texts: tuple[bytes, ...] = ()
    """The bytes of each token, which may be a part of a character; joined they are the text."""


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """A way of finding important keys and attending to them: an index, a budget and a remainder."""

    name: str = ""
    """Name used in requests."""
    summary: str = ""
    """One sentence."""
    source: str = ""
    """Where the method comes from."""
    indexes: tuple[str, ...] = ()
    """Names of the stored indexes that it uses; empty when it needs none. One that only the remainder uses may be
    missing in a context where `remainder_optional` is set."""
    keep_ratio: float | None = None
    """Fraction of the keys."""
    target_mass: float | None = None
    """Fraction of the attention weight."""
    token_budget: int | None = None
    """Number of keys."""
    budget: str = ""
    """That budget for people to read (for example "5.00%"); empty for methods that attend to everything."""
    remainder: str = ""
    """What becomes of the keys that are not selected: "dropped", "monopole", "centred" or "coarse"; empty for methods
    that attend to everything."""
    remainder_optional: bool = False
    """Whether a context without the remainder's clusters is served as well, with those keys dropped."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """All that the method is made with, as text: parameters of its indexes ("query_tables.subspaces": "16"), search
    options ("search.group": "per_head"), the budget's ("budget.least": "16"), "sinks", "recent" and
    "append_block"."""
    index: str = ""
    """Name of the index that is searched, stored or not; empty for methods that attend to everything."""
    partition: str = ""
    """Name of the index whose clusters stand for what is not selected; empty when that is dropped."""
    bytes_per_token: float = 0.0
    """Bytes of its stored indexes together per token, KV head and layer, for a long context. Indexes that several
    methods use are stored once."""


@dataclass(frozen=True, slots=True)
class MethodList:
    """Response of ListMethods."""

    methods: tuple[MethodInfo, ...] = ()
    """All methods of this server. Which of them a context supports is listed in the context."""
    head_dim: int = 0
    """Dimension of the loaded model's heads, which the sizes below and in the methods are for."""
    dtype: str = ""
    """Number type in which keys and values of this server's contexts are stored."""
    kv_bytes_per_token: float = 0.0
    """Bytes of keys and values themselves per token, KV head and layer, for comparison."""


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """What a server does now, and did since it started. Fields that say so only grow: the difference of two calls is
    what happened between them."""

    model: str = ""
    """Name of the model that is served."""
    waiting: int = 0
    """Requests that wait for a free session, or for the memory that it may need."""
    prompting: int = 0
    """Requests whose prompts are being read."""
    decoding: int = 0
    """Requests that generate."""
    requests: int = 0
    """Requests in the server: those above, and those that wait until their contexts are in memory."""
    session_bytes: int = 0
    """Most bytes that the sessions of admitted requests may come to hold."""
    session_limit_bytes: int = 0
    """The bound of `session_bytes`."""
    context_bytes: int = 0
    """Bytes of contexts in memory, or being loaded, of the host and of a GPU together."""
    context_used_bytes: int = 0
    """The part of `context_bytes` that is in use."""
    context_limit_bytes: int = 0
    """The bound of `context_bytes`."""
    contexts: int = 0
    """Contexts in memory."""
    context_loads: int = 0
    """Times that a context was loaded; it grows."""
    context_hits: int = 0
    """Times that a context was found in memory; it grows."""
    context_evictions: int = 0
    """Times that a context was dropped for another one; it grows."""
    steps: int = 0
    """Turns of the scheduler; it grows. In each some prompts are read, and everybody who generates gets a token."""
    prompt_tokens: int = 0
    """Tokens of prompts that were fed to the model; it grows."""
    decode_steps: int = 0
    """Turns in which somebody generated; it grows."""
    decode_tokens: int = 0
    """Tokens that were fed in these turns, one for each who generated; it grows. Divided by `decode_steps` it is the
    mean batch."""
    decode_batch: int = 0
    """Requests that generated in the latest turn."""
    context_device_bytes: int = 0
    """The part of `context_bytes` that is memory of a GPU."""
    context_device_used_bytes: int = 0
    """The part of `context_used_bytes` that is memory of a GPU."""
    context_device_limit_bytes: int = 0
    """The part of `context_limit_bytes` that is memory of a GPU; 0 without one."""
    host_bytes_read: int = 0
    """Sum of the field of that name in `Timings`, over requests that have ended; it grows."""
    rows_reused: int = 0
    """Sum of the field of that name in `Timings`, over requests that have ended; it grows."""
    device_wait_for_host_ns: int = 0
    """Sum of the field of that name in `Timings`, over requests that have ended; it grows."""
    open_calls: int = 0
    """Calls of all kinds, this one included."""
    unfinished_calls: int = 0
    """Calls whose message has not come."""
    unread_answers: int = 0
    """Calls whose answers wait for their clients to read them, finished generations among them."""
    plain_requests: int = 0
    """Requests that named no context; it grows."""
    found_beginnings: int = 0
    """Those of them for which a stored beginning was found; it grows."""
    found_tokens: int = 0
    """Tokens of these beginnings, which were not read; it grows."""
    kept_beginnings: int = 0
    """Beginnings that came again and were ordered as contexts (`serve --keep-beginnings`); it grows."""
    removed_beginnings: int = 0
    """Such contexts that were removed for others, since they were not used for longest; it grows."""
    method_choices: tuple[str, ...] = ()
    """What is chosen for requests that leave the method to the server, for people to read: from which length of a
    context on a method takes less time than full attention, by placement, and how often each was chosen."""
    max_positions: int = 0
    """Positions of the model: most tokens that context, prompt and answer have together."""
    template_reads: tuple[str, ...] = ()
    """What the model's chat template reads beside roles, contents, calls and tools: variables that a request cannot
    set ("enable_thinking"), and "name" where it says who speaks."""
    objects_pending: int = 0
    """Contexts that the object store does not have as they are now (`serve --objects`)."""
    objects_pending_bytes: int = 0
    """Bytes of these contexts."""
    objects_fetching: int = 0
    """Contexts that are being fetched from the object store."""
    objects_problem: str = ""
    """What keeps some contexts from being uploaded, for people to read; empty where nothing does."""
    audit_lines_lost: int = 0
    """Calls that the audit log lacks, since their lines could not be written, as on a full disk; the log says why."""
    objects_mended: int = 0
    """Contexts that were found damaged on the disk or in the object store, and were made whole from the other one."""


@dataclass(frozen=True, slots=True)
class TenantLimit:
    """One limit."""

    name: str = ""
    """Its name in the file of quotas."""
    used: int = 0
    """What is used of it now; of a limit per minute what was used and has not come back. 0 without a limit per
    minute."""
    allowed: int | None = None
    """What is allowed; unset without a limit."""


@dataclass(frozen=True, slots=True)
class TenantUse:
    """What a tenant uses, held against its quota."""

    name: str = ""
    """The tenant's name; empty for callers without one."""
    weight: float = 0.0
    """What it gets of turns where tenants want more than there is; 1 is usual."""
    limits: tuple[TenantLimit, ...] = ()
    """All limits that there are."""
    requests: int = 0
    """Requests that were let in; it grows."""
    prompt_tokens: int = 0
    """Tokens of prompts that were read; it grows."""
    generated_tokens: int = 0
    """Tokens that were generated; it grows."""
    refused: int = 0
    """Requests that the quota refused; it grows."""


@dataclass(frozen=True, slots=True)
class TenantList:
    """The use of tenants."""

    tenants: tuple[TenantUse, ...] = ()
    """The tenants, by name: those that the quotas name, and others that asked for something lately."""
    quotas_problem: str = ""
    """Why the file of quotas is not in force as it is now, and an older one is; empty where it is. Told to admins."""


class GenerateFields(TypedDict, total=False):
    """Request of Generate."""

    text: str | None
    """Text that continues the context word for word. Special tokens written out in it are ordinary text."""
    question: str | None
    """A question: the same as `messages` with one message of role USER."""
    max_tokens: int | None
    """Most tokens to generate; 0 means 256. Fewer where the model's positions end before that
    (`Usage.max_tokens`)."""
    temperature: float | None
    """Divides the logits before sampling, 0 to 100; 0 (the default) always takes the likeliest token."""
    top_p: float | None
    """Sample from the smallest set of tokens whose probability reaches this, above 0 and at most 1; unset means 1."""
    top_k: int | None
    """Sample from this many likeliest tokens; 0 (the default) means all of them."""
    seed: int | None
    """Seed of the sampling: on one server the same request with the same seed samples the same tokens, whatever
    requests run beside it. Unset means a new seed for every request. Requests with a seed cost the server more, see
    docs/architecture.md."""
    stop: str | Sequence[str] | None
    """Up to 16 texts of 1 to 256 characters; generation ends where one of them would appear, and it is not sent."""
    method: str | None
    """How keys are found and attended: a method of ListMethods, possibly with another remainder, a period of searches
    and options of search and windows, as PRESET[+REMAINDER][@period=P][@OPTION=VALUE]. For example "refined",
    "oracle+centred", "refined@period=4", "csattention@group=pooled". A period is 1 to 64; windows (sinks, recent,
    append_block) reach to the model's positions, append_block from 16 on. At most 128 characters. "auto" means what
    takes less time, by steps that were timed while there was nothing else to do: full attention or the context's
    `default_method` with its `default_budget`; always the latter for a request with `keep`, with a seed that samples,
    or with a budget or search period of its own. Empty means what the server was started with (`serve --method`):
    "auto", or the context's `default_method`."""
    keep_ratio: float | None
    """Fraction of the keys, above 0 and at most 1. A method that cuts at a threshold takes the one that was
    calibrated to keep this fraction on average."""
    target_mass: float | None
    """Fraction of every query head's attention weight that the kept keys hold, above 0 and at most 1."""
    token_budget: int | None
    """Number of keys, at least 1, whatever the length of the context."""
    search_period: int | None
    """Decode steps that one search serves, 1 to 64; 0 (the default) means what `method` says, else 1. Takes the place
    of a period in `method`. Longer periods cost less time and lose answers: measure before use."""
    n: int | None
    """Answers to generate, 1 to 16, and no more than the server has sessions; 0 (the default) means 1. The prompt is
    read once. Each answer samples by a seed of its own: the first by `seed`, answer i by `seed` + i *
    0x9E3779B97F4A7C15 modulo 2^64, which its summary tells. More than one needs a temperature: they would all be the
    same. If one fails, the call does."""
    top_logprobs: int | None
    """Set where log probabilities are wanted: how many likeliest tokens are told beside each token, 0 to 20.
    Probabilities are those of the model's exact output with the method in use, before temperature, penalties, biases
    and constraints."""
    prompt_logprobs: bool | None
    """Whether log probabilities of the prompt's tokens are wanted, but of the first, before which only the stored
    context stands; with as many alternatives as `top_logprobs` says. Needs a prompt of at most 4,096 tokens. Without
    `context` all of it is read."""
    presence_penalty: float | None
    """Is taken from the logits of tokens that the answer contains, -2 to 2; 0 (the default) changes nothing."""
    frequency_penalty: float | None
    """Is taken from the logits of tokens for every time that the answer contains them, -2 to 2; 0 (the default)
    changes nothing."""
    repetition_penalty: float | None
    """Divides positive logits of tokens that prompt or answer contain, and multiplies negative ones, 0.01 to 100; 0
    (the default) and 1 change nothing. The context that the request names does not count."""
    logit_bias: Mapping[int, float] | None
    """Is added to the logits of these tokens, -100 to 100; at most 300 tokens. After the penalties."""
    stop_token_ids: Sequence[int] | None
    """Tokens that end the answer, besides the model's own; at most 64. Their text is not sent."""
    min_tokens: int | None
    """Tokens before which neither a stop string nor a token that ends the answer is accepted, 0 to `max_tokens`; 0 is
    the default."""
    explain: bool | None
    """Whether the summary tells why the answer came as it did (`GenerationSummary.explanation`)."""
    map_every: int | None
    """Has one in so many tokens of the first answer told where in the context it was looked for
    (`GenerateResponse.looks`), 1 to 1,024, of 256 tokens at most; 0 (the default) tells nothing. "auto" then means
    the context's `default_method`, since full attention selects nothing. Such a request costs more: on a GPU its
    steps go the general path."""
    priority: int | None
    """Of the requests of the caller's tenant that wait, those of a higher priority are admitted first, -100 to 100; 0
    is the default. It counts nothing against other tenants."""
    ignore_eos: bool | None
    """Whether the answer goes on behind the model's own tokens that end one, up to `max_tokens`; `stop` and
    `stop_token_ids` still end it. Such tokens count as all others, and what is kept has them; their text is not
    sent."""


class CreateFields(TypedDict, total=False):
    """Request of CreateContext."""

    display_name: str | None
    """What people call the context: at most 500 printable characters. Empty: the first words of the document, with
    digits of its id where they are a name already; a context that is there keeps its name."""
    ttl_s: float | None
    """Time from its publication until it expires, 1 second to 36,500 days; unset for a context that never does. Of a
    context that is there already, the time is counted anew; unset, it stays as it is."""
    methods: str | Sequence[str] | None
    """Names of the methods whose indexes to build, each once, at most 16. Empty: the default method (`refined`)."""
    request_id: str | None
    """Makes repeats harmless (AIP-155): 1 to 128 printable characters that the client chose for this request, best a
    random UUID. A repeat of the request returns the operation of the first; another request of the same id is
    INVALID_ARGUMENT."""
    priority: int | None
    """Jobs of a higher priority are taken first: -100 to 100."""
    parent: str | None
    """Name of a context that the new one continues, `contexts/{context}`: a child, which stores the keys and values
    of its own tokens alone and has its parent's indexes. `text`, `token_ids` and `upload` follow the parent's tokens
    word for word; `messages` are further turns of a parent that was made of messages. `methods` is empty then."""
    labels: Mapping[str, str] | None
    """Labels of the context, as Context.labels. A context that is there keeps those of other keys."""
    rows: str | None
    """How exact keys and values are stored: "dtype", in the server's number type, or "int8", in 8 bits a number, four
    of which are the coarse copy that `refined` searches. Empty: "dtype". Only "dtype" goes with `parent`."""
    move_name: bool | None
    """Once the context is there, takes `display_name` from the one that has it, which keeps its id, and is called by
    digits of it, too: a name that moves to a new edition."""
    renew_s: float | None
    """Context.renew, 1 second to 36,500 days; the first time to live where `ttl` is unset. Of a context that is there
    already it is set anew; unset, it stays as it is."""


CLASSES: Mapping[str, type[Any]] = {
    "sparsekv.v1.Context.Index": IndexInfo,
    "sparsekv.v1.Context": ContextInfo,
    "sparsekv.v1.ListContextsResponse": ContextPage,
    "sparsekv.v1.WarmContextResponse": WarmResult,
    "sparsekv.v1.CreateContextMetadata": OperationState,
    "sparsekv.v1.Upload": UploadInfo,
    "sparsekv.v1.TokenLogprob.Alternative": Alternative,
    "sparsekv.v1.TokenLogprob": TokenLogprob,
    "sparsekv.v1.ToolCallPart": ToolCallPart,
    "sparsekv.v1.Look.Layers": LayersLooked,
    "sparsekv.v1.Look": Look,
    "sparsekv.v1.GenerateResponse": Piece,
    "sparsekv.v1.Waiting": Waiting,
    "sparsekv.v1.Usage": Usage,
    "sparsekv.v1.Timings": Timings,
    "sparsekv.v1.SelectionFigures": SelectionFigures,
    "sparsekv.v1.Explanation": Explanation,
    "sparsekv.v1.GenerationSummary": Summary,
    "sparsekv.v1.TokenizeResponse": TokenizedText,
    "sparsekv.v1.Method": MethodInfo,
    "sparsekv.v1.ListMethodsResponse": MethodList,
    "sparsekv.v1.ServerStatus": ServerStatus,
    "sparsekv.v1.Tenant.Limit": TenantLimit,
    "sparsekv.v1.Tenant": TenantUse,
    "sparsekv.v1.ListTenantsResponse": TenantList,
}
"""The class of each message, by its full name."""
