"""The engine against the definition: one float64 backward pass per rollout, sharing no code with it."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from scoregram.gram import backward_with_gram, collect, contract, head, leaves, measure_gram
from scoregram.gram.measurement import Measurement
from scoregram.gram.model import facts_of
from tests.cases import ARCHITECTURES, KeepDouble, build, rollouts
from tests.naive import score_rows

pytestmark = pytest.mark.filterwarnings("default")


def distance(measured: torch.Tensor, reference: torch.Tensor) -> float:
    return float((measured.detach().double() - reference.detach()).norm() / reference.detach().norm())


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


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


def assert_matches_definition(name: str, padding: str = "right") -> None:
    model, batch = model_of(name), rollouts(padding=padding)
    weights = torch.linspace(-1.0, 2.0, 5, dtype=torch.float64)
    with KeepDouble():
        rows = score_rows(model, *batch.arguments)
        gram = backward_with_gram(model, *batch.arguments, weights=weights)
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    assert distance(gram.matrix, rows @ rows.T) < 1e-12
    assert distance(flat, weights @ rows) < 1e-12
    assert not gram.replayed
    torch.testing.assert_close(sum(gram.by_layer.values()), gram.matrix)
    assert bool((gram.matrix[3] == 0).all()), "a rollout without a completion token is a zero row"
    assert float(torch.linalg.eigvalsh(gram.matrix)[0]) > -1e-12 * float(gram.matrix.norm())


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_gram_and_gradient_match_the_definition(name):
    assert_matches_definition(name)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
@pytest.mark.usefixtures("streamed", "wide")
def test_streamed_weights_seen_from_outside_match_the_definition(name):
    assert_matches_definition(name)


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "qwen3-moe", "phi", "gemma2"])
@pytest.mark.usefixtures("streamed")
def test_streamed_weights_match_the_definition_under_left_padding(name):
    assert_matches_definition(name, padding="left")


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "phi"])
@pytest.mark.usefixtures("streamed")
def test_recomputed_logit_gradients_and_small_chunks_match_the_definition(name, monkeypatch):
    monkeypatch.setattr(head, "STORE_BYTES", 0)
    monkeypatch.setattr(head, "LOGIT_CHUNK_ELEMENTS", 7 * 61)
    monkeypatch.setattr(contract, "CHUNK_ELEMENTS", 1000)
    monkeypatch.setattr(contract, "DOT_LENGTH", 64)
    assert_matches_definition(name)


def test_large_rows_match_the_definition(monkeypatch):
    """Rows of large parameters are contracted one by one, not stacked."""
    monkeypatch.setattr(collect, "STACKED_ELEMENTS", 0)
    assert_matches_definition("gpt2")


def test_looking_is_the_same_as_training():
    model, batch = model_of("llama-tied"), rollouts()
    trained = backward_with_gram(model, *batch.arguments, weights=torch.ones(5))
    model.zero_grad(set_to_none=True)
    torch.testing.assert_close(measure_gram(model, *batch.arguments).matrix, trained.matrix)


def reference(model: nn.Module, batch, **options) -> torch.Tensor:
    rows = score_rows(model, *batch.arguments, **options)
    return rows @ rows.T


@pytest.mark.parametrize("options", [{"r": 3}, {"r": 3, "use_dora": True}, {"r": 3, "modules_to_save": ["lm_head"]}])
def test_adapters_with_a_frozen_base(options):
    import peft

    config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.3, **options)
    model: Any = peft.get_peft_model(build("Llama"), config).double().eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    batch = rollouts()
    with KeepDouble():
        expected = reference(model, batch)
        gram = measure_gram(model, *batch.arguments, verify=True)
        assert distance(gram.matrix, expected) < 1e-12
        model.train()
        with pytest.warns(UserWarning, match="dropout was switched off"):
            trained = measure_gram(model, *batch.arguments)
    assert distance(trained.matrix, expected) < 1e-12
    assert not gram.replayed
    assert gram.notes == () and "dropout" in trained.notes[0]


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe", "gpt2"])  # the last with dropout
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("width", ["narrow", "wide"])
def test_gradient_checkpointing_changes_nothing(name, reentrant, width, request):
    request.getfixturevalue("streamed")
    if width == "wide":
        request.getfixturevalue("wide")
    model, batch = ARCHITECTURES[name](), rollouts()
    with KeepDouble():
        expected = reference(model, batch)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train()
        gram = measure_gram(model, *batch.arguments)
    measure_gram(model, *batch.arguments, verify=True)
    assert distance(gram.matrix, expected) < 1e-12
    assert not gram.replayed


class Reentrant(nn.Module):
    """A model that checkpoints its layers by a nested backward pass of its own, and uses one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 8)
        self.layer = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 61)
        self.nested = "none"

    def forward(self, input_ids):  # noqa: D102
        x = self.embedding(input_ids).cumsum(1)
        for turn in range(2):
            is_nested = self.nested == "both" or (self.nested, turn) in {("first", 0), ("second", 1)}
            x = checkpoint(self.step, x, use_reentrant=True) if is_nested else self.step(x)
        return self.head(x)

    def step(self, x):  # noqa: D102
        return torch.tanh(self.layer(x) * self.scale.exp())


