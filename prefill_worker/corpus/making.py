"""A worker of a corpus: one document after the other becomes a context, by the jobs of `prefill-worker run`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from index_store.cli.console import SilentReporter
from index_store.errors import InvalidArgumentError, ModelUnsupportedError, SparseKVError
from index_store.models.loading import load_tokenizer
from index_store.models.resolve import resolve_model
from index_store.objects.courier import Courier
from index_store.objects.tier import Tier
from prefill_worker.build.stages import Clock
from prefill_worker.config import CorpusConfig
from prefill_worker.corpus.documents import Document
from prefill_worker.jobs.document_layers import KeptModel, Means
from prefill_worker.jobs.job import carry_out
from prefill_worker.jobs.prepared_job import document_tokens, job_over_tokens

_PAUSE_S = 1.0
_LASTING = (InvalidArgumentError, ModelUnsupportedError)
"""What the same document would meet again."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a document. id: its context's; problem, reason: why there is none, "" of others.

    created: False where the store had it. tokens: of the context. nbytes: of the text.
    """

    source: str
    nbytes: int
    id: str = ""
    created: bool = False
    tokens: int = 0
    problem: str = ""
    reason: str = ""


class CorpusWorker:
    """Makes contexts of documents; the model is loaded for the first one that the store lacks.

    Raises what `resolve_model`, `JobConfig.open_store` and a look at the object store raise.
    """

    def __init__(self, config: CorpusConfig) -> None:
        self._config, self._job = config, config.job()
        self._folder = resolve_model(config.model)
        self._tokenizer = load_tokenizer(self._folder)
        self._model = KeptModel()
        self._store = self._job.open_store()
        self._courier = None if config.objects is None else Courier(self._store, Tier.of(self._store))
        if self._courier is not None:
            self._courier.look(wait=True)  # what others made is not made again

    def make(self, documents: Iterable[Document]) -> Sequence[Outcome]:
        """One outcome for each, in their order; none of them harms another one. With an object store, what was made
        is there, verified, or has failed.
        """
        made = [self._tried(each) for each in documents]
        return made if self._courier is None else list(self._uploaded(made, self._courier))

    def _tried(self, document: Document) -> Outcome:
        failed = Outcome(document.source, document.nbytes, problem=document.problem, reason=document.reason)
        for attempt in range(self._config.retries + 1 if not document.problem else 0):
            try:
                return self._made(document)
            except SparseKVError as error:
                failed = replace(failed, problem=error.message, reason=error.reason)
                if isinstance(error, _LASTING):
                    break
            except Exception as error:
                logger.exception("%s failed", document.source)
                failed = replace(failed, problem=f"{type(error).__name__}: {error}", reason="INTERNAL")
            if attempt < self._config.retries:
                time.sleep(_PAUSE_S * 2 ** min(attempt, 5))
        return failed

    def _made(self, document: Document) -> Outcome:
        tokens = document_tokens(self._tokenizer, document.text)
        job = job_over_tokens(self._job, self._folder, tokens, document.title)
        means = Means(self._model.load, stays=True, store=self._store)
        report = carry_out(job, SilentReporter(), Clock(), means)
        return Outcome(document.source, document.nbytes, report.manifest.id, report.created, len(tokens))

    def _uploaded(self, made: Sequence[Outcome], courier: Courier) -> Iterator[Outcome]:
        waiting: set[str] = set()
        for attempt in range(self._config.retries + 1):
            courier.look(wait=True)
            waiting = {each.id for each in courier.pending()}
            if not waiting & {each.id for each in made}:
                break
            if attempt < self._config.retries:
                time.sleep(_PAUSE_S * 2 ** min(attempt, 5))
        problem = f"stored, and not uploaded: {courier.state().problem or 'another process uses it'}"
        for each in made:
            lost = each.id in waiting
            yield replace(each, problem=problem, reason="OBJECTS_UNAVAILABLE") if lost else each
