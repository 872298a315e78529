"""The Gram of more rollouts than a pass holds, against one backward pass per rollout, and the plans."""

import functools
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import nn

from scoregram.checks import ScoregramError
from scoregram.gram import (
    Gram,
    PassPlan,
    Sketch,
    bytes_of_pass,
    contract,
    free_bytes,
    in_passes,
    measure_gram,
    plan_passes,
)
from scoregram.gram.engine import refuse_several_passes
from scoregram.gram.kept import KeptRows
from tests.cases import ARCHITECTURES, KeepDouble, Rollouts, build, rollouts
from tests.naive import score_rows

pytestmark = pytest.mark.filterwarnings("default")

PLANS = {
    "kept": PassPlan(5, 2),
    "kept in parts": PassPlan(5, 2, parts=3),
    "one at a time": PassPlan(5, 1),
    "pairs": PassPlan(5, 3, parts=0),
}


@functools.cache
def model_of(name: str) -> Any:
    return ARCHITECTURES[name]()


@functools.cache
def definition(name: str, padding: str) -> torch.Tensor:
    with KeepDouble():
        rows = score_rows(model_of(name), *rollouts(padding=padding).arguments)
    return rows @ rows.T


@functools.cache
def measured_at_once(name: str) -> Gram:
    with KeepDouble():
        return measure_gram(model_of(name), *rollouts().arguments)


def in_several(model: nn.Module, batch: Rollouts, plan: PassPlan | Literal["auto"] | None = "auto", **settings: Any):
    with KeepDouble():
        return measure_gram(model, *batch.arguments, plan=plan, **settings)


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "phi", "mixtral", "mamba"])
def test_the_whole_gram_is_exact(name, plan):
    model, batch = model_of(name), rollouts()
    once = measured_at_once(name)
    gram, whole = in_several(model, batch, plan), definition(name, "right")
    assert float((gram.matrix - whole).norm() / whole.norm()) < 1e-12
    torch.testing.assert_close(gram.log_probs, once.log_probs, rtol=1e-12, atol=1e-12)
    assert set(gram.by_layer) == set(once.by_layer)
    for layer, block in once.by_layer.items():
        torch.testing.assert_close(gram.by_layer[layer], block, rtol=1e-9, atol=1e-12 * float(whole.norm()))
    assert gram.notes[-1] == str(plan)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_are_kept_chunk_by_chunk(monkeypatch):
    monkeypatch.setattr(contract, "CHUNK_ELEMENTS", 1 << 8)
    whole = definition("gpt2", "right")
    gram = in_several(model_of("gpt2"), rollouts(), PLANS["kept"])
    assert float((gram.matrix - whole).norm() / whole.norm()) < 1e-12


@pytest.mark.parametrize("plan", [PLANS["kept"], PLANS["pairs"]], ids=["kept", "pairs"])
def test_left_padding(plan):
    whole = definition("gpt2", "left")
    gram = in_several(model_of("gpt2"), rollouts(padding="left"), plan, verify=True)
    assert float((gram.matrix - whole).norm() / whole.norm()) < 1e-12


