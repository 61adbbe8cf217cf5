"""How one method's predictions for one text after a context compare with full attention's.

Shape legend: T tokens of the scored text, V vocabulary.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode_engine.runner import ModelRunner
from index_store.context import ResidentContext
from index_store.methods import Method

WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True)
class Segment:
    """A text that follows a context: a question with its answer, or plain text.

    token_ids: T ids. answer_start: how many of them are the prompt; None for plain text.
    """

    token_ids: tuple[int, ...]
    answer_start: int | None = None

    @property
    def inputs(self) -> tuple[int, ...]:
        """The tokens that the model is given: all but the last."""
        return self.token_ids[:-1]


@dataclass(frozen=True, slots=True)
class Touched:
    """Keys attended and keys there were, summed over steps and KV heads.

    Once over the layers in which the method selects, once over all layers (dense ones attend to every key).
    """

    sparse_kept: int
    sparse_total: int
    kept: int
    total: int


@dataclass(frozen=True, slots=True)
class SegmentScore:
    """exact: every answer token was the most probable one; None for plain text.

    kl_T: KL(full || method) in nats at each of the T - 1 predicted positions. answer_T: which of them predict
    answer tokens.
    """

    exact: bool | None
    kl_T: Tensor
    answer_T: Tensor
    touched: Touched


def reference_log_probs(
    runner: ModelRunner, context: ResidentContext, full: Method, segment: Segment
) -> Tensor:
    """Log-probabilities [T - 1, V] float32 under full attention."""
    return _log_probs(runner, context, full, segment)[0]


def score_segment(
    runner: ModelRunner, context: ResidentContext, method: Method, segment: Segment, reference_TV: Tensor
) -> SegmentScore:
    """Feeds the whole text in one forward pass and compares every prediction with the reference.

    Each row selects its own keys and its hidden state carries the errors of all earlier rows and layers, so this
    equals decoding the same tokens one by one.
    """
    log_probs_TV, touched = _log_probs(runner, context, method, segment)
    kl_T = torch.sum(reference_TV.exp() * (reference_TV - log_probs_TV), dim=-1).clamp_(min=0.0)
    targets_T = torch.tensor(segment.token_ids[1:])
    answer_T = torch.zeros(len(targets_T), dtype=torch.bool)
    exact = None
    if segment.answer_start is not None:
        answer_T[segment.answer_start - 1 :] = True
        exact = bool((log_probs_TV.argmax(-1) == targets_T)[answer_T].all())
    return SegmentScore(exact, kl_T, answer_T, touched)


def seconds_per_token(
    runner: ModelRunner, context: ResidentContext, method: Method, token_ids: Sequence[int]
) -> float:
    """Median seconds of a decode step, over the given tokens fed one at a time after two that warm up."""
    session = runner.start(context, method)
    seconds = []
    try:
        for token in token_ids:
            start = time.perf_counter()
            runner.forward([session], [[token]])
            seconds.append(time.perf_counter() - start)
    finally:
        session.close()
    return statistics.median(seconds[WARM_UP_STEPS:])


def _log_probs(
    runner: ModelRunner, context: ResidentContext, method: Method, segment: Segment
) -> tuple[Tensor, Touched]:
    session = runner.start(context, method)
    try:
        logits_TV = runner.forward([session], [segment.inputs], all_logits=True)[0].cpu()
        figures = session.figures
    finally:
        session.close()
    touched = Touched(figures.sparse_attended, figures.sparse_available, figures.attended, figures.available)
    return torch.log_softmax(logits_TV, dim=-1), touched


@dataclass(frozen=True, slots=True)
class Score:
    """What is reported for one method at one keep ratio and context length.

    keep: None for a method that keeps everything. Fields ending in _se are standard errors of the mean; those of
    KL treat a question or text as one draw, because neighbouring tokens are not independent. None for a single draw.
    exact_match_loss: full attention's exact match minus this one's, on the same questions.
    kl: over question and answer tokens; kl_answer: answer tokens only; kl_text: plain text. In nats per token.
    touched_sparse, touched_all: keys attended as a fraction of all keys, in the layers where the method selects
    and in all layers.
    """

    context_length: int
    method: str
    keep: float | None
    questions: int
    exact_match: float
    exact_match_se: float | None
    exact_match_loss: float
    exact_match_loss_se: float | None
    kl: float
    kl_se: float | None
    kl_answer: float
    kl_answer_se: float | None
    kl_text: float
    kl_text_se: float | None
    touched_sparse: float | None
    touched_all: float
    milliseconds_per_token: float
    index_bytes_per_token: float


class Tally:
    """Collects the segment scores of one method."""

    def __init__(self) -> None:
        self.scores: list[SegmentScore] = []
        self.seconds: list[float] = []

    def summarise(
        self,
        context_length: int,
        method: Method,
        keep: float | None,
        full: Tally,
        index_bytes_per_token: float,
    ) -> Score:
        """Means and standard errors. `full` is full attention's tally over the same segments in the same order."""
        exact = [float(score.exact) for score in self.scores if score.exact is not None]
        full_exact = [float(score.exact) for score in full.scores if score.exact is not None]
        losses = [a - b for a, b in zip(full_exact, exact, strict=True)]
        asked = [score for score in self.scores if score.exact is not None]
        kl, kl_se = cluster_mean([score.kl_T for score in asked])
        kl_answer, kl_answer_se = cluster_mean([score.kl_T[score.answer_T] for score in asked])
        kl_text, kl_text_se = cluster_mean([score.kl_T for score in self.scores if score.exact is None])
        sparse_total = sum(score.touched.sparse_total for score in self.scores)
        return Score(
            context_length=context_length,
            method=method.name,
            keep=keep,
            questions=len(exact),
            exact_match=statistics.fmean(exact),
            exact_match_se=standard_error(exact),
            exact_match_loss=statistics.fmean(losses),
            exact_match_loss_se=standard_error(losses),
            kl=kl,
            kl_se=kl_se,
            kl_answer=kl_answer,
            kl_answer_se=kl_answer_se,
            kl_text=kl_text,
            kl_text_se=kl_text_se,
            touched_sparse=sum(score.touched.sparse_kept for score in self.scores) / sparse_total
            if sparse_total
            else None,
            touched_all=sum(score.touched.kept for score in self.scores)
            / sum(score.touched.total for score in self.scores),
            milliseconds_per_token=1e3 * statistics.median(self.seconds),
            index_bytes_per_token=index_bytes_per_token,
        )


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean of independent values; None for fewer than two."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def cluster_mean(clusters: Sequence[Tensor]) -> tuple[float, float | None]:
    """Mean over all values of all clusters, and its standard error when only clusters are independent.

    The error is None for a single cluster.
    """
    values = torch.cat([cluster.double() for cluster in clusters])
    mean = float(values.mean())
    spread = sum(float((cluster.double() - mean).sum()) ** 2 for cluster in clusters)
    count = len(clusters)
    if count < 2:
        return mean, None
    return mean, (count / (count - 1) * spread) ** 0.5 / len(values)
