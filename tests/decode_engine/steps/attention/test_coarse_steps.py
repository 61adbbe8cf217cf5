"""Decode steps of `refined` through records equal the general path with the same selection, in every placement.

Without a CUDA device the kernels run in interpreters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.coarse.sizes import CoarseWork
from decode_engine.layers.selected_attention import Observation
from decode_engine.layers.session import Session
from decode_engine.layers.sparse_layer import SparseLayer
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.attention.listed_steps import HybridSteps, ListedSteps
from decode_engine.steps.attention.selections import CoarseSelection
from decode_engine.steps.attention.step_attention import StepAttention, StepPlan
from decode_engine.steps.attention.step_batch import STEP_COUNTS, StepBatch, step_counts
from decode_engine.steps.batch_kinds import step_attention_for
from index_store.attention.attention_state import AttentionState
from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.memory.placement import Placement
from index_store.methods.method import Method
from index_store.methods.presets import get_method
from index_store.selection.budgets import Mass, Ratio, TokenCount
from index_store.store.description.context_id import ModelIdentity
from tests.support.devices import nightly

H, SIZE = 2, 3
SHAPES = ((3, 64), (16, 64), (7, 256))
"""Query heads of a KV head, and channels."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
pytestmark = [pytest.mark.gpu if DEVICE == "cuda" else pytest.mark.usefixtures("few_programs")]
TOLERANCE = 2e-2  # queries times scales are rounded to bytes
LENGTHS = (200, 77)


def identity_of(group: int, head_dim: int) -> ModelIdentity:
    return ModelIdentity("test", "test", "0" * 16, "0" * 16, 2, H * group, H, head_dim, 2, 4096)


IDENTITY = identity_of(*SHAPES[0])


def method_of(expression: str, budget: Ratio | TokenCount) -> Method:
    return replace(get_method(expression), budget=budget, recent=32, append_block=16)


@dataclass
class Run:
    """One layer's step of sessions on contexts of some lengths, and an idle row."""

    out_BHGD: Tensor
    batch: StepBatch
    observations: list[Observation]
    sessions: list[Session]

    @property
    def attention(self) -> ListedSteps:
        found = self.batch.attentions[0]
        assert isinstance(found, ListedSteps)
        return found

    def listed(self, b: int, head: int) -> Tensor:
        return self.attention.selection.lists.of_row(b * H + head)


def run(
    method: Method,
    kind: type[StepAttention],
    placement: Placement = Placement.DEVICE,
    shape: tuple[int, int] = SHAPES[0],
) -> Run:
    generator = torch.Generator(DEVICE).manual_seed(3)
    (group, head_dim), identity = shape, identity_of(*shape)
    batch = StepBatch(StepPlan(identity, method, SIZE, 512, DTYPE, torch.device(DEVICE)), [kind, kind])
    observations: list[Observation] = []
    counts = torch.zeros(SIZE, STEP_COUNTS, dtype=torch.int64)
    queries = torch.zeros(SIZE, H, group, head_dim, device=DEVICE)
    sessions = []
    for row, length in enumerate(LENGTHS):
        dtype = str(DTYPE).removeprefix("torch.")
        context = made_up_context(
            identity, dtype, method, length, seed=row, device=DEVICE, placement=placement
        )
        session = Session(context, method.on(context.manifest))
        layer = session.layers[1]
        assert isinstance(layer, SparseLayer)
        layer.observer = observations.append
        for _ in range(row + 1):
            q = 2.0 * torch.randn(H, 1, group, head_dim, generator=generator, device=DEVICE)
            k, v = (
                torch.randn(H, 1, head_dim, generator=generator, device=DEVICE).to(DTYPE) for _ in range(2)
            )
            observations[row:] = []
            q = q.to(DTYPE).float()
            layer.attend(q * head_dim**-0.5, k, v, session.position)
            session.position += 1
        session.position -= 1
        batch.place(row, session)
        for field, value in step_counts(session).items():
            counts[row, field - records.STEP_FIELDS[0]] = value
        queries[row] = q[:, 0]
        sessions.append(session)
    batch.send()
    batch.refresh(counts.to(DEVICE))
    found = batch.attentions[0].attend(1, queries.to(DTYPE), batch._records_LBF[1])
    return Run(found.float(), batch, observations, sessions)


