"""What a stored context is, at rest and in memory, and how its keys are searched."""

import os

# torch, faiss and numba each bring an OpenMP runtime; threads of one that spin while another works slow
# every call down 10-100x. The variable is read when a runtime starts, so it has to be set before any import.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
