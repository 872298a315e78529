"""The preconditioned Gram against one backward pass per rollout times `√D`, and Adam's `D` against its formula."""

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scoregram.checks import ScoregramError
from scoregram.gram import (
    Gram,
    PassPlan,
    Sketch,
    adam_preconditioner,
    collect,
    contract,
    cross_gram,
    head,
    leaves,
    measure_gram,
)
from scoregram.gram.measurement import Measurement
from scoregram.gram.model import facts_of
from tests.cases import ARCHITECTURES, KeepDouble, Opaque, Rollouts, build, rollouts
from tests.naive import score_rows

pytestmark = pytest.mark.filterwarnings("default")

NAMED = sorted(ARCHITECTURES)
FEW = ["llama-tied", "gpt2", "phi", "mixtral", "gemma2"]


@functools.cache
def model_of(name: str) -> Any:
    return ARCHITECTURES[name]()


@pytest.fixture
def streamed(monkeypatch):
    """Every weight streamed, however small."""
    monkeypatch.setattr(leaves, "KEPT_ELEMENTS", 0)


@pytest.fixture
def wide(monkeypatch):
    """No pass narrowed to the modules that own parameters."""
    monkeypatch.setattr(Measurement, "narrow_pass", lambda self: None)


def random_diagonal(model: nn.Module, seed: int = 4) -> dict[Tensor, Tensor]:
    """Entries over four powers of ten, a tenth of them 0."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            found[parameter] = torch.where(drawn < 0.1, 0.0, 10 ** (4 * drawn - 2)).to(parameter.dtype)
    return found


def definition(model: nn.Module, batch: Rollouts, diagonal: dict[Tensor, Tensor], **options: Any) -> Tensor:
    """`⟨ψ_i, D ψ_j⟩` from one backward pass per rollout."""
    flat = torch.cat([diagonal[p].double().flatten() for p in model.parameters() if p.requires_grad])
    rows = score_rows(model, *batch.arguments, **options)
    return torch.stack([torch.stack([(one * flat * other).sum() for other in rows]) for one in rows])


def assert_exact(model: Any, batch: Rollouts, **options: Any) -> Gram:
    diagonal = random_diagonal(model)
    with KeepDouble():
        expected = definition(model, batch, diagonal)
        gram = measure_gram(model, *batch.arguments, preconditioner=diagonal, **options)
    assert float((gram.matrix - expected).norm()) < 1e-12 * float(expected.norm())
    torch.testing.assert_close(sum(gram.by_layer.values()), gram.matrix)
    assert all(parameter.grad is None for parameter in model.parameters())
    return gram


@pytest.mark.parametrize("name", NAMED)
def test_it_matches_the_definition(name):
    assert not assert_exact(model_of(name), rollouts()).replayed


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.usefixtures("streamed", "wide")
def test_streamed_weights_seen_from_outside_match_the_definition(name):
    assert not assert_exact(model_of(name), rollouts(padding="left")).replayed


@pytest.mark.parametrize("name", FEW)
@pytest.mark.usefixtures("streamed")
def test_small_chunks_and_recomputed_logit_gradients_match_the_definition(name, monkeypatch):
    monkeypatch.setattr(head, "STORE_BYTES", 0)
    monkeypatch.setattr(head, "LOGIT_CHUNK_ELEMENTS", 7 * 61)
    monkeypatch.setattr(contract, "CHUNK_ELEMENTS", 1000)
    monkeypatch.setattr(contract, "DOT_LENGTH", 64)
    monkeypatch.setattr(collect, "STACKED_ELEMENTS", 0)
    assert_exact(model_of(name), rollouts())


@pytest.mark.parametrize(
    "plan", [PassPlan(5, 2), PassPlan(5, 2, parts=3), PassPlan(5, 3, parts=0), PassPlan(5, 5)], ids=str
)
@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "mixtral"])
def test_several_passes_match_the_definition(name, plan, monkeypatch):
    monkeypatch.setattr(contract, "CHUNK_ELEMENTS", 1 << 10)  # kept rows are split, and so is D
    gram = assert_exact(model_of(name), rollouts(), plan=plan)
    assert plan.is_single or gram.notes[-1] == str(plan)


@pytest.mark.parametrize("options", [{"r": 3}, {"r": 3, "use_dora": True}, {"r": 3, "modules_to_save": ["lm_head"]}])
def test_adapters_with_a_frozen_base(options):
    import peft

    config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, **options)
    model: Any = peft.get_peft_model(build("Llama"), config).double().eval()
    assert_exact(model, rollouts(), verify=True)


def test_adapters_on_fused_experts():
    """Their factors meet the activations as a part `s L R` of the weight, and each expert is a view of a parameter."""
    import peft

    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj"], target_parameters=names)
    model: Any = peft.get_peft_model(build("Mixtral", num_local_experts=4), config).double().eval()
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1, generator=generator)
    assert_exact(model, rollouts())


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe", "gpt2"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.usefixtures("streamed")
def test_gradient_checkpointing_changes_nothing(name, reentrant):
    model = ARCHITECTURES[name]()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "training", True)
        assert_exact(model, rollouts())


class Views(nn.Module):
    """Regions, transposed and strided views, a tied head with a bias, a replayed parameter and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(61, 8, dtype=torch.float64)
        self.packed = nn.Parameter(torch.randn(24, 8, dtype=torch.float64))
        self.across = nn.Parameter(torch.randn(8, 8, dtype=torch.float64).t())  # columns are contiguous
        self.stack = nn.Parameter(torch.randn(2, 8, 8, dtype=torch.float64))
        self.hidden = nn.Parameter(torch.randn(8, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(61, dtype=torch.float64))
        self.unused = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, input_ids, **_):  # noqa: D102
        x = self.embed(input_ids).cumsum(1) / 4
        query, key, value = (x @ part.t() for part in self.packed.chunk(3))
        x = torch.tanh(query * key + value) @ self.across + x @ self.stack[1] + x @ self.stack[0].t()
        x = x + (x @ self.across[:, :4]) @ self.packed[8:12]
        logits = nn.functional.linear(Opaque.apply(x, self.hidden), self.embed.weight, self.bias)
        return type("Output", (), {"logits": logits})()


