"""Means and standard errors over all that was asked of one method.

Shape legend: T predicted positions, H KV heads, G group heads.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode_engine.evaluation.probe import LayerSample
from decode_engine.evaluation.scoring import SegmentScore
from decode_engine.evaluation.settings import Variant

ALL_TASKS = "all"


@dataclass(frozen=True, slots=True)
class Score:
    """What is reported for one method at one budget, context length and task ("all" stands for all tasks together).

    budget: as a text. keep, mass: the budget as a number, whichever it is; None for a method that keeps everything.
    Fields ending in _se are standard errors of the mean; those of KL and of what was observed inside of layers treat
    a question or text as one draw, because neighbouring tokens are not independent. None for a single draw.
    exact_match_loss: full attention's exact match minus this one's, on the same questions. answer_tokens_hit: share of
    the answer tokens that were the most probable ones.
    kl: over question and answer tokens; kl_answer: answer tokens only; kl_text: plain text. In nats per token.
    recall, captured_mass, output_error, vectors_read, bytes_per_step, bytes_share: means over layers that search, see
    `LayerSample`; None when nothing searched. vectors_read: per KV head, layer and step. bytes_per_step: of keys,
    values and index, per layer and step; bytes_share: the same relative to all keys and values.
    corrected: share of stale or predicted selections that were replaced; None for a method that replaces none.
    touched_sparse, touched_all: keys attended as a fraction of all keys, in the layers where the method selects
    and in all layers.
    """

    context_length: int
    task: str
    method: str
    budget: str
    keep: float | None
    mass: float | None
    questions: int
    exact_match: float
    exact_match_se: float | None
    exact_match_loss: float
    exact_match_loss_se: float | None
    answer_tokens_hit: float
    answer_tokens_hit_se: float | None
    kl: float
    kl_se: float | None
    kl_answer: float
    kl_answer_se: float | None
    kl_text: float
    kl_text_se: float | None
    recall: float | None
    recall_se: float | None
    captured_mass: float | None
    captured_mass_se: float | None
    output_error: float | None
    output_error_se: float | None
    vectors_read: float | None
    bytes_per_step: float | None
    bytes_share: float | None
    corrected: float | None
    touched_sparse: float | None
    touched_all: float
    milliseconds_per_token: float
    index_bytes_per_token: float


@dataclass(frozen=True, slots=True)
class MassMap:
    """Mean attention weight captured by each query head (columns) of each searching layer (rows)."""

    context_length: int
    method: str
    budget: str
    keep: float | None
    mass: float | None
    layers: tuple[int, ...]
    captured: tuple[tuple[float, ...], ...]


class Tally:
    """Collects the segment scores of one method at one budget."""

    def __init__(self) -> None:
        self.scores: list[SegmentScore] = []
        self.seconds: list[float] = []

    def summarise(
        self,
        context_length: int,
        variant: Variant,
        full: Tally,
        index_bytes_per_token: float,
        task: str = ALL_TASKS,
    ) -> Score:
        """Means and standard errors. `full` is full attention's tally over the same segments in the same order."""
        pairs = [
            (mine, reference)
            for mine, reference in zip(self.scores, full.scores, strict=True)
            if task in {ALL_TASKS, mine.task}
        ]
        scores = [mine for mine, _ in pairs]
        asked = [(mine, reference) for mine, reference in pairs if mine.exact is not None]
        exact = [float(bool(mine.exact)) for mine, _ in asked]
        losses = [float(bool(reference.exact)) - float(bool(mine.exact)) for mine, reference in asked]
        hit, hit_se = cluster_mean([mine.hit_T[mine.answer_T].double() for mine, _ in asked])
        kl, kl_se = cluster_mean([mine.kl_T for mine, _ in asked])
        kl_answer, kl_answer_se = cluster_mean([mine.kl_T[mine.answer_T] for mine, _ in asked])
        kl_text, kl_text_se = cluster_mean([score.kl_T for score in scores if score.exact is None])
        recall, recall_se = _observed(scores, lambda sample: sample.recall_HT)
        captured, captured_se = _observed(scores, lambda sample: sample.mass_HTG)
        error, error_se = _observed(scores, lambda sample: sample.error_T)
        vectors, _ = _observed(scores, lambda sample: sample.vectors_T)
        read, _ = _observed(scores, lambda sample: sample.bytes_T)
        share, _ = _observed(scores, lambda sample: sample.bytes_T / sample.full_bytes_T)
        return Score(
            context_length=context_length,
            task=task,
            method=variant.name,
            budget=variant.budget,
            keep=variant.keep,
            mass=variant.mass,
            questions=len(exact),
            exact_match=statistics.fmean(exact),
            exact_match_se=standard_error(exact),
            exact_match_loss=statistics.fmean(losses),
            exact_match_loss_se=standard_error(losses),
            answer_tokens_hit=hit,
            answer_tokens_hit_se=hit_se,
            kl=kl,
            kl_se=kl_se,
            kl_answer=kl_answer,
            kl_answer_se=kl_answer_se,
            kl_text=kl_text,
            kl_text_se=kl_text_se,
            recall=recall,
            recall_se=recall_se,
            captured_mass=captured,
            captured_mass_se=captured_se,
            output_error=error,
            output_error_se=error_se,
            vectors_read=vectors,
            bytes_per_step=read,
            bytes_share=share,
            corrected=_ratio((s.touched.corrected, s.touched.correctable) for s in scores),
            touched_sparse=_ratio((s.touched.sparse_kept, s.touched.sparse_total) for s in scores),
            touched_all=_ratio((s.touched.kept, s.touched.total) for s in scores) or 0.0,
            milliseconds_per_token=1e3 * statistics.median(self.seconds),
            index_bytes_per_token=index_bytes_per_token,
        )

    def mass_map(self, context_length: int, variant: Variant) -> MassMap | None:
        """Mass captured per layer and query head over all observed positions; None when no layer searched."""
        by_layer: dict[int, list[Tensor]] = {}
        for score in self.scores:
            for sample in score.samples:
                heads = sample.mass_HTG.transpose(0, 1).flatten(1)
                by_layer.setdefault(sample.layer, []).append(heads)
        if not by_layer:
            return None
        layers = tuple(sorted(by_layer))
        means = [torch.cat(by_layer[layer]).mean(0) for layer in layers]
        captured = tuple(tuple(round(value, 6) for value in mean.tolist()) for mean in means)
        return MassMap(
            context_length, variant.name, variant.budget, variant.keep, variant.mass, layers, captured
        )

    @property
    def tasks(self) -> list[str]:
        """The families asked so far, in order."""
        return list(dict.fromkeys(score.task for score in self.scores if score.exact is not None))


def _observed(
    scores: Iterable[SegmentScore], value: Callable[[LayerSample], Tensor]
) -> tuple[float | None, float | None]:
    """Mean of a figure over each observed segment, then over segments; nan values are left out."""
    means = []
    for score in scores:
        if score.samples:
            mean = float(torch.cat([value(sample).flatten().double() for sample in score.samples]).nanmean())
            means += [] if math.isnan(mean) else [mean]
    return (statistics.fmean(means), standard_error(means)) if means else (None, None)


def _ratio(parts: Iterable[tuple[int, int]]) -> float | None:
    pairs = list(parts)
    total = sum(whole for _, whole in pairs)
    return sum(part for part, _ in pairs) / total if total else None


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
