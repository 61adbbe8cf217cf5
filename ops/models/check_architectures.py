"""Serves a tiny random model of every causal language model that transformers knows, or says which sentence refuses it.

What is served decodes as `generate` of transformers does: the same 64 greedy tokens after 300 tokens and after 3,000,
in float32; and with a budget of all keys every method gives the logits of full attention. Of models with states,
chunks or latents the same tokens have to come in every way in which a prompt may stand behind a text. Prints one JSON
line for every architecture, or with `--table` writes the tables of docs/models.md from such lines.

    python ops/models/check_architectures.py --out found.jsonl [--only llama,gemma2]
    python ops/models/check_architectures.py --table found.jsonl
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "protos")]

import torch  # noqa: E402
from tiny_models import make_model, tiny_config  # noqa: E402
from transformers import AutoConfig  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

from decode_engine.model.runner import ModelRunner  # noqa: E402
from index_store.cli.console import LineReporter  # noqa: E402
from index_store.errors import InvalidArgumentError, SparseKVError  # noqa: E402
from index_store.memory.arena import Arena  # noqa: E402
from index_store.memory.resident import ResidentContext  # noqa: E402
from index_store.methods.presets import METHODS  # noqa: E402
from index_store.models.attention_reading import read_config  # noqa: E402
from index_store.models.loading import (  # noqa: E402
    attention_of,
    identify,
    resolve_model,
)
from index_store.store.catalog import Store  # noqa: E402
from index_store.store.description.manifest import Manifest  # noqa: E402
from prefill_worker.config import PrefillConfig  # noqa: E402
from prefill_worker.jobs.job import run_job  # noqa: E402
from tests.support.layers import ALL_METHODS, with_everything  # noqa: E402
from tests.support.models import write_tokenizer  # noqa: E402
from tests.support.ways import WAYS, served  # noqa: E402

LENGTHS = (300, 3000)
NEW_TOKENS = 64
PROMPT = (70, 71, 72, 73, 74)
LONGER = (*PROMPT, 75, 76, 77, 78, 79, 80, 81)
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- tables -->", "<!-- end of the tables -->"


def check(kind: str, folder: Path) -> dict[str, Any]:
    """What became of one architecture."""
    config = tiny_config(kind)
    folder.mkdir()
    write_tokenizer(folder)
    refusal = _refusal(config, folder)
    if refusal is not None and "does not run" not in refusal and "does not make" not in refusal:
        return {"refused": refusal}
    if refusal is not None:  # perhaps only because it is so small
        try:
            usual = _refusal(AutoConfig.for_model(kind), folder)
        except Exception:  # there is no usual one
            return {"refused": refusal}
        return {"failed": f"small: {refusal}"} if usual is None else {"refused": usual}
    model = make_model(config)
    if isinstance(model, str):
        return {"failed": model}
    model.save_pretrained(folder)
    found: dict[str, Any] = {"attention": _describe(folder), "equal": {}}
    try:
        runner = ModelRunner(resolve_model(str(folder)))
        for length in LENGTHS:
            with _Context(folder, length) as (context, without):
                found["equal"][length] = _same_tokens(runner, context, model)
                if length == LENGTHS[0]:
                    found["differing"] = sorted(_differing(runner, context, without))
                    found["without"] = without
            if any(
                what in found["attention"] for what in ("states", "chunk", "latents", "learnt", "several")
            ):
                found["equal"] |= _ways(runner, folder, model, length)
    except SparseKVError as error:
        return {"refused": _clause(error)}
    return found


def _clause(error: SparseKVError) -> str:
    return re.sub(r"^model '[^']*' cannot be (served|loaded): ", "", error.message)


def _refusal(config: Any, folder: Path) -> str | None:
    """Why a model of this configuration is refused before its weights are read; None when it is not."""
    config.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    try:
        identify(resolve_model(str(folder)))
    except SparseKVError as error:
        return _clause(error)
    return None


def _describe(folder: Path) -> str:
    """What is special about its attention."""
    readings = attention_of(resolve_model(str(folder)))
    config = json.loads((folder / "config.json").read_text())
    parts = []
    states = identify(resolve_model(str(folder))).states
    if states is not None:
        kinds = " and ".join(sorted({part.kind for part in states.parts}, reverse=True))
        kept = {layer for part in states.parts for layer in part.layers}
        parts.append(f"{kinds} states{' in every layer' if kept <= set(states.attending) else ''}")
    windows = sum(1 for own in readings if own.window)
    if windows:
        kind = "chunk" if any(own.chunked for own in readings) else "window"
        parts.append(f"{kind} in every layer" if windows == len(readings) else f"{kind}s beside full layers")
    if len({(own.query_heads, own.kv_heads, own.head_dim) for own in readings}) > 1:
        parts.append("windows of other heads")
    if any(own.sinks for own in readings):
        parts.append("learnt sinks")
    if any(own.cap for own in readings):
        parts.append("capped logits")
    if any(abs(own.scale * own.head_dim**0.5 - 1) > 1e-6 for own in readings):
        parts.append("another scale")
    text = config.get("text_config", config)
    if text.get("kv_lora_rank"):
        parts.append("latents")
    own = read_config(resolve_model(str(folder)))
    if len(readings) > (text.get("num_layers_per_stack") or own.num_hidden_layers):
        parts.append("layers that attend several times")
    if any(own.index_keys for own in readings):
        parts.append("a learnt index")
    if any("expert" in name and text[name] not in (None, 0, 1) for name in text):
        parts.append("experts")
    return ", ".join(parts)


class _Context:
    """A prefilled context of so many tokens, and methods that the model cannot have."""

    def __init__(self, folder: Path, length: int) -> None:
        self._folder, self._length = folder, length

    def __enter__(self) -> tuple[ResidentContext, list[str]]:
        self._home = tempfile.TemporaryDirectory()
        home = Path(self._home.name)
        letters = torch.randint(26, (self._length,), generator=torch.Generator().manual_seed(self._length))
        (home / "text").write_text("".join(chr(97 + int(letter)) for letter in letters))
        names = ["full"] if self._length != LENGTHS[0] else [name for name in METHODS if name != "oracle"]
        without: list[str] = []
        try:
            manifest = self._prefill(home, names)
        except InvalidArgumentError as error:
            if "windowed RoPE" not in error.message:
                raise
            without = ["multipole-windowed"]
            manifest = self._prefill(home, [name for name in names if name not in without])
        self._lease = Arena(2**31).acquire(Store(home / "store"), manifest.id)
        return self._lease.__enter__(), without

    def _prefill(self, home: Path, names: list[str]) -> Manifest:
        config = PrefillConfig(
            model=str(self._folder),
            store=home / "store",
            input=(home / "text",),
            method=tuple(names),
            chunk=512,
        )
        return run_job(config, LineReporter(io.StringIO())).manifest

    def __exit__(self, *error: object) -> None:
        self._lease.__exit__(None, None, None)
        self._home.cleanup()


def _ways(runner: ModelRunner, folder: Path, model: Any, length: int) -> dict[str, int]:
    """How many of the greedy tokens are those of `generate`, in every way in which a prompt may come."""
    text = torch.randint(3, 259, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    expected = _generated(model, [*text, *LONGER])
    with (
        tempfile.TemporaryDirectory() as home,
        served(folder, Path(home, "store"), text, runner=runner) as own,
    ):
        return {
            f"{length} {name}": _equal(way(own, LONGER, NEW_TOKENS), expected) for name, way in WAYS.items()
        }


def _equal(found: list[int], expected: list[int]) -> int:
    return sum(one == other for one, other in zip(found, expected, strict=True))


def _same_tokens(runner: ModelRunner, context: ResidentContext, model: Any) -> int:
    """How many of the greedy tokens are those of `generate`."""
    ids = [*context.tokens().tolist(), *PROMPT]
    session = runner.start(context, METHODS["full"].on(context.manifest))
    logits = runner.read([session], [list(PROMPT)])[0]
    found = [int(logits[-1].argmax())]
    while len(found) < NEW_TOKENS:
        found.append(int(runner.forward([session], [[found[-1]]])[0][-1].argmax()))
    return _equal(found, _generated(model, ids))


def _generated(model: Any, ids: list[int]) -> list[int]:
    return model.generate(  # type: ignore[no-any-return]
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=1,
    )[0, len(ids) :].tolist()


def _differing(runner: ModelRunner, context: ResidentContext, without: list[str]) -> Iterator[str]:
    """Methods whose logits with a budget of all keys are not those of full attention."""

    def logits(method: Any) -> torch.Tensor:
        session = runner.start(context, method.on(context.manifest))
        after = runner.forward([session], [list(PROMPT)])[0]
        return torch.cat([after, runner.forward([session], [[80]])[0]])

    expected = logits(METHODS["full"])
    for name, method in ALL_METHODS.items():
        if name.partition("+")[0] not in without:
            found = logits(with_everything(method))
            if float((found - expected).abs().max() / expected.std()) > 2e-3:
                yield name


def write_tables(lines: Path) -> None:
    """Puts the lists into the page, in place of those between the marks."""
    results = [json.loads(line) for line in lines.read_text().splitlines()]
    served = [each for each in results if "attention" in each]
    wrong = [
        each["kind"]
        for each in results
        if "failed" in each or each.get("differing") or set(each.get("equal", {}).values()) - {NEW_TOKENS}
    ]
    if wrong:
        raise SystemExit(f"not right: {', '.join(wrong)}")
    kinds: dict[str, list[str]] = defaultdict(list)
    for each in served:
        kinds[each["attention"] or "causal, full"].append(each["kind"])
    refused: dict[str, list[str]] = defaultdict(list)
    for each in results:
        if "refused" in each:
            refused[_pattern(each["refused"])].append(each["kind"])
    rows = [f"**Served** ({len(served)} of {len(results)}):", ""]
    rows += [f"- *{what}*: {', '.join(sorted(names))}" for what, names in sorted(kinds.items())]
    rows += ["", f"**Refused** ({len(results) - len(served)}):", ""]
    rows += [f"- *{why}*: {', '.join(sorted(names))}" for why, names in sorted(refused.items())]
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{chr(10).join(rows)}\n{END}{after}")


def _pattern(sentence: str) -> str:
    """A refusal without the numbers of this model."""
    sentence = re.sub(r"\((?:\w+Error|AssertionError): .*\)$", "(the error of transformers)", sentence)
    sentence = re.sub(r"^\S+ is an encoder", "it is an encoder", sentence)
    sentence = re.sub(r"^its text part \(\w+\)", "its text part", sentence)
    return re.sub(r"\d+", "N", sentence)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, help="file for one JSON line an architecture; those in it are passed over"
    )
    parser.add_argument("--only", help="model types, separated by commas; all by default")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="write the tables of docs/models.md from it"
    )
    chosen = parser.parse_args()
    if chosen.table is not None:
        write_tables(chosen.table)
        return
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    done = set()
    if chosen.out is not None and chosen.out.exists():
        done = {json.loads(line)["kind"] for line in chosen.out.read_text().splitlines()}
    for kind in chosen.only.split(",") if chosen.only else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if kind in done:
            continue
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as home:
            try:
                found = check(kind, Path(home, "model"))
            except Exception as error:
                traceback.print_exc()
                found = {"failed": f"{type(error).__name__}: {error}"}
        line = json.dumps({"kind": kind, **found, "seconds": round(time.perf_counter() - begin, 1)})
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        if chosen.out is not None:
            with chosen.out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