@pytest.mark.parametrize("kept", [0, 1 << 20])
@pytest.mark.parametrize("plan", [None, PassPlan(5, 2), PassPlan(5, 3, parts=0)], ids=str)
def test_views_regions_and_replayed_parameters(kept, plan, monkeypatch):
    monkeypatch.setattr(leaves, "KEPT_ELEMENTS", kept)
    gram = assert_exact(Views(), rollouts(), plan=plan)
    assert "hidden" in gram.replayed


def test_a_model_without_interception_is_replayed_with_its_preconditioner():
    model, batch = ARCHITECTURES["llama"](), rollouts()
    measure_gram(model, *batch.arguments)
    facts_of(model).needs_plain_passes = True
    assert len(assert_exact(model, batch).replayed) == len(list(model.parameters()))


def test_groups_duplicates_coefficients_and_temperature():
    model, few = model_of("llama-tied"), rollouts()
    order = torch.tensor([0, 1, 0, 0, 2, 2, 4, 1])
    batch = Rollouts(few.input_ids[order], few.completion_mask[order], few.attention_mask[order])
    coefficients = torch.linspace(-3, 1e4, few.input_ids.numel(), dtype=torch.float64).view_as(few.input_ids)[order]
    diagonal, options = random_diagonal(model), {"coefficients": coefficients, "temperature": 0.7}
    with KeepDouble():
        expected = definition(model, batch, diagonal, **options)
        whole = measure_gram(model, *batch.arguments, preconditioner=diagonal, verify=True, **options).matrix
        blocks = measure_gram(model, *batch.arguments, preconditioner=diagonal, group_size=4, **options).matrix
    inside = torch.block_diag(*[torch.ones(4, 4)] * 2).bool()
    assert float((whole - expected).norm()) < 1e-12 * float(expected.norm())
    assert float((blocks - expected)[inside].norm()) < 1e-12 * float(expected.norm())
    assert bool(blocks[~inside].isnan().all())


def test_packed_rollouts():
    model, batch = model_of("llama"), rollouts()
    real, diagonal = batch.attention_mask.bool(), random_diagonal(model)
    owner = torch.arange(5)[:, None].expand_as(real)[real][None]
    packed = batch.input_ids[real][None], batch.completion_mask[real][None]
    with KeepDouble():
        found = measure_gram(model, *packed, rollout_ids=owner, preconditioner=diagonal).matrix
        expected = definition(model, batch, diagonal)
    assert float((found - expected).norm()) < 1e-12 * float(expected.norm())


