"""Padding, positions and masks: every rollout counts as if it were alone and unpadded, or an error says why not."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from scoregram.checks import ScoregramError
from scoregram.gram import DeferredGram, backward_with_gram, measure_gram
from scoregram.gram.contract import Contractor
from tests.cases import ARCHITECTURES, KeepDouble, Rollouts, build, rollouts
from tests.naive import score_rows

pytestmark = pytest.mark.filterwarnings("default")

DECODER: dict[str, Any] = {
    "d_model": 32,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 40 for side in ("encoder", "decoder")},
}


def adapted(model: Any, config: Any) -> Any:
    """A model with adapters that are not at their initial zeros."""
    import peft

    wrapped = peft.get_peft_model(model, config).double().eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return wrapped


def lora(model: Any, *targets: str) -> Any:
    import peft

    return adapted(model, peft.LoraConfig(target_modules=list(targets), r=3))


def with_prefix(model: Any) -> Any:
    import peft

    return adapted(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


MODELS: dict[str, Callable[[], Any]] = {
    # positions from padding_idx + 1
    "roberta": lambda: build("Roberta", is_decoder=True),
    "xlm-roberta": lambda: build("XLMRoberta", is_decoder=True),
    "camembert": lambda: build("Camembert", is_decoder=True),
    "data2vec-text": lambda: build("Data2VecText", is_decoder=True),
    "roberta-prelayernorm": lambda: build("RobertaPreLayerNorm", is_decoder=True),
    "xmod": lambda: build("Xmod", is_decoder=True, languages=["en_XX"], default_language="en_XX"),
    "xlm-roberta-xl": lambda: build("XLMRobertaXL", is_decoder=True),
    # no argument for positions
    "bart": lambda: build("Bart", **DECODER),
    "pegasus": lambda: build("Pegasus", **DECODER),
    "rwkv": lambda: build("Rwkv", attention_hidden_size=32).train(),
    # an argument that the wrapper hides
    "lora-gpt2": lambda: lora(ARCHITECTURES["gpt2"](), "c_attn"),
    "lora-gpt-neo": lambda: lora(
        build("GPTNeo", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]), "q_proj", "v_proj"
    ),
    "lora-gpt-bigcode": lambda: lora(build("GPTBigCode", n_embd=32, n_layer=2, n_head=4, n_positions=64), "c_attn"),
    "lora-biogpt": lambda: lora(build("BioGpt"), "q_proj", "v_proj"),
    "prefix-llama": lambda: with_prefix(build("Llama")),
    # exact before, to stay so
    "gpt2": ARCHITECTURES["gpt2"],
    "llama": ARCHITECTURES["llama"],
    "mamba": ARCHITECTURES["mamba"],
}


def with_holes(*, left: bool = True) -> Rollouts:
    """Prompts, left-padded or not, then padding between prompt and completion, then completions of unequal lengths."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 61, (5, 14), generator=generator)
    attention, completion = torch.zeros_like(ids), torch.zeros(5, 14, dtype=torch.bool)
    for row in range(5):
        attention[row, row % 2 if left else 0 : 5] = 1
        attention[row, 6 + row % 3 : 14 - row % 2] = 1
        completion[row, 6 + row % 3 : 14 - row % 2] = True
    completion[3] = False
    return Rollouts(ids, completion, attention)


def error_of(model: Any, batch: Rollouts, measured: Tensor) -> float:
    with KeepDouble():
        rows = score_rows(model, *batch.arguments)
    expected = rows @ rows.T
    return float((measured - expected).norm() / expected.norm())


FAST = ("roberta", "bart", "lora-gpt2", "prefix-llama", "gpt2", "llama")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_padding_on_the_left_and_in_the_middle_changes_nothing(name):
    model, weights = MODELS[name](), torch.linspace(-1.0, 2.0, 5, dtype=torch.float64)
    for batch in (rollouts(), rollouts(padding="left"), with_holes()):
        with KeepDouble():
            gram = measure_gram(model, *batch.arguments, verify=True)
            again = backward_with_gram(model, *batch.arguments, weights=weights)
        squared = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
        model.zero_grad(set_to_none=True)
        assert error_of(model, batch, gram.matrix) < 1e-12
        assert error_of(model, batch, again.matrix) < 1e-12
        assert squared == pytest.approx(float(weights @ gram.matrix @ weights), rel=1e-10)
        if name != "rwkv":
            assert not gram.replayed, "positions that all rollouts share are looked up for each"


