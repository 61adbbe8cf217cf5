"""Means and standard errors over all that was asked of one method.

Shape legend: T predicted positions, H KV heads, G group heads.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    Fields ending in _se are standard errors of the mean with a context and all that was asked about it as one draw,
    because its questions share text, index and where k-means began (`cluster_mean`). Contexts that overlap in the
    text are one draw. None for a single one. contexts: how many draws that are. exact_match_loss: full attention's
    exact match minus this one's, on the same questions; its error is of these differences. answer_tokens_hit: share
    of the answer tokens that were the most probable ones.
    kl: over question and answer tokens; kl_answer: answer tokens only; kl_text: plain text. In nats per token.
    recall, captured_mass, output_error, vectors_read, bytes_per_step, bytes_share: means over layers that search, see
    `LayerSample`; None when nothing searched. vectors_read: per KV head, layer and step. bytes_per_step: of keys,
    values and index, per layer and step; bytes_per_token: the same per token of context and tail; bytes_share: the same
    relative to all keys and values. bytes_all: that over all layers, of which those that do not search read every key
    that their queries see; layers count by their keys.
    search_share, exact_share, remainder_share: what of it the search reads, the keys
    and values that are attended exactly, and the remainder.
    device_bytes_per_token, host_bytes_per_token: what a context takes of both memories, as it is placed, with this
    method's indexes alone; all layers. On a CPU all of it is the host's. index_bytes_per_token: of those indexes, as
    they are stored.
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
    contexts: int
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
    touched_sparse: float | None
    touched_all: float
    milliseconds_per_token: float
    index_bytes_per_token: float
    bytes_per_token: float | None = None
    search_share: float | None = None
    exact_share: float | None = None
    remainder_share: float | None = None
    device_bytes_per_token: float | None = None
    host_bytes_per_token: float | None = None
    bytes_all: float | None = None


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """Bytes per token of a context with one method's indexes: of the indexes at rest, and of both memories."""

    indexes: float
    device: float
    host: float


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
        self.contexts: list[int] = []
        self.seconds: list[float] = []

    def add(self, score: SegmentScore, context: int) -> None:
        """A segment's score; context: a number for the context that it follows, or for all that overlap with it."""
        self.scores.append(score)
        self.contexts.append(context)

    def summarise(
        self, context_length: int, variant: Variant, full: Tally, stored: StoredBytes, task: str = ALL_TASKS
    ) -> Score:
        """Means and standard errors. `full` is full attention's tally over the same segments in the same order."""
        pairs = [
            (context, mine, reference)
            for context, mine, reference in zip(self.contexts, self.scores, full.scores, strict=True)
            if task in {ALL_TASKS, mine.task}
        ]
        scores = [mine for _, mine, _ in pairs]
        observed = [(context, mine) for context, mine, _ in pairs if mine.samples]
        asked = [pair for pair in pairs if pair[1].exact is not None]
        text = [pair for pair in pairs if pair[1].exact is None]
        measured = {
            "exact_match": _mean(asked, lambda mine, _: _exact(mine)),
            "exact_match_loss": _mean(asked, lambda mine, reference: _exact(reference) - _exact(mine)),
            "answer_tokens_hit": _mean(asked, lambda mine, _: mine.hit_T[mine.answer_T]),
            "kl": _mean(asked, lambda mine, _: mine.kl_T),
            "kl_answer": _mean(asked, lambda mine, _: mine.kl_T[mine.answer_T]),
            "kl_text": _mean(text, lambda mine, _: mine.kl_T),
            "recall": _observed(observed, lambda sample: sample.recall_HT),
            "captured_mass": _observed(observed, lambda sample: sample.mass_HTG),
            "output_error": _observed(observed, lambda sample: sample.error_T),
        }
        figures: dict[str, Any] = {name: mean for name, (mean, _) in measured.items()}
        figures |= {f"{name}_se": error for name, (_, error) in measured.items()}
        of_samples: Mapping[str, Callable[[LayerSample], Tensor]] = {
            "vectors_read": lambda sample: sample.vectors_T,
            "bytes_per_step": lambda sample: sample.bytes_T,
            "bytes_per_token": lambda sample: sample.bytes_T / sample.tokens_T,
            "bytes_share": lambda sample: sample.bytes_T / sample.full_bytes_T,
            "search_share": lambda sample: sample.search_bytes_T / sample.full_bytes_T,
            "exact_share": lambda sample: sample.exact_bytes_T / sample.full_bytes_T,
            "remainder_share": lambda sample: sample.remainder_bytes_T / sample.full_bytes_T,
        }
        figures |= {name: _observed(observed, value)[0] for name, value in of_samples.items()}
        return Score(
            context_length=context_length,
            task=task,
            method=variant.name,
            budget=variant.budget,
            keep=variant.keep,
            mass=variant.mass,
            questions=len(asked),
            contexts=len({context for context, _, _ in asked}),
            **figures,
            bytes_all=_over_all_layers(figures["bytes_share"], scores),
            touched_sparse=_ratio((s.touched.sparse_kept, s.touched.sparse_total) for s in scores),
            touched_all=_ratio((s.touched.kept, s.touched.total) for s in scores) or 0.0,
            milliseconds_per_token=1e3 * statistics.median(self.seconds),
            index_bytes_per_token=stored.indexes,
            device_bytes_per_token=stored.device,
            host_bytes_per_token=stored.host,
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
        return list(dict.fromkeys(score.task for score in self.scores if score.exact is not None))


def _mean(
    pairs: Sequence[tuple[int, SegmentScore, SegmentScore]],
    value: Callable[[SegmentScore, SegmentScore], Tensor],
) -> tuple[float, float | None]:
    """`cluster_mean` of what segments' scores and full attention's say; pairs: each after its context's number."""
    values = [value(mine, reference) for _, mine, reference in pairs]
    return cluster_mean(values, [context for context, _, _ in pairs])


def _exact(score: SegmentScore) -> Tensor:
    """1 for an exact match, otherwise 0: [1]."""
    return torch.tensor([float(bool(score.exact))], dtype=torch.float64)


def _observed(
    scores: Sequence[tuple[int, SegmentScore]], value: Callable[[LayerSample], Tensor]
) -> tuple[float | None, float | None]:
    """Mean of a figure over each observed segment, then over segments; nan values are left out.

    scores: observed ones with the numbers of their contexts.
    """
    means, contexts = [], []
    for context, score in scores:
        mean = torch.cat([value(sample).flatten().double() for sample in score.samples]).nanmean()
        if not mean.isnan():
            means.append(mean[None])
            contexts.append(context)
    return cluster_mean(means, contexts) if means else (None, None)


def _over_all_layers(searching: float | None, scores: Sequence[SegmentScore]) -> float | None:
    """Bytes that all layers read, as a share of all keys and values. searching: the same of the layers that search.

    None where layers select keys and none of them was observed.
    """
    touched = [score.touched for score in scores]
    total, among = sum(each.total for each in touched), sum(each.sparse_total for each in touched)
    unsearched = sum(each.kept - each.sparse_kept for each in touched)
    if not total or (among and searching is None):
        return None
    return (unsearched + (searching or 0.0) * among) / total


def _ratio(parts: Iterable[tuple[int, int]]) -> float | None:
    pairs = list(parts)
    total = sum(whole for _, whole in pairs)
    return sum(part for part, _ in pairs) / total if total else None


def cluster_mean(parts: Sequence[Tensor], contexts: Sequence[int]) -> tuple[float, float | None]:
    """Mean over all values of all parts, and its standard error when only contexts are independent.

    contexts: of every part. The error is cluster-robust, sqrt(G / (G - 1) sum_g (sum of g's residuals)^2) / n for n
    values in G contexts; None for a single context.
    """
    values = torch.cat([part.double() for part in parts])
    mean = float(values.mean())
    residuals: dict[int, float] = {}
    for context, part in zip(contexts, parts, strict=True):
        residuals[context] = residuals.get(context, 0.0) + float((part.double() - mean).sum())
    count = len(residuals)
    if count < 2:
        return mean, None
    spread = sum(residual**2 for residual in residuals.values())
    return mean, (count / (count - 1) * spread) ** 0.5 / len(values)