class Shared(nn.Module):
    """Half of an embedding, doubled and transposed, is also the head: regions, views and a replayed parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 8, dtype=torch.float64)
        self.inner = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
        self.scale = nn.Parameter(torch.randn(8, dtype=torch.float64))
        self.unused = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, input_ids, **_):  # noqa: D102
        hidden = self.embed(input_ids) @ self.inner[:, :4] @ self.inner[4:].t().t() * self.scale
        mixed = hidden + torch.einsum("ntd,de->nte", hidden.cumsum(1), self.inner @ self.inner)
        return type("Output", (), {"logits": mixed @ self.embed.weight.t()})()


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_views_regions_and_replayed_parameters(plan):
    torch.manual_seed(1)
    model, ids = Shared(), torch.randint(20, (5, 6))
    batch = Rollouts(ids, torch.arange(6).expand(5, 6) > 1, torch.ones_like(ids))
    rows = score_rows(model, *batch.arguments)
    gram = in_several(model, batch, plan)
    torch.testing.assert_close(gram.matrix, rows @ rows.T, rtol=1e-11, atol=1e-11)
    assert gram.replayed == measure_gram(model, *batch.arguments).replayed != ()


def test_adapters_keep_only_their_own_gradients(monkeypatch):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model, batch = peft.get_peft_model(build("Llama"), config).double(), rollouts()
    kept: list[int] = []
    taken = KeptRows.take_grams
    monkeypatch.setattr(
        KeptRows,
        "take_grams",
        lambda self, *given: kept.append(sum(rows.numel() for rows in self._rows.values())) or taken(self, *given),
    )
    with KeepDouble():
        rows = score_rows(model, *batch.arguments)
    torch.testing.assert_close(in_several(model, batch, PLANS["kept"]).matrix, rows @ rows.T, rtol=1e-10, atol=1e-10)
    assert kept == [rows.numel()]


@pytest.mark.parametrize("plan", [PLANS["kept"], PLANS["pairs"]], ids=["kept", "pairs"])
def test_kept_padding_stays_in_every_pass(plan):
    """Positions count the padding, so a pass that drops its columns would measure another model."""
    model, batch = model_of("gpt2"), rollouts(padding="left")
    batch.attention_mask[:, 0] = 0  # a column that is padding in every rollout
    whole = in_several(model, batch, None, keep_padding=True)
    gram = in_several(model, batch, plan, keep_padding=True)
    assert float((gram.matrix - whole.matrix).norm() / whole.matrix.norm()) < 1e-12
    moved = in_several(model, batch, plan)
    assert float((moved.matrix - whole.matrix).norm() / whole.matrix.norm()) > 1e-3


def test_equal_rollouts_run_once_and_coefficients_count():
    model, batch = model_of("llama-tied"), rollouts(3)
    twice = torch.tensor([0, 1, 2, 0, 2])
    given = [tensor[twice] for tensor in batch.arguments]
    coefficients = torch.linspace(-3, 1e4, batch.input_ids.numel(), dtype=torch.float64).view_as(batch.input_ids)[twice]
    with KeepDouble():
        rows = score_rows(model, *given, coefficients=coefficients, temperature=0.7)
        gram = measure_gram(model, *given, coefficients=coefficients, temperature=0.7, plan=PassPlan(5, 2))
    torch.testing.assert_close(gram.matrix, rows @ rows.T, rtol=1e-10, atol=1e-10)
    assert gram.notes[-1].startswith("3 rollouts in 2 passes of 2,")


def test_a_pass_that_does_not_suffice_is_repeated(monkeypatch):
    """What a narrow pass kept before the wide one must not be counted twice."""
    monkeypatch.setattr("scoregram.gram.passes.Pass.missed_something", lambda self: self.is_narrow)
    model = build("Llama")
    with KeepDouble():
        rows = score_rows(model, *rollouts().arguments)
    torch.testing.assert_close(
        in_several(model, rollouts(), PLANS["kept"]).matrix, rows @ rows.T, rtol=1e-11, atol=1e-11
    )


def test_float32_keeps_its_precision():
    model, batch = build("Llama", tie_word_embeddings=True).float(), rollouts(7)
    once = measure_gram(model, *batch.arguments)
    for plan in (PassPlan(7, 2), PassPlan(7, 3, 0), PassPlan(7, 100), PassPlan(7, 1, 4)):
        gram = measure_gram(model, *batch.arguments, plan=plan)
        assert float((gram.matrix - once.matrix).norm() / once.matrix.norm()) < 1e-6


def test_a_device_that_runs_out_of_memory_gets_smaller_passes(monkeypatch):
    tried = []
    run = in_passes.scores_of_plan

    def only_two(measured, distinct, plan, diagonal):
        tried.append(plan.per_pass)
        if plan.per_pass > 2:
            raise torch.OutOfMemoryError("full")
        return run(measured, distinct, plan, diagonal)

    monkeypatch.setattr(in_passes, "scores_of_plan", only_two)
    whole = definition("llama-tied", "right")
    gram = in_several(model_of("llama-tied"), rollouts())
    assert tried == [5, 3, 2]
    assert float((gram.matrix - whole).norm() / whole.norm()) < 1e-12
    with pytest.raises(torch.OutOfMemoryError):
        measure_gram(model_of("llama-tied"), *rollouts().arguments, plan=PassPlan(5, 4))


@pytest.mark.parametrize(("on_gpu", "free", "first"), [(True, 0.9, 8), (True, 0.5, 2), (False, 0.9, 4)])
def test_a_gpu_tries_one_pass_if_the_estimate_is_close(monkeypatch, on_gpu, free, first):
    model = build("Llama")
    single = bytes_of_pass(model, 8, 1000)
    monkeypatch.setattr(in_passes, "survives_exhaustion", lambda _: on_gpu)
    monkeypatch.setattr(in_passes, "free_bytes", lambda _: free * single)
    assert in_passes.first_plan(model, 8, 1000).per_pass == first


# Plans


class Counted(nn.Module):
    """A model that counts the rollouts of every backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.sizes = build("Llama"), []

    def forward(self, input_ids, **given):  # noqa: D102
        if torch.is_grad_enabled():
            self.sizes.append(len(input_ids))
        return self.model(input_ids=input_ids, **given)


