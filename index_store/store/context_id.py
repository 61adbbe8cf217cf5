"""The address of a context: a hash over everything that determines what is stored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.store.manifest import FORMAT_VERSION, ModelIdentity


def context_id(
    model: ModelIdentity,
    dtype: str,
    parameters: Mapping[str, object],
    salt: str,
    token_ids: Sequence[int] | np.ndarray[tuple[int, ...], np.dtype[np.integer]] | Tensor,
) -> str:
    """The content address of a context: what goes into its arrays determines its id, and nothing else does.

    SHA-256 over format version, both fingerprints, stored dtype, parameters (JSON values, nested as needed, in any
    order), salt and token ids, as 64 hex digits. Names and times do not count.
    """
    header = {
        "format_version": FORMAT_VERSION,
        "model": model.fingerprint,
        "tokenizer": model.tokenizer_fingerprint,
        "dtype": dtype,
        "parameters": parameters,
        "salt": salt,
    }
    try:
        text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"parameters must be finite JSON values: {error}") from None
    tokens = np.asarray(token_ids)
    if tokens.ndim != 1 or tokens.size == 0 or tokens.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"token ids must be a non-empty list of integers, got shape {tokens.shape}"
        )
    if int(tokens.min()) < 0 or int(tokens.max()) >= model.vocab_size:
        raise InvalidArgumentError(
            f"token ids span {int(tokens.min())}..{int(tokens.max())}, the model's are 0..{model.vocab_size - 1}"
        )
    digest = hashlib.sha256(text.encode())
    digest.update(b"\0" + tokens.astype("<u4").tobytes())
    return digest.hexdigest()
