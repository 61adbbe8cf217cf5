"""Compiles the kernels of captured steps for compute capability 9.0 where there is no GPU; a command of its own.

Steps of every kind run on tensors in host memory that say they are on a GPU. Launches compile and do nothing else: what
a kernel is compiled for is what a captured step passes, by the launch functions themselves. It ends with Triton's own
IR, which is where Python that the interpreter runs and the compiler refuses is found; code for the machine would take
minutes. Prints JSON: kernels by how often they were compiled, what failed, and a digest of all launches in their order:
two commits with the same one launch the same code, with the same arguments, on the same streams.

Methods as arguments: steps of these alone, in seconds. Their kernels that are not among what was compiled are launched
by nothing.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import triton.compiler
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from index_store.store.description.context_id import ModelIdentity

TARGET = GPUTarget("cuda", 90, 32)
GPU = torch.device("cuda", 0)
CARD = SimpleNamespace(multi_processor_count=132, total_memory=80 * 2**30)
HEADS, SIZE, KEYS = 8, 4, 65536
METHODS = (
    "full", "csattention", "csattention+dropped", "csattention+dropped@group=pooled", "csattention+centred",
    "multipole", "refined", "refined+dropped",
)  # fmt: skip
LARGE_GROUPS = ("full", "csattention", "csattention+dropped@group=pooled", "multipole", "refined-3")
SMALL_DIMENSIONS = ("full", "csattention+dropped", "multipole", "refined")
WIDE_SHAPES = ((16, 128), (9, 64), (2, 256))
WIDE_METHODS = ("full", "refined")
"""What takes groups of more than 8 and heads of 256 channels, and some of these."""
COARSE = ((16, 128, 4), (9, 128, 3), (4, 256, 4), (8, 256, 2))
"""Groups, channels and bits of coarse rows."""
IN_HOST_MEMORY = ("csattention+dropped", "refined")
IN_PLANES = ("full", "csattention", "csattention+dropped", "multipole", "refined")


class _Card:
    """What Triton asks of a driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET


LAUNCHED = hashlib.sha256()


def note(*words: object) -> None:
    """Adds to the digest; of tensors shapes, of addresses in host memory nothing."""
    for word in words:
        said = (tuple(word.shape), word.stride(), word.dtype) if isinstance(word, Tensor) else word
        LAUNCHED.update(f"{None if isinstance(word, int) and word >= 2**40 else said}\n".encode())


class _Stream:
    """A stream, or an event: nothing runs."""

    made = 0

    def __init__(self, *_: object) -> None:
        _Stream.made += 1
        self.cuda_stream = _Stream.made

    def wait_stream(self, other: object) -> None:
        note("wait")

    def record_event(self) -> _Stream:
        return self


