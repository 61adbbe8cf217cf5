"""A long generation after a long context: whether methods keep to full attention, find new tokens, and what it costs.

usage: python ops/bench/whole_model/long_generation.py --out DIR [--methods refined,tactic] [--context-length 16k]

Regime: the packaged novels' first tokens are the context, prefilled by prefill-worker's command; then full attention
samples one text with temperature 1 from a fixed seed (greedy text of a small model falls into loops, where every method
finds the loop's tokens). Every method reads that text one token at a time, as if it had generated it, with every index
appended to. `agreement` is the share of tokens after which its most probable token is full attention's, `kl` the mean
KL(full || method) of next-token distributions in nats.

Every --observe steps each searching layer's choice is compared with the exact best keys of the searched range, as many
as were selected, by their attention weight within the range, summed over the group: `recall_new` is the share of the
generated keys among them that were selected, `recall_all` of all of them, `new_share` how many of them are generated
keys. The time of that is taken out of the step times. `append_us` is the time for which a step made tail keys
searchable: next to nothing in most steps, since keys leave the window of recent tokens in blocks. One JSON line per
method and stretch of tokens, then one per method over all of them; figures of a stretch are its own, `session_bytes`
is what the session holds at its end.

Shape legend: H KV heads, G group heads, R searched keys, K selected keys, N tokens of the context, d head dim, T tokens
of the text, V of the vocabulary.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import torch
import typer
from harness.parsing import parse_method
from harness.report import reporting
from torch import Tensor

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.evaluation.pictures import check_pictures
from decode_engine.evaluation.prefill_command import PrefillCommand
from decode_engine.evaluation.tasks.documents import parse_length, source_text
from decode_engine.layers.selected_attention import Observation
from decode_engine.layers.session import Session
from decode_engine.layers.sparse_layer import SparseLayer
from decode_engine.model.runner import ModelRunner
from index_store.memory.arena import Arena
from index_store.memory.context_loading import placed_bytes
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.methods.presets import METHODS
from index_store.models.loading import resolve_model
from index_store.store.catalog import Store


@dataclass
class Recall:
    """Running counts of the exact best keys: all of them, generated ones, and how many of each were selected."""

    best: int = 0
    best_new: int = 0
    found: int = 0
    found_new: int = 0

    def add(self, seen: Observation) -> None:
        """Compares one step's selection with the exact best keys."""
        context, tail = seen.rows.context_HN2D, seen.rows.tail_Ht2D
        assert isinstance(context, torch.Tensor), "contexts here are not stored in 8 bits"
        count = context.shape[1]
        keys_HND = torch.cat([context[:, :, 0], tail[:, :, 0]], dim=1)
        keys_HRD = keys_HND[:, seen.sinks : seen.search_end].float()
        weights_HR = (seen.q_HTGD[:, 0] @ keys_HRD.transpose(1, 2)).softmax(-1).sum(1)
        selected = seen.selection
        for head, kept in enumerate(selected.counts_HT[:, 0].tolist()):
            best = weights_HR[head].topk(kept).indices + seen.sinks
            found = torch.isin(best, selected.ids_HTK[head, 0, :kept].long())
            self.best += kept
            self.best_new += int((best >= count).sum())
            self.found += int(found.sum())
            self.found_new += int((found & (best >= count)).sum())

    def figures(self) -> dict[str, float | None]:
        """Shares; None of nothing."""
        return {
            "recall_new": self.found_new / self.best_new if self.best_new else None,
            "recall_all": self.found / self.best if self.best else None,
            "new_share": self.best_new / self.best if self.best else None,
        }


