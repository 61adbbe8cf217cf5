"""Times full attention over rows in 8 bits: usage: shapes.py small|whole CASE:SHAPES ..; V says the variant, old the old code."""
import importlib.util, os, sys
sys.path.insert(0, "ops/bench/one_layer")
V = os.environ.get("V", "cw")
if V == "old":
    import decode_engine.kernels.attention
    name = "decode_engine.kernels.attention.row_planes"
    spec = importlib.util.spec_from_file_location(name, "trial/row_planes_old.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
import torch
import shared_gpu as g
import decode_engine.steps.attention.listed_steps as l
from decode_engine.kernels.attention.shared_attention import SharedShape as S, shared_shape as base
only = sys.argv[1]
ONE = {
    "d": {},
    "a": dict(tile=16, stages=4, warps=1, programs=8),
    "b": dict(tile=32, stages=3, warps=1, programs=8),
    "c": dict(tile=32, stages=4, warps=1, programs=6),
    "e": dict(tile=64, stages=3, warps=2, programs=4),
    "f": dict(tile=64, stages=4, warps=4, programs=2),
    "g": dict(tile=128, stages=2, warps=4, programs=2),
    "h": dict(tile=128, stages=3, warps=4, programs=2),
    "i": dict(tile=16, stages=6, warps=1, programs=8),
    "m": dict(many_stages=2), "n": dict(many_stages=4), "o": dict(many_tile=32, many_stages=4), "p": dict(rows=32),
    "q": dict(rows=128, warps=8, programs=1, many_stages=2),
}
CASES = {"1": (1,), "own4": (1,) * 4, "own8": (1,) * 8, "16@1": (16,), "64@1": (64,), "1s": (1,), "4@1": (4,)}
for argument in sys.argv[2:]:
    case, shapes = argument.split(":")
    many = "@" in case and case != "4@1"
    tokens = 1024 if only == "small" else 32768 if case.endswith("s") else 131072
    memory = None
    for s in shapes:
        shape = ONE[s]
        if s != "d" and many != (not ("tile" in shape)):
            continue
        if not many and s != "d":
            shape = dict(shape, rows=16)
        try:
            if V == "bf16":
                shape = {}
            q = CASES[case]
            memory = memory or g.SharedMemory(tokens, len(q), sum(q), coded=V != "bf16")
            l.shared_shape = lambda *a: S(**shape)
            bench = g.Bench(memory, g.Figure(case, tokens, q))
            figure = bench.check() if only == "small" else round(bench.microseconds(), 1)
            if only != "small":
                print(V, case, tokens, s, shape, figure, flush=True)
        except Exception as error:
            print(V, case, tokens, s, shape, repr(error)[:200], flush=True)
    del memory
    torch.cuda.empty_cache()
