"""What a request wants to become of its session."""

from __future__ import annotations

from decode_engine.orders.order import KeepOptions
from decode_engine.settings.request_bounds import MAX_NAME_CHARACTERS, MAX_TTL_S
from index_store.errors import InvalidArgumentError
from sparsekv.v1 import generation_pb2


def parse_keep(request: generation_pb2.GenerateRequest) -> KeepOptions:
    """The checked field `keep`, which is there. Raises InvalidArgumentError and names the field."""
    keep, ttl = request.keep, None
    if keep.display_name and (
        len(keep.display_name) > MAX_NAME_CHARACTERS or not keep.display_name.isprintable()
    ):
        raise InvalidArgumentError(
            f"keep.display_name is {ascii(keep.display_name)[:100]}, expected at most {MAX_NAME_CHARACTERS} printable "
            "characters",
            field="keep.display_name",
        )
    if keep.HasField("ttl"):
        if not 1 <= keep.ttl.seconds <= MAX_TTL_S:
            raise InvalidArgumentError(
                f"keep.ttl is {keep.ttl.seconds} s, expected 1 to {MAX_TTL_S}", field="keep.ttl"
            )
        ttl = keep.ttl.seconds
    if keep.prompt_only and request.max_tokens:
        raise InvalidArgumentError(
            f"max_tokens is {request.max_tokens} and keep.prompt_only is set, which generates nothing; leave one out",
            field="max_tokens",
        )
    if request.n > 1 or request.HasField("constraint"):
        raise InvalidArgumentError(
            "keep is set, which goes with a single answer that may be anything; leave out n and constraint",
            field="keep",
        )
    turns = request.WhichOneof("prompt") in ("question", "messages")
    if keep.move_name and not keep.display_name:
        raise InvalidArgumentError(
            "keep.move_name is set without keep.display_name, which says what moves", field="keep.move_name"
        )
    return KeepOptions(keep.display_name, ttl, keep.prompt_only, turns, moves=keep.move_name)
