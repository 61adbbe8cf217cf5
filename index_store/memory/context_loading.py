"""Loading a context from its files into memory, layer by layer, verifying every checksum on the way.

Rows of int8 index arrays with at least three dimensions start at multiples of 256 bytes of device memory: kernels that
add up table rows read them in whole aligned pieces. Such a tensor's rows are farther apart than they are long, its last
dimension has stride 1, and what lies between rows is arbitrary but allocated. All other tensors are contiguous.

Shape legend: H KV heads, N tokens of the context, d head dim.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError, MemoryBudgetError, StoreError
from index_store.memory.host_memory import HostBlock, PageLocker, aligned, paged
from index_store.memory.placement import SLOT_SHARE, MemoryBytes, Placement, slot_bytes
from index_store.memory.resident import IndexKinds, LayerGate, ResidentContext
from index_store.store.description.array_entry import ArrayEntry
from index_store.store.description.dtypes import STORED_DTYPES
from index_store.store.description.manifest import Manifest
from index_store.store.files.reading import Readers, file_threads
from index_store.store.stored_context import Context

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PIECE_BYTES = 8 * 2**20
"""Of one staging buffer; a file is read and copied in pieces of this size."""


def row_length(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Elements from one row of an array [H, ...] in device memory to the next, padding included."""
    padded = dtype == torch.int8 and len(shape) >= 3
    return aligned(shape[-1]) if padded else shape[-1]


def device_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes that an array takes in device memory, padding included."""
    return torch.Size(shape[:-1]).numel() * row_length(shape, dtype) * dtype.itemsize


class DeviceBlock:
    """One contiguous range of device memory, cut into tensors from its front, with padded rows (see above)."""

    locked_bytes = 0

    def __init__(self, nbytes: int, device: torch.device | str) -> None:
        """Reserves `nbytes`. Raises MemoryBudgetError when the device has not that much left."""
        self._device = torch.device(device)
        try:
            self._raw = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            raise MemoryBudgetError(
                f"device {self._device} refused {nbytes} bytes of memory; lower --device-memory or free some",
                needed=nbytes,
            ) from error
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next part of the block as an uninitialised tensor, its rows padded where the array's kind asks for it."""
        start, nbytes = self._used, device_bytes(shape, dtype)
        self._used = start + aligned(nbytes)
        whole = self._raw[start : start + nbytes].view(dtype).view(*shape[:-1], row_length(shape, dtype))
        return whole[..., : shape[-1]]

    def lock(self) -> None:
        """Nothing to do: device memory stays where it is."""

    def release(self) -> None:
        """Lets go of the memory once the device has done what was asked of it in the stream that all threads use.

        Waiting for the whole device would spoil a graph that another thread captures meanwhile, and fail itself.
        """
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._raw = torch.empty(0, dtype=torch.uint8, device="cpu")


