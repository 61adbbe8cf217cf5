"""What a job knows before it loads the model: its tokens, its indexes, the id of its context, what it will need; and
what it ends with.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from index_store.cli.documents import STANDARD_INPUT, document_name, read_document, read_messages, read_text
from index_store.errors import InvalidArgumentError, StoreFullError
from index_store.jobs.job_record import ReadingOptions
from index_store.methods.method import IndexSpec
from index_store.models.attention_reading import feed_forward_width
from index_store.models.conversation.messages import Message, Role
from index_store.models.conversation.turns import StoredConversation
from index_store.models.loading import (
    ModelFolder,
    Tokenizer,
    check_positions,
    checkpoint_dtype,
    identify,
    load_tokenizer,
)
from index_store.store.description.array_entry import ArrayEntry, kv_entry, plane_entry, window_entry
from index_store.store.description.context_id import ModelIdentity, context_id
from index_store.store.description.dtypes import INT8, stored_dtype
from index_store.store.description.manifest import Manifest
from prefill_worker.build import dense_layers as rule
from prefill_worker.build.dense_layers import Selectivity
from prefill_worker.build.index_choice import (
    ChosenIndexes,
    check_build,
    check_centroids,
    choose_indexes,
    with_high_plane,
)
from prefill_worker.build.kv_placement import LIBRARY_BYTES, JobSizes, UsedMemory
from prefill_worker.config import PrefillConfig, parse_dense_layers
from prefill_worker.muse.ranges import planned_bytes
from prefill_worker.reading.query_sample import SampledPositions, plan_sample


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """`created` is False when the store had the context already; `seconds` then are those of what was added.

    changed: of a context that was there, a few words on each of "indexes", "methods", "name", "ttl" that was changed.
    memory: what reading took; None where nothing was read.
    """

    manifest: Manifest
    created: bool
    seconds: Mapping[str, float]
    changed: Mapping[str, str] = field(default_factory=dict)
    memory: UsedMemory | None = None


def read_prompts(path: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of the example prompts in a calibration file.

    Plain text: one question per line, worded by the model's chat template. `.jsonl`: one object per line, either
    {"question": text} (worded by the chat template) or {"prompt": text} (taken word for word). An "answer" beside it,
    as `make-document --questions` writes it, is passed over.
    Raises InvalidArgumentError naming file and line of what cannot be used.
    """
    try:
        text = read_text(path)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"--calibration: {error.message}") from error
    prompts = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        jsonl = path.suffix == ".jsonl"
        ids = _json_prompt(line, where, tokenizer) if jsonl else _question(line.strip(), tokenizer)
        if not ids:
            raise InvalidArgumentError(f"{where}: the prompt is empty")
        prompts.append(ids)
    if not prompts:
        raise InvalidArgumentError(f"calibration file {path} has no prompts; expected one per line")
    return prompts


def fingerprint_prompts(prompts: Sequence[Sequence[int]]) -> str:
    """SHA-256 over the prompts' token ids; empty without prompts."""
    if not prompts:
        return ""
    return hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode()).hexdigest()


