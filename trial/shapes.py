"""Times full attention over rows in 8 bits: usage: shapes.py small|whole|error CASE:SHAPES ..; V: new, old or bf16."""
import os, sys
sys.path.insert(0, "ops/bench/one_layer")
sys.path.insert(0, "trial")
import old
import torch
import shared_gpu as g
import decode_engine.steps.attention.listed_steps as l
from decode_engine.kernels.attention.shared_attention import SharedShape as S
V = os.environ.get("V", "new")
only = sys.argv[1]
given = l.shared_shape
SHAPES = {
    "e": dict(rows=16, warps=2, programs=4),
    "r": dict(tile=128), "s": dict(many_tile=128, many_stages=2), "t": dict(many_stages=2), "u": dict(many_stages=4),
    "v": dict(rows=16, tile=32, stages=3, warps=2, programs=4), "w": dict(rows=16, tile=64, stages=2, warps=4, programs=2),
    "x": dict(rows=16, tile=32, stages=2, warps=2, programs=4),
}
CASES = {"1": (1,), "own4": (1,) * 4, "own8": (1,) * 8, "16@1": (16,), "64@1": (64,), "1s": (1,), "16@1s": (16,), "4@1": (4,)}
def error(memory, bench, figure):
    """Largest, and root of the mean square, relative to the largest output; against what the codes stand for."""
    out, found, top = bench.attend(0), [], 0.0
    for b in {0, figure.sessions - 1}:
        planes = memory.planes[0][figure.contexts()[b]]
        for h in range(g.KV_HEADS):
            rows = planes.heads(slice(h, h + 1)).decode(0, figure.length)[0].double()
            kv = torch.cat([rows, memory.tail[b, h].double()])
            logits = memory.q[0, b, h].double() @ kv[:, 0].t() * kv.shape[2] ** -0.5
            expected = logits.softmax(-1) @ kv[:, 1]
            found.append((out[b, h].double() - expected).flatten())
            top = max(top, float(expected.abs().max()))
    found = torch.cat(found)
    return f"error {float(found.abs().max()) / top:.2e} rms {float(found.square().mean().sqrt()) / top:.2e}"
for argument in sys.argv[2:]:
    case, shapes = argument.split(":")
    name, dim, group = (case + "/128/4").split("/")[:3]
    tokens = 1024 if only == "small" else 32768 if name.endswith("s") else 131072
    q = CASES[name]
    memory = None
    for s in shapes:
        try:
            memory = memory or g.SharedMemory(tokens, len(q), sum(q), int(dim), int(group), coded=V != "bf16")
            l.shared_shape = given if s == "d" else lambda *a: S(**SHAPES[s])
            figure = g.Figure(case, tokens, q)
            bench = g.Bench(memory, figure)
            if only == "small":
                bench.check()
            else:
                what = round(bench.microseconds(), 1)
                if s == "d" and V != "bf16" and name in ("1", "1s", "16@1"):
                    what = (what, error(memory, bench, figure))
                print(V, case, tokens, s, what, flush=True)
        except Exception as e:
            print(V, case, tokens, s, repr(e)[:200], flush=True)
    del memory
    torch.cuda.empty_cache()