class StagingBuffers:
    """Two page-locked host buffers: one is filled from a file while the other is copied to the device.

    For the thread that makes them, whose stream from then on is theirs: copies come after what the device was asked
    before. Every call to the device gives up the interpreter's lock, so there are few: steps of the engine wait for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._buffers = [
            torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=self._cuda) for _ in range(2)
        ]
        self._arrays: list[NDArray[np.uint8]] = [buffer.numpy() for buffer in self._buffers]
        self._turn = 0
        if self._cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))
            torch.cuda.set_stream(self._stream)
            self._copied = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]

    def next(self, nbytes: int) -> NDArray[np.uint8]:
        """The first bytes of the buffer whose turn it is, once its last copy is done."""
        if self._cuda:
            self._copied[self._turn].synchronize()
        return self._arrays[self._turn][:nbytes]

    def send(self, nbytes: int, out: Tensor) -> None:
        """Copies the buffer's first bytes to a uint8 tensor of as many elements; then it is the other one's turn."""
        staged = self._buffers[self._turn]
        if nbytes < PIECE_BYTES or out.dim() > 1:
            staged = staged[:nbytes].view(out.shape)
        if self._cuda:
            out.copy_(staged, non_blocking=True)
            self._copied[self._turn].record(self._stream)
        else:
            out.copy_(staged)
        self._turn = 1 - self._turn

    def wait(self) -> None:
        """Returns when every copy is done."""
        if self._cuda:
            self._stream.synchronize()


class StagedArray:
    """Takes the bytes of a stored array and puts them into device memory (`zarr_io.Pieces`)."""

    def __init__(self, out: Tensor, buffers: StagingBuffers) -> None:
        """out: contiguous, or int8 with padded rows."""
        flat = out.reshape(1, -1) if out.is_contiguous() else out.flatten(0, -2)
        self._rows_RW = flat.view(torch.uint8)
        self._pieces = torch.split(self._rows_RW[0], PIECE_BYTES) if out.is_contiguous() else ()
        self._buffers = buffers

    def buffer(self, start: int, left: int) -> NDArray[np.uint8]:
        width = self._rows_RW.shape[1]
        inside = width - start % width
        count = min(left, PIECE_BYTES)
        if count > inside:
            # Whole rows, or the rest of one.
            count = inside if start % width else count // width * width
        return self._buffers.next(count)

    def filled(self, start: int, count: int) -> None:
        if self._pieces:
            self._buffers.send(count, self._pieces[start // PIECE_BYTES])
            return
        row, column = divmod(start, self._rows_RW.shape[1])
        if column + count <= self._rows_RW.shape[1]:
            out = self._rows_RW[row, column : column + count]
        else:
            out = self._rows_RW[row : row + count // self._rows_RW.shape[1]]
        self._buffers.send(count, out)


_LAST_READ_S = 1.0
"""How long those who wait for a load that failed wait for reads under way to end: far longer than those take."""

Read = Callable[[], None]
"""Reads one KV head of an array to where it belongs."""


class LoadedContext:
    """A context in memory, or on its way there, and the blocks that hold it."""

    def __init__(self, resident: ResidentContext, memory: _Memory) -> None:
        self.resident = resident
        self._blocks = memory.blocks
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._changing = threading.Lock()
        self._on_free: Callable[[], None] | None = None

    @property
    def locked_bytes(self) -> int:
        """Bytes of host memory whose pages are locked."""
        return sum(block.locked_bytes for block in self._blocks)

    def wait(self) -> None:
        """Returns when everything is there. Raises what loading raised."""
        self.resident.gate.wait_for_all()
        self._ended.wait()

    def stop(self) -> None:
        """Ends loading soon, if it has not ended; who waits for layers gets an error."""
        self._stop.set()

    def release(self, on_free: Callable[[], None] = lambda: None) -> None:
        """Stops loading and lets go of all memory, then calls `on_free`. Comes once, and does not wait.

        While something is still being read into the memory, whoever reads it lets go of it in the end.
        """
        self._stop.set()
        with self._changing:
            if not self._ended.is_set():
                self._on_free = on_free
                return
        self._free(on_free)

    @property
    def stopped(self) -> bool:
        """Whether loading is to end."""
        return self._stop.is_set()

    def end(self) -> None:
        """Notes that nothing is read into the memory any more. Called once, by the thread that loads."""
        with self._changing:
            self._ended.set()
            on_free = self._on_free
        if on_free is not None:
            self._free(on_free)

    def _free(self, on_free: Callable[[], None]) -> None:
        self.resident.release()
        for block in self._blocks:
            block.release()
        on_free()


def placed_bytes(
    manifest: Manifest,
    device: torch.device | None = None,
    placement: Placement = Placement.DEVICE,
    slot_share: int = SLOT_SHARE,
) -> MemoryBytes:
    """Bytes that a context takes in each memory: every array, aligned, and its token ids as int64.

    In memory of a device (see `start_loading`) with the padding of rows that some arrays have there, and with slots
    (`placement.slot_bytes`) where keys and values are in the host's.
    """
    arrays = _array_bytes(manifest, device, placement)
    return arrays + MemoryBytes(device=slot_bytes(manifest, slot_share)) if placement.kv_on_host else arrays


def _array_bytes(manifest: Manifest, device: torch.device | None, placement: Placement) -> MemoryBytes:
    """What is reserved when loading begins."""
    tokens = aligned(manifest.token_count * torch.int64.itemsize)
    host, shared = (tokens, 0) if placement.kv_on_host else (0, tokens)
    shared += 0 if manifest.state is None else aligned(manifest.state.chunk_bytes)
    for name, _, entry in _parts(manifest):
        if _on_host(manifest, name, entry, placement):
            host += paged(_layer_bytes(entry, None))
        else:
            shared += aligned(_layer_bytes(entry, device))
    return MemoryBytes(host=host + shared) if device is None else MemoryBytes(host=host, device=shared)


def choose_placement(
    manifest: Manifest, device: torch.device, room: int, slot_share: int = SLOT_SHARE
) -> tuple[Placement, str]:
    """Where a context goes beside a device with so many bytes for contexts, and why.

    All of it there if it fits, else its indexes, else those that the host does not search. slot_share: see
    `placed_bytes`.
    """
    budget = f"the device budget of {room}"
    whole = placed_bytes(manifest, device).device
    if whole <= room:
        return Placement.DEVICE, f"its {whole} bytes fit into {budget}"
    why = f"its {whole} bytes do not fit into {budget}"
    indexes = placed_bytes(manifest, device, Placement.HYBRID, slot_share).device
    rest = placed_bytes(manifest, device, Placement.HOST, slot_share).device
    if indexes <= room or rest == indexes:
        return Placement.HYBRID, why
    return (
        Placement.HOST,
        f"{why}, nor do its indexes' {indexes}, without those that the host searches {rest}",
    )


def start_loading(
    context: Context,
    locker: PageLocker | None = None,
    kinds: IndexKinds | None = None,
    device: torch.device | None = None,
    placement: Placement = Placement.DEVICE,
    on_end: Callable[[Exception | None], None] = lambda error: None,
    slot_share: int = SLOT_SHARE,
) -> LoadedContext:
    """Reserves memory and begins to read every array into it, layer by layer, head by head, in many threads.

    Each layer's keys and values are one contiguous [H, N, 2, d] tensor, each index array of a layer [H, ...]. Whoever
    asks the context for a layer waits for it; an error goes to all who wait for a layer that was not there by then.
    Raises MemoryBudgetError, or the matching ContextCorruptError for token ids and states, which are read here. The
    context must stay open until loading has ended. A read that does not come back ends loading with
    StoreUnavailableError after the context's limit; the memory is then let go of when it does come back.

    device: into whose memory, through a few staging buffers, with rows padded as said above; None for host
    memory, which is then page-locked by `locker`. placement: all but DEVICE need a device, and put keys and values into
    host memory, one range per layer, each locked at the latest when it has been read; HOST also indexes that the host
    searches.
    on_end: called by the thread that loads, with the error if there was one, before those who wait get it.
    """
    manifest = context.manifest
    if placement.kv_on_host and device is None:
        raise InvalidArgumentError(f"placement {placement.value} needs a device beside the host; use device")
    memory = _Memory.reserve(manifest, locker, device, placement)
    try:
        memory.tokens.copy_(context.tokens())
        stored = context.state()
        if stored is not None and memory.state is not None:
            memory.state.copy_(stored)
        gate = LayerGate(manifest.model.layers)
        resident = ResidentContext(
            manifest,
            memory.tokens,
            memory.kv,
            memory.arrays,
            kinds,
            placement=placement,
            device=device,
            gate=gate,
            slot_share=slot_share,
            state=memory.state,
        )
        loaded = LoadedContext(resident, memory)
        layers = _plan_reads(context, memory, device, placement)
        readers = Readers(file_threads(), "load", context.read_limit_s)
        threading.Thread(
            target=_load,
            args=(layers, gate, readers, loaded, on_end),
            name=f"load-{manifest.id[:12]}",
            daemon=True,
        ).start()
    except BaseException:
        for block in memory.blocks:
            block.release()
        raise
    return loaded


@dataclass(slots=True)
class _Memory:
    """Reserved memory of a context, cut into its arrays.

    full: by layer, the blocks that are full, and therefore are locked, once that layer has been read.
    """

    tokens: Tensor
    state: Tensor | None = None
    kv: dict[int, Tensor] = field(default_factory=dict)
    arrays: dict[tuple[str, int], dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    blocks: list[HostBlock | DeviceBlock] = field(default_factory=list)
    full: dict[int, HostBlock | DeviceBlock] = field(default_factory=dict)

    @classmethod
    def reserve(
        cls, manifest: Manifest, locker: PageLocker | None, device: torch.device | None, placement: Placement
    ) -> _Memory:
        beside = placement.kv_on_host
        needed = _array_bytes(manifest, device, placement)
        tokens_shape, last = (manifest.token_count,), manifest.model.layers - 1
        shared: HostBlock | DeviceBlock
        shared = HostBlock(needed.host, locker) if device is None else DeviceBlock(needed.device, device)
        tokens = (
            torch.empty(tokens_shape, dtype=torch.int64, device="cpu")
            if beside
            else shared.take(tokens_shape, torch.int64)
        )
        state = None if manifest.state is None else shared.take(manifest.state.chunks, torch.uint8)
        memory = cls(tokens, state, blocks=[shared])
        if not beside:
            memory.full[last] = shared
        try:
            for index, layer, entry in _parts(manifest):
                shape, dtype = entry.shape[1:], STORED_DTYPES[entry.dtype].torch_dtype
                block = shared
                if _on_host(manifest, index, entry, placement):
                    # Of indexes there only cores of the host read: their pages need not be locked.
                    kv, locked = index is None, locker if index is None else None
                    block = HostBlock(_layer_bytes(entry, None), locked, gathered=kv, huge_pages=not kv)
                    memory.blocks.append(block)
                    if index is None:
                        memory.full[layer] = block
                array = block.take(shape, dtype)
                if index is None:
                    memory.kv[layer] = array
                else:
                    memory.arrays[index, layer][entry.path.rpartition("/")[2]] = array
        except BaseException:
            for block in memory.blocks:
                block.release()
            raise
        return memory


@dataclass(frozen=True, slots=True)
class _LayerReads:
    """What reads one layer, and the block that is full then."""

    reads: list[Read]
    full: HostBlock | DeviceBlock | None


def _plan_reads(
    context: Context, memory: _Memory, device: torch.device | None, placement: Placement
) -> list[_LayerReads]:
    """What reads each layer, in the order in which the arrays lie in memory."""
    staged = None if device is None else _StagedReads(context, device)
    reads: dict[int, list[Read]] = defaultdict(list)
    for index, layer, entry in _parts(context.manifest):
        name = entry.path.rpartition("/")[2]
        array = memory.kv[layer] if index is None else memory.arrays[index, layer][name]
        to_host = staged is None or _on_host(context.manifest, index, entry, placement)
        read_head = context.read_head if to_host or staged is None else staged.read
        reads[layer] += [
            partial(read_head, entry.path, layer, head, array[head]) for head in range(entry.shape[1])
        ]
    layers = range(context.manifest.model.layers)
    return [_LayerReads(reads[layer], memory.full.get(layer)) for layer in layers]


class _StagedReads:
    """Reads into device memory, in every thread through a pair of staging buffers of its own."""

    def __init__(self, context: Context, device: torch.device) -> None:
        self._context = context
        self._device = device
        self._own = threading.local()

    def read(self, path: str, layer: int, head: int, out: Tensor) -> None:
        """Returns when the bytes are in device memory: who waits for the layer may use it in any stream."""
        buffers: StagingBuffers | None = getattr(self._own, "buffers", None)
        if buffers is None:
            # By the threads themselves, beside each other: locking pages takes its time.
            buffers = self._own.buffers = StagingBuffers(self._device)
        try:
            self._context.read_head(path, layer, head, StagedArray(out, buffers))
        finally:
            buffers.wait()  # also after an error: nothing may be written any more once the memory is given back


def _load(
    layers: list[_LayerReads],
    gate: LayerGate,
    readers: Readers,
    loaded: LoadedContext,
    on_end: Callable[[Exception | None], None],
) -> None:
    """Reads all layers, and opens the gate for each. The body of the thread that loads."""
    error: Exception | None = None
    try:
        _read_layers(layers, gate, readers, loaded)
    except Exception as raised:
        error = raised.with_traceback(None)  # whose frames would keep the memory
    except BaseException:
        error = StoreError("loading a context was interrupted; ask again")
    layers.clear()
    readers.stop()
    ended = readers.join(_LAST_READ_S)
    if ended:
        loaded.end()
    on_end(error)
    if error is not None:
        gate.fail(error)  # last: who sees it finds it noted elsewhere too
    if not ended:
        readers.join()
        loaded.end()


def _read_layers(layers: list[_LayerReads], gate: LayerGate, readers: Readers, loaded: LoadedContext) -> None:
    """Reads on a few threads, in the order of the layers."""

    def check() -> None:
        if loaded.stopped:
            raise StoreError("the context was released while it was being loaded; ask again")

    pending = deque(deque(readers.submit(read) for read in layer.reads) for layer in layers)
    for layer in layers:
        futures = pending.popleft()
        while futures:
            check()
            readers.result(futures.popleft(), check)
        if layer.full is not None:
            layer.full.lock()
        gate.open_next()


def _parts(manifest: Manifest) -> Iterator[tuple[str | None, int, ArrayEntry]]:
    """(index name or None, layer, array) in the order in which they lie in memory: layer by layer."""
    for layer in range(manifest.model.layers):
        yield None, layer, manifest.layer_entry(layer)
        for index in manifest.indexes:
            if layer in index.layers:
                yield from ((index.name, layer, array) for array in index.arrays)


def _on_host(manifest: Manifest, index: str | None, array: ArrayEntry, placement: Placement) -> bool:
    """Whether an array of an index, or of keys and values (None), is in host memory beside a device.

    Those of a sliding window are few, and are read whole at every step.
    """
    if index is None:
        return placement.kv_on_host and bool(manifest.model.full_layers) and array is manifest.kv
    return any(entry.name == index and placement.index_on_host(entry.kind) for entry in manifest.indexes)


def _layer_bytes(entry: ArrayEntry, device: torch.device | None) -> int:
    if device is not None:
        return device_bytes(entry.shape[1:], STORED_DTYPES[entry.dtype].torch_dtype)
    return entry.nbytes // entry.shape[0]