def expected_out(made: Run, b: int, *, coarse: bool) -> Tensor:
    """Attention [H, G, d] to the keys that kernels listed and those always attended, and to all others coarsely."""
    session, observed = made.sessions[b], made.observations[b]
    context, layer = session.context, session.layers[1]
    q_HGD = observed.q_HTGD[:, 0]
    index = context.index(session.method.index.name, 1) if session.method.index else None
    assert isinstance(index, CoarseRows)
    first, end = session.method.searched_range(session.position, context.manifest.token_count)
    end = min(end, context.manifest.token_count)
    outs = []
    for head in range(H):
        exact_N = torch.ones(context.manifest.token_count, dtype=torch.bool, device=DEVICE)
        exact_N[first:end] = False
        exact_N[made.listed(b, head).to(DEVICE)] = True
        kv = torch.cat(
            [context.kv(1)[head].to(DEVICE)[exact_N], layer.tail.rows[head, : session.tail_keys + 1]]
        ).float()
        states = [state(q_HGD[head], kv[:, 0], kv[:, 1])]
        if coarse and not exact_N.all():
            keys, values = (
                decode(0, len(exact_N))[head][~exact_N]
                for decode in (index.rows.decode_keys, index.rows.decode_values)
            )
            states.append(state(q_HGD[head], keys, values))
        merged = states[0]
        for other in states[1:]:
            merged = merged.merge(other)
        outs.append(merged.out)
    return torch.stack(outs)


def state(q_GD: Tensor, keys_ND: Tensor, values_ND: Tensor) -> AttentionState:
    logits = q_GD @ keys_ND.t()
    return AttentionState(logits.softmax(-1) @ values_ND, logits.logsumexp(-1))


@pytest.mark.parametrize(
    ("expression", "shape"),
    [
        ("refined", SHAPES[0]),
        ("refined+dropped", SHAPES[0]),
        *nightly(*(("refined", shape) for shape in SHAPES[1:])),
    ],
)
def test_listed_keys_are_exact_and_all_others_coarse(expression: str, shape: tuple[int, int]) -> None:
    made = run(method_of(expression, Ratio(0.1)), ListedSteps, shape=shape)
    for b, length in enumerate(LENGTHS):
        expected = expected_out(made, b, coarse=expression != "refined+dropped")
        torch.testing.assert_close(made.out_BHGD[b], expected, rtol=TOLERANCE, atol=TOLERANCE)
        for head in range(H):
            assert len(made.listed(b, head)) == pytest.approx(0.1 * length, rel=0.3)
    assert (made.out_BHGD[len(LENGTHS) :] == 0).all()
    kept = [sum(len(made.listed(b, head)) for head in range(H)) for b in range(len(LENGTHS))]
    assert made.batch.kept_B().tolist() == [*kept, 0]


def test_the_same_keys_are_listed_as_on_the_general_path() -> None:
    """Where all searched keys are sampled, but for the border, whose keys a draw tells apart."""
    made = run(method_of("refined", TokenCount(25)), ListedSteps)
    for b, observed in enumerate(made.observations):
        for head in range(H):
            count = int(observed.selection.counts_HT[head, 0])
            best = set(observed.selection.ids_HTK[head, 0, :count].tolist())
            listed = set(made.listed(b, head).tolist())
            assert len(listed & best) > 0.8 * count
            assert len(listed) < 1.2 * count