@pytest.mark.parametrize(
    "batch", [rollouts(padding="left"), with_holes(), with_holes(left=False)], ids=["left", "holes", "holes alone"]
)
def test_log_probs_are_at_the_places_of_the_given_tokens(batch):
    model = ARCHITECTURES["gpt2"]()
    expected = torch.zeros(batch.input_ids.shape, dtype=torch.float64)
    for row, real in enumerate(batch.attention_mask.bool()):
        ids = batch.input_ids[row][real]
        said = model(input_ids=ids[None]).logits[0, :-1].log_softmax(1).gather(1, ids[1:, None])[:, 0].detach()
        expected[row, real] = torch.cat([torch.zeros(1).double(), said]) * batch.completion_mask[row][real]
    torch.testing.assert_close(measure_gram(model, *batch.arguments).log_probs, expected)
    deferred = DeferredGram(model, *batch.arguments)
    torch.testing.assert_close(deferred.log_probs, expected)
    coefficients = torch.linspace(0.5, 1.5, expected.numel(), dtype=torch.float64).view(expected.shape)
    gram, _ = deferred.finish(coefficients, torch.ones(1, 5, dtype=torch.float64))
    torch.testing.assert_close(gram.matrix, measure_gram(model, *batch.arguments, coefficients=coefficients).matrix)


def test_packed_rollouts_may_have_padding_inside():
    model, batch = ARCHITECTURES["llama"](), with_holes()
    owner = torch.arange(5)[:, None].expand_as(batch.input_ids)
    packed = [tensor.reshape(1, -1) for tensor in (*batch.arguments, owner)]
    gram = measure_gram(model, *packed[:3], rollout_ids=packed[3])
    assert error_of(model, batch, gram.matrix) < 1e-6
    torch.testing.assert_close(gram.log_probs.view(5, -1), measure_gram(model, *batch.arguments).log_probs)


def test_a_rollout_of_padding_alone_is_a_zero_row():
    model, batch = ARCHITECTURES["llama"](), rollouts(padding="left")
    batch.attention_mask[3] = 0  # it has no completion token
    gram = measure_gram(model, *batch.arguments, verify=True)
    assert bool((gram.matrix[3] == 0).all())
    rest = [tensor[[0, 1, 2, 4]] for tensor in batch.arguments]
    assert error_of(model, Rollouts(*rest), gram.matrix[[0, 1, 2, 4]][:, [0, 1, 2, 4]]) < 1e-6


def test_kept_padding_is_the_model_s_own_padded_call():
    model, batch = ARCHITECTURES["gpt2"](), rollouts(padding="left")
    rows = []
    for row in range(5):
        here = slice(row, row + 1)
        ids, mask = batch.input_ids[here], batch.completion_mask[here]
        said = model(input_ids=ids, attention_mask=batch.attention_mask[here]).logits[0, :-1].log_softmax(1)
        total = (said.gather(1, ids[0, 1:, None])[:, 0] * mask[0, 1:]).sum()
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(total, list(model.parameters()))]))
    expected = torch.stack(rows) @ torch.stack(rows).T
    kept = measure_gram(model, *batch.arguments, keep_padding=True, verify=True)
    moved = measure_gram(model, *batch.arguments)
    assert float((kept.matrix - expected).norm() / expected.norm()) < 1e-12
    assert float((moved.matrix - expected).norm() / expected.norm()) > 1e-2, "positions count the padding"


class LengthScaled(nn.Module):
    """A model whose logits depend on the length of the batch, padding included."""

    def __init__(self, strength: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 8)
        self.head = nn.Linear(8, 61)
        self.strength = strength

    def forward(self, input_ids: Tensor) -> Tensor:  # noqa: D102
        return self.head(self.embedding(input_ids).cumsum(1) / (1 + self.strength * input_ids.shape[1]))


def test_a_model_that_depends_on_padding_is_refused_or_found_by_verification():
    torch.manual_seed(0)
    batch, weights = rollouts(), torch.ones(5)
    even = [tensor[:, :9] for tensor in batch.arguments]
    model = LengthScaled(1.0).double()
    measure_gram(model, *even, verify=True)
    with pytest.raises(ScoregramError, match="must not depend on padding, got log-probabilities that change by"):
        backward_with_gram(model, *batch.arguments, weights=weights)
    assert all(parameter.grad is None for parameter in model.parameters())
    measure_gram(model, *batch.arguments, keep_padding=True, verify=True)
    model = LengthScaled(1e-4).double()
    measure_gram(model, *batch.arguments)
    with pytest.raises(ScoregramError, match=r"rollout alone .* log-probabilities that differ .* depends on padding"):
        measure_gram(model, *batch.arguments, verify=True)


