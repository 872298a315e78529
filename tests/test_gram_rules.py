"""Single rules of the engine that whole measurements seldom show, each at the smallest place where it decides."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from scoregram.errors import ScoregramError
from scoregram.gram import DeferredGram, cross_gram, leaves, measure_gram
from scoregram.gram.axis import Axes, FirstAxis, merged_axes, observed_axes, probe_batch
from scoregram.gram.batch import RolloutLayout, make_batch
from scoregram.gram.collect import Collector, WeightUse, under_autocast
from scoregram.gram.contract import Contractor
from scoregram.gram.model import MeasuredModel, has_dropout_rate
from scoregram.gram.undo import Undo, autocast_depth
from tests.cases import ARCHITECTURES, KeepDouble, build, rollouts
from tests.naive import score_rows

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def streamed(monkeypatch):
    """Every weight streamed, however small."""
    monkeypatch.setattr(leaves, "KEPT_ELEMENTS", 0)


def scores_of(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Scores `(N, D)` of a model that takes token ids alone and returns logits, one backward pass per rollout."""
    rows = []
    for row, counted in zip(ids, mask, strict=True):
        chosen = model(row[None]).log_softmax(-1)[0, :-1].gather(1, row[1:, None])[:, 0]
        grads = torch.autograd.grad((chosen * counted[1:]).sum(), list(model.parameters()))
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(rows)


def assert_gram(measured: Tensor, scores: Tensor) -> None:
    reference = scores @ scores.T
    assert float((measured - reference).norm()) <= 1e-12 * float(reference.norm())


# The rollout axis.


def axis(length: int, seed: int = 0) -> FirstAxis:
    return FirstAxis.of(torch.randn(24, 5, generator=torch.Generator().manual_seed(seed))[:length])


def test_an_axis_runs_over_the_rollouts_only_if_it_grows_with_them():
    assert axis(2).entries_per_rollout(axis(3)) == 1
    assert axis(8).entries_per_rollout(axis(12)) == 4  # the values of `axis(8)` are the first of `axis(12)`
    assert axis(4).entries_per_rollout(axis(4)) is None  # four experts, whatever the batch
    assert axis(8).entries_per_rollout(axis(12, seed=1)) is None  # other values: sorted by token
    assert axis(3).entries_per_rollout(axis(3)) is None


def test_tokens_packed_by_expert_are_not_blocks_of_rollouts():
    """An expert that gets its own tokens first and zeros behind them sees those of the third rollout too early."""
    tokens = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
    chosen = torch.arange(24) % 3 == 0  # the tokens of one expert among eight of each of three rollouts

    def in_place(count: int) -> FirstAxis:
        return FirstAxis.of((tokens * chosen[:, None])[:count])

    def packed(count: int) -> FirstAxis:
        own = tokens[:count][chosen[:count]]
        return FirstAxis.of(torch.cat([own, torch.zeros(count - len(own), 5)]))

    assert in_place(16).entries_per_rollout(in_place(24)) == 8
    assert packed(16).entries_per_rollout(packed(24)) is None
    nothing = [
        FirstAxis.of(torch.zeros(count, 5)) for count in (16, 24)
    ]  # an expert without tokens contradicts nothing
    assert nothing[0].entries_per_rollout(nothing[1]) == 8


def test_one_call_that_differs_takes_the_axis_from_all():
    few, many = axis(2), axis(3)
    assert len(observed_axes({("a",): [few, few]}, {("a",): [many, many]}, 5)["a",]) == 1
    assert observed_axes({("a",): [few, axis(4)]}, {("a",): [many, axis(4)]}, 5)["a",] == frozenset()
    assert observed_axes({("a",): [few]}, {("a",): [many, many]}, 5)["a",] == frozenset()
    assert observed_axes({("a",): [few]}, {}, 5)["a",] == frozenset()


def test_an_operation_without_the_axis_stays_without():
    seen = observed_axes({("a",): [axis(2)]}, {("a",): [axis(3)]}, 5)
    unseen: Axes = {("a",): frozenset()}
    assert merged_axes(seen, unseen) == merged_axes(unseen, seen) == unseen
    assert merged_axes(seen, {}) == merged_axes({}, seen) == merged_axes(seen, seen) == seen