@pytest.mark.parametrize("nested", ["none", "first", "second", "both"])
@pytest.mark.usefixtures("streamed")
def test_layers_used_twice_and_nested_checkpointing(nested):
    torch.manual_seed(0)
    model, batch = Reentrant().double(), rollouts()
    rows = []
    for i in range(5):
        real = batch.attention_mask[i].bool()
        ids = batch.input_ids[i][real][None]
        chosen = model(ids).log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        total = (chosen * batch.completion_mask[i][real][1:]).sum()
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(total, list(model.parameters()))]))
    model.nested = nested
    gram = measure_gram(model, *batch.arguments)
    stacked = torch.stack(rows)
    assert distance(gram.matrix, stacked @ stacked.T) < 1e-12
    assert bool(gram.replayed) == (nested == "first"), "its second use was contracted before the first ran again"


def test_any_parameter_has_an_exact_route():
    class Odd(nn.Module):
        """Parameters in operations no rule knows: a bilinear form, a matrix exponential, a convolution."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(61, 6)
            self.bilinear = nn.Parameter(torch.randn(6, 6, 6) / 3)
            self.generator = nn.Parameter(torch.randn(6, 6) / 3)
            self.kernel = nn.Parameter(torch.randn(6, 6, 3) / 3)
            self.hidden = nn.Parameter(torch.randn(6))
            self.head = nn.Linear(6, 61, bias=False)

        def forward(self, input_ids):
            x = self.embedding(input_ids)
            x = x + torch.einsum("ntj,ntk,ijk->nti", x, x, self.bilinear)
            x = x @ torch.matrix_exp(self.generator)
            padded = nn.functional.pad(x.transpose(1, 2), (2, 0))
            x = x + nn.functional.conv1d(padded, self.kernel).transpose(1, 2)
            return self.head(HiddenScale.apply(x, self.hidden))

    torch.manual_seed(0)
    model, batch = Odd().double(), rollouts(padding="right")
    gram = measure_gram(model, *batch.arguments, verify=True)
    assert gram.replayed == ("hidden",), "autograd functions of others cannot be seen into"
    weights = torch.linspace(-1.0, 1.0, 5, dtype=torch.float64)
    backward_with_gram(model, *batch.arguments, weights=weights)
    norm = sum(float(gradient_of(parameter).square().sum()) for parameter in model.parameters())
    assert norm == pytest.approx(float(weights @ gram.matrix @ weights), rel=1e-12)


class HiddenScale(torch.autograd.Function):
    """A product with a parameter inside somebody else's autograd function."""

    @staticmethod
    def forward(ctx, x, scale):  # noqa: D102
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, *grad_outputs):  # noqa: D102
        (grad,) = grad_outputs
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x).sum((0, 1))


def test_order_subset_and_padding_change_nothing_but_rounding():
    model, batch = model_of("llama-tied"), rollouts()
    order = torch.tensor([4, 2, 0])
    with KeepDouble():
        whole = measure_gram(model, *batch.arguments).matrix
        part = measure_gram(model, *(tensor[order] for tensor in batch.arguments)).matrix
        wider = measure_gram(model, *(nn.functional.pad(tensor, (3, 4)) for tensor in batch.arguments)).matrix
    assert distance(part, whole[order][:, order]) < 1e-12
    assert distance(wider, whole) < 1e-12


