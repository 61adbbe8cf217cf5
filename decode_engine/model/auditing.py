"""Audits: of a sampled share of decode steps it is measured how far they are from full attention.

An audited step is taken twice behind the same tokens, at first with attention to all of them, then as always, and says
what it would say anyway. So an audit sees what the selections of one step cost; what earlier steps have left in keys
and values of prompt and answer it takes as given.

Shape legend: V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from decode_engine.engine.stepping import Forward
from decode_engine.layers.session import Session

logger = logging.getLogger(__name__)


def audited(
    forward: Forward[Session],
    full: Forward[Session],
    sessions: Sequence[Session],
    token_ids: Sequence[Sequence[int]],
) -> Sequence[Tensor]:
    """A step as `forward` takes it, of which some rows are audited. full: attends to everything.

    The sessions' figures get what was found. Where an audit fails there is none, and the step is as always.
    """
    due = [row for row, session in enumerate(sessions) if session.audit_due()]
    exact: Sequence[Tensor] = ()
    if due:
        exact = _look_ahead(full, [sessions[row] for row in due], [token_ids[row] for row in due])
    found = forward(sessions, token_ids)
    for row, full_1V in zip(due, exact, strict=False):
        sessions[row].note_audit(_divergence(full_1V[-1], found[row][-1]))
    return found


def _look_ahead(
    full: Forward[Session], sessions: Sequence[Session], token_ids: Sequence[Sequence[int]]
) -> Sequence[Tensor]:
    """Logits after tokens that no session takes in; none where something goes wrong.

    Keys and values that this leaves in tails are written anew by the step.
    """
    kept = [(copy(session.figures), session.states and session.states.copy()) for session in sessions]
    positions = [session.position for session in sessions]
    try:
        return full(sessions, token_ids)
    except Exception as error:
        logger.warning("an audit of %d sessions failed: %s", len(sessions), error)
        return ()
    finally:
        for session, position, (figures, states) in zip(sessions, positions, kept, strict=True):
            session.rewind(session.position - position)
            session.figures.become(figures)
            session.states = states


def _divergence(full_V: Tensor, found_V: Tensor) -> float:
    """KL(full || found) in nats, of logits."""
    full_V, found_V = torch.log_softmax(full_V.double(), -1), torch.log_softmax(found_V.double(), -1)
    return max(float((full_V.exp() * (full_V - found_V)).sum()), 0.0)
