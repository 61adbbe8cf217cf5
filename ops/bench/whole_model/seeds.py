"""What it costs that a request with a seed gets the same tokens beside others as alone, and whether it does.

usage: python ops/bench/whole_model/seeds.py [--device cuda] [--methods full,csattention] [--length 32k] [--prompts 30]
       python ops/bench/whole_model/seeds.py --sharing [--methods full,refined] [--keep 0.01] [--sessions 2,8,16]

Regime: sessions that share one made-up context, with a few random tokens of their own, sampled at temperature 1. On a
CPU the packaged reader by the general path; on a GPU a model of Llama-3.1-8B's shape with random weights, by captured
steps. First every prompt is decoded alone, and then beside 15 others, half of them with seeds, that come and go:
`same` counts the prompts whose tokens were the same, with the promise (`seeds`: all, or the benchmark fails) and with
the same draws but without it (`none`). Then the time of a step: `seeded` of the `sessions` have seeds. Kinds of steps
take turns, so that a disturbance meets all of them alike: medians, and the least time of the process's own cores
(`cpu_ms`), which neighbours disturb less.

With --sharing no session has a seed. The time of a step of sessions that share a context stands beside that of as many
on copies of it, which take turns, too (`times_as_fast`, `cpu_times_as_fast`; `layer_ms` is the attention of one layer).
And `same_greedy` counts the sessions, of so many prompts, with the same most likely tokens alone and in random groups;
on a CPU all have to be the same.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import torch
import typer
from harness.made_up.contexts import make_model
from harness.report import CheckFailedError, reporting
from harness.steps.general_steps import first_tokens, forward, start_sessions
from torch import Tensor

from decode_engine.engine.requests import Found
from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.engine.stepping import decode_by_forward
from decode_engine.evaluation.tasks import parse_length
from decode_engine.layers.session import Session
from decode_engine.model.decode_attention import ATTENTION_NAME, register_attention
from decode_engine.model.packed_weights import pack_weights
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.step_graph import step_model
from decode_engine.steps.stepper import Stepper
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.methods.presets import get_method
from index_store.models.loading import load_model, resolve_model
from index_store.store.description.context_id import ModelIdentity

OTHERS = 15
WARM_UP = 2
STAY, AWAY = 20, 10
"""Steps that one of the others takes part in, and is away for, by turns."""


class Model:
    """A model and its steps, as the engine runs them on the device."""

    def __init__(self, device: str, layers: int) -> None:
        self.model: Any
        self.identity: ModelIdentity
        self._stepper: Stepper | None = None
        if device == "cpu":
            register_attention()
            loaded = load_model(resolve_model("reader"), ATTENTION_NAME, device=torch.device("cpu"))
            self.model, self.identity = loaded.model, loaded.identity
            pack_weights(self.model, "auto", torch.bfloat16)
            return
        self.model, self.identity = make_model(layers, device)
        run = step_model(self.model)
        self._stepper = Stepper(run, self.identity, torch.bfloat16, torch.device(device))

    def step(
        self, sessions: Sequence[Session], tokens: Sequence[int], samplers: Sequence[Sampler]
    ) -> list[int]:
        """The tokens that follow. Raises CheckFailedError where a session's step has failed."""
        results: Sequence[Found]
        if self._stepper is None:
            results = decode_by_forward(self._forward, sessions, tokens, samplers)
        else:
            results = self._stepper.step(sessions, tokens, samplers)
        for result in results:
            if isinstance(result, Exception):
                raise CheckFailedError(str(result))
        return [int(result) for result in results if isinstance(result, int)]

    def _forward(self, sessions: Sequence[Session], token_ids: Sequence[Sequence[int]]) -> list[Tensor]:
        return list(forward(self.model, sessions, [ids[0] for ids in token_ids])[:, None])


