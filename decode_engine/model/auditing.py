"""Audits: how far the steps of some answers are from full attention.

An audited session has a shadow, one with full attention that is fed the same tokens behind it. So what is compared is
what evaluations compare: the shadow's keys and values of prompt and answer are full attention's own.

Shape legend: V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from decode_engine.engine.stepping import Forward
from decode_engine.layers.session import Session

logger = logging.getLogger(__name__)

_AT_ONCE = 64
"""Tokens that a shadow is fed in a step: other sessions wait for them. It has the prompt to make up for at first."""


def audited(
    forward: Forward[Session],
    full: Forward[Session],
    sessions: Sequence[Session],
    token_ids: Sequence[Sequence[int]],
) -> Sequence[Tensor]:
    """A step as `forward` takes it, and behind it, as `full` does, those of the sessions' shadows.

    Figures get what was found. Where a shadow fails there is none any more, and its session goes on.
    """
    found = forward(sessions, token_ids)
    for session, ids, logits_TV in zip(sessions, token_ids, found, strict=True):
        if session.shadow is not None:
            session.lag += ids
            try:
                _follow(full, session, session.shadow, logits_TV)
            except Exception as error:
                logger.warning("an audit failed, and is given up: %s", error)
                session.end_audit()
    return found


def _follow(full: Forward[Session], session: Session, shadow: Session, logits_TV: Tensor) -> None:
    """Feeds a shadow, and compares it with its session where it has got as far."""
    piece, session.lag = session.lag[:_AT_ONCE], session.lag[_AT_ONCE:]
    (full_TV,) = full([shadow], [piece])
    if not session.lag:
        session.figures.note_audit(_divergence(full_TV[-1], logits_TV[-1]))


def _divergence(full_V: Tensor, found_V: Tensor) -> float:
    """KL(full || found) in nats, of logits."""
    full_V, found_V = torch.log_softmax(full_V.double(), -1), torch.log_softmax(found_V.double(), -1)
    return max(float((full_V.exp() * (full_V - found_V)).sum()), 0.0)