def test_the_check_takes_the_most_padded_rollout_that_has_a_completion():
    torch.manual_seed(0)
    ids, completion, attention = rollouts().arguments
    completion[2] = False  # the most padded one
    with pytest.raises(ScoregramError, match="when 1 tokens of padding are removed"):
        measure_gram(LengthScaled(1.0).double(), ids, completion, attention)


class MixedPrecision(LengthScaled):
    """A layer in bfloat16 between others in float32."""

    def __init__(self, strength: float) -> None:
        super().__init__(strength)
        self.layer = nn.Linear(8, 8).bfloat16()

    def forward(self, input_ids: Tensor) -> Tensor:  # noqa: D102
        x = self.layer(self.embedding(input_ids).cumsum(1).to(self.layer.weight.dtype)).float()
        return self.head(x / (1 + self.strength * input_ids.shape[1]))


def test_the_lowest_precision_among_the_parameters_decides_what_verification_allows(monkeypatch):
    torch.manual_seed(0)
    model, grams = MixedPrecision(0.0), Contractor.grams
    monkeypatch.setattr(Contractor, "grams", lambda *args: 1.01 * grams(*args))
    measure_gram(model, *rollouts().arguments, verify=True)
    with pytest.raises(ScoregramError, match=r"must agree with a plain backward pass .* to 0\.0001"):
        measure_gram(model.float(), *rollouts().arguments, verify=True)


def test_the_lowest_precision_among_the_parameters_decides_what_is_rounding():
    torch.manual_seed(0)
    model = MixedPrecision(1e-2)
    measure_gram(copy.deepcopy(model), *rollouts().arguments)
    with pytest.raises(ScoregramError, match="must not depend on padding"):
        measure_gram(model.float(), *rollouts().arguments)


def test_noise_of_autocast_is_not_taken_for_dependence_on_padding():
    torch.manual_seed(0)
    model, batch = LengthScaled(0.02).float(), rollouts()
    measure_gram(copy.deepcopy(model).bfloat16(), *batch.arguments)
    with torch.autocast("cpu", torch.bfloat16):
        measure_gram(copy.deepcopy(model), *batch.arguments)
    with pytest.raises(ScoregramError, match="must not depend on padding"):
        measure_gram(model, *batch.arguments)


def long_padding() -> tuple[Tensor, Tensor, Tensor]:
    """Ids, completion and attention mask of four rollouts of 64, 20, 10 and 64 tokens."""
    ids = torch.randint(3, 61, (4, 64), generator=torch.Generator().manual_seed(0))
    attention = torch.ones_like(ids)
    attention[1, 20:] = attention[2, 10:] = 0
    completion = attention.bool().clone()
    completion[:, :5] = False
    return ids, completion, attention


LOW = {
    "bfloat16": (torch.bfloat16, False),
    "float16": (torch.float16, False),
    "autocast": (torch.float32, True),
}


@pytest.mark.parametrize("kind", LOW)
def test_a_model_that_depends_on_padding_is_refused_in_half_precision(kind):
    """`K_ii` of the padded rollouts would be 0.13 and 0.20 of its value."""
    torch.manual_seed(0)
    dtype, has_autocast = LOW[kind]
    model = LengthScaled(0.1).to(dtype)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=has_autocast),
        pytest.raises(ScoregramError, match="must not depend on padding, got log-probabilities that change by 0"),
    ):
        measure_gram(model, *long_padding())


@pytest.mark.parametrize("kind", LOW)
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3-moe"])
def test_models_that_ignore_padding_are_measured_in_half_precision(name, kind):
    dtype, has_autocast = LOW[kind]
    model = ARCHITECTURES[name]().to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
        gram = measure_gram(model, *long_padding())
    assert not any("padding" in note for note in gram.notes)


def test_a_change_that_rounding_could_make_is_noted_every_time():
    torch.manual_seed(0)
    model = LengthScaled(0.01)
    low = copy.deepcopy(model).bfloat16()
    for _ in range(2):
        notes = measure_gram(low, *long_padding()).notes
        assert any(note.startswith("log-probabilities that change by 0.0") for note in notes)
    with pytest.raises(ScoregramError, match="must not depend on padding"):
        measure_gram(copy.deepcopy(model).half(), *long_padding())


class Noisy(LengthScaled):
    """A model whose logits have noise that depends on the number of rollouts, as kernels on a GPU do."""

    def __init__(self, size: float) -> None:
        super().__init__(0.0)
        self.size = size

    def forward(self, input_ids: Tensor) -> Tensor:  # noqa: D102
        logits = super().forward(input_ids)
        return logits + self.size * torch.sin(1e3 * torch.arange(61) + 7 * len(input_ids) + input_ids[..., None])