def test_cross_gram_has_both_blocks():
    model, train, held = model_of("qwen3"), rollouts(3, 9), rollouts(4, 12, seed=1)
    diagonal = random_diagonal(model)
    with KeepDouble():
        found = cross_gram(model, train.arguments, held.arguments, preconditioner=diagonal)
        parts = [score_rows(model, *part.arguments) for part in (train, held)]
    flat = torch.cat([diagonal[p].flatten() for p in model.parameters()])
    torch.testing.assert_close(found.cross, (parts[0] * flat) @ parts[1].T, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.train, (parts[0] * flat) @ parts[0].T, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", FEW)
def test_ones_give_the_plain_gram_and_a_factor_scales_it(name):
    model, batch = model_of(name), rollouts()
    plain = measure_gram(model, *batch.arguments)
    ones = {parameter: torch.ones_like(parameter) for parameter in model.parameters()}
    same = measure_gram(model, *batch.arguments, preconditioner=ones)
    torch.testing.assert_close(same.matrix, plain.matrix, rtol=1e-12, atol=1e-12 * float(plain.matrix.norm()))
    assert set(same.by_layer) == set(plain.by_layer)
    diagonal = random_diagonal(model)
    once = measure_gram(model, *batch.arguments, preconditioner=diagonal).matrix
    seven = {parameter: 7 * one for parameter, one in diagonal.items()}
    again = measure_gram(model, *batch.arguments, preconditioner=seven).matrix
    torch.testing.assert_close(again, 7 * once, rtol=1e-12, atol=1e-12 * float(once.norm()))
    assert float(torch.linalg.eigvalsh(once)[0]) > -1e-12 * float(once.norm())
    zeros = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}
    assert not bool(measure_gram(model, *batch.arguments, preconditioner=zeros).matrix.any())


def test_a_layer_alone_is_the_gram_of_that_layer():
    """D of one parameter is 1, of all others 0."""
    model, batch = model_of("llama"), rollouts()
    by_layer = measure_gram(model, *batch.arguments).by_layer
    chosen = model.model.layers[1].mlp.up_proj.weight
    one = {parameter: torch.full_like(parameter, float(parameter is chosen)) for parameter in model.parameters()}
    found = measure_gram(model, *batch.arguments, preconditioner=one).matrix
    torch.testing.assert_close(found, by_layer["model.layers.1.mlp.up_proj"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("streamed")
def test_lower_precisions_keep_a_wide_range(dtype):
    """D reaches 1e10, so that `√D ψ` overflows float16; the float64 twin has the same weights."""
    low = ARCHITECTURES["llama-tied"]().to(dtype)
    model, batch = ARCHITECTURES["llama-tied"](), rollouts(8, 40)
    model.load_state_dict(low.state_dict())
    drawn = random_diagonal(low)
    given = {parameter: 1e8 * one.float() for parameter, one in drawn.items()}
    double = {p: given[q].double() for p, q in zip(model.parameters(), low.parameters(), strict=True)}
    with KeepDouble():
        expected = definition(model, batch, double)
    found = measure_gram(low, *batch.arguments, preconditioner=given).matrix
    floor = {torch.float32: 1e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    assert float((found - expected).norm() / expected.norm()) < floor


@pytest.mark.usefixtures("streamed")
def test_half_precision_does_not_go_through_the_slab(monkeypatch):
    """Its kernels contract the rows as they are, without `√D`."""
    model, batch = ARCHITECTURES["llama"]().bfloat16(), rollouts()
    diagonal = random_diagonal(model)
    expected = measure_gram(model, *batch.arguments, preconditioner=diagonal).matrix
    monkeypatch.setattr(contract.Contractor, "suits_slab", lambda *_: True)
    monkeypatch.setattr(contract.Contractor, "slab", lambda *_: pytest.fail("a weight went to the slab"))
    assert torch.equal(measure_gram(model, *batch.arguments, preconditioner=diagonal).matrix, expected)


def test_a_preconditioner_is_not_changed_and_may_have_another_layout():
    model, batch = model_of("llama-tied"), rollouts()
    diagonal = random_diagonal(model)
    before = {parameter: one.clone() for parameter, one in diagonal.items()}
    expected = measure_gram(model, *batch.arguments, preconditioner=diagonal).matrix
    assert all(torch.equal(diagonal[parameter], one) for parameter, one in before.items())
    columns = {p: one.t().contiguous().t() if one.ndim == 2 else one for p, one in diagonal.items()}
    assert torch.equal(measure_gram(model, *batch.arguments, preconditioner=columns).matrix, expected)
    stranger = nn.Parameter(torch.zeros(3))
    more = {**diagonal, stranger: torch.full((3,), math.nan)}  # as of an optimiser that trains another model too
    assert torch.equal(measure_gram(model, *batch.arguments, preconditioner=more).matrix, expected)


def entry(model: nn.Module, name: str, value: object) -> dict[Tensor, Any]:
    ones: dict[Tensor, Any] = {parameter: torch.ones_like(parameter) for parameter in model.parameters()}
    return ones | {model.get_parameter(name): value}


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, rf"must have an entry for every trainable parameter, got none for {NORM}\. Make one with adam"),
        (torch.ones(31), rf"of {NORM} must have the shape \(32,\), got \(31,\)"),
        (torch.ones(32).long(), rf"of {NORM} must be a tensor of real numbers, got torch\.int64"),
        (1.0, rf"of {NORM} must be a tensor of real numbers, got float"),
        (torch.tensor([math.inf] + [1.0] * 31), rf"of {NORM} must be finite, got inf at index \(0,\)"),
        (torch.tensor([1.0, math.nan] + [1.0] * 30), rf"of {NORM} must be finite, got nan at index \(1,\)"),
        (torch.tensor([-0.5] + [1.0] * 31), rf"of {NORM} must not be negative, got -0\.5"),
    ],
)
def test_what_is_no_preconditioner_is_refused(value, message, unchecked_shapes):
    model = model_of("llama")
    with pytest.raises(ScoregramError, match=f"measure_gram: preconditioner {message}"):
        measure_gram(model, *rollouts().arguments, preconditioner=entry(model, NORM, value))


