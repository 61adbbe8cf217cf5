"""Where kernels run, and how those compiled by numba are started from several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from numba import threading_layer
from torch import Tensor

_workqueue_guard = threading.Lock()


def on_host(tensor: Tensor) -> bool:
    """Whether the compiled kernels can read the tensor; their eager references run on any device."""
    return tensor.device.type == "cpu"


def launch(kernel: Callable[..., None], *args: object) -> None:
    """Runs a parallel kernel; the GIL is free meanwhile.

    numba's fallback threading layer, workqueue, aborts the process when two threads enter it at once, so there
    (and on the very first launch, when the layer is not known yet) launches take turns.
    """
    if _is_thread_safe():
        kernel(*args)
        return
    with _workqueue_guard:
        kernel(*args)


def _is_thread_safe() -> bool:
    try:
        return bool(threading_layer() != "workqueue")
    except ValueError:  # no parallel kernel has run yet
        return False
