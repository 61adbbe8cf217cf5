"""Chooses the next token from logits: greedy, temperature, top-k, top-p; one rule on every device, for whole batches.

The rule: top_k keeps the tokens of the largest logits, ties going to the lower id. Of these, in the same order, top_p
keeps those before which less than top_p of the probability lies. The kept tokens share the unit interval in the order
of their ids, each with an interval as long as its probability, and the token is the one whose interval holds the
session's uniform number. Ids and not likelihood make that order: two near-equal logits that change places between
devices then move borders by almost nothing, instead of exchanging intervals.

Probabilities are float64, so that devices which add them up in another order choose other tokens only where a number
lies within about 1e-15 of a border.

Shape legend: B rows (sessions), V vocabulary, K candidates, M blocks of C tokens.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace

import torch
from msgspec import structs
from torch import Tensor

from decode_engine.engine.sampling.edits import (
    Edits,
    RuledLogits,
    edit_logits_reference,
    tell_tokens_reference,
)
from decode_engine.engine.sampling.grammar import Grammar
from decode_engine.orders.events import TokenLogprob
from decode_engine.orders.fields import Sampling, check_drawn
from decode_engine.settings.request_bounds import MAX_SEED
from index_store.errors import SparseKVError

_SEED_STRIDE = 0x9E3779B97F4A7C15
"""Between the seeds of one request's answers: seeds that people count up by hand meet none of them."""


class SamplingParameters(Sampling, frozen=True):
    """What an order says of it, checked. grammar: what the answer must be; None lets it be anything.

    Raises InvalidArgumentError, which names the field, for a value out of range.
    """

    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        check_drawn(self)

    @classmethod
    def of(cls, sampling: Sampling, grammar: Grammar | None = None) -> SamplingParameters:
        return cls(**structs.asdict(sampling), grammar=grammar)

    def for_answer(self, index: int) -> SamplingParameters:
        """How the answer of that number draws, of several to one prompt: the first one by the seed itself."""
        if self.seed is None:
            return self
        return structs.replace(self, seed=(self.seed + index * _SEED_STRIDE) % (MAX_SEED + 1))


_CANDIDATES = 1024
"""Likeliest tokens among which top_p is looked for first, in single rows: to sort 131,072 logits takes a CPU 12 ms."""
_BLOCK = 512  # tokens whose probabilities one program adds up: long rows are summed by many


@dataclass(frozen=True, slots=True)
class Draws:
    """How one token of each row is drawn, as tensors on the device of the logits.

    temperature_B: 0 is greedy. top_p_B: above 0, 1 keeps all tokens. top_k_B: 0 keeps all tokens. uniform_B: in [0, 1).
    All are float32, which counts tokens of any vocabulary exactly, so that a step sends them as one table.
    """

    temperature_B: Tensor
    top_p_B: Tensor
    top_k_B: Tensor
    uniform_B: Tensor

    @staticmethod
    def numbers(sampler: Sampler, ahead: int = 0) -> tuple[float, ...]:
        """A sampler's row of that table: parameters and present number, or that so many tokens ahead."""
        p = sampler.parameters
        return p.temperature, p.top_p, p.top_k, sampler.draw(ahead)

    @classmethod
    def table(cls, rows_BX: Tensor) -> Draws:
        return cls(*rows_BX.unbind(1))

    @classmethod
    def of(cls, samplers: Sequence[Sampler], device: torch.device | str = "cpu", ahead: int = 0) -> Draws:
        rows = [cls.numbers(sampler, ahead) for sampler in samplers]
        return cls.table(torch.tensor(rows, dtype=torch.float32, device=device))


DRAW_COLUMNS = len(fields(Draws))


def choose_greedy(logits_BV: Tensor) -> Tensor:
    """[B] int64: each row's likeliest token, the first of equals; -1 where logits are not finite.

    Logits of -inf mark tokens that cannot come; a row needs one that can. Never waits for a device.
    """
    best_B, finite_B = _best(logits_BV.float())
    return torch.where(finite_B, best_B, -1)