def test_packed_rollouts_give_the_gram_of_padded_ones():
    model, batch = model_of("llama"), rollouts()
    real = batch.attention_mask.bool()
    ids = batch.input_ids[real][None]
    owner = torch.arange(5)[:, None].expand_as(real)[real][None]
    packed_mask = batch.completion_mask[real][None]
    padding = nn.functional.pad
    with KeepDouble():
        expected = measure_gram(model, *batch.arguments)
        packed = measure_gram(
            model, padding(ids, (0, 3)), padding(packed_mask, (0, 3)), rollout_ids=padding(owner, (0, 3), value=-1)
        )
    assert distance(packed.matrix, expected.matrix) < 1e-12
    torch.testing.assert_close(packed.log_probs[0, :-3], expected.log_probs[real])


def test_attention_kernel_and_mode_change_nothing_but_rounding():
    batch = rollouts()
    with KeepDouble():
        grams = []
        for kernel in ("sdpa", "eager"):
            model = build("Llama", attn_implementation=kernel)
            grams += [measure_gram(model, *batch.arguments).matrix]
            grams += [measure_gram(model.train(), *batch.arguments).matrix]
    assert all(distance(gram, grams[0]) < 1e-12 for gram in grams)


def test_only_blocks_within_groups():
    model, batch = model_of("qwen3"), rollouts(6)
    with KeepDouble():
        whole = measure_gram(model, *batch.arguments).matrix
        blocks = measure_gram(model, *batch.arguments, group_size=3, verify=True).matrix
    inside = torch.block_diag(*[torch.ones(3, 3)] * 2).bool()
    assert bool(blocks[~inside].isnan().all())
    assert distance(blocks[inside], whole[inside]) < 1e-12


@pytest.mark.parametrize("name", ["llama-tied", "gemma2", "phi"])
@pytest.mark.parametrize("stored", [0, 1 << 30])
def test_gram_of_a_weighted_loss_at_a_temperature(name, stored, monkeypatch):
    monkeypatch.setattr(head, "STORE_BYTES", stored)
    model, batch = model_of(name), rollouts()
    coefficients = torch.randn(batch.input_ids.shape, generator=torch.Generator().manual_seed(2)).double()
    coefficients[~batch.completion_mask] = torch.nan
    finite = coefficients.nan_to_num()
    with KeepDouble():
        gram = measure_gram(model, *batch.arguments, coefficients=coefficients, temperature=0.7)
        expected = reference(model, batch, coefficients=finite, temperature=0.7)
    assert distance(gram.matrix, expected) < 1e-12


def test_a_baseline_that_depends_on_the_gram_needs_no_second_pass():
    model, batch = model_of("llama"), rollouts()
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64)

    def factors(gram):
        energy = gram.matrix.diagonal()
        return torch.stack([torch.ones(()).double(), -(energy @ rewards) / energy.sum()])

    with KeepDouble():
        rows = score_rows(model, *batch.arguments)
        gram = backward_with_gram(
            model, *batch.arguments, weights=torch.stack([rewards, torch.ones(5).double()]), combine=factors
        )
    energy = rows.square().sum(1)
    expected = (rewards - (energy @ rewards) / energy.sum()) @ rows
    flat = torch.cat([gradient_of(parameter).flatten() for parameter in model.parameters()])
    model.zero_grad(set_to_none=True)
    assert distance(flat, expected) < 1e-12
    assert distance(gram.matrix, rows @ rows.T) < 1e-12


def test_gradients_add_up_over_calls():
    model, batch = ARCHITECTURES["gpt2"](), rollouts()
    weights = torch.ones(5, dtype=torch.float64)
    with KeepDouble():
        backward_with_gram(model, *batch.arguments, weights=weights)
        once = [gradient_of(parameter).clone() for parameter in model.parameters()]
        backward_with_gram(model, *batch.arguments, weights=2 * weights)
    for parameter, grad in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 3 * grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precisions_stay_at_their_noise_floor(dtype):
    model, batch = ARCHITECTURES["llama-tied"](), rollouts(8, 40)
    low = ARCHITECTURES["llama-tied"]().to(dtype)
    model.load_state_dict(low.state_dict())  # the same weights, exactly, in float64
    with KeepDouble():
        expected = reference(model, batch)
    floor = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    assert distance(measure_gram(low, *batch.arguments).matrix, expected) < floor


