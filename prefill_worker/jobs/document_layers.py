"""The model reads the document, while its layers are written; then their indexes are built.

Of a document that begins as a stored context does, keys and values are taken, and only the rest is computed. What is
taken is what a prefill in one go would make, bit for bit: exact attention, the same chunks, whole ones only, on the
same kind of device, and rows that are stored as they were computed. The sample of queries is another: of what was
taken, the few that the store has; and so that indexes have enough to be built from, as many tokens at the end as the
sample has rows are always computed.

Shape legend: S sampled positions among the tokens that are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from index_store.cli.console import Reporter
from index_store.errors import InvalidArgumentError, SparseKVError
from index_store.family.prefixes import longest_beginning
from index_store.indexes.coarse_rows.two_planes import read_rows
from index_store.methods.method import IndexSpec
from index_store.models.attention_reading import logit_cap
from index_store.models.loading import LoadedModel, ModelFolder, load_model
from index_store.store.catalog import Store
from index_store.store.description.context_id import ModelIdentity, first_digest
from index_store.store.description.dtypes import AS_DTYPE, dtype_name, stored_dtype
from index_store.store.description.json_fields import Scalar
from index_store.store.description.manifest import STATE_MARKS, Manifest
from index_store.store.stored_context import Context
from index_store.store.writer import ContextWriter
from prefill_worker.build.checkpoint import Checkpoint
from prefill_worker.build.index_choice import check_build
from prefill_worker.build.kv_placement import (
    DeviceMeter,
    KvPlacement,
    UsedMemory,
    device_limit,
    place_kv,
    weight_bytes,
)
from prefill_worker.build.layer_writing import LayerWriting, StoredRows, WrittenLayers
from prefill_worker.build.stages import Clock
from prefill_worker.jobs.prepared_job import PreparedJob
from prefill_worker.muse.ranges import RangeAttention
from prefill_worker.reading.capture import Capture, register_attention
from prefill_worker.reading.prefill import check_capture, run_context, run_prompts
from prefill_worker.reading.query_sample import SampledPositions

Load = Callable[[ModelFolder, torch.device], tuple[LoadedModel, Tensor | None]]
"""A model ready to be read with, and the [d/2] inverse frequencies of its rotary embedding, where it has that form."""


def load_for_reading(folder: ModelFolder, device: torch.device) -> tuple[LoadedModel, Tensor | None]:
    """Loads a model and compares it with itself. Raises ModelUnsupportedError."""
    loaded = load_model(folder, register_attention(), device=device)
    return loaded, check_capture(loaded)


class KeptModel:
    """Loads a model once, for all jobs of a worker."""

    def __init__(self) -> None:
        self._loaded: tuple[LoadedModel, Tensor | None] | None = None

    def load(self, folder: ModelFolder, device: torch.device) -> tuple[LoadedModel, Tensor | None]:
        """The model of the first call."""
        if self._loaded is None:
            self._loaded = load_for_reading(folder, device)
        return self._loaded


@dataclass(frozen=True, slots=True)
class Means:
    """load: where the model comes from. stays: whether its weights stay in memory after the reading.

    checkpoint: where the job leaves what another one can go on from; None without. writing: the folder in which the
    context is written until it is published; None for one that the store removes. store: the job's, where it is open
    already: then its contexts are known, and not read again.
    """

    load: Load = load_for_reading
    stays: bool = False
    checkpoint: Checkpoint | None = None
    writing: Path | None = None
    store: Store | None = None


DEFAULT_MEANS = Means()
"""Of a job that runs alone."""


_SAME = ("chunk", "attention", "device")
"""Notes of a manifest that decide how tokens were computed."""


@dataclass(frozen=True, slots=True)
class TakenBeginning:
    """The first `tokens` tokens, whole chunks, of a stored context."""

    store: Store
    manifest: Manifest
    tokens: int

    def describe(self) -> dict[str, Scalar]:
        """As the new context's manifest notes it."""
        return {"taken_tokens": self.tokens, "taken_from": self.manifest.id}

    def told(self, of: int) -> str:
        """For people. of: tokens of the document."""
        rest = of - self.tokens
        return f"{self.tokens} tokens are taken from context {self.manifest.id[:12]}, {rest} are computed"

    def sampled(self, job: PreparedJob) -> SampledPositions:
        """What the store has of the beginning, and of the rest what a document of its own would have."""
        rest = job.sampled_positions(self.tokens)
        return SampledPositions(torch.cat([self._stored_S(), rest.context_P]), rest.prompts)

    def fill(self, capture: Capture) -> None:
        """Gives keys, values and queries to a capture. Raises what `Store.open` and reading raise."""
        with self.store.open(self.manifest.id, self.manifest) as context:
            for layer in range(self.manifest.model.layers):
                self.store.bounded(lambda layer=layer: self._fill_layer(context, capture, layer))  # type: ignore[misc]
            marks = [
                mark for mark in self.manifest.state_marks if mark < self.tokens and capture.is_mark(mark)
            ]
            for tokens in (*marks, self.tokens):
                capture.take_state(context.state(tokens), self.manifest.dtype, tokens)

    def _fill_layer(self, context: Context, capture: Capture, layer: int) -> None:
        kv = read_rows(context, layer).to(capture.kv_dtype)
        queries = None
        if self.manifest.queries is not None and layer in self.manifest.model.full_layers:
            queries = context.queries(layer).queries_HPGD[:, : len(self._stored_S())]
        first = self.manifest.token_count - kv.shape[1]  # of those kept, in a layer with a window
        kept = kv[:, : self.tokens - first]
        capture.take(layer, kept.to(capture.device), queries)

    def _stored_S(self) -> Tensor:
        positions = torch.tensor(self.manifest.query_positions, dtype=torch.int64)
        return positions[positions < self.tokens]


