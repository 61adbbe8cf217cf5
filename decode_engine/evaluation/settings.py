"""What to evaluate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from decode_engine.evaluation.prefill_command import attention_flags
from decode_engine.evaluation.tasks.documents import DocumentSet, parse_length
from decode_engine.evaluation.tasks.family import FAMILIES, get_family
from decode_engine.settings import command_options as shared
from index_store.cli.options import (
    AUTO,
    AtLeast,
    InputFile,
    MoreThan,
    OneOf,
    OutputFolder,
    check_bounds,
    comma_separated,
)
from index_store.errors import InvalidArgumentError
from index_store.methods.presets import EXPRESSION_HELP
from index_store.store.description.dtypes import AS_DTYPE, ROW_CODINGS

if TYPE_CHECKING:
    from index_store.methods.method import Method

WARM_UP_STEPS = 2
TIMED_STEPS = 12

CONTINUATION_TOKENS = 128
"""Tokens that `tune` predicts where no texts are given."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A method at one budget.

    expression: what names the method. keep, mass: whichever the budget is made from; both None for full attention.
    after: how contexts were prefilled, where that is not exact attention.
    """

    expression: str
    method: Method
    keep: float | None = None
    mass: float | None = None
    after: str | None = None

    @property
    def name(self) -> str:
        return self.expression if self.after is None else f"{self.expression} after {self.after}"

    @property
    def budget(self) -> str:
        """The budget as a text for tables: `1.00%` of the keys, or `mass 0.9`."""
        if self.mass is not None:
            return f"mass {self.mass:.4g}"
        return "all" if self.keep is None else f"{self.keep:.2%}"


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidArgumentError(f"{text!r} is no number; expected some such as 0.02") from None


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """What to evaluate: what the flags of `decode-engine evaluate` say.

    tasks: families that share the questions evenly. methods: expressions for `get_method`, all presets when none is
    given. text: sources of the
    contexts, joined; the packaged novels when empty.
    index: indexes with other parameters than the methods' own, each as `prefill-worker run --index` takes it.
    attention: "exact", or how a second set of contexts is prefilled, which is compared with the first
    (`attention_flags`). index_for: methods whose indexes the contexts get besides, so that runs of different methods
    can share contexts.
    prompts: what a question's tokens attend to; auto is each what a search for it selects, on any device.
    """

    out: Annotated[Path, "Folder for the results, the pictures and the store.", OutputFolder()]
    model: shared.ModelOption = "reader"
    context_lengths: Annotated[
        tuple[int, ...],
        Option("--context-length", help="Context lengths in tokens, comma-separated."),
        comma_separated("8k,32k", parse_length),
        AtLeast(1, 2**31),
    ] = (8192, 32768)
    tasks: Annotated[
        tuple[str, ...],
        f"Tasks, comma-separated: {', '.join(FAMILIES)}.",
        comma_separated("single"),
        OneOf(*FAMILIES),
    ] = ("single",)
    questions: Annotated[int, "Questions per context length, over all tasks.", AtLeast(1, 1_000_000)] = 216
    facts: Annotated[int, "Questions per context at most.", AtLeast(1, 100_000)] = 24
    distractors: shared.DistractorsOption = None
    methods: Annotated[
        tuple[str, ...],
        f"Methods, comma-separated, each {EXPRESSION_HELP}; by default all presets.",
        comma_separated(""),
    ] = ()
    keep: Annotated[
        tuple[float, ...],
        "Fractions of the keys to keep, comma-separated.",
        comma_separated("0.01,0.02,0.05,0.1", _parse_number),
        MoreThan(0, 1),
    ] = (0.01, 0.02, 0.05, 0.1)
    mass: Annotated[
        tuple[float, ...],
        "Attention masses to keep, for methods that follow mass.",
        comma_separated("0.5,0.7,0.9,0.95", _parse_number),
        MoreThan(0, 1),
    ] = (0.5, 0.7, 0.9, 0.95)
    text: shared.TextOption = ()
    text_tokens: Annotated[
        int, "Plain-text tokens scored after each context.", AtLeast(TIMED_STEPS + WARM_UP_STEPS, 100_000)
    ] = 96
    chat: Annotated[bool, "Ask through the model's own chat template."] = False
    dense_layers: Annotated[str, "As for prefill-worker run."] = AUTO
    calibration: Annotated[Path | None, "As for prefill-worker run.", InputFile()] = None
    index: Annotated[tuple[str, ...], Option(metavar="NAME", help="As for prefill-worker run.")] = ()
    index_for: Annotated[
        tuple[str, ...],
        "Further methods to build indexes for, so that several runs share contexts.",
        comma_separated(""),
    ] = ()
    store: Annotated[Path | None, "Store for the contexts; OUT/store by default.", OutputFolder()] = None
    seed: Annotated[int, "Decides facts, depths and parts of the text.", AtLeast(0)] = 0
    device: shared.DeviceOption = AUTO
    placement: shared.PlacementOption = AUTO
    prompts: shared.PromptsOption = shared.Prompts.AUTO
    weights: shared.WeightsOption = AUTO
    attention: Annotated[
        str,
        "muse, or muse:block=1024,clusters=64,monopole: prefill every context with approximate attention as "
        "well, and compare what it answers with full attention to the exact one.",
    ] = "exact"
    rows: Annotated[
        str,
        "int8: prefill every context with rows in 8 bits as well, and compare in the same way.",
        OneOf(*ROW_CODINGS),
    ] = AS_DTYPE

    def __post_init__(self) -> None:
        from index_store.methods.presets import METHODS, get_method

        check_bounds(self)
        shared.check_device(self.device)
        shared.check_placement(self.placement, self.device)
        shared.check_weights(self.weights, self.device)
        if not self.context_lengths:
            raise InvalidArgumentError("--context-length is empty, expected lengths such as 8k,32k")
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise InvalidArgumentError(
                f"--tasks is {','.join(self.tasks)!r}, expected one or more, each once"
            )
        if self.questions < len(self.tasks):
            raise InvalidArgumentError(
                f"--questions is {self.questions}, expected at least one for each of {len(self.tasks)} tasks"
            )
        if not self.methods:
            object.__setattr__(self, "methods", tuple(METHODS))
        for name in self.index_for:
            get_method(name)
        attention_flags(self.attention)
        self.variants()

    def variants(self) -> list[Variant]:
        """Methods at their budgets, full attention first whether it was asked for or not.

        Raises MethodUnsupportedError or InvalidArgumentError for what is no method or budget.
        """
        from index_store.methods.presets import get_method
        from index_store.selection.budgets import Mass

        found: list[Variant] = []
        for name in dict.fromkeys(("full", *self.methods)):
            method = get_method(name)
            if not method.sparse:
                found.append(Variant(name, method))
            elif isinstance(method.budget, Mass):
                found += [Variant(name, get_method(name, mass=mass), mass=mass) for mass in self.mass]
            else:
                found += [Variant(name, get_method(name, keep), keep=keep) for keep in self.keep]
        return found

    def approximated(self) -> list[Variant]:
        """The same variants over contexts with approximate attention or rows in 8 bits; none where all is exact."""
        after = [self.attention] if self.attention != "exact" else []
        after += [self.rows] if self.rows != AS_DTYPE else []
        return [replace(variant, after=" and ".join(after)) for variant in self.variants() if after]

    def indexed(self) -> list[str]:
        """Expressions to prefill contexts for, in an order that does not depend on which of them are measured."""
        from index_store.methods.presets import get_method

        names = {*self.methods, *self.index_for}
        return sorted(name for name in names if get_method(name).index_specs())

    def document_sets(self, length: int) -> list[DocumentSet]:
        """How many contexts of each task, and how many questions in each, answer for all questions of a length."""
        sets = []
        for task, questions in self.questions_by_task().items():
            facts = get_family(task).questions_in(length, self.facts)
            sets.append(DocumentSet(-(-questions // facts), facts, task, self.distractors))
        return sets

    def questions_by_task(self) -> dict[str, int]:
        """The questions of a length, divided evenly; the first tasks get what is left over."""
        each, rest = divmod(self.questions, len(self.tasks))
        return {task: each + (number < rest) for number, task in enumerate(self.tasks)}