def test_autocast_is_as_good_as_plain_autocast():
    model, batch = ARCHITECTURES["llama-tied"]().float(), rollouts(8, 40)
    rows = score_rows(model, *batch.arguments)
    weights = torch.linspace(-1.0, 1.0, 8)
    with torch.autocast("cpu", torch.bfloat16):
        plain = score_rows(model, *batch.arguments)
        gram = backward_with_gram(model, *batch.arguments, weights=weights)
    flat = torch.cat([gradient_of(parameter).flatten() for parameter in model.parameters()])
    assert distance(gram.matrix, rows @ rows.T) < 2 * distance(plain @ plain.T, rows @ rows.T) + 1e-3
    assert distance(flat, weights.double() @ rows) < 2 * distance(weights.double() @ plain, weights.double() @ rows)
    assert all(gradient_of(parameter).dtype is torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("name", ["llama", "gpt2", "nemotron"])
@pytest.mark.usefixtures("streamed")
def test_a_measurement_casts_what_autocast_casts(name):
    model, batch = ARCHITECTURES[name]().float(), rollouts()
    kinds: dict[str, torch.dtype] = {}
    for place, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)) and module is not model.get_output_embeddings():
            module.register_forward_hook(lambda module, args, out, place=place: kinds.update({place: out.dtype}))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(batch.input_ids)
        plain = dict(kinds)
        grams = [measure_gram(model, *batch.arguments) for _ in range(2)]  # the second by what was remembered
    assert kinds == plain and torch.bfloat16 in plain.values()
    assert not any(gram.replayed for gram in grams)


def test_a_layer_whose_forward_was_replaced_is_measured_as_it_is():
    model, batch = build("Llama"), rollouts()
    layer = model.model.layers[0].mlp.up_proj
    plain = layer.forward
    layer.forward = lambda x: 2 * plain(x)
    with KeepDouble():
        expected = reference(model, batch)
        gram = measure_gram(model, *batch.arguments)
    assert distance(gram.matrix, expected) < 1e-12
    assert not gram.replayed


class Borrowing(nn.Module):
    """A model that uses the weight of a layer without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 8)
        self.layer = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 61, bias=False)

    def forward(self, input_ids):  # noqa: D102
        x = self.embedding(input_ids).cumsum(1)
        return self.head(torch.tanh(nn.functional.linear(x, self.layer.weight) + self.layer(x)))


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_a_weight_used_outside_its_module_is_seen_from_outside(kept, monkeypatch):
    monkeypatch.setattr(leaves, "KEPT_ELEMENTS", kept)
    torch.manual_seed(0)
    model, batch = Borrowing().double(), rollouts()
    first = measure_gram(model, *batch.arguments, verify=True)
    assert not first.replayed
    assert facts_of(model).needs_wide_pass, "it is not tried the narrow way again"
    torch.testing.assert_close(measure_gram(model, *batch.arguments).matrix, first.matrix)


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "phi"])
def test_an_ordinary_model_needs_no_pass_from_outside(name):
    """Every parameter is used by its own module, positions that all rollouts share included."""
    model = ARCHITECTURES[name]()
    measure_gram(model, *rollouts().arguments)
    assert not facts_of(model).needs_wide_pass


class TwiceHeaded(nn.Module):
    """A model that multiplies with its head's weight before the head, too."""

    def __init__(self, *, where: str, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 8)
        self.head = nn.Linear(8, 61, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.where = where

    def get_output_embeddings(self) -> nn.Module:
        """The head, as Hugging Face models tell it."""
        return self.head

    def forward(self, input_ids):  # noqa: D102
        x = self.embedding(input_ids).cumsum(1)
        if self.where == "layer":
            guess = self.head(x)
        elif self.where == "weight":
            guess = nn.functional.linear(x, self.head.weight)
        else:
            guess = x.sum(-1, keepdim=True).expand(-1, -1, 61)
        return self.head(x + guess.softmax(-1) @ self.embedding.weight)


@pytest.mark.parametrize("where", ["layer", "weight", "embedding only"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_a_head_that_is_used_before_the_head(where, tied, kept, monkeypatch):
    monkeypatch.setattr(leaves, "KEPT_ELEMENTS", kept)
    torch.manual_seed(0)
    model, batch = TwiceHeaded(where=where, tied=tied).double(), rollouts()
    measure_gram(model, *batch.arguments, verify=True)