@pytest.mark.parametrize("plan", [PassPlan(8, 2), PassPlan(8, 3, 2), PassPlan(8, 4, 0), PassPlan(8, 2, 0)], ids=str)
def test_a_plan_says_how_many_passes_it_takes(plan):
    model = Counted()
    with KeepDouble():
        measure_gram(model, *rollouts(8).arguments)  # probe passes come with the first measurement
        model.sizes.clear()
        measure_gram(model, *rollouts(8).arguments, plan=plan)
    assert len(model.sizes) == plan.passes and max(model.sizes) <= plan.per_pass
    # a round of kept gradients leaves out the weight gradients of the other parts: (2S + 1)/3 instead of S
    rounds = sum(model.sizes) / 8
    assert plan.work == pytest.approx((2 * rounds + 1) / 3 if plan.parts else rounds)


def all_plans(model: nn.Module, count: int, tokens: int) -> list[PassPlan]:
    """Every plan of every size, with its memory counted parameter by parameter."""
    sizes = [parameter.nbytes for parameter in model.parameters()]
    plans = []
    for per_pass in range(1, count + 1):
        used = bytes_of_pass(model, per_pass, tokens)
        if per_pass == count:
            plans.append(PassPlan(count, per_pass, bytes=used))
            continue
        if per_pass > 1:
            plans.append(PassPlan(count, per_pass, 0, used))
        for parts in range(1, len(sizes) + 1):
            largest = max(sum(sizes[i] for i in part) for part in in_passes.parts_of(sizes, parts))
            plans.append(PassPlan(count, per_pass, parts, used + count * largest))
    return plans


def test_the_plan_is_the_cheapest_that_fits():
    model = build("Llama", num_hidden_layers=4)
    plans = all_plans(model, 32, 4)
    seen = set()
    for limit in sorted({plan.bytes for plan in plans})[::3]:
        chosen = plan_passes(model, 32, 4, memory_gb=limit / 1e9)
        seen.add(chosen.parts)
        fitting = [plan for plan in plans if plan.bytes <= limit and plan.per_pass in in_passes.halvings(32)]
        if fitting:
            assert chosen.bytes <= limit and chosen.work == min(plan.work for plan in fitting)
    assert {0, 1} < seen  # pairs, kept gradients, and kept gradients in parts were all chosen somewhere
    assert plan_passes(model, 32, 4, memory_gb=1e-9).bytes == min(
        plan.bytes for plan in plans if plan.per_pass in in_passes.halvings(32)
    )


