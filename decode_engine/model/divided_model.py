"""A model whose matrices are divided among several GPUs, or processes, by transformers' own plan.

Every rank has its part of the rows or columns of each matrix and its part of the KV heads, and runs the same code over
them. What row-parallel layers give is summed over all ranks, logits are gathered; embeddings are whole everywhere. So
nothing else of a step needs the other ranks: attention and searches are those of a KV head.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from index_store.errors import ModelUnsupportedError
from index_store.models.attention_reading import read_config
from index_store.models.loading import describe
from index_store.models.model_folder import ModelFolder
from index_store.store.heads_part import HeadsPart

WAIT_S = 300.0
"""How long a rank waits for the others in a step: as long as they may take to compile what it has compiled."""

# Of one name in newer versions of torch, of the other one in older ones.
_all_gather: Callable[[Tensor, Tensor], object] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)

_DIVIDED = {"colwise", "rowwise", "colwise_gather_output", "embedding_rowwise"}
_REPLICATED = {"replicated_with_grad_allreduce"}


def meeting_place() -> str:
    """A file in memory, where ranks find each other as long as this process lives: torch's own server of addresses
    listens at all of them."""
    return f"/proc/{os.getpid()}/fd/{os.memfd_create('ranks')}"


def join(part: HeadsPart, place: str, device: torch.device) -> DistributedConfig:
    """Meets the other ranks, each of which sees one GPU or none; what a model is loaded with (`localize` follows).

    place: the first rank's `meeting_place`.
    """
    on_gpu = device.type == "cuda"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")  # all ranks are of one host
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{place}",
        rank=part.rank,
        world_size=part.ranks,
        timeout=timedelta(seconds=WAIT_S),
        device_id=torch.device("cuda", torch.cuda.current_device()) if on_gpu else None,
    )
    return DistributedConfig(tp_size=part.ranks)


def check_division(folder: ModelFolder, ranks: int) -> None:
    """What can be known before weights are read. Raises InvalidArgumentError and ModelUnsupportedError, as a runner
    would, for a model that so many ranks cannot share."""
    HeadsPart(0, ranks).identity(describe(folder))
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(read_config(folder))
    plan: dict[str, str] = skeleton.tp_plan
    for name, module in skeleton.named_modules():
        style = plan.get(replace_layer_number_by_wildcard(name), "")
        simple = style in _DIVIDED and isinstance(module, nn.Linear | nn.Embedding)
        if style and style not in _REPLICATED and not simple:
            raise _refusal(name, style)


def localize(model: Any) -> None:
    """Has a model that transformers has divided compute with plain tensors, this rank's, so that its layers are what
    they are elsewhere: linear layers of fewer rows or columns. Raises ModelUnsupportedError for other divided layers.
    """
    plan: dict[str, str] = model.tp_plan
    for name, module in model.named_modules():
        divided = {key: each for key, each in module._parameters.items() if isinstance(each, DTensor)}
        style = plan.get(replace_layer_number_by_wildcard(name), "")
        if not divided:
            if style and style not in _REPLICATED and style not in _DIVIDED:
                raise _refusal(name, style)
            continue
        if style not in _DIVIDED or not isinstance(module, nn.Linear | nn.Embedding):
            raise _refusal(name, style or "another layer's")
        for key, each in divided.items():
            module._parameters[key] = nn.Parameter(
                each.full_tensor() if isinstance(module, nn.Embedding) else each.to_local(),
                requires_grad=False,
            )
        if isinstance(module, nn.Embedding):
            del module.forward  # the class's own
        elif style == "colwise":
            module.out_features = len(module.weight)
        elif style == "rowwise":
            module.in_features = module.weight.shape[1]
        elif style == "colwise_gather_output" and module.out_features % dist.get_world_size() == 0:
            vars(module)["forward"] = partial(_gathered, module)


def _gathered(module: nn.Linear, x: Tensor) -> Tensor:
    """What all ranks' rows give, which are as many each. In few calls, unlike the plan's own, that graphs capture."""
    own = linear(x, module.weight, module.bias).flatten(0, -2)
    ranks, (rows, outputs) = dist.get_world_size(), own.shape
    parts = own.new_empty(ranks * rows, outputs)
    _all_gather(parts, own)
    return parts.view(ranks, rows, outputs).transpose(0, 1).reshape(*x.shape[:-1], ranks * outputs)


def _refusal(name: str, style: str) -> ModelUnsupportedError:
    return ModelUnsupportedError(
        f"the model cannot be divided among GPUs: its layer {name} is divided by the plan {style!r}, expected one of "
        f"{', '.join(sorted(_DIVIDED))}; run it on one GPU"
    )
