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

from decode_engine.evaluation.probe import LayerSample, Probe
from decode_engine.evaluation.settings import WARM_UP_STEPS
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.settings.command_options import Prompts
from index_store.memory.devices import finish
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method

OBSERVED_POSITIONS = 6


@dataclass(frozen=True, slots=True)
class Segment:
    """A text that follows a context: a question with its answer, or plain text.

    token_ids: T ids. answer_start: how many of them are the prompt; None for plain text. task: name of the family.
    observed: whether searching layers are compared with exact attention at some of its positions.
    """

    token_ids: tuple[int, ...]
    answer_start: int | None = None
    task: str = "single"
    observed: bool = False

    @property
    def inputs(self) -> tuple[int, ...]:
        """The tokens that the model is given: all but the last."""
        return self.token_ids[:-1]

    def observed_offsets(self) -> list[int]:
        """Up to OBSERVED_POSITIONS of the inputs: evenly spread, for a question half of them over the answer."""
        if not self.observed:
            return []
        last = len(self.inputs) - 1
        if self.answer_start is None:
            return _spread(0, last, OBSERVED_POSITIONS)
        half = OBSERVED_POSITIONS // 2
        middle = self.answer_start - 1
        return _spread(0, max(middle - 1, 0), OBSERVED_POSITIONS - half) + _spread(middle, last, half)


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
    answer tokens. hit_T: where the most probable token was the true one. samples: of the searching layers, when the
    segment was observed.
    """

    exact: bool | None
    kl_T: Tensor
    answer_T: Tensor
    touched: Touched
    hit_T: Tensor
    task: str = "single"
    samples: tuple[LayerSample, ...] = ()


def reference_log_probs(
    runner: ModelRunner, context: ResidentContext, full: Method, segment: Segment
) -> Tensor:
    """Log-probabilities [T - 1, V] float32 under full attention."""
    return _predict(runner, context, full, segment)[0]


def score_segment(
    runner: ModelRunner, context: ResidentContext, method: Method, segment: Segment, reference_TV: Tensor
) -> SegmentScore:
    """Feeds the text and compares every prediction with the reference.

    Where the method allows it, the whole text goes in one forward pass: each row selects its own keys and its hidden
    state carries the errors of all earlier rows and layers, so this equals decoding the same tokens one by one.
    Where it does not (`Method.one_pass`), and where decode steps run in graphs with kernels of their own, the prompt is
    fed at once and everything after it token by token, as it is served. Observed texts go in one pass even then:
    graphs cannot be looked into. A question whose tokens attend to something else than a search for each selects
    (`ModelRunner.prompts`) is fed at once before the rest.
    """
    log_probs_TV, touched, samples = _predict(runner, context, method, segment)
    kl_T = torch.sum(reference_TV.exp() * (reference_TV - log_probs_TV), dim=-1).clamp_(min=0.0)
    targets_T = torch.tensor(segment.token_ids[1:], device="cpu")
    hit_T = log_probs_TV.argmax(-1) == targets_T
    answer_T = torch.zeros(len(targets_T), dtype=torch.bool, device="cpu")
    exact = None
    if segment.answer_start is not None:
        answer_T[segment.answer_start - 1 :] = True
        exact = bool(hit_T[answer_T].all())
    return SegmentScore(exact, kl_T, answer_T, touched, hit_T, segment.task, samples)


def seconds_per_token(
    runner: ModelRunner, context: ResidentContext, method: Method, token_ids: Sequence[int]
) -> float:
    """Median seconds of a decode step, over the given tokens fed one at a time after two that warm up."""
    session = runner.start(context, method.on(context.manifest))
    seconds = []
    try:
        for token in token_ids:
            start = time.perf_counter()
            runner.feed(session, token)
            finish(runner.device)
            seconds.append(time.perf_counter() - start)
    finally:
        session.close()
    return statistics.median(seconds[WARM_UP_STEPS:])


def _predict(
    runner: ModelRunner, context: ResidentContext, method: Method, segment: Segment
) -> tuple[Tensor, Touched, tuple[LayerSample, ...]]:
    session = runner.start(context, method.on(context.manifest))
    probe = Probe([session.position + offset for offset in segment.observed_offsets()])
    try:
        if segment.observed:
            probe.attach(session)
        logits_TV = _feed(runner, session, segment, method)
        figures = session.figures
    finally:
        session.close()
    touched = Touched(figures.sparse_attended, figures.sparse_available, figures.attended, figures.available)
    return torch.log_softmax(logits_TV, dim=-1), touched, tuple(probe.samples)


def _feed(runner: ModelRunner, session: Session, segment: Segment, method: Method) -> Tensor:
    """Logits [T - 1, V] after each of the segment's inputs."""
    inputs = segment.inputs
    # What serves is what is judged: kernels of captured steps take their thresholds from samples.
    one_pass = method.one_pass and (segment.observed or not runner.has_graph(session))
    logits: list[Tensor] = []
    if segment.answer_start is not None and runner.prompts is not Prompts.EACH:
        logits += runner.read([session], [inputs[: segment.answer_start]], all_logits=True)
        inputs = inputs[segment.answer_start :]
    at_once = len(inputs) if one_pass else (0 if logits else segment.answer_start or 1)
    if at_once:
        logits += runner.forward([session], [inputs[:at_once]], all_logits=True)
    logits += [runner.feed(session, token) for token in inputs[at_once:]]
    return torch.cat(logits).cpu()


def _spread(first: int, last: int, count: int) -> list[int]:
    """Up to `count` whole numbers from first to last, both included."""
    return sorted({round(x) for x in torch.linspace(first, last, count).tolist()})