@pytest.mark.parametrize(("size", "is_refused"), [(0.1, False), (2.0, True)])
def test_noise_of_other_batches_is_not_taken_for_dependence_on_padding(size, is_refused):
    """Only a change of more than 0.5 is refused whatever the noise."""
    torch.manual_seed(0)
    model = Noisy(size).bfloat16()
    with pytest.raises(ScoregramError, match="depend on padding") if is_refused else contextlib.nullcontext():
        assert any("tokens of padding" in note for note in measure_gram(model, *long_padding()).notes)


class LengthMinded(nn.Module):
    """A norm that scales by its weight; in sequences longer than 8 tokens, by the centred weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 32, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x * self.weight if x.shape[1] <= 8 else x * (self.weight - self.weight.mean() + 1)


def test_a_module_that_does_something_else_at_another_length():
    model = ARCHITECTURES["llama"]()
    model.model.layers[1].input_layernorm = LengthMinded()
    short, long = rollouts(5, 8), rollouts(5, 11)
    for batch in (short, long, short):
        with KeepDouble():
            gram = measure_gram(model, *batch.arguments)
        # the module looks at the padded length, so the reference does too
        rows = []
        for row in range(5):
            ids = batch.input_ids[row : row + 1]
            with KeepDouble():
                said = model(input_ids=ids).logits[0, :-1].log_softmax(1).gather(1, ids[0, 1:, None])[:, 0]
            total = (said * batch.completion_mask[row, 1:]).sum()
            rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(total, list(model.parameters()))]))
        expected = torch.stack(rows) @ torch.stack(rows).T
        assert float((gram.matrix - expected).norm() / expected.norm()) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("exponent", [-60, -24, 20])
def test_the_size_of_coefficients_costs_no_digit(dtype, exponent):
    model, batch = ARCHITECTURES["llama-tied"]().to(dtype), rollouts()
    coefficients = torch.linspace(0.5, 1.5, 55, dtype=torch.float64).view(5, 11)
    weights = torch.linspace(-1.0, 2.0, 5, dtype=torch.float64)
    one = backward_with_gram(model, *batch.arguments, weights=weights, coefficients=coefficients)
    grads = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    size = 2.0**exponent  # a power of two: every digit must stay
    other = backward_with_gram(model, *batch.arguments, weights=weights / size, coefficients=coefficients * size)
    assert torch.equal(other.matrix, one.matrix * size**2)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))
    measure_gram(model, *batch.arguments, coefficients=coefficients * size, verify=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i, c, a: (i, c, a * 2), "attention_mask must contain only 0 and 1, got 2 at row 0, column 0"),
        (lambda i, c, a: (i, c, a * 0.5), r"attention_mask must contain only 0 and 1, got 0\.5 at row 0, column 0"),
        (lambda i, c, a: (i, c * 3, a), "completion_mask must contain only 0 and 1, got 3 at row 0, column 4"),
        (lambda i, c, a: (np.asarray(i), c, a), "input_ids must be a tensor, got ndarray"),
        (lambda i, c, a: (i, np.asarray(c), a), "completion_mask must be a tensor, got ndarray"),
        (lambda i, c, a: (i, c, a.tolist()), "attention_mask must be a tensor, got list"),
        (lambda i, c, a: (i.double(), c, a), r"input_ids must be integers, got torch\.float64"),
        (lambda i, c, a: (i + 55, c, a), r"token ids must lie in 0 … 60, got \d+ in rollout 0"),
        (lambda i, c, a: (torch.where(a == 0, -100, i), c, a), r"token ids must lie in 0 … 60, got -100 in rollout 1"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_ids_and_masks_are_named(change, message):
    model, batch = build("Llama"), rollouts()
    with pytest.raises(ScoregramError, match=message):
        measure_gram(model, *change(*batch.arguments))


@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_weights_and_coefficients_are_named():
    model, batch = build("Llama"), rollouts()
    with pytest.raises(ScoregramError, match="coefficients must be a tensor, got ndarray"):
        measure_gram(model, *batch.arguments, coefficients=np.ones((5, 11)))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ScoregramError, match="weights must be a tensor, got list"):
        backward_with_gram(model, *batch.arguments, weights=[1.0] * 5)  # pyright: ignore[reportArgumentType]


def test_ids_of_32_bits_and_masks_of_floats_are_fine():
    model, batch = ARCHITECTURES["gemma2"](), rollouts(padding="left")  # logits in autograd
    expected = measure_gram(model, *batch.arguments)
    ids, completion, attention = batch.arguments
    gram = measure_gram(model, ids.int(), completion.float(), attention.double())
    assert torch.equal(gram.matrix, expected.matrix)