def test_what_a_preconditioner_excludes(unchecked_shapes, monkeypatch):
    model, batch = model_of("llama"), rollouts()
    ones = entry(model, NORM, torch.ones(32))
    mistakes: tuple[Any, ...] = ({NORM: torch.ones(32)}, [torch.ones(32)])
    for given in mistakes:
        with pytest.raises(ScoregramError, match="preconditioner must map parameters to tensors"):
            measure_gram(model, *batch.arguments, preconditioner=given)
    with pytest.raises(ScoregramError, match="a preconditioner excludes a sketch"):
        measure_gram(model, *batch.arguments, preconditioner=ones, sketch=Sketch())
    monkeypatch.setattr("scoregram.gram.engine.sharded_modules", lambda _: [model])
    with pytest.raises(ScoregramError, match="preconditioner needs a model that is whole, got a sharded model"):
        measure_gram(model, *batch.arguments, preconditioner=ones)


# Adam's diagonal


def trained(optimizer: torch.optim.Optimizer, gradients: list[dict[nn.Parameter, Tensor]]) -> None:
    for each in gradients:
        for parameter, gradient in each.items():
            parameter.grad = gradient.clone()
        optimizer.step()


def adam_diagonal_by_hand(gradients: list[float], beta: float, eps: float, *, amsgrad: bool) -> float:
    """`1 / (√v̂ + ε)` of one weight after some gradients."""
    mean_square, largest = 0.0, 0.0
    for gradient in gradients:
        mean_square = beta * mean_square + (1 - beta) * gradient**2
        largest = max(largest, mean_square)
    used = largest if amsgrad else mean_square
    return 1 / (math.sqrt(used / (1 - beta ** len(gradients))) + eps)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("fused", [False, True])
