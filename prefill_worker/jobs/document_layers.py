"""The model reads the document, while its layers are written; then their indexes are built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial

from index_store.cli.progress import Reporter
from index_store.errors import InvalidArgumentError, SparseKVError
from index_store.methods.index_specs import IndexSpec
from index_store.models.attention_reading import logit_cap
from index_store.store.description.dtypes import dtype_name, stored_dtype
from index_store.store.description.json_fields import Scalar
from index_store.store.stored_context import Context
from index_store.store.writer import ContextWriter
from prefill_worker.build.index_choice import check_build
from prefill_worker.build.kv_placement import (
    DeviceMeter,
    KvPlacement,
    UsedMemory,
    device_limit,
    place_kv,
    weight_bytes,
)
from prefill_worker.build.layer_writing import LayerWriting, WrittenLayers
from prefill_worker.build.stages import Clock
from prefill_worker.build.stored_rows import StoredRows
from prefill_worker.jobs.beginnings import TakenBeginning
from prefill_worker.jobs.means import DEFAULT_MEANS, Means
from prefill_worker.jobs.prepared_job import PreparedJob
from prefill_worker.muse.ranges import RangeAttention
from prefill_worker.reading.capture import Capture
from prefill_worker.reading.prefill import run_context, run_prompts


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
        if config.muse is not None and logit_cap(loaded.readings) is not None:
            raise InvalidArgumentError(
                f"--attention muse cannot approximate capped logits, which model {job.identity.name!r} has; "
                "leave it out"
            )
        for spec in specs:
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