@dataclass
class Stretch:
    """What was measured over some consecutive tokens, of all but `recall` one value per step. Times in nanoseconds."""

    recall: Recall = field(default_factory=Recall)
    alike: list[bool] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    step_ns: list[int] = field(default_factory=list)
    append_ns: list[int] = field(default_factory=list)
    session_bytes: int = 0

    def figures(self) -> dict[str, Any]:
        return {
            "agreement": statistics.fmean(self.alike),
            "kl": statistics.fmean(self.kl),
            **self.recall.figures(),
            "session_bytes": self.session_bytes,
            "step_ms": _percentiles(self.step_ns, 1e6),
            "append_us": _percentiles(self.append_ns, 1e3),
        }


def _percentiles(nanoseconds: Sequence[int], unit: float) -> dict[str, float]:
    ordered = sorted(nanoseconds)
    found: dict[str, float] = {
        f"p{share}": ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 90, 99)
    }
    found |= {"max": ordered[-1], "mean": statistics.fmean(ordered)}
    return {name: round(value / unit, 2) for name, value in found.items()}


class Observer:
    """Looks into the searching layers of a session while it is attached; counts the time that takes."""

    def __init__(self, session: Session) -> None:
        self._layers = [layer for layer in session.layers if isinstance(layer, SparseLayer)]
        self.spent_ns = 0

    @contextmanager
    def into(self, recall: Recall) -> Iterator[None]:
        def observe(seen: Observation) -> None:
            begin = time.perf_counter_ns()
            recall.add(seen)
            self.spent_ns += time.perf_counter_ns() - begin

        for layer in self._layers:
            layer.observer = observe
        try:
            yield
        finally:
            for layer in self._layers:
                layer.observer = None


@dataclass(frozen=True)
class Text:
    """What full attention made. tokens: T that are read one by one. log_probs_TV: float32, its choice after each."""

    tokens: list[int]
    log_probs_TV: Tensor


def sample_text(runner: ModelRunner, context: ResidentContext, first: int, options: Options) -> Text:
    """The text that full attention goes on with after the token `first`."""
    session = runner.start(context, METHODS["full"].on(context.manifest))
    sampler = Sampler(SamplingParameters(temperature=1.0, seed=options.seed))
    tokens = [first]
    found: list[torch.Tensor] = []
    try:
        while len(found) < options.tokens:
            logits = runner.forward([session], [tokens[-1:]])[0][-1]
            found.append(logits.float().log_softmax(-1))
            tokens.append(sampler.sample(logits))
    finally:
        session.close()
    return Text(tokens[:-1], torch.stack(found))


def read_text(
    runner: ModelRunner, context: ResidentContext, method: Method, text: Text, options: Options
) -> Iterator[Stretch]:
    """The method reads the text token by token; yields one stretch after another."""
    session = runner.start(context, method.on(context.manifest))
    observer = Observer(session)
    try:
        for begin in range(0, options.tokens, options.stretch):
            stretch = Stretch()
            for number in range(begin, min(options.tokens, begin + options.stretch)):
                token, expected_V = text.tokens[number], text.log_probs_TV[number]
                appended, spent = session.figures.append_ns, observer.spent_ns
                start = time.perf_counter_ns()
                if number % options.observe == 0:
                    with observer.into(stretch.recall):
                        logits = runner.forward([session], [[token]])[0]
                else:
                    logits = runner.forward([session], [[token]])[0]
                elapsed = time.perf_counter_ns() - start
                stretch.step_ns.append(elapsed - (observer.spent_ns - spent))
                stretch.append_ns.append(session.figures.append_ns - appended)
                found_V = logits[-1].float().log_softmax(-1)
                stretch.alike.append(bool(found_V.argmax() == expected_V.argmax()))
                stretch.kl.append(float((expected_V.exp() * (expected_V - found_V)).sum()))
            stretch.session_bytes = session.nbytes
            yield stretch
    finally:
        session.close()


@dataclass(frozen=True)
class Options:
    """How to generate and what to look at; see the command's flags."""

    tokens: int
    stretch: int
    observe: int
    seed: int