def _question(text: str, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode_turns((Message(Role.USER, text),)) if text else []


def _json_prompt(line: str, where: str, tokenizer: Tokenizer) -> list[int]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InvalidArgumentError(f"{where}: not JSON: {error}") from None
    given = sorted(set(entry) - {"answer"}) if isinstance(entry, dict) else []
    if given not in (["prompt"], ["question"]) or not isinstance(entry[given[0]], str):
        found = f"the members {', '.join(map(ascii, given))[:80]}" if len(given) > 1 else line.strip()[:80]
        raise InvalidArgumentError(
            f'{where}: expected {{"prompt": text}} or {{"question": text}}, perhaps with an "answer", got {found}'
        )
    text: str = entry[given[0]]
    return _question(text, tokenizer) if given == ["question"] else tokenizer.encode_behind(text)


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A document and what to make of it, checked as far as that goes before the model is loaded.

    title: name of the context where it is new and the configuration gives none. labels: that it gets. owner: who asked
    for it, "" where nobody was asked for a name. traceparent: the span in which it is done, "" without one.
    """

    config: PrefillConfig
    folder: ModelFolder
    identity: ModelIdentity
    dtype: str
    token_ids: Sequence[int]
    prompts: Sequence[Sequence[int]]
    chosen: ChosenIndexes
    title: str
    conversation: StoredConversation | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    owner: str = ""
    traceparent: str = ""

    def reading(self) -> dict[str, object]:
        """What, besides model, dtype, salt, tenant and tokens, decides what a context is before any index is built."""
        config = self.config
        options = ReadingOptions(
            self.given_dense_layers,
            config.query_sample,
            config.seed,
            fingerprint_prompts(self.prompts),
            None if config.muse is None else config.muse.describe(),
            config.rows,
        ).describe()
        return options if self.conversation is None else {**options, "messages": True}

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.identity.query_heads // self.identity.kv_heads

    def sampled_positions(self, start: int = 0) -> SampledPositions:
        """The positions from `start` on whose queries are sampled."""
        rows = max(1, self.config.query_sample // self.group)
        lengths = [len(prompt) for prompt in self.prompts]
        planned = plan_sample(len(self.token_ids) - start, lengths, rows, self.config.seed)
        return replace(planned, context_P=planned.context_P + start)

    def sampled_queries(self) -> int:
        """Queries that the index of one KV head is built from."""
        return self.sampled_positions().rows * self.group

    def sizes(self, model: Any, specs: Sequence[IndexSpec]) -> JobSizes:
        """What decides how much memory the job needs with this model to build these indexes."""
        index_row = sum(spec.built.bytes_per_token(self.identity.head_dim) for spec in specs)
        tokens, muse, weight = len(self.token_ids), self.config.muse, next(model.parameters())
        compute = weight.dtype
        return JobSizes(
            self.identity,
            tokens=tokens,
            chunk=self.config.pass_tokens,
            sampled=self.sampled_positions().rows,
            feed_forward=feed_forward_width(model.config),
            index_bytes=int(tokens * self.identity.kv_heads * index_row),
            kv_dtype=stored_dtype(self.dtype).torch_dtype,
            compute_dtype=compute,
            approximation_bytes=0 if muse is None else planned_bytes(muse, self.identity, tokens, compute),
            library_bytes=LIBRARY_BYTES if weight.is_cuda else 0,
            pass_flag="--chunk" if muse is None else "--muse-block",
        )

    @property
    def state_marks(self) -> int:
        """Places before the document's end behind which states are kept."""
        every = self.config.state_marks
        return 0 if every is None else (len(self.token_ids) - 1) // every

    @property
    def given_dense_layers(self) -> tuple[int, ...] | None:
        """The dense layers that the job was told; None when they are to be measured."""
        return parse_dense_layers(self.config.dense_layers)

    def dense_layers(self, measured: Sequence[Selectivity]) -> tuple[int, ...]:
        """Those given, otherwise those whose attention was measured to be flat."""
        given = self.given_dense_layers
        return rule.choose_dense_layers(measured) if given is None else given

    def kv_entry(self) -> ArrayEntry:
        """The array of keys and values, or of what is in no index of them."""
        if self.config.rows == INT8:
            return plane_entry(self.identity, len(self.token_ids))
        return kv_entry(self.identity, len(self.token_ids), self.dtype)

    def id(self) -> str:
        config = self.config
        return context_id(
            self.identity, self.dtype, self.reading(), config.salt, self.token_ids, config.tenant
        )


def prepare_job(
    config: PrefillConfig, folder: ModelFolder, identity: ModelIdentity, standard_input: BinaryIO
) -> PreparedJob:
    """Reads the inputs and checks everything that can be checked without running the model.

    Raises SparseKVError with a sentence for what cannot be used.
    """
    chosen = _choices(config, identity)
    tokenizer = load_tokenizer(folder, identity.tokenizer_fingerprint)
    conversation: StoredConversation | None = None
    if config.messages is not None:
        messages = read_messages(config.messages, standard_input)
        token_ids, conversation = tokenizer.begin_conversation(messages)
    else:
        token_ids = document_tokens(tokenizer, read_document(config.input, standard_input))
    prompts = [] if config.calibration is None else read_prompts(config.calibration, tokenizer)
    title = document_name(config.input or (config.messages or STANDARD_INPUT,))
    return _checked(config, folder, identity, chosen, token_ids, prompts, title, conversation)


def document_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a document's tokens, behind those that the model begins every text with."""
    return [*tokenizer.prefix_ids, *tokenizer.encode(text)]


def job_over_tokens(
    config: PrefillConfig,
    folder: ModelFolder,
    token_ids: Sequence[int],
    title: str,
    conversation: StoredConversation | None = None,
) -> PreparedJob:
    """A job over tokens; what the configuration says of inputs does not count. Raises as `prepare_job` does.

    conversation: the messages that the tokens are.
    """
    identity = identify(folder)
    chosen = _choices(config, identity)
    return _checked(config, folder, identity, chosen, token_ids, (), title, conversation)


def _choices(config: PrefillConfig, identity: ModelIdentity) -> ChosenIndexes:
    """What can be known without the document."""
    chosen = choose_indexes(config.methods, config.index)
    if config.rows == INT8:
        chosen = with_high_plane(chosen, identity)
    dense = parse_dense_layers(config.dense_layers)
    if dense and dense[-1] >= identity.layers:
        raise InvalidArgumentError(
            f"--dense-layers names layer {dense[-1]}, model {identity.name!r} has layers 0 to {identity.layers - 1}"
        )
    every = config.state_marks
    if every is not None and identity.states is None:
        raise InvalidArgumentError(
            f"--state-marks is given, model {identity.name!r} has no states; leave it out"
        )
    if every is not None and every % config.pass_tokens:
        raise InvalidArgumentError(
            f"--state-marks is {every}, expected a multiple of the {config.pass_tokens} tokens of a pass (--chunk)"
        )
    return chosen


def _checked(
    config: PrefillConfig,
    folder: ModelFolder,
    identity: ModelIdentity,
    chosen: ChosenIndexes,
    token_ids: Sequence[int],
    prompts: Sequence[Sequence[int]],
    title: str,
    conversation: StoredConversation | None = None,
) -> PreparedJob:
    check_positions(identity, len(token_ids) + max((len(prompt) for prompt in prompts), default=0))
    dtype = checkpoint_dtype(folder) if config.dtype == "auto" else config.dtype
    job = PreparedJob(config, folder, identity, dtype, token_ids, prompts, chosen, title, conversation)
    check_centroids(chosen, job.sampled_queries())
    # Whether the model's rotary embedding suits is known when the model is loaded.
    frequencies = torch.ones(identity.head_dim // 2)
    for spec in chosen.specs:
        check_build(spec, identity, frequencies)
    return job


def check_space(job: PreparedJob) -> None:
    """Raises StoreFullError before any work when not even keys and values can fit."""
    window = window_entry(job.identity, len(job.token_ids), job.dtype)
    needed = job.kv_entry().nbytes + (0 if window is None else window.nbytes)
    free = shutil.disk_usage(job.config.store).free
    if needed > free:
        raise StoreFullError(
            f"{job.config.store}: keys and values take {needed} bytes, {free} are free; nothing was written. "
            "Free space (`index-store gc`, `index-store rm`) and run again",
            needed=needed,
            free=free,
        )
