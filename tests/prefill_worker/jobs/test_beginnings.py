"""Documents whose beginning is stored: what is taken, and that nothing differs by it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from index_store.cli.console import LineReporter
from index_store.errors import InvalidArgumentError
from index_store.family.parents import Missed
from index_store.family.prefixes import longest_beginning, longest_prefix
from index_store.store.catalog import Store
from index_store.store.description.context_id import continued_digests, first_digest
from index_store.store.description.manifest import MARKS_VERSION, Manifest
from prefill_worker.config import PrefillConfig
from prefill_worker.jobs.job import run_job
from tests.support.models import LAYER_KINDS, write_model_folder
from tests.support.store import flip

TEXT = "The lamp of the grey harbour was lit by a keeper who counted ships. " * 12
OTHER = "Every winter the harbour froze, and he walked over the ice. " * 3
CHUNK = 64


class Desk:
    """Prefills documents with a toy model, in which a byte is a token."""

    def __init__(self, path: Path, model: Path) -> None:
        self.path, self.model = path, model
        self.said = ""

    def prefill(self, text: str, store: str = "store", **changes: Any) -> Manifest:
        document = self.path / "document.txt"
        document.write_text(text)
        options = {
            "chunk": CHUNK,
            "query_sample": 64,
            "method": ("csattention", "multipole"),
            "device": "cpu",
        }
        written = io.StringIO()
        config = PrefillConfig(
            model=str(self.model), store=self.path / store, input=(document,), **{**options, **changes}
        )
        manifest = run_job(config, LineReporter(written)).manifest
        self.said = written.getvalue()
        return manifest


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"), "llama", layers=3, head_dim=32)


@pytest.fixture
def desk(tmp_path: Path, model: Path) -> Desk:
    return Desk(tmp_path, model)


def rows(path: Path, manifest: Manifest) -> list[torch.Tensor]:
    with Store(path).open(manifest.id) as context:
        return [
            context.array(manifest.layer_entry(layer).path, layer, head).clone()
            for layer in range(manifest.model.layers)
            for head in range(manifest.layer_entry(layer).shape[1])
        ]


def same_rows(desk: Desk, made: Manifest, alone: Manifest) -> bool:
    found, expected = rows(desk.path / "store", made), rows(desk.path / "other", alone)
    return all(a.equal(b) for a, b in zip(found, expected, strict=True))


def test_only_the_rest_is_computed_and_every_row_is_the_same(desk: Desk) -> None:
    first = desk.prefill(TEXT)
    made = desk.prefill(TEXT[:700] + OTHER * 2)
    assert made.prefill["taken_from"] == first.id
    assert made.prefill["taken_tokens"] == 700 // CHUNK * CHUNK
    assert "640 tokens are taken" in desk.said
    alone = desk.prefill(TEXT[:700] + OTHER * 2, store="other")
    assert "taken_tokens" not in alone.prefill
    assert made.id == alone.id
    assert same_rows(desk, made, alone)
    sampled = [position for position in made.query_positions if position < 640]
    assert sampled == [position for position in first.query_positions if position < 640]
    assert {index.name for index in made.indexes} == {index.name for index in alone.indexes}
    third = desk.prefill(TEXT[:700] + OTHER * 2 + TEXT)  # the longer of two
    assert third.prefill["taken_from"] == made.id


def test_queries_that_the_store_has_stay_what_they_were(desk: Desk) -> None:
    first = desk.prefill(TEXT)
    made = desk.prefill(TEXT + OTHER * 2)
    store = Store(desk.path / "store")
    with store.open(first.id) as before, store.open(made.id) as after:
        old, new = before.queries(1), after.queries(1)
    taken = int(made.prefill["taken_tokens"])
    common = [position for position in new.positions_P.tolist() if position < taken]
    for position in common:
        row, source = new.positions_P.tolist().index(position), old.positions_P.tolist().index(position)
        assert new.queries_HPGD[:, row].equal(old.queries_HPGD[:, source])
    assert common


@pytest.mark.parametrize("kind", ["windows", "windows only", "caps"])
def test_layers_with_windows_go_on_where_their_last_rows_are_stored(tmp_path: Path, kind: str) -> None:
    family, settings = LAYER_KINDS[kind]
    desk = Desk(tmp_path, write_model_folder(tmp_path / "model", family, layers=3, **settings))
    first = desk.prefill(TEXT[:640])
    made, cut = desk.prefill(TEXT[:640] + OTHER * 2), desk.prefill(TEXT[:500] + OTHER * 2)
    assert made.prefill["taken_tokens"] == 640
    assert made.prefill["taken_from"] == first.id
    assert "taken_tokens" not in cut.prefill  # the rows before its place were not kept
    assert same_rows(desk, made, desk.prefill(TEXT[:640] + OTHER * 2, store="other"))


@pytest.mark.parametrize(
    "changes", [{"salt": "mine"}, {"chunk": 32}, {"dtype": "bfloat16"}, {"query_sample": 4096}]
)
def test_what_was_read_in_another_way_is_not_taken(desk: Desk, changes: dict[str, Any]) -> None:
    desk.prefill(TEXT)
    assert "taken_tokens" not in desk.prefill(TEXT + OTHER, **changes).prefill


def test_a_damaged_beginning_is_told_and_everything_computed(desk: Desk) -> None:
    first = desk.prefill(TEXT)
    flip(desk.path / "store/contexts" / first.id / "kv/c/1/0/0/0/0", 100)
    made = desk.prefill(TEXT + OTHER)
    assert "nothing is taken, all is computed" in desk.said
    assert "taken_tokens" not in made.prefill
    assert same_rows(desk, made, desk.prefill(TEXT + OTHER, store="other"))


@pytest.fixture
def hybrid(tmp_path: Path) -> Desk:
    family, settings = LAYER_KINDS["states"]
    return Desk(tmp_path, write_model_folder(tmp_path / "model", family, layers=3, **settings))


def test_a_model_with_states_goes_on_at_marks(hybrid: Desk) -> None:
    """Which tell what they take; what is made of a beginning has its own, and the same states."""
    first = hybrid.prefill(TEXT, state_marks=2 * CHUNK)
    assert list(first.state_marks) == [128, 256, 384, 512, 640, 768]
    assert first.state.grid == (7,)
    assert first.format_version == MARKS_VERSION
    assert "states are kept behind 6 marks, which takes" in hybrid.said
    text = TEXT[:700] + OTHER * 2
    made = hybrid.prefill(text, state_marks=4 * CHUNK)
    assert made.prefill["taken_tokens"] == 640
    alone = hybrid.prefill(text, store="other", state_marks=4 * CHUNK)
    assert same_rows(hybrid, made, alone)
    with (
        Store(hybrid.path / "store").open(made.id) as one,
        Store(hybrid.path / "other").open(alone.id) as two,
    ):
        for tokens in (256, 512, 768, 1024, None):
            found, expected = one.state(tokens), two.state(tokens)
            assert expected is not None
            assert found.equal(expected)
    for store in ("store", "other"):
        assert all(
            not Store(hybrid.path / store).verify(each.id) for each in Store(hybrid.path / store).list()
        )
    assert hybrid.prefill(TEXT[:550] + OTHER).prefill["taken_tokens"] == 512  # and keeps none of its own
    assert "taken_tokens" not in hybrid.prefill(TEXT[:600] + OTHER, state_marks=3 * CHUNK).prefill


def test_without_marks_states_are_behind_the_end_alone(hybrid: Desk) -> None:
    first = hybrid.prefill(TEXT[:640])
    assert first.format_version < MARKS_VERSION
    assert "taken_tokens" not in hybrid.prefill(TEXT[:600] + OTHER * 2).prefill
    assert hybrid.prefill(TEXT[:640] + OTHER * 2).prefill["taken_tokens"] == 640
    with pytest.raises(InvalidArgumentError, match="a multiple of the 64 tokens of a pass"):
        hybrid.prefill(TEXT, state_marks=100)


def test_a_damaged_mark_is_told_and_everything_computed(hybrid: Desk) -> None:
    first = hybrid.prefill(TEXT, state_marks=CHUNK)
    flip(hybrid.path / "store/contexts" / first.id / "state/c/8", 100)
    (error,) = Store(hybrid.path / "store").verify(first.id)
    assert error.metadata["array"] == "state"
    made = hybrid.prefill(TEXT[:600] + OTHER)
    assert "nothing is taken, all is computed" in hybrid.said
    assert "taken_tokens" not in made.prefill


def test_a_model_without_states_has_no_marks(desk: Desk) -> None:
    with pytest.raises(InvalidArgumentError, match="has no states; leave it out"):
        desk.prefill(TEXT, state_marks=CHUNK)


def test_contexts_are_found_by_their_tokens(desk: Desk) -> None:
    made = {
        text: desk.prefill(text)
        for text in (TEXT[:31], TEXT[:40], TEXT[:200], TEXT[:300], TEXT[:600], OTHER * 3)
    }
    store = Store(desk.path / "store")
    manifest = made[TEXT[:300]]
    with store.open(made[TEXT[:600]].id) as context:
        ids = context.tokens()
    first = first_digest(manifest.model, manifest.dtype, "")

    def search(
        tokens: torch.Tensor, begin: str = first, **options: Any
    ) -> tuple[Manifest | None, Missed | None]:
        return longest_prefix(store, continued_digests(begin, tokens), tokens, **options)

    def prefix(tokens: torch.Tensor, begin: str = first, **options: Any) -> Manifest | None:
        return search(tokens, begin, **options)[0]

    assert prefix(ids) == made[TEXT[:600]]  # with nothing behind it
    assert prefix(ids[:599]) == manifest
    longer = torch.cat([ids, ids[:3]])
    assert prefix(longer) == made[TEXT[:600]]
    assert prefix(longer, suits=lambda each: each.token_count < 600) == manifest
    longer[599] += 1
    assert prefix(longer) == manifest
    assert prefix(ids, first_digest(manifest.model, manifest.dtype, "salt")) is None
    for count, found in ((250, TEXT[:200]), (200, TEXT[:200]), (199, TEXT[:40]), (40, TEXT[:40])):
        assert prefix(ids[:count]) == made[found]  # of any length from LEAST_TOKENS on
    assert prefix(ids[:39]) is None
    found = longest_beginning(store, first, longer)
    assert (found.manifest.id, found.tokens) == (made[TEXT[:600]].id, 599)

    def missed(tokens: torch.Tensor, **options: Any) -> Missed | None:
        return search(tokens, **options)[1]

    long = made[TEXT[:600]].id
    assert missed(ids) is None  # all of it is stored
    assert missed(torch.cat([ids, ids[:3]])) == Missed("not_stored")
    assert missed(longer) == Missed("partial", long, 512)
    assert missed(ids[:599]) == Missed("partial", long, 512)
    assert missed(ids, suits=lambda each: each.token_count < 600) == Missed("too_large", long, 600)
    assert missed(ids, begin=first_digest(manifest.model, manifest.dtype, "salt")) == Missed("not_stored")
    (desk.path / "store/contexts" / long / "tokens/c/0").unlink()
    assert search(ids) == (manifest, Missed("unreadable", long, 600))