def test_the_estimate_of_a_pass_counts_what_the_pass_holds():
    model = build("Llama")
    before = bytes_of_pass(model, 4, 100)
    assert bytes_of_pass(build("Llama", vocab_size=122), 4, 100) - before > 2 * 4 * 100 * 61 * 8  # logits, twice
    model.model.embed_tokens.requires_grad_(False)
    assert before - bytes_of_pass(model, 4, 100) == model.model.embed_tokens.weight.nbytes  # its gradient
    rows = [bytes_of_pass(model, 4, tokens) for tokens in (100, 200)]
    model.config._attn_implementation = "eager"  # keeps one number for every two tokens
    more = [bytes_of_pass(model, 4, tokens) - known for tokens, known in zip((100, 200), rows, strict=True)]
    assert more[1] == 4 * more[0] > 0
    eager = bytes_of_pass(model, 4, 200)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert bytes_of_pass(model, 4, 200) < eager


def test_processes_share_the_free_memory(monkeypatch):
    model = build("Llama")
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    assert [free_bytes(model), free_bytes(model, 4)] == [1000, 250]


@pytest.mark.parametrize(("free", "is_single"), [(1.1, False), (1.3, True)])
def test_a_plan_leaves_a_fifth_of_the_free_memory(free, is_single, monkeypatch):
    model = build("Llama")
    monkeypatch.setattr(in_passes, "free_bytes", lambda _: free * bytes_of_pass(model, 64, 256))
    assert plan_passes(model, 64, 256).is_single == is_single


def test_more_memory_never_means_more_work():
    model = build("Llama")
    works = [plan_passes(model, 64, 256, memory_gb=gb / 100).work for gb in range(1, 60, 3)]
    assert all(after <= before for before, after in pairwise(works)) and works[0] > works[-1] == 1


@pytest.mark.parametrize(
    ("sizes", "count", "parts"),
    [
        ([1, 1, 1, 1], 2, [[0, 1], [2, 3]]),
        ([10, 1, 1], 3, [[0], [1, 2]]),
        ([1, 1, 10], 2, [[0, 1], [2]]),
        ([5], 4, [[0]]),
        ([0, 0], 1, [[0, 1]]),
    ],
)
def test_parts_cover_every_parameter_once(sizes, count, parts):
    assert in_passes.parts_of(sizes, count) == parts


def test_a_gradient_under_autocast_is_kept_in_half_precision():
    matrix, vector = torch.zeros(4, 4), torch.zeros(4)
    assert [in_passes.kept_bytes(p) for p in (matrix, vector)] == [64, 16]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [in_passes.kept_bytes(p) for p in (matrix, vector)] == [32, 16]


def test_words_of_a_plan():
    assert str(PassPlan(8, 8, bytes=2_000_000_000)) == "8 rollouts in one pass: 1 times the work of one pass, 2 GB"
    assert "4 passes of 2, keeping the gradients: 1 times" in str(PassPlan(8, 2))
    assert "of one part in 3 of the parameters at a time: 2.33 times" in str(PassPlan(8, 2, 3))
    assert "6 passes of 4, so that every two rollouts meet: 3 times" in str(PassPlan(8, 4, 0))


@pytest.mark.parametrize("settings", [{"group_size": 5}, {"sketch": Sketch(8)}], ids=str)
def test_blocks_and_sketches_are_refused(settings):
    with pytest.raises(ScoregramError, match="plan is for the whole Gram alone"):
        in_several(model_of("llama-tied"), rollouts(), PassPlan(5, 2), **settings)


def test_an_unknown_word_is_refused():
    with pytest.raises(ScoregramError, match="plan must be 'auto' or a PassPlan, got 'all'"):
        refuse_several_passes(model_of("llama-tied"), "all", None, None)


@pytest.mark.parametrize("sizes", [(0, 2), (5, 0), (5, 1, 0), (5, 2, -1)])
def test_an_impossible_plan_is_refused(sizes):
    with pytest.raises(ScoregramError, match="PassPlan"):
        PassPlan(*sizes)


def test_a_plan_for_nothing_is_refused():
    with pytest.raises(ScoregramError, match="rollouts must be at least 1, got 0"):
        plan_passes(model_of("llama-tied"), 0, 8)
    with pytest.raises(ScoregramError, match="memory_gb must be positive, got -1"):
        plan_passes(model_of("llama-tied"), 4, 8, memory_gb=-1.0)