def test_the_diagonal_of_adam_follows_from_its_formula(kind, fused):
    """Three groups with their own settings; the gradients fall, so amsgrad's largest `v` is an earlier one."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(2, 3, generator=generator, dtype=torch.float64)) for _ in range(4)]
    groups = [
        {"params": weights[:2]},
        {"params": weights[2:3], "betas": (0.5, 0.7), "eps": 0.3},
        {"params": weights[3:], "betas": (0.9, 0.8), "amsgrad": True},
    ]
    settings = [(0.999, 1e-8, False)] * 2 + [(0.7, 0.3, False), (0.8, 1e-8, True)]
    optimizer = kind(groups, lr=0.0, weight_decay=0.0, fused=fused)
    gradients = [
        {w: torch.randn(2, 3, generator=generator, dtype=torch.float64) / 4**step for w in weights} for step in range(4)
    ]
    trained(optimizer, gradients)
    found = adam_preconditioner(optimizer)
    assert list(found) == weights
    for weight, (beta, eps, amsgrad) in zip(weights, settings, strict=True):
        for place in range(6):
            each = [float(one[weight].flatten()[place]) for one in gradients]
            expected = adam_diagonal_by_hand(each, beta, eps, amsgrad=amsgrad)
            assert float(found[weight].flatten()[place]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_it_is_the_diagonal_of_the_step_itself(amsgrad):
    """Without momentum, `β₁ = 0`, the step is `-η D g`."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(5, generator=generator, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=0.1, betas=(0.0, 0.9), weight_decay=0.0, amsgrad=amsgrad)
    for _ in range(3):
        before, gradient = weight.detach().clone(), torch.randn(5, generator=generator, dtype=torch.float64)
        trained(optimizer, [{weight: gradient}])
        torch.testing.assert_close(weight.detach() - before, -0.1 * adam_preconditioner(optimizer)[weight] * gradient)


def test_a_diagonal_is_a_copy_in_float32_or_wider():
    weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([weight], lr=0.0)
    trained(optimizer, [{weight: torch.tensor([0.0, 1.0, 2.0]).bfloat16()}])
    first = adam_preconditioner(optimizer)[weight]
    assert first.dtype == torch.float32 and not first.requires_grad and bool(first.isfinite().all())
    kept = first.clone()
    trained(optimizer, [{weight: torch.ones(3).bfloat16()}])
    assert torch.equal(first, kept) and not torch.equal(adam_preconditioner(optimizer)[weight], kept)


def test_frozen_parameters_need_no_state_and_others_do():
    weight, frozen, late = (nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen.requires_grad_(False)
    optimizer = torch.optim.Adam([weight, frozen])
    with pytest.raises(ScoregramError, match=r"none for parameter 0 of group 0, shape \(2,\)\. Take a step"):
        adam_preconditioner(optimizer)
    assert not optimizer.state, "asking for a state must not make one"
    trained(optimizer, [{weight: torch.ones(2)}])
    assert list(adam_preconditioner(optimizer)) == [weight]
    optimizer.add_param_group({"params": [late]})
    with pytest.raises(ScoregramError, match="parameter 0 of group 1"):
        adam_preconditioner(optimizer)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.NAdam])
def test_other_optimisers_are_refused(kind):
    optimizer = kind([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(ScoregramError, match=rf"must be torch\.optim\.Adam or AdamW, got {kind.__name__}\. Pass"):
        adam_preconditioner(optimizer)


def test_it_predicts_a_small_step_of_adam():
    """`η Σ_i w_i ⟨ψ_i, D ψ_h⟩` against the change of held-out log-probabilities, without momentum."""
    model, train, held = ARCHITECTURES["llama-tied"](), rollouts(4, 9), rollouts(5, 12, seed=1)
    weights = torch.tensor([1.0, -0.5, 0.3, -0.8], dtype=torch.float64)
    rate = 1e-9
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.0, 0.9), eps=1e-2, weight_decay=0.0)
    with KeepDouble():
        rows = score_rows(model, *train.arguments)
        before = measure_gram(model, *held.arguments).log_probs.sum(1)
        start = [parameter.detach().clone() for parameter in model.parameters()]
        ascent = torch.split(weights @ rows, [parameter.numel() for parameter in model.parameters()])
        for parameter, part in zip(model.parameters(), ascent, strict=True):
            parameter.grad = -part.view_as(parameter)
        optimizer.step()
        optimizer.zero_grad()
        after = measure_gram(model, *held.arguments).log_probs.sum(1)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), start, strict=True):
                parameter.copy_(value)
        cross = cross_gram(model, train.arguments, held.arguments, preconditioner=adam_preconditioner(optimizer)).cross
    torch.testing.assert_close(after - before, rate * weights @ cross, rtol=1e-4, atol=1e-12)