@dataclass(frozen=True)
class Bench:
    """A method on one context that all sessions share."""

    model: Model
    context: ResidentContext
    method: Method

    def sessions(self, count: int) -> list[Session]:
        """As many, each with tokens of its own."""
        return start_sessions([self.context] * count, self.method)

    def decode_alone(self, number: int, prompts: int, tokens: int) -> list[int]:
        """What a prompt's session says by itself."""
        session, sampler = self.sessions(prompts)[number], make_sampler(number, True)
        said = [first_tokens(range(prompts))[number]]
        while len(said) <= tokens:
            said += self.model.step([session], said[-1:], [sampler])
        return said

    def time_sharing(self, count: int, turns: int) -> dict[str, float]:
        """Figures of steps of so many sessions on the context, and on copies of it."""
        copies = [copy_context(self.context) for _ in range(count)]
        cases = {"shared": self.sessions(count), "copies": start_sessions(copies, self.method)}
        tokens, samplers = first_tokens(range(count)), [make_sampler(0, False) for _ in range(count)]
        times: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
        for _ in range(WARM_UP + turns):
            for case, sessions in cases.items():
                before = attention_ns(sessions[0])
                begin, cpu = time.perf_counter(), time.process_time()
                self.model.step(sessions, tokens, samplers)
                spent = (time.perf_counter() - begin, time.process_time() - cpu)
                times[case].append((*spent, attention_ns(sessions[0]) - before))
        for copied in copies:
            copied.release()
        figures: dict[str, float] = {"sessions": count}
        for case, found in times.items():
            steps, cpu_s, layers = zip(*found[WARM_UP:], strict=True)
            figures[f"{case}_ms"] = statistics.median(steps) * 1e3
            figures[f"{case}_cpu_ms"] = min(cpu_s) * 1e3
            figures[f"{case}_tokens_per_s"] = count / statistics.median(steps)
            if case == "shared":
                figures["layer_ms"] = statistics.median(layers) / self.model.identity.layers / 1e6
        figures["times_as_fast"] = figures["copies_ms"] / figures["shared_ms"]
        figures["cpu_times_as_fast"] = figures["copies_cpu_ms"] / figures["shared_cpu_ms"]
        return figures

    def count_same_greedy(self, count: int, tokens: int) -> int:
        """Of so many sessions, those with the same most likely tokens alone and in groups that change at every step."""
        tasks, sampler = range(count), make_sampler(0, False, greedy=True)
        sessions, said = self.sessions(count), [[token] for token in first_tokens(range(count))]
        generator = random.Random(0)
        while left := [each for each in tasks if len(said[each]) <= tokens]:
            here = generator.sample(left, generator.randint(1, len(left)))
            last = [said[each][-1] for each in here]
            found = self.model.step([sessions[each] for each in here], last, [sampler] * len(here))
            for each, token in zip(here, found, strict=True):
                said[each].append(token)
        alone, firsts = self.sessions(count), first_tokens(range(count))
        same = 0
        for session, token, beside in zip(alone, firsts, said, strict=True):
            own = [token]
            while len(own) <= tokens:
                own += self.model.step([session], own[-1:], [sampler])
            same += own == beside
        return same

    def decode_beside(self, number: int, prompts: int, tokens: int, repeatable: bool) -> list[int]:
        """The same beside others, which are sessions of other prompts."""
        sessions, said = self.sessions(prompts), [[token] for token in first_tokens(range(prompts))]
        samplers = [make_sampler(each, repeatable and each % 2 == number % 2) for each in range(prompts)]
        others = [(number + 1 + place) % prompts for place in range(min(OTHERS, prompts - 1))]
        for step in range(tokens):
            here = [each for each in others if (step + 7 * each) % (STAY + AWAY) < STAY]
            here.insert(step % (len(here) + 1), number)
            found = self.model.step(
                [sessions[each] for each in here],
                [said[each][-1] for each in here],
                [samplers[each] for each in here],
            )
            for each, token in zip(here, found, strict=True):
                said[each].append(token)
        return said[number]

    def count_same(self, prompts: int, tokens: int) -> dict[str, int]:
        """Of so many prompts, those with the same tokens alone and beside others, with seeds and without."""
        same = {"seeds": 0, "none": 0}
        for number in range(prompts):
            alone = self.decode_alone(number, prompts, tokens)
            for promise in same:
                same[promise] += alone == self.decode_beside(number, prompts, tokens, promise == "seeds")
        return same

    def time_steps(self, count: int, turns: int) -> list[dict[str, float]]:
        """Figures of steps of so many sessions, by the number of those with seeds."""
        sessions, tokens = self.sessions(count), first_tokens(range(count))
        times: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for turn in range(WARM_UP + turns):
            for seeded in sorted({0, 1, count}):
                samplers = [make_sampler(turn, number < seeded) for number in range(count)]
                begin, cpu = time.perf_counter(), time.process_time()
                self.model.step(sessions, tokens, samplers)
                if turn >= WARM_UP:
                    times[seeded].append((time.perf_counter() - begin, time.process_time() - cpu))
        return [
            {
                "sessions": count,
                "seeded": seeded,
                "step_ms": statistics.median(step for step, _ in found) * 1e3,
                "cpu_ms": min(cpu for _, cpu in found) * 1e3,
            }
            for seeded, found in times.items()
        ]


