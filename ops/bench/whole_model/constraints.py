"""Whether answers are what JSON schemas describe, and what a constraint costs a token.

usage: python ops/bench/whole_model/constraints.py [--schemas 200] [--tokens 160]

Regime: the packaged reader on a CPU, general path, full attention over a made-up context of 2,048 tokens; random
schemas and random prompts, every second answer sampled at temperature 1. Each schema's answer is generated token by
token, and as many tokens after the same prompt without a constraint, right after. Every answer that ends by its grammar
has to validate by `jsonschema`, or the benchmark fails. `choose_us`: medians of the time between the model's logits and
the choice of a token, waiting for the grammar included, which works while the model computes; `token_ms`: of a whole
step. `compile_ms`: of a schema that was not seen before, with its trial in another process.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import jsonschema
import typer
from harness.made_up.random_constraints import random_schema
from harness.report import CheckFailedError, reporting

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.engine.sampling.grammar import Grammar
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.orders.order import Constraint
from index_store.memory.resident import ResidentContext
from index_store.methods.presets import get_method
from index_store.models.resolve import resolve_model

_CONTEXT = 2048
_FULL = get_method("full")


@dataclass
class Times:
    """Of steps, in seconds: whole ones, and the choice of their tokens."""

    steps: list[float] = field(default_factory=list)
    choices: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Bench:
    """A model and a context."""

    runner: ModelRunner
    context: ResidentContext

    def answer(self, prompt: list[int], sampler: Sampler, tokens: int, times: Times) -> list[int]:
        """Up to so many tokens."""
        session = self.runner.start(self.context, _FULL.on(self.context.manifest))
        said: list[int] = []
        logits = self.runner.read([session], [prompt])[0]
        while True:
            chosen = time.perf_counter()
            said.append(sampler.sample(logits[-1]))
            times.choices.append(time.perf_counter() - chosen)
            if sampler.ended or len(said) >= tokens or said[-1] in self.runner.tokenizer.eos_ids:
                break
            begin = time.perf_counter()
            logits = self.runner.forward([session], [[said[-1]]])[0]
            times.steps.append(time.perf_counter() - begin + times.choices[-1])
        session.close()
        return said


def parameters(number: int, grammar: Grammar | None) -> SamplingParameters:
    """Every second answer is drawn."""
    return SamplingParameters(temperature=float(number % 2), seed=number, grammar=grammar)


def check(schema: dict[str, object], text: str) -> None:
    """Raises CheckFailedError unless the text is JSON that the schema describes."""
    try:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    except (ValueError, jsonschema.ValidationError) as error:
        raise CheckFailedError(f"{json.dumps(schema)} does not describe {text!r}: {error}") from error


def main(
    schemas: Annotated[int, typer.Option(help="How many.")] = 200,
    tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 160,
) -> None:
    """Generates an answer to each schema, validates it, and times it against an answer without."""
    with reporting("constraints", gpu=False) as report:
        runner = ModelRunner(resolve_model("reader"))
        context = made_up_context(runner.identity, runner.kv_dtype, _FULL, _CONTEXT)
        bench, draw = Bench(runner, context), random.Random(0)
        free, obeying, compiled, finished = Times(), Times(), list[float](), 0
        try:
            for number in range(schemas):
                schema = random_schema(draw)
                begin = time.perf_counter()
                constraint = Constraint("json_schema", json.dumps(schema))
                runner.vocabulary.check(constraint)
                grammar = runner.grammars.compile(constraint)
                compiled.append(time.perf_counter() - begin)
                prompt = [draw.randrange(1, 4000) for _ in range(draw.randint(2, 12))]
                sampler = Sampler(parameters(number, grammar))
                said = bench.answer(prompt, sampler, tokens, obeying)
                if sampler.ended:
                    finished += 1
                    check(schema, runner.tokenizer.decode(said))
                bench.answer(prompt, Sampler(parameters(number, None)), len(said), free)
        finally:
            runner.close()
            context.release()
        report.add(
            {
                "schemas": schemas,
                "finished": finished,
                "valid": finished,
                "tokens": len(obeying.choices),
                "choose_us": statistics.median(obeying.choices) * 1e6,
                "choose_us_free": statistics.median(free.choices) * 1e6,
                "choose_us_p99": statistics.quantiles(obeying.choices, n=100)[98] * 1e6,
                "token_ms": statistics.median(obeying.steps) * 1e3,
                "token_ms_free": statistics.median(free.steps) * 1e3,
                "compile_ms": statistics.median(compiled) * 1e3,
                "compile_ms_max": max(compiled) * 1e3,
            }
        )


if __name__ == "__main__":
    typer.run(main)
