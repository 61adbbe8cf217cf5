"""Checkpoints whose weights have 8 or 4 bits: which are loaded, and with what.

transformers makes their weights those of the dtype that is computed in as it loads them. So everything else works as
with any model: a checkpoint's rounding stays, but neither memory nor time is saved. What has no such way is refused
before anything is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from index_store.models.model_folder import ModelFolder

_NEEDED: Mapping[str, Sequence[str]] = MappingProxyType(
    {"fp8": ("accelerate",), "compressed-tensors": ("accelerate", "compressed_tensors"), "mxfp4": ()}
)
"""Modules that transformers needs to load a checkpoint, by its `quant_method`."""


def widened(folder: ModelFolder, given: Any) -> dict[str, Any]:
    """The `quantization_config` by which transformers widens the weights, of the checkpoint's own.

    Raises ModelUnsupportedError for what cannot be widened, or not without a package that is not there.
    """
    found = given if isinstance(given, dict) else given.to_dict()
    method = str(found.get("quant_method", "of no name"))
    needed = _NEEDED.get(method)
    if needed is None:
        raise folder.refuse(
            f"its weights are quantized ({method}), of which {', '.join(_NEEDED)} can be served; pass another "
            "checkpoint of the model"
        )
    absent = [name for name in needed if find_spec(name) is None]
    if absent:
        raise folder.refuse(
            f"its weights are quantized ({method}), which needs {' and '.join(absent)}; "
            "install sparsekv[quantized]"
        )
    return {**{name: each for name, each in found.items() if name != "run_compressed"}, "dequantize": True}