def together(stretches: Sequence[Stretch]) -> Stretch:
    """All stretches as one."""
    whole = Stretch(session_bytes=stretches[-1].session_bytes)
    for stretch in stretches:
        for name in ("best", "best_new", "found", "found_new"):
            setattr(whole.recall, name, getattr(whole.recall, name) + getattr(stretch.recall, name))
        whole.alike += stretch.alike
        whole.kl += stretch.kl
        whole.step_ns += stretch.step_ns
        whole.append_ns += stretch.append_ns
    return whole


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Recall of new keys, memory and median step time against the tokens generated."""
    check_pictures()
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.2))
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        at = [row["to"] for row in own]
        axes[0].plot(at, [row["recall_new"] for row in own], marker="o", label=method)
        axes[1].plot(at, [row["session_bytes"] / 2**20 for row in own], marker="o")
        axes[2].plot(at, [row["step_ms"]["p50"] for row in own], marker="o")
    labels = ("recall of generated keys", "session, MiB", "median step, ms")
    for axis, label in zip(axes, labels, strict=True):
        axis.set_ylabel(label)
        axis.set_xlabel("tokens generated")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].set_ylim(0, 1)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def prefill(
    runner: ModelRunner, model: str, methods: Sequence[Method], length: int, out: Path
) -> tuple[str, int]:
    """Has the first tokens of the packaged text prefilled; returns the context's id and the token that follows."""
    ids = runner.tokenizer.encode(source_text(()))
    body = length - len(runner.tokenizer.prefix_ids)
    document = out / "context.txt"
    document.write_text(runner.tokenizer.decode(ids[:body]), encoding="utf-8")
    presets = list(dict.fromkeys(method.name.partition("+")[0].partition("@")[0] for method in methods))
    report = PrefillCommand(model, out / "store", presets).run(document, "long-generation")
    return str(report["id"]), ids[body]


def main(
    out: Annotated[Path, typer.Option(help="Folder for the store and the picture.")],
    methods: Annotated[
        str, typer.Option(help="NAME or NAME:KEEP, comma-separated.")
    ] = "refined,refined:0.01,csattention:0.02,multipole:0.02",
    context_length: Annotated[str, typer.Option(help="Tokens of the context.")] = "16k",
    tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 2000,
    stretch: Annotated[int, typer.Option(help="Tokens per figure.")] = 250,
    observe: Annotated[int, typer.Option(help="Look into the layers every so many steps.")] = 10,
    model: Annotated[str, typer.Option(help="Packaged model or a Hugging Face folder.")] = "reader",
    seed: Annotated[int, typer.Option()] = 0,
    picture: Annotated[bool, typer.Option(help="Draw the figures (needs matplotlib).")] = True,
) -> None:
    """Reads a long text after a long context by every method; one JSON line per stretch and method."""
    options = Options(tokens, stretch, observe, seed)
    asked = {name.strip(): parse_method(name.strip()) for name in methods.split(",")}
    with reporting("long_generation", gpu=False) as report:
        if picture:
            check_pictures()
        out.mkdir(parents=True, exist_ok=True)
        runner = ModelRunner(resolve_model(model))
        id_, first = prefill(runner, model, list(asked.values()), parse_length(context_length), out)
        store = Store(out / "store")
        drawn: list[dict[str, Any]] = []
        with Arena(placed_bytes(store.manifest(id_))).acquire(store, id_) as context:
            text = sample_text(runner, context, first, options)
            for name, method in asked.items():
                base = {"method": name, "context": context.manifest.token_count}
                stretches: list[Stretch] = []
                for found in read_text(runner, context, method, text, options):
                    begin = len(stretches) * stretch
                    stretches.append(found)
                    row = {**base, "from": begin, "to": begin + len(found.step_ns), **found.figures()}
                    drawn.append(row)
                    report.add(row)
                report.add({**base, "from": 0, "to": tokens, **together(stretches).figures()})
        if picture:
            draw(out / "long_generation.png", drawn)


if __name__ == "__main__":
    typer.run(main)
