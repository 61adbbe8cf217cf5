"""Puts the former decoding and launches in place where V is old; then runs the script that is named, if any."""
import importlib.util, os, runpy, sys
sys.path.insert(0, os.getcwd())
if os.environ.get("V") == "old":
    import decode_engine.kernels.attention
    name = "decode_engine.kernels.attention.row_planes"
    spec = importlib.util.spec_from_file_location(name, "trial/row_planes_old.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    import decode_engine.steps.attention.listed_steps as l
    from decode_engine.kernels.attention.shared_attention import SharedShape as S
    l.shared_shape = lambda g, d, p, n: S(rows=16, tile=16, stages=5) if d > 128 and p else S()
if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