def make_sampler(seed: int, repeatable: bool, greedy: bool = False) -> Sampler:
    """One that draws by the seed, or takes the most likely token, with the promise or without."""
    sampler = Sampler(SamplingParameters(temperature=0.0 if greedy else 1.0, seed=seed))
    sampler.repeatable = repeatable
    return sampler


def attention_ns(session: Session) -> int:
    """Time that the session's attention has taken so far, in all layers."""
    figures = session.figures
    return figures.search_ns + figures.gather_ns + figures.attend_ns + figures.append_ns


def copy_context(context: ResidentContext) -> ResidentContext:
    """The same context in memory of its own."""
    layers, specs = range(context.manifest.model.layers), context.manifest.indexes
    copied: dict[int, Tensor] = {}

    def copy_of(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in copied:
            copied[tensor.data_ptr()] = tensor.clone()
        return copied[tensor.data_ptr()]

    return ResidentContext(
        context.manifest,
        context.tokens(),
        {layer: copy_of(context.kv(layer)) for layer in layers},
        {
            (spec.name, layer): {
                name: copy_of(array) for name, array in context.index(spec.name, layer).arrays().items()
            }
            for spec in specs
            for layer in spec.layers
        },
        placement=context.placement,
        device=context.device,
    )


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = "full,csattention",
    keep: Annotated[float, typer.Option(help="Fraction of the keys that sparse methods keep.")] = 0.05,
    length: Annotated[str, typer.Option(help="Tokens of the context.")] = "32k",
    prompts: Annotated[int, typer.Option(help="Prompts that are decoded alone and beside others.")] = 30,
    tokens: Annotated[int, typer.Option(help="Tokens that each of them generates.")] = 100,
    sessions: Annotated[str, typer.Option(help="Numbers of sessions whose steps are timed.")] = "1,16",
    turns: Annotated[int, typer.Option(help="Timed steps of every kind.")] = 30,
    layers: Annotated[int, typer.Option(help="Layers of the model, on a GPU.")] = 32,
    sharing: Annotated[
        bool, typer.Option("--sharing", help="Time sessions on one context and on copies.")
    ] = False,
) -> None:
    """Checks that seeds give the same tokens beside others, and times what that costs."""
    with reporting("seeds", gpu=device != "cpu") as report:
        model = Model(device, layers)
        for name in methods.split(","):
            method = get_method(name, None if name == "full" else keep)
            context = made_up_context(
                model.identity, "bfloat16", method, parse_length(length), distinct=2, device=device
            )
            bench = Bench(model, context, method)
            line = {"method": method.name, "context": parse_length(length), "device": device}
            if sharing:
                for count in map(int, sessions.split(",")):
                    report.add({**line, **bench.time_sharing(count, turns)})
                greedy = bench.count_same_greedy(prompts, tokens)
                report.add({**line, "prompts": prompts, "tokens": tokens, "same_greedy": greedy})
                if device == "cpu" and greedy < prompts:
                    raise CheckFailedError(f"{method.name}: {greedy} of {prompts} sessions said the same")
                context.release()
                continue
            same = bench.count_same(prompts, tokens)
            if same["seeds"] < prompts:
                raise CheckFailedError(
                    f"{method.name}: {same['seeds']} of {prompts} prompts gave the same tokens"
                )
            report.add({**line, "prompts": prompts, "tokens": tokens, "same": same})
            for count in map(int, sessions.split(",")):
                for figures in bench.time_steps(count, turns):
                    report.add({**line, **figures})
            context.release()


if __name__ == "__main__":
    typer.run(main)