def choose_tokens(logits_BV: Tensor, draws: Draws, *, filtered: bool = True) -> Tensor:
    """[B] int64: each row's token by the module's rule; -1 where logits are not finite (see `choose_greedy`).

    Shapes do not depend on values and nothing waits for a device, so it can be captured in a CUDA graph. `filtered`
    may be False when no row has a top_k above 1 or a top_p below 1: then nothing is sorted. It holds about 70 bytes
    a logit at its peak (B = 16, V = 131072: 150 MB), 40 of them without sorting.
    """
    logits_BV = logits_BV.float()
    best_B, finite_B = _best(logits_BV)
    greedy_B = (draws.temperature_B == 0) | (draws.top_k_B == 1)
    weights_BV = _weights(logits_BV, best_B, draws.temperature_B.masked_fill(greedy_B, 1.0))
    if filtered:
        weights_BV = weights_BV.masked_fill(~_kept(logits_BV, weights_BV, draws), 0.0)
    sums = _RunningSums.of(weights_BV)
    drawn_B = sums.position(draws.uniform_B.double() * sums.total_B)
    return torch.where(finite_B, torch.where(greedy_B, best_B, drawn_B), -1)


def _best(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """[B] id of the largest logit, and whether it is finite: the largest of a row with a NaN is that NaN."""
    best_B = logits_BV.argmax(dim=1)
    return best_B, logits_BV.gather(1, best_B[:, None]).isfinite()[:, 0]


def _weights(logits_BV: Tensor, best_B: Tensor, temperature_B: Tensor) -> Tensor:
    """[B, V] float64: probabilities but for a factor a row, which makes the largest 1."""
    offsets_BV = logits_BV.double() - logits_BV.gather(1, best_B[:, None]).double()
    return (offsets_BV / temperature_B[:, None].double()).exp_()


def _kept(logits_BV: Tensor, weights_BV: Tensor, draws: Draws) -> Tensor:
    """[B, V] bool: the tokens that top_k and top_p leave."""
    rows, vocabulary = logits_BV.shape
    rank_V = torch.arange(vocabulary, device=logits_BV.device)
    ids_BV = torch.sort(logits_BV, dim=1, descending=True, stable=True).indices
    top_k_B = draws.top_k_B.long().masked_fill(draws.top_k_B == 0, vocabulary)
    sorted_BV = weights_BV.gather(1, ids_BV).masked_fill_(rank_V >= top_k_B[:, None], 0.0)
    sums = _RunningSums.of(sorted_BV)
    # a token stays while those before it have not reached top_p, so that the likeliest always stays
    enough_B = sums.count_below(draws.top_p_B.double() * sums.total_B) + 1
    count_B = torch.minimum(top_k_B, torch.where(draws.top_p_B < 1.0, enough_B, vocabulary))
    kept_BV = torch.zeros(rows, vocabulary, dtype=torch.bool, device=logits_BV.device)
    return kept_BV.scatter_(1, ids_BV, rank_V < count_B[:, None])


@dataclass(frozen=True, slots=True)
class _RunningSums:
    """Running sums of non-negative rows, in two levels: inside blocks, and over whole blocks.

    inside_BMC: sums from the block's beginning. ends_BM: sums of the row up to each block's end.
    """

    inside_BMC: Tensor
    ends_BM: Tensor

    @classmethod
    def of(cls, weights_BV: Tensor) -> _RunningSums:
        rows, count = weights_BV.shape
        padded_BV = torch.nn.functional.pad(weights_BV, (0, -count % _BLOCK))
        inside_BMC = padded_BV.view(rows, -1, _BLOCK).cumsum(2)
        return cls(inside_BMC, inside_BMC[:, :, -1].cumsum(1))

    @property
    def total_B(self) -> Tensor:
        return self.ends_BM[:, -1]

    def position(self, target_B: Tensor) -> Tensor:
        """[B] int64: the first position whose sum exceeds the target, which is below the row's total."""
        block_B, inside_BC, rest_B = self._find(target_B, self.ends_BM <= target_B[:, None])
        # rounding may leave nothing above the rest: then it is the block's last position that adds something
        last_B = (inside_BC < inside_BC[:, -1:]).sum(1)
        return block_B * _BLOCK + torch.minimum((inside_BC <= rest_B[:, None]).sum(1), last_B)

    def count_below(self, target_B: Tensor) -> Tensor:
        """[B] int64: how many sums are below the target, which is at most the row's total."""
        block_B, inside_BC, rest_B = self._find(target_B, self.ends_BM < target_B[:, None])
        return block_B * _BLOCK + (inside_BC < rest_B[:, None]).sum(1)

    def _find(self, target_B: Tensor, passed_BM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The first block that was not passed, its sums [B, C], and what is left of the target inside of it."""
        block_B = passed_BM.sum(1).clamp_(max=passed_BM.shape[1] - 1)
        inside_BC = self.inside_BMC.gather(1, block_B[:, None, None].expand(-1, 1, _BLOCK))[:, 0]
        before_B = self.ends_BM.gather(1, (block_B[:, None] - 1).clamp_(min=0))[:, 0]
        return block_B, inside_BC, target_B - before_B.masked_fill(block_B == 0, 0.0)


class Sampler:
    """One session's sampler: the same parameters, seed and logits give the same tokens.

    Uniform numbers are drawn on the CPU from the session's own generator, one for each token, so that neither the
    device nor what other sessions sample changes the result. repeatable: a seed was given to draw by, so that logits
    must have the same bits whatever other sessions do, too. edited: logits are changed before the choice, or more than
    it is wanted of them (`edits`). waits: how they are changed depends on the token before, which must have been taken.
    logprobs: of tokens that were taken and not told, where they are wanted.
    """

    def __init__(
        self, parameters: SamplingParameters, prompt: Sequence[int] = (), end_ids: Collection[int] = ()
    ) -> None:
        """prompt: what stands before the answer. end_ids: tokens that end it."""
        self.parameters = parameters
        self.logprobs: deque[TokenLogprob] = deque()
        self._ruled = RuledLogits(parameters, prompt, end_ids) if parameters.rules_logits else None
        self._obeyed = None if parameters.grammar is None else parameters.grammar.start()
        self.waits = self._obeyed is not None
        self.edited = self.waits or self._ruled is not None or parameters.top_logprobs is not None
        self.greedy = parameters.greedy
        self.repeatable = parameters.seed is not None and not parameters.greedy
        if self.greedy:
            self.seed = 0
        else:
            self.seed = secrets.randbits(63) if parameters.seed is None else parameters.seed
        self._generator = torch.Generator("cpu")
        # torch takes seeds up to 2^64 - 1 but reads those from 2^63 on as negative numbers
        self._generator.manual_seed(self.seed)
        self._uniforms: deque[float] = deque()  # of the next tokens, as far as they were drawn

    def draw(self, ahead: int = 0) -> float:
        """The uniform number in [0, 1) of the next token: the same one until `take`. 0 for a greedy sampler.

        A step that failed and is repeated thus draws the same token. ahead: tokens before that one which are not taken.
        """
        if self.greedy:
            return 0.0
        while len(self._uniforms) <= ahead:
            self._uniforms.append(float(torch.rand((), generator=self._generator, device="cpu")))
        return self._uniforms[ahead]

    @property
    def logprob(self) -> TokenLogprob | None:
        """Of the last token that was taken, where that is wanted and was not told."""
        return self.logprobs[-1] if self.logprobs else None

    @property
    def ended(self) -> bool:
        """Whether the answer is whole by its grammar, which allows nothing more."""
        return self._obeyed is not None and self._obeyed.ended

    def edits(self, device: torch.device, vocabulary: int, ahead: int = 0) -> Edits | None:
        """What a choice does to logits of so many tokens on that device; it counts the token that it chooses.

        ahead: tokens before that one which are not taken; none where the sampler waits. Raises SparseKVError where the
        grammar fails.
        """
        if not self.edited:
            return None
        edits = Edits() if self._ruled is None else self._ruled.edits(device, vocabulary, ahead)
        allowed_W = None if self._obeyed is None or self._obeyed.ended else self._obeyed.allowed()
        return replace(edits, allowed_W=allowed_W, told=self.parameters.top_logprobs)

    def take(self, token: int, logprob: TokenLogprob | None = None) -> None:
        """Goes on to the next number: this token was chosen. logprob: of it, where that is wanted.

        Raises SparseKVError where the grammar fails.
        """
        if not self.greedy:
            self.draw()
            self._uniforms.popleft()
        if self._ruled is not None:
            self._ruled.take(token)
        if self._obeyed is not None:
            self._obeyed.take(token)
        if logprob is not None:
            self.logprobs.append(logprob)

    def sample(self, logits_V: Tensor) -> int:
        """Chooses a token from float logits [V] on any device, and advances.

        Raises SparseKVError when they are not finite.
        """
        logits_V = logits_V.detach()
        edits = self.edits(logits_V.device, len(logits_V))
        edited_V = logits_V if edits is None else edit_logits_reference(logits_V[None], [edits])[0]
        token = self._choose(edited_V)
        if token < 0:
            raise not_finite()
        [logprob] = tell_tokens_reference(logits_V[None], [edits], [token])
        self.take(token, logprob)
        return token

    def guess(self, logits_V: Tensor, ahead: int) -> int:
        """The token that logits like these give, so many behind the next one; without edits, and nothing advances."""
        return self._choose(logits_V.detach(), ahead)

    def _choose(self, logits_V: Tensor, ahead: int = 0) -> int:
        """`choose_tokens` for one row, or a shorter way to the same token."""
        p = self.parameters
        if self.greedy:
            return int(choose_greedy(logits_V[None]))
        draws, filtered = Draws.of([self], logits_V.device, ahead), p.top_p < 1.0
        limit = p.top_k or (_CANDIDATES if filtered else 0)
        if not 0 < limit < logits_V.numel():
            return int(choose_tokens(logits_V[None], draws, filtered=filtered))
        values_K = torch.topk(logits_V.float(), limit).values
        if not values_K[0].isfinite():
            return -1
        if p.top_k == 0:
            values_K, filtered = _nucleus(logits_V.float(), values_K, p), False
            if len(values_K) == limit:  # it may have more tokens than these
                return int(choose_tokens(logits_V[None], draws))
        ids_K = _ids_of(logits_V.float(), values_K)
        # These ascend, so that ties and intervals stand in the same order among them as in the vocabulary.
        return int(ids_K[choose_tokens(logits_V[ids_K][None], draws, filtered=filtered)])


class Guesses(Sampler):
    """Draws what another sampler would draw next by such logits, without edits; that one does not advance."""

    def __init__(self, of: Sampler) -> None:
        given = of.parameters
        super().__init__(
            SamplingParameters(temperature=given.temperature, top_p=given.top_p, top_k=given.top_k)
        )
        self._of, self._drawn = of, 0

    def draw(self, ahead: int = 0) -> float:
        return self._of.draw(self._drawn + ahead)

    def take(self, token: int, logprob: TokenLogprob | None = None) -> None:
        self._drawn += 1


def _ids_of(logits_V: Tensor, values_K: Tensor) -> Tensor:
    """[K] int64, ascending: ids of the largest logits, whose values descend; ties go to the lower id."""
    above = (logits_V > values_K[-1]).nonzero()[:, 0]
    equal = (logits_V == values_K[-1]).nonzero()[: len(values_K) - len(above), 0]
    return torch.cat([above, equal]).sort().values


def _nucleus(logits_V: Tensor, values_K: Tensor, parameters: SamplingParameters) -> Tensor:
    """Those of the largest logits, whose values descend, that top_p leaves; all when it leaves more than are here."""
    best, temperature = values_K[0].double(), parameters.temperature
    weights_K = ((values_K.double() - best) / temperature).exp_()
    total = ((logits_V.double() - best) / temperature).exp_().sum()
    enough = int((weights_K.cumsum(0) < parameters.top_p * total).sum()) + 1
    return values_K[:enough]


def any_filters(samplers: Sequence[Sampler]) -> bool:
    """Whether `choose_tokens` has to look at top_k and top_p for any of them."""
    drawn = [sampler.parameters for sampler in samplers if not sampler.greedy]
    return any(p.top_k > 0 or p.top_p < 1.0 for p in drawn)


def not_finite() -> SparseKVError:
    """What a row without a token means."""
    return SparseKVError("the model's logits are not finite")