class InHostMemory(TorchFunctionMode):
    """New tensors are made there, whatever device they are made for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if given.get("device") is not None:
            given["device"] = "cpu"
        given.pop("pin_memory", None)
        return func(*args, **given)


def pretend() -> tuple[Counter[str], list[str]]:
    """Makes tensors say that they are on a GPU, and launches compile; returns what is filled meanwhile."""
    compiled: Counter[str] = Counter()
    failed: list[str] = []
    driver.set_active(_Card())

    def compile_for_gpu(src: Any, target: GPUTarget, options: dict[str, Any]) -> object:
        backend = triton.compiler.make_backend(target)
        parsed = backend.parse_options(dict(options, **src.parse_options()))
        context, stages = ir.context(), {}
        ir.load_dialects(context)
        backend.load_dialects(context)
        backend.add_stages(stages, parsed, src.language)
        generators, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
        compiled[f"{src.fn.__module__}.{src.fn.__name__}"] += 1
        try:
            first = "ttir" if "ttir" in stages else "ttgir"  # kernels in Gluon begin with layouts
            made = stages[first](src.make_ir(target, parsed, generators, modules, context), {})
            note(made.str_nodebug(), parsed.num_warps, parsed.num_stages, parsed.maxnreg)
        except Exception as error:
            failed.append(f"{src.fn.__module__}.{src.fn.__name__} with {src.constants}: {error}")
        return object()

    run = JITFunction.run

    def launch(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **given: Any) -> Any:
        note(self.__name__, grid, *args, *(each for name in sorted(given) for each in (name, given[name])))
        return run(self, *args, grid=grid, warmup=True, **given)

    JITFunction.run = launch
    triton.compiler.compile = compile_for_gpu
    torch.cuda.get_device_properties = lambda device: CARD
    torch.cuda.get_device_capability = lambda device=None: divmod(TARGET.arch, 10)
    torch.cuda.Stream = torch.cuda.current_stream = _Stream
    torch.cuda.stream = lambda stream: nullcontext()
    Tensor.device = property(lambda self: GPU)
    Tensor.is_cuda = property(lambda self: True)
    return compiled, failed


def model_of(group: int, head_dim: int) -> ModelIdentity:
    digest = "0" * 16
    return ModelIdentity("test", "test", digest, digest, 2, HEADS * group, HEADS, head_dim, 2, 2 * KEYS)


def take_steps(
    group: int,
    head_dim: int,
    methods: Sequence[str],
    where: str = "device",
    planes: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """A layer's step of every method, over contexts in such a place (`Placement`).

    planes: with rows in 8 bits. dtype: of the model.
    """
    from decode_engine.host_search.mailbox import SearchThreads
    from decode_engine.kernels import records
    from decode_engine.kernels.attention.shared_attention import write_tails
    from decode_engine.model.unstored import unstored_manifest
    from decode_engine.steps.attention.host_steps import HostPlan
    from decode_engine.steps.batch_kinds import step_attention_for
    from index_store.attention.attention_state import LogitForm
    from index_store.memory.placement import Placement
    from index_store.methods.presets import get_method
    from tests.support.store import in_planes

    model = model_of(group, head_dim)
    queries = torch.zeros(SIZE, HEADS, group, head_dim, dtype=dtype)
    new = torch.zeros(SIZE, HEADS, head_dim, dtype=dtype)
    records_BF = torch.zeros(SIZE, records.RECORD_FIELDS, dtype=torch.int64)
    forms = [LogitForm(sink_HG=torch.zeros(HEADS, group))] * 2 if group == 8 else []
    threads = SearchThreads(1)
    for name in methods:
        method = get_method(name)
        manifest = unstored_manifest(model, str(dtype).removeprefix("torch."), KEYS, method.name)
        manifest = in_planes(manifest) if planes else manifest
        kind = step_attention_for(method, manifest, Placement(where))
        if isinstance(kind, str):
            raise ValueError(f"method {name} has no kernels: {kind}")
        plan = HostPlan(model, method, SIZE, KEYS, dtype, GPU, forms, planes=planes, searching=threads)
        write_tails(new, new, records_BF)
        kind(plan).attend(1, queries, records_BF)
    threads.close()


def copy_some() -> None:
    from decode_engine.kernels.slots.slot_cache import copy_rows

    addresses = torch.zeros(8, dtype=torch.int64)
    copy_rows(addresses, torch.zeros(8, 256, dtype=torch.bfloat16))


def edit_some() -> None:
    from decode_engine.engine.sampling.edits_triton import (
        RESULT_COLUMNS,
        EditBuffers,
        edit_logits,
        tell_tokens,
    )

    buffers = EditBuffers.allocate(SIZE, 128256, GPU)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        logits_BV = torch.zeros(SIZE, 128256, dtype=dtype)
        edit_logits(logits_BV, buffers)
        tell_tokens(logits_BV, buffers, torch.zeros(SIZE, RESULT_COLUMNS, dtype=torch.int64))


def copy_states_of(*sizes: int) -> None:
    from decode_engine.kernels.state_rows import StateChunks, copy_states
    from index_store.store.description.context_id import ModelStates, StatePart

    parts = tuple(StatePart("recurrent", number, (0, 2), (size,), "") for number, size in enumerate(sizes))
    model, addresses = ModelStates(3, (1,), parts), torch.zeros(SIZE, 2, dtype=torch.int64)
    chunks = StateChunks.of(model, torch.bfloat16, GPU)
    block = torch.zeros(SIZE * model.nbytes("bfloat16"), dtype=torch.uint8)
    for back in (False, True):
        copy_states(addresses[:, int(back)], block, chunks, back)


def attend_window_of(group: int, head_dim: int) -> None:
    from decode_engine.kernels.attention.online_softmax import Partials
    from decode_engine.kernels.attention.shared_attention import attend_window

    queries = torch.zeros(SIZE, HEADS, group, head_dim, dtype=torch.bfloat16)
    records_BF = torch.zeros(SIZE, 1, dtype=torch.int64)
    attend_window(queries, records_BF, Partials.allocate(SIZE * HEADS, 4, group, head_dim, GPU), 1.0)


def go_over_coarse_rows() -> None:
    from decode_engine.kernels import records
    from decode_engine.kernels.attention.online_softmax import Partials
    from decode_engine.kernels.attention.sparse_attention import KeyLists
    from decode_engine.kernels.coarse.search import find_cuts
    from decode_engine.kernels.coarse.sizes import CoarseSizes, CoarseWork, coarse_shape
    from decode_engine.kernels.coarse.warp_pass import weigh_keys
    from decode_engine.kernels.coarse.warp_values import attend_others

    records_BF = torch.zeros(SIZE, records.RECORD_FIELDS, dtype=torch.int64)
    rows = SIZE * HEADS
    for group, head_dim, bits in COARSE:
        sizes = CoarseSizes(HEADS, group, head_dim, bits, bits, 1, KEYS, coarse_shape(GPU, KEYS))
        queries = torch.zeros(SIZE, HEADS, group, head_dim, dtype=torch.bfloat16)
        work = CoarseWork.make(sizes, SIZE, GPU)
        lists = KeyLists.allocate(rows, sizes.splits(rows), sizes.width(rows), GPU)
        slots = sizes.slots(rows)
        partials = Partials.allocate(rows, slots, group, head_dim, GPU)
        find_cuts(queries, records_BF, sizes, work)
        weigh_keys(queries, records_BF, sizes, work, lists, weigh=False)
        weigh_keys(queries, records_BF, sizes, work, lists)
        attend_others(queries, records_BF, sizes, work, lists, partials)
        weigh_keys(queries, records_BF, sizes, work, lists)
        attend_others(queries, records_BF, sizes, work, lists, partials, exact=True)


def compile_all() -> None:
    from tests.support.layers import presets_with_kernels

    with InHostMemory():
        take_steps(4, 128, METHODS)
        take_steps(8, 128, LARGE_GROUPS)
        take_steps(3, 64, SMALL_DIMENSIONS)
        take_steps(4, 128, IN_HOST_MEMORY, "hybrid")
        take_steps(4, 128, IN_HOST_MEMORY[:1], "host")
        take_steps(4, 128, IN_PLANES, planes=True)
        for dtype in (torch.float16, torch.float32):
            take_steps(4, 128, IN_PLANES, planes=True, dtype=dtype)
        take_steps(8, 128, IN_PLANES[:1], planes=True)
        take_steps(3, 64, IN_PLANES[:1], planes=True)
        take_steps(4, 128, IN_HOST_MEMORY, "hybrid", planes=True)
        for shape in WIDE_SHAPES:
            take_steps(*shape, WIDE_METHODS)
            take_steps(*shape, WIDE_METHODS, planes=True)
            take_steps(*shape, WIDE_METHODS[1:], "hybrid")
            take_steps(*shape, WIDE_METHODS[1:], "hybrid", planes=True)
            attend_window_of(*shape)
        for planes in (False, True):
            take_steps(16, 256, WIDE_METHODS[:1], planes=planes)
        attend_window_of(16, 256)
        copy_some()
        copy_states_of(32 * 128 * 128, 8192 * 4)
        copy_states_of(3, 5000)
        edit_some()
        attend_window_of(4, 128)
        go_over_coarse_rows()
        listed = {*METHODS, *LARGE_GROUPS}
        take_steps(4, 128, [name for name in presets_with_kernels(model_of(4, 128)) if name not in listed])


def main() -> None:
    gc.disable()  # a compiler makes many objects and keeps most
    compiled, failed = pretend()
    if sys.argv[1:]:
        with InHostMemory():
            take_steps(4, 128, sys.argv[1:])
            take_steps(4, 128, sys.argv[1:], "hybrid")
    else:
        compile_all()
    json.dump({"compiled": compiled, "failed": failed, "launched": LAUNCHED.hexdigest()}, sys.stdout)


if __name__ == "__main__":
    main()