def find_beginning(job: PreparedJob, store: Store, id_: str) -> TakenBeginning | None:
    """The stored context that most can be taken of; None where there is none that suits.

    id_: of the job's own, which may be there, damaged.
    """
    config, chunk = job.config, job.config.pass_tokens
    wanted = {"chunk": chunk, "attention": config.attention, "device": config.torch_device.type}
    if config.muse is not None:
        return None

    def suits(manifest: Manifest) -> bool:
        return (
            manifest.id != id_
            and manifest.tenant == config.tenant
            and manifest.rows == AS_DTYPE
            and all(manifest.prefill.get(note) == wanted[note] for note in _SAME)
        )

    first = first_digest(job.identity, job.dtype, config.salt, config.tenant)
    found = longest_beginning(store, first, list(job.token_ids), suits)
    if found is None:
        return None
    rest = max(1, config.query_sample // job.group)
    tokens = min(found.tokens, len(job.token_ids) - rest) // chunk * chunk
    window = job.identity.window
    if window is not None and tokens < found.manifest.token_count > window.size:
        return None  # of layers with a window the store has the last rows alone
    if job.identity.states is not None:
        own = found.manifest.prefill.get(STATE_MARKS)
        if config.state_marks is not None and not (isinstance(own, int) and config.state_marks % own == 0):
            return None  # its own marks lie where none are
        behind = (*found.manifest.state_marks, found.manifest.token_count)
        tokens = max((each for each in behind if each <= tokens and each % chunk == 0), default=0)
    return TakenBeginning(store, found.manifest, tokens) if tokens > 0 else None


def _check_approximation(identity: ModelIdentity, cap: float | None) -> None:
    if cap is not None or identity.index_keys:
        what = "capped logits" if cap is not None else "an index of its own"
        raise InvalidArgumentError(
            f"--attention muse cannot approximate {what}, which model {identity.name!r} has; leave it out"
        )


def write_layers(
    job: PreparedJob,
    specs: Sequence[IndexSpec],
    writer: ContextWriter,
    clock: Clock,
    reporter: Reporter,
    present: Context | None = None,
    beginning: TakenBeginning | None = None,
    means: Means = DEFAULT_MEANS,
) -> tuple[WrittenLayers, str, UsedMemory, Mapping[str, Scalar]]:
    """Runs the model, builds and writes all layers: what was written, the dtype it computed in, the memory it took.

    present: the context as the store has it; then only indexes are written, over the keys and values that it has, and
    of the reading only the queries count. beginning: tokens that are taken from another context, unless that cannot be
    read any more; what was taken is returned as the manifest notes it. Keys and values are written as they come. On a
    device layers are built as soon as the last chunk has passed them, unless calibration prompts, whose queries belong
    to the sample, follow. A checkpoint is gone on from, rather than anything taken, and what is read is kept there,
    unless something was taken.
    """
    config = job.config
    kv_dtype = stored_dtype(job.dtype).torch_dtype
    with clock("load"):
        loaded, frequencies = means.load(job.folder, config.torch_device)
        if config.muse is not None:
            _check_approximation(job.identity, logit_cap(loaded.readings))
        for spec in specs if job.identity.searched_layers else ():
            check_build(spec, job.identity, frequencies, kv_dtype, config.torch_device)
    compute = next(loaded.model.parameters()).dtype
    placement = place_kv(
        job.sizes(loaded.model, specs), device_limit(config.torch_device, config.device_memory)
    )
    if placement.block_tokens is not None:
        reporter.note(placement.describe())
    meter = DeviceMeter(config.torch_device)
    if means.checkpoint is not None and means.checkpoint.begun:
        beginning = None
    capture, taken = _begun_capture(job, placement, beginning, clock, reporter)
    rows = capture if present is None else StoredRows(present, config.torch_device, capture)
    kept = means.checkpoint if taken is None else None
    keeper = kept if present is None else None  # layers of an index that is added are not kept
    with (
        closing(capture),
        LayerWriting(writer, rows, frequencies, config.seed, clock, keeper=keeper) as writing,
    ):
        first = 0 if taken is None else taken.tokens
        if kept is not None:
            first = kept.restore(capture)
        new = present is None
        measure = new and job.given_dense_layers is None
        writing.begin(specs, capture if new else None, measure=measure, rows=config.rows)
        if writing.adopted:
            reporter.note(f"went on with {writing.adopted} layers that were written before")
        early = capture.device.type == "cuda" and not job.prompts

        def leave(layer: int, start: int, count: int) -> None:
            writing.passed(layer, start, count)
            if early and start + count == len(job.token_ids):
                capture.settle()
                writing.add(layer)

        for layer in range(job.identity.layers) if first else ():
            writing.passed(layer, 0, first)
        capture.when_passed(leave)
        with clock("prefill"), reporter.phase("prefill", "tokens") as update:
            passed = None if kept is None else partial(kept.keep, capture)
            run_context(loaded.model, capture, job.token_ids, config.pass_tokens, update, first, passed)
        if job.prompts:
            with clock("calibration"), reporter.phase("calibration", "prompts") as update:
                run_prompts(loaded.model, capture, job.prompts, config.prompt_tokens, update)
        if not means.stays:
            weights = weight_bytes(loaded.model)
            del loaded  # the weights have done their part
            meter.without(weights)
        with clock("layers"), reporter.phase("index", "layers") as update:
            written = writing.finish(update)
    notes = {} if taken is None else taken.describe()
    return written, dtype_name(compute), placement.used(meter.peak()), notes


def _begun_capture(
    job: PreparedJob,
    placement: KvPlacement,
    beginning: TakenBeginning | None,
    clock: Clock,
    reporter: Reporter,
) -> tuple[Capture, TakenBeginning | None]:
    """A capture that has the beginning, and what of that could be read."""
    if beginning is not None:
        reporter.note(beginning.told(len(job.token_ids)))
        capture = _make_capture(job, placement, beginning)
        try:
            with clock("taken"):
                beginning.fill(capture)
            return capture, beginning
        except SparseKVError as error:
            capture.close()
            reporter.note(f"nothing is taken, all is computed: {error.message}")
        except BaseException:
            capture.close()
            raise
    return _make_capture(job, placement, None), None


def _make_capture(job: PreparedJob, placement: KvPlacement, beginning: TakenBeginning | None) -> Capture:
    config, identity = job.config, job.identity
    return Capture(
        identity,
        len(job.token_ids),
        stored_dtype(job.dtype).torch_dtype,
        job.sampled_positions() if beginning is None else beginning.sampled(job),
        config.torch_device,
        block_tokens=placement.block_tokens,
        approximation=None if config.muse is None else RangeAttention(config.muse, identity.layers),
        state_marks=config.state_marks,
    )


def sync_written(writer: ContextWriter, total: int, clock: Clock, reporter: Reporter) -> None:
    """Waits until what was written, `total` bytes, is durable, before anybody can see it."""
    done = 0
    with clock("sync"), reporter.phase("sync", "bytes") as update:

        def count(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            update(min(done, total), total)

        writer.sync(count)
