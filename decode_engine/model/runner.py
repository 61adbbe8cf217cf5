"""Runs the model over sessions: tokens in, logits out.

Some answers are audited: how far their steps are from full attention. An audited session has a shadow, one with full
attention that is fed the same tokens behind it. So what is compared is what evaluations compare: the shadow's keys and
values of prompt and answer are full attention's own.

Shape legend: V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Unpack
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from decode_engine.engine.drafting import MOST, ContextSuffixes
from decode_engine.engine.prompt_pieces import PromptCost, prompt_cost
from decode_engine.engine.requests import Found, Step
from decode_engine.engine.sampler import Guesses, Sampler
from decode_engine.engine.sampling.constraints import Vocabulary, VocabularySource
from decode_engine.engine.sampling.grammar import Grammars
from decode_engine.engine.stepping import Chosen, Flight, Forward, decode_by_forward
from decode_engine.errors import InternalError
from decode_engine.host_search.mailbox import SearchThreads
from decode_engine.layers.session import Session, Watch
from decode_engine.layers.sparse_layer import SparseLayer
from decode_engine.model.decode_attention import (
    ATTENTION_NAME,
    DecodeStep,
    Manner,
    packed,
    register_attention,
)
from decode_engine.model.divided_model import localize
from decode_engine.model.packed_weights import KeptWeights, pack_weights
from decode_engine.model.ranks import Alone, CapturedStep, CatchUp, Layer, Pass, places_of
from decode_engine.model.row_layers import row_layers
from decode_engine.model.unstored import check_decoding, no_context
from decode_engine.settings.command_options import Prompts, search_cores
from decode_engine.steps.step_graph import step_model
from decode_engine.steps.stepper import Stepper
from index_store.attention.fused import prepare_many
from index_store.cli.options import AUTO
from index_store.errors import InvalidArgumentError
from index_store.memory.placement import Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import FittedMethod
from index_store.models.loading import ModelFolder, load_model, load_tokenizer
from index_store.models.state_cache import TextStates, passing
from index_store.store.description.dtypes import stored_dtype
from index_store.store.description.manifest import Manifest, require_dtype, require_model

logger = logging.getLogger(__name__)

_AT_ONCE = 64
"""Tokens that a shadow is fed in a step: other sessions wait for them. It has the prompt to make up for at first."""


def _nothing() -> None:
    """Nothing is done in layers."""


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


class ModelRunner:
    """A loaded model whose attention reads sessions.

    folder: the model. device: where it computes, and where the contexts of its sessions must be. dtype: name of the
    dtype in which served contexts store keys and values, `auto` for the checkpoint's own. prompts: what they attend to;
    by default on a GPU everything, which takes less time there than searching for every token of a prompt. Not thread-
    safe: one thread calls the methods that feed tokens.
    """

    def __init__(
        self,
        folder: ModelFolder,
        device: str | torch.device = "cpu",
        dtype: str = "auto",
        prompts: Prompts = Prompts.AUTO,
        searching: SearchThreads | None = None,
        say: Callable[[str, str], None] = lambda what, how_far: None,
        weights: str = AUTO,
        ranks: Alone | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """searching: threads for contexts that are searched on the host; by default most cores.

        say: is told what is done, and how far it has come, by several threads. weights: how matrices are kept on a
        CPU, one of `WEIGHTS`. ranks: among which the model is divided; options: by which it is loaded then.
        """
        self.ranks = ranks or Alone()
        divided = self.ranks.divided
        register_attention()
        self.device = torch.device(device)
        default = Prompts.EXACT if self.device.type == "cuda" else Prompts.EACH
        self.prompts = default if prompts is Prompts.AUTO else prompts
        say("load weights", folder.name)

        def hashing(done: int, in_all: int) -> None:
            if done < in_all:
                say("hash weights", f"{done / 1e9:.1f} of {in_all / 1e9:.1f} GB")
            else:
                say("load weights", folder.name)

        loaded = load_model(
            folder,
            ATTENTION_NAME,
            device=self.device,
            hashing=hashing,
            options=options,
            arrange=localize if divided else lambda model: None,
        )
        self.model = loaded.model
        self.kept_weights = KeptWeights("", "")
        if self.device.type == "cpu" and not divided:
            checkpoint = stored_dtype(loaded.kv_dtype).torch_dtype
            self.kept_weights = kept = pack_weights(self.model, weights, checkpoint)
            logger.info("model %s: %s", loaded.identity.name, kept.told)
            loaded = replace(loaded, weights=kept.name)
        self.identity = loaded.identity
        self.forms = loaded.forms
        self.kv_dtype = loaded.kv_dtype if dtype == "auto" else dtype
        own = self.ranks.part.identity(self.identity) if divided else self.identity
        self.no_context = no_context(own, self.kv_dtype, self.device)
        self.tokenizer = tokenizer = load_tokenizer(folder, self.identity.tokenizer_fingerprint)
        size, ends = self.identity.vocab_size, tokenizer.eos_ids
        self.vocabulary = Vocabulary(lambda: VocabularySource(tokenizer.definition(), size, ends))
        self.grammars = Grammars(self.vocabulary)
        say("compare decoding with the model's own attention", "")
        check_decoding(replace(loaded, identity=own, remembers=not divided))
        on_cpu = self.device.type == "cpu" and not divided
        self._row_layers = row_layers(self.model, self.no_context, self.forms) if on_cpu else None
        self._suffixes: WeakKeyDictionary[ResidentContext, ContextSuffixes] = WeakKeyDictionary()
        self._stepper: Stepper | None = None
        self._searching = searching or SearchThreads(search_cores())
        weight = next(loaded.model.parameters())
        self._compute_dtype = weight.dtype
        if self.device.type == "cuda":
            self._stepper = Stepper(
                step_model(loaded.model),
                own,
                weight.dtype,
                weight.device,
                searching=self._searching,
                forms=self.forms,
            )

    def close(self) -> None:
        """Ends the threads that search on the host, and what grammars need. No step may be in progress, or follow."""
        self._searching.close()
        self.grammars.close()
        self.vocabulary.close()

    def check(self, manifest: Manifest) -> None:
        """Raises ModelMismatchError or DtypeMismatchError unless the model can decode against the context."""
        require_model(manifest, self.identity)
        require_dtype(manifest, self.kv_dtype)

    def prepare(
        self,
        fitted: FittedMethod,
        sessions: int,
        placement: Placement = Placement.DEVICE,
        *,
        beside: bool = False,
        least: int = 1,
    ) -> None:
        """Captures decode steps of up to `sessions` sessions on such a context, where steps are captured.

        placement: of the context. beside: on another thread than the one that feeds tokens (`Stepper.prepare_beside`),
        for batches of at least so many. Raises as `check` does.
        """
        self.check(fitted.manifest)
        if self._stepper is None or self.ranks.divided:
            return
        if beside:
            self._stepper.prepare_beside(fitted, sessions, placement, least)
        else:
            self._stepper.prepare(fitted, sessions, placement)

    def steps_kind(self, fitted: FittedMethod, placement: Placement) -> Hashable:
        """What captured steps of such sessions have in common; None where steps take the general path."""
        return None if self._stepper is None else self._stepper.kind_of(fitted, placement)

    def prepare_prompts(self) -> None:
        """Prepares attention of many queries on a GPU, for the calling thread alone: the one that reads prompts."""
        dtype = stored_dtype(self.kv_dtype).torch_dtype
        for shape in {self.identity.shape(layer) for layer in self.identity.full_layers}:
            prepare_many(shape.kv_heads, shape.head_dim, dtype, self.device)

    def start(
        self,
        context: ResidentContext,
        fitted: FittedMethod,
        waiting: Callable[[], None] = lambda: None,
        again: int = 0,
        watch: Watch | None = None,
    ) -> Session:
        """A new session.

        waiting: called now and then while it waits for a layer that is being loaded; what it raises ends the wait.
        again: 1 where the prompt begins with the context's last token, which is read for what follows it. watch: see
        `Session`. The context has been checked (`check`). Raises what `Session` raises.
        """
        states = new_states(context, self._compute_dtype)
        if states is not None and again:
            raise InvalidArgumentError(
                f"states of context {context.manifest.id[:12]} are behind its last token, which cannot be read again; "
                "give a token that follows it"
            )
        if self.ranks.divided:  # a layer that does not come would end a step of all ranks
            for layer in range(self.identity.layers):
                context.gate.wait(layer, waiting)
        session = Session(context, fitted, self.forms, check=waiting, again=again, watch=watch, states=states)
        try:
            self.ranks.begin(session, fitted, again)
        except BaseException:
            session.close()
            raise
        return session

    def suffixes(self, context: ResidentContext) -> ContextSuffixes | None:
        """What followed tokens in a context, made when it is first asked for; None where there is no text."""
        if not context.manifest.token_count:
            return None
        found = self._suffixes.get(context)
        if found is None:
            found = self._suffixes[context] = ContextSuffixes(context.tokens().cpu().numpy())
        return found

    def prompt_cost(self, fitted: FittedMethod, tail: int = 0) -> PromptCost:
        """What tokens of a prompt cost that `read` reads, behind `tail` other tokens of the session."""
        return prompt_cost(fitted, self.prompts, self.device, tail)

    def read(
        self,
        sessions: Sequence[Session],
        token_ids: Sequence[Sequence[int]],
        *,
        all_logits: bool = False,
        between: Callable[[], None] = _nothing,
    ) -> list[Tensor]:
        """`forward` of prompts, which attend to the context as the runner has them (`Prompts`)."""
        exact, shared = self.prompts is Prompts.EXACT, self.prompts is Prompts.SPARSE
        logits = self.forward(
            sessions, token_ids, all_logits=all_logits, exact=exact, shared=shared, between=between
        )
        for session in sessions:
            session.mark()
            if exact:
                self.catch_up(session)
        return logits

    def restore(self, session: Session, rows: Sequence[Tensor], state: Tensor | None = None) -> None:
        """Adds tokens to a session whose keys and values are known, and makes them searchable, as `read` does.

        state: packed, behind the last of them.
        """
        session.restore(rows)
        if state is not None and session.states is not None:
            session.states.unpack(state, self.kv_dtype)
        self.catch_up(session)

    def states_behind(self, session: Session, token_ids: Sequence[int]) -> TextStates | None:
        """The states of a session that ends behind these tokens of its own; None of a model without.

        Where it has read more (an answer that a stop string cuts), what follows the prompt is read again. The session
        cannot be used after this.
        """
        position = session.context.manifest.token_count + len(token_ids)
        if session.states is not None and session.position != position:
            if session.marked is None or session.marked[0] > position:
                raise InternalError(f"a session at {session.position} has no states of {position} tokens")
            session.position, session.states = session.marked[0], session.marked[1].copy()
            again = token_ids[len(token_ids) - (position - session.position) :]
            if again:
                self.forward([session], [again], exact=True)
        return session.states

    def catch_up(self, session: Session) -> None:
        """Appends what left the window while tokens attended to everything; steps with kernels need it nowhere."""
        if not self.has_graph(session.drafting or session):
            if session.mirror is not None:
                self.ranks.tell(CatchUp(session.mirror.number, session.position))
            with torch.inference_mode():
                for layer in session.layers:
                    if isinstance(layer, SparseLayer):
                        layer.catch_up(session.position)

    def forward(
        self,
        sessions: Sequence[Session],
        token_ids: Sequence[Sequence[int]],
        *,
        all_logits: bool = False,
        between: Callable[[], None] = _nothing,
        **manner: Unpack[Manner],
    ) -> list[Tensor]:
        """Feeds each session its new tokens, any number of each, in one pass over the model.

        between: called in every layer; other sessions may decode there.

        What several sessions attend to of one context exactly is read once for all of them. Returns per session float32
        logits [1, vocab] after the last of its T >= 1 tokens, or [T, vocab] with `all_logits`, on the runner's device.
        Session positions advance only when the call succeeds. Raises InvalidArgumentError for empty input, or tokens
        outside the vocabulary.
        """
        self._check_tokens(sessions, token_ids)
        told, own_between = between is not _nothing, between
        if told and self.ranks.divided:

            def between() -> None:
                own_between()
                self.ranks.tell(Layer())

        def order() -> Pass:
            ids = [[*each] for each in token_ids]
            return Pass(places_of(sessions), ids, all_logits, manner, told)

        # A state goes on through all tokens of a sequence, so these are of one session alone.
        alone = self.identity.states is not None and not _steps(sessions, token_ids)
        alone = alone or bool(self.identity.index_keys)
        at_once = [[row] for row in range(len(sessions))] if alone else [list(range(len(sessions)))]
        steps: list[DecodeStep] = []
        logits: list[Tensor] = []
        for some in at_once:
            own = [token_ids[row] for row in some]
            inputs = packed([sessions[row] for row in some], own, self.device, between=between, **manner)
            counts = [len(ids) for ids in own]
            ends = torch.tensor(counts, device="cpu").cumsum(0)
            keep = (
                0 if all_logits or max(counts) == 1 else 1 if len(counts) == 1 else (ends - 1).to(self.device)
            )
            with self.ranks.together(order), torch.inference_mode(), passing(inputs["decode_step"]):
                if self._row_layers is not None and inputs["input_ids"].shape[1] == 1:
                    logits_TV = self._row_layers.logits(inputs)
                else:
                    logits_TV = self.model(**inputs, logits_to_keep=keep).logits.flatten(0, 1).float()
            steps.append(inputs["decode_step"])
            logits += logits_TV.split_with_sizes(counts if all_logits else [1] * len(logits_TV))
        for step in steps:
            step.advance()
        return logits

    def _check_tokens(self, sessions: Sequence[Session], token_ids: Sequence[Sequence[int]]) -> None:
        if len(sessions) != len(token_ids) or not token_ids or not all(token_ids):
            lengths = [len(ids) for ids in token_ids]
            raise InvalidArgumentError(
                f"{len(sessions)} sessions got token lists of lengths {lengths}; expected one list a session, of at "
                "least one token each"
            )
        least, most = min(map(min, token_ids)), max(map(max, token_ids))
        if least < 0 or most >= self.identity.vocab_size:
            raise InvalidArgumentError(
                f"token ids span {least}..{most}, the model has 0..{self.identity.vocab_size - 1}"
            )

    def decode(
        self, sessions: Sequence[Session], last_tokens: Sequence[int], samplers: Sequence[Sampler]
    ) -> Sequence[Found]:
        """One decode step: feeds each session its last token and chooses its next one, see `decode_by_forward`."""
        return self.launch(sessions, last_tokens, samplers).tokens()

    def launch(
        self,
        sessions: Sequence[Session],
        last_tokens: Sequence[int],
        samplers: Sequence[Sampler],
        drafts: Sequence[Sequence[int]] = (),
    ) -> Step:
        """Begins what `decode` does. The step that was launched before must have ended. drafts: see `Runner`.

        On a GPU sessions of methods with kernels go through captured graphs (`steps.stepper`), the others as on a CPU.
        """
        forward: Forward[Session] = partial(self.forward, all_logits=True, rows=True)
        if any(session.shadow is not None for session in sessions):
            forward = partial(audited, forward, self.forward)
        if self._stepper is None:
            return Chosen(decode_by_forward(forward, sessions, last_tokens, samplers, drafts))
        captured = [self.has_graph(session) for session in sessions]
        if all(captured) and self.ranks.divided:
            return Chosen(self.step_captured(sessions, last_tokens, samplers))
        if all(captured) and not any(drafts):
            return self._stepper.launch(sessions, last_tokens, samplers)
        drafts = drafts or [()] * len(sessions)
        results: dict[int, Found] = {}
        for by_graph in (True, False):
            rows = [row for row, own in enumerate(captured) if own is by_graph]
            some, last = [sessions[row] for row in rows], [last_tokens[row] for row in rows]
            own_samplers, own_drafts = [samplers[row] for row in rows], [drafts[row] for row in rows]
            found: Sequence[Found] = ()
            if rows and by_graph and self.ranks.divided:
                found = self.step_captured(some, last, own_samplers)
            elif rows and by_graph:
                found = self._stepper.step(some, last, own_samplers, own_drafts)
            elif rows:
                found = decode_by_forward(forward, some, last, own_samplers, own_drafts)
            results |= zip(rows, found, strict=True)
        return Chosen([results[row] for row in range(len(sessions))])

    def step_captured(
        self, sessions: Sequence[Session], tokens: Sequence[int], samplers: Sequence[Sampler]
    ) -> Sequence[Found]:
        """A captured step of all ranks, which ends before this returns, without drafts.

        Raises InternalError where steps are not captured.
        """
        if self._stepper is None:
            raise InternalError("a captured step was asked of a runner without captured steps")

        def order() -> CapturedStep:
            return CapturedStep(places_of(sessions), [*tokens], [each.repeatable for each in samplers])

        with self.ranks.together(order):
            return self._stepper.step(sessions, tokens, samplers)

    def draft(
        self,
        sessions: Sequence[Session],
        last_tokens: Sequence[int],
        samplers: Sequence[Sampler],
        counts: Sequence[int],
    ) -> list[list[int]]:
        """See `Runner.draft`. Keys and values that drafts leave in tails are written anew when they are verified."""
        drafts: list[list[int]] = [[] for _ in sessions]
        drafting = [own for session in sessions if (own := session.drafting) is not None]
        captured = len(drafting) == len(sessions) and all(map(self.has_graph, drafting))
        try:
            if self._stepper is not None and captured:
                return self._draft_captured(self._stepper, drafting, last_tokens, samplers, counts)
            for ahead in range(max(counts)):
                rows = [row for row, count in enumerate(counts) if count > ahead]
                fed = [[(last_tokens[row], *drafts[row])[-1]] for row in rows]
                logits = self.forward([sessions[row] for row in rows], fed, drafts=True)
                for row, logits_1V in zip(rows, logits, strict=True):
                    drafts[row].append(max(0, samplers[row].guess(logits_1V[0], ahead)))
        finally:
            for session, draft in zip(sessions, drafts, strict=True):
                session.rewind(len(draft))
        return drafts

    def _draft_captured(
        self,
        stepper: Stepper,
        sessions: Sequence[Session],
        last_tokens: Sequence[int],
        samplers: Sequence[Sampler],
        counts: Sequence[int],
    ) -> list[list[int]]:
        """Drafts by captured steps, each launched before the tokens of the one before are read where that may be."""
        drafts: list[list[int]] = [[] for _ in sessions]
        flight: Flight[Session] = Flight(stepper)
        tokens, guesses, most = [*last_tokens], [Guesses(sampler) for sampler in samplers], max(counts)
        for ahead in range(most):
            found = flight.step(sessions, tokens, guesses, follow=ahead + 1 < most)
            tokens = [token for token in found if isinstance(token, int)]
            if len(tokens) < len(sessions):
                break
            for draft, token in zip(drafts, tokens, strict=True):
                draft.append(token)
        for session in sessions:
            flight.leave(session)
        return [draft[:count] for draft, count in zip(drafts, counts, strict=True)]

    def draft_room(self, samplers: Sequence[Sampler]) -> int:
        if self._stepper is None:
            return MOST
        return 0 if self.ranks.divided else self._stepper.draft_room(samplers)

    def has_graph(self, session: Session) -> bool:
        return self._stepper is not None and not session.watched and self._stepper.takes(session)

    def feed(self, session: Session, token: int) -> Tensor:
        """A decode step as `decode` takes it, with a token that is given: float32 logits [1, V] after it."""
        if self._stepper is not None and self.has_graph(session):
            return self._stepper.feed(session, token)
        return self.forward([session], [[token]])[0]


def new_states(context: ResidentContext, dtype: torch.dtype) -> TextStates | None:
    """The states behind a context's last token, in a copy; None of a model without. dtype: that it computes in."""
    manifest, stored = context.manifest, context.state()
    if manifest.model.states is None:
        return None
    states = TextStates(manifest.model.states, dtype, context.device)
    if stored is not None:
        states.unpack(stored, manifest.dtype)
    return states


def _steps(sessions: Sequence[Session], token_ids: Sequence[Sequence[int]]) -> bool:
    """Whether all of the sessions have states, behind which each has one token."""
    begun = all(session.states is not None and session.states.begun for session in sessions)
    return begun and max(map(len, token_ids)) == 1