@pytest.mark.parametrize("shape", [SHAPES[0], *nightly(*((shape,) for shape in SHAPES[1:]))])
def test_hybrid_equals_device(shape: tuple[int, int]) -> None:
    """Though listing and attending are one launch on a device, and two where rows are fetched between them.

    Bit for bit, unless that launch attends to listed keys as well: sums are in another order then.
    """
    method = method_of("refined", Ratio(0.1))
    device = run(method, ListedSteps, shape=shape)
    hybrid = run(method, HybridSteps, Placement.HYBRID, shape)
    selection = device.attention.selection
    assert isinstance(selection, CoarseSelection)
    rounding = TOLERANCE if selection.attends_alone else 0.0
    torch.testing.assert_close(device.out_BHGD, hybrid.out_BHGD, rtol=rounding, atol=rounding)
    assert torch.equal(device.batch.kept_B(), hybrid.batch.kept_B())
    fetched = hybrid.batch.fetched_B2()
    assert fetched.sum() > 0


def test_a_budget_of_everything_is_dense_attention() -> None:
    made = run(method_of("refined", TokenCount(10_000)), ListedSteps)
    for b, session in enumerate(made.sessions):
        kv = torch.cat(
            [session.context.kv(1).to(DEVICE), session.layers[1].tail.rows[:, : session.tail_keys + 1]], dim=1
        ).float()
        q_HGD = made.observations[b].q_HTGD[:, 0]
        for head in range(H):
            expected = state(q_HGD[head], kv[head, :, 0], kv[head, :, 1]).out
            torch.testing.assert_close(made.out_BHGD[b, head], expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_the_next_layers_search_has_buffers_of_its_own() -> None:
    method = method_of("refined", Ratio(0.1))
    plan = StepPlan(IDENTITY, method, SIZE, 512, DTYPE, torch.device(DEVICE))
    steps = HybridSteps(plan)
    selection = steps.selection
    assert isinstance(selection, CoarseSelection)
    again = type(selection)(plan)
    assert again.work.cuts_RX.data_ptr() != selection.work.cuts_RX.data_ptr()


def test_weights_are_left_only_where_others_are_attended_to() -> None:
    """Twelve bytes for each key and KV head of a batch, which a search that only lists has no use for."""
    plan = StepPlan(IDENTITY, method_of("refined", Ratio(0.1)), SIZE, 512, DTYPE, torch.device(DEVICE))
    attending, listing = HybridSteps(plan).selection, CoarseSelection(plan)
    assert isinstance(attending, CoarseSelection)
    held = [sum(tensor.nbytes for tensor in weights_of(each.work)) for each in (attending, listing)]
    assert held[0] >= SIZE * H * 512 * 2 * SHAPES[0][0]
    assert held[1] == 0


def weights_of(work: CoarseWork) -> tuple[Tensor, ...]:
    return work.weights_RSX, work.tiles_RSX, work.weighed_RS, work.left_RSG


@pytest.mark.parametrize(
    ("method", "shape", "expected"),
    [
        (get_method("refined"), (3, 64), "ListedSteps"),
        (get_method("refined-3"), (16, 128), "ListedSteps"),
        (get_method("refined+dropped"), (3, 64), "ListedSteps"),
        (get_method("refined-3"), (3, 64), "take 4 of that dimension"),
        (get_method("refined"), (9, 256), "take groups of 1 to 8 of that dimension"),
        (get_method("csattention+coarse"), (3, 64), "over rows that its search does not score"),
        (replace(get_method("refined"), budget=Mass(0.9)), (3, 64), "a ratio or a number of keys"),
    ],
)
def test_methods_run_where_their_kernels_are(method: Method, shape: tuple[int, int], expected: str) -> None:
    manifest = made_up_context(identity_of(*shape), "float32", method, 40).manifest
    found = step_attention_for(method, manifest)
    assert expected in (found if isinstance(found, str) else found.__name__)
    if expected == "ListedSteps":
        for placement in (Placement.HYBRID, Placement.HOST):
            assert step_attention_for(method, manifest, placement) is HybridSteps