def test_rollouts_of_a_probe_differ_in_tokens_and_length():
    model, ids = build("Llama"), torch.arange(3, 11)[None]
    mask = torch.ones_like(ids).bool()
    mask[:, 0] = False
    probe = probe_batch(make_batch(model, ids, mask, None, temperature=1.0), 3)
    assert len(probe.input_ids.unique(dim=0)) == 3
    assert probe.attention_mask.sum(1).tolist() == [8, 7, 8]


# Products, norms and the head.


@pytest.mark.parametrize("bias", [None, torch.linspace(-1.0, 1.0, 7)])
def test_operands_of_a_product_are_those_of_autocast(bias):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 5, generator=generator), torch.randn(7, 5, generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        expected, operands = functional.linear(x, weight, bias), under_autocast(x, weight, bias)
    assert expected.dtype is torch.bfloat16
    assert torch.equal(functional.linear(*operands), expected)
    assert all(torch.equal(a, b) for a, b in zip(under_autocast(x, weight, None)[:2], (x, weight), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_a_bias_is_added_up_in_float32(dtype):
    """Over 4,000 tokens, a sum in half precision would be off by more than a tenth."""
    bias, collector = nn.Parameter(torch.zeros(3, dtype=dtype)), Collector(2, 1, None)
    g = torch.rand(2, 4000, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    WeightUse(RolloutLayout(2, 4000), collector, None, False, (), bias).collect(g, g)
    rows = collector.state(bias).rows
    assert rows is not None
    torch.testing.assert_close(rows.double(), g.double().sum(1), rtol=1e-5, atol=0)


def test_a_layer_norm_under_autocast_is_left_to_autocast():
    """On a GPU autocast runs it in float32, whatever the dtype of its input."""
    unused = object.__new__(leaves.Leaves)
    with torch.autocast("cpu", torch.bfloat16):
        assert leaves.layer_norm_with_copies(nn.LayerNorm(4), 0.0, torch.randn(2, 3, 4), unused) is None


class SoftLookup(nn.Module):
    """A tied head whose weight is also a factor of a product: embeddings averaged by probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 6)
        self.head = nn.Linear(6, 61, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mixing", torch.randn(6, 61))

    def get_output_embeddings(self) -> nn.Module:  # noqa: D102
        return self.head

    def forward(self, input_ids: Tensor) -> Any:  # noqa: D102
        x = self.embedding(input_ids).cumsum(1)
        return self.head(x + (x @ self.mixing).softmax(-1) @ self.embedding.weight)


@pytest.mark.usefixtures("streamed")
def test_a_tied_head_that_is_also_a_factor_of_a_product():
    torch.manual_seed(0)
    model, (ids, mask, _) = SoftLookup().double(), rollouts().arguments
    gram = measure_gram(model, ids, mask)
    assert not gram.replayed
    assert_gram(gram.matrix, scores_of(model, ids, mask))


@pytest.mark.parametrize(("name", "is_captured"), [("llama", True), ("gemma2", False), ("cohere", False)])
def test_a_head_whose_logits_the_config_changes_is_not_captured(name, is_captured):
    model = ARCHITECTURES[name]()
    measured = MeasuredModel(model)
    with Undo() as undo, undo, measured.in_use(undo):
        assert (measured.capturable_head() is model.lm_head.weight) == is_captured


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_prompt_tokens_have_no_log_probability(name):
    batch = rollouts()
    log_probs = measure_gram(ARCHITECTURES[name](), *batch.arguments).log_probs
    assert bool((log_probs[~batch.completion_mask] == 0).all())
    assert bool((log_probs[batch.completion_mask] < 0).all())


# The result.


def test_rounding_that_is_not_symmetric_is_averaged(monkeypatch):
    model, batch, grams = build("Llama"), rollouts(), Contractor.grams
    expected = measure_gram(model, *batch.arguments).matrix

    def rounded(*args: Any) -> Tensor:
        found = grams(*args)
        return found + 1e-3 * torch.ones_like(found).triu(1) - 1e-3 * torch.ones_like(found).tril(-1)

    monkeypatch.setattr(Contractor, "grams", rounded)
    found = measure_gram(model, *batch.arguments).matrix
    for same in (expected, found.T):
        torch.testing.assert_close(found, same, rtol=0, atol=1e-12 * float(expected.abs().max()))


@pytest.mark.parametrize("group", [0, 1, 2])
def test_verify_finds_an_error_in_every_group(group, monkeypatch):
    model, batch, grams = build("Llama"), rollouts(6), Contractor.grams

    def wrong(*args: Any) -> Tensor:
        found = grams(*args).clone()
        found[:, group] *= 1.01
        return found

    measure_gram(model, *batch.arguments, group_size=2, verify=True)
    monkeypatch.setattr(Contractor, "grams", wrong)
    first, last = 2 * group, 2 * group + 1
    with pytest.raises(ScoregramError, match=f"disagreement of .* for rollouts {first} to {last}"):
        measure_gram(model, *batch.arguments, group_size=2, verify=True)


def test_equal_rollouts_may_get_different_coefficients_later():
    model, batch = build("Llama"), rollouts(3)
    ids, mask, attention = (torch.cat([tensor, tensor[:1]]) for tensor in batch.arguments)
    coefficients = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)).double()
    with KeepDouble():
        gram, _ = DeferredGram(model, ids, mask, attention).finish(coefficients, torch.ones(1, 4).double())
        assert_gram(gram.matrix, score_rows(model, ids, mask, attention, coefficients))


class MeanOfAll(nn.Module):
    """Every position also sees the mean over the real tokens of its rollout, later ones included."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 6)
        self.head = nn.Linear(6, 61, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:  # noqa: D102
        x = self.embedding(input_ids)
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        mean = (x * real[..., None]).sum(1, keepdim=True) / real.sum(1)[:, None, None]
        return self.head(torch.tanh(x.cumsum(1) + mean))


def test_the_shorter_part_of_a_cross_gram_is_padded_with_padding():
    torch.manual_seed(0)
    model, long, short = MeanOfAll().double(), rollouts(3, 11), rollouts(2, 7, seed=1)
    parts = [(batch.input_ids, batch.completion_mask) for batch in (long, short)]
    found = cross_gram(model, *parts)
    train, held_out = (scores_of(model, *part) for part in parts)
    torch.testing.assert_close(found.cross, train @ held_out.T, rtol=1e-12, atol=1e-12)
    assert_gram(found.train, train)


# The state of a model.


class Watching(TorchFunctionMode):
    """Notes every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def function_modes() -> int:
    return torch._C._len_torch_function_stack()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_mode_that_was_left_behind_is_gone_before_anything_is_restored():
    """As after Ctrl-C between the `__enter__` of a mode and its block."""
    measured, mode, depth = MeasuredModel(build("Llama")), Watching(), function_modes()
    try:
        with Undo() as undo, undo, measured.in_use(undo):
            mode.__enter__()
            mode.seen.clear()
        assert function_modes() == depth
    finally:
        while function_modes() > depth:
            mode.__exit__(None, None, None)
    assert set(mode.seen) <= {torch._C._set_grad_enabled}  # pyright: ignore[reportAttributeAccessIssue]  # torch's own block


TORCH: Any = torch._C
TORCH_STATE: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "grad mode": (torch.is_grad_enabled, lambda: TORCH._set_grad_enabled(False)),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.set_autocast_enabled("cpu", True)),
    "dtype of autocast": (
        lambda: torch.get_autocast_dtype("cpu"),
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
    ),
    "cache of autocast": (torch.is_autocast_cache_enabled, lambda: torch.set_autocast_cache_enabled(False)),
    "attention of cuDNN": (cuda.cudnn_sdp_enabled, lambda: cuda.enable_cudnn_sdp(False)),
    "autocast blocks": (autocast_depth, torch.autocast_increment_nesting),
    "oneDNN": (TORCH._get_mkldnn_enabled, lambda: TORCH._set_mkldnn_enabled(False)),
    "hooks on saved tensors": (
        lambda: TORCH._autograd._top_saved_tensors_default_hooks(False),
        lambda: TORCH._autograd._push_saved_tensors_default_hooks(lambda t: t, lambda t: t),
    ),
    "vmap": (
        TORCH._functorch.get_dynamic_layer_stack_depth,
        lambda: TORCH._functorch._vmap_increment_nesting(2, "error"),
    ),
    "torch functions": (
        TORCH._get_torch_function_state,
        lambda: TORCH._set_torch_function_state(TORCH._TorchFunctionState.ALL_DISABLED),
    ),
}
"""States of torch: how to read one, and what an interrupt between the ends of torch's own block leaves behind."""


@pytest.mark.parametrize("name", TORCH_STATE)
def test_a_state_of_torch_that_was_left_behind_is_restored(name):
    read, change = TORCH_STATE[name]
    before = read()
    with Undo() as undo, undo:
        undo.keep_torch_state(torch.device("cpu"))
        change()
        assert read() != before
    assert read() == before


def test_weights_that_autocast_has_cast_are_forgotten_after_an_interrupt():
    """As after Ctrl-C in an autocast block of the model: the next block must see the weights of the optimiser."""
    layer, x = nn.Linear(3, 3, bias=False), torch.ones(1, 3)
    with Undo() as undo, undo:
        undo.keep_torch_state(torch.device("cpu"))
        torch.autocast("cpu", torch.bfloat16).__enter__()
        layer(x)
    with torch.no_grad():
        layer.weight.mul_(3.0)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
    torch.testing.assert_close(found, functional.linear(x.bfloat16(), layer.weight.bfloat16()))


def test_what_is_undone_goes_on_after_an_interrupt():
    """The operation that was interrupted runs again, the others follow, and the interrupt is raised at the end."""
    done: list[str] = []

    def interrupted_once() -> None:
        done.append("second")
        if done.count("second") == 1:
            raise KeyboardInterrupt

    undo = Undo()
    with pytest.raises(KeyboardInterrupt), undo:
        undo.operations += [(done.append, "third"), (interrupted_once,), (done.append, "first")]
    assert done == ["first", "second", "second", "third"]


def test_an_interrupt_behind_an_error_is_raised_as_an_interrupt():
    def fail_while_cleaning_up() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise ValueError("a library that cleans up and fails")

    with pytest.raises(KeyboardInterrupt), Undo():
        fail_while_cleaning_up()


def test_a_frozen_module_that_two_models_share_is_claimed():
    shared = nn.Linear(4, 4).requires_grad_(False)
    one, other = (MeasuredModel(nn.Sequential(shared, nn.Linear(4, 4))) for _ in range(2))
    refused = pytest.raises(ScoregramError, match="can be in one measurement at a time")
    with Undo() as undo, undo, one.in_use(undo), refused, Undo() as second:
        other.claim(second)
    with Undo() as undo, undo:
        other.claim(undo)


def test_checkpointed_layers_run_without_a_nested_backward_pass():
    """A nested one gives a layer no gradient if its input has none, as behind a frozen embedding."""
    model, batch = build("Llama"), rollouts()
    model.model.embed_tokens.requires_grad_(False)
    with KeepDouble():
        scores = score_rows(model, *batch.arguments)
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.disable_input_require_grads()
        model.train()
        assert_gram(measure_gram(model, *batch.arguments).matrix, scores)


@pytest.mark.usefixtures("streamed")
def test_experts_are_measured_one_by_one_and_the_setting_comes_back():
    model, batch = ARCHITECTURES["qwen3-moe"]().float(), rollouts()
    expected = measure_gram(model, *batch.arguments)
    model.config._experts_implementation_internal = "grouped_mm"
    found = measure_gram(model, *batch.arguments)
    assert not found.replayed and not expected.replayed
    assert torch.equal(found.matrix, expected.matrix)
    assert model.config._experts_implementation_internal == "grouped_mm"


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_attention_with_a_dropout_rate_of_its_own_is_seen(rate):
    layer = build("Llama", attention_dropout=rate).model.layers[0].self_attn
    assert has_dropout_rate(layer) == (rate > 0)
    assert has_dropout_rate(nn.Dropout(rate)) == (rate > 0)


class AlwaysDropping(nn.Module):
    """Attention that drops whatever its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 8)
        self.project = nn.Linear(8, 24)
        self.head = nn.Linear(8, 61, bias=False)
        self.rate = 0.5
        self.by_position = False

    def forward(self, input_ids: Tensor) -> Any:  # noqa: D102
        q, k, v = self.project(self.embedding(input_ids).cumsum(1)).chunk(3, dim=-1)
        attend = functional.scaled_dot_product_attention
        if self.by_position:
            return self.head(attend(q, k, v, None, self.rate, True))
        return self.head(attend(q, k, v, dropout_p=self.rate, is_causal=True))


@pytest.mark.parametrize("by_position", [True, False])
def test_the_dropout_of_attention_is_off(by_position):
    torch.manual_seed(0)
    model, (ids, mask, _) = AlwaysDropping().double(), rollouts().arguments
    model.by_position = by_position
    found = measure_gram(model, ids, mask, verify=True).matrix
    model.rate = 0.0
    assert_gram(found, scores_of(model, ids, mask))
