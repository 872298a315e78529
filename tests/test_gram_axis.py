"""The rollout axis is known, whatever other sizes are equal to the number of rollouts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scoregram.gram import measure_gram
from scoregram.gram.model import facts_of
from tests.cases import KeepDouble, build, rollouts
from tests.naive import score_rows

pytestmark = pytest.mark.filterwarnings("default")

DECODER: dict[str, Any] = {
    "d_model": 32,
    "num_layers": 2,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 40,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "is_decoder": True,
    "is_encoder_decoder": False,
}
MODELS: dict[str, Callable[[], Any]] = {
    "blenderbot": lambda: build("Blenderbot", **DECODER),
    "bigbird-pegasus": lambda: build("BigBirdPegasus", attention_type="original_full", **DECODER),
    "mvp": lambda: build("Mvp", **DECODER),
    "trocr": lambda: build("TrOCR", **DECODER),
    "llama4": lambda: build(
        "Llama4", config="Llama4TextConfig", head_dim=8, num_local_experts=4, intermediate_size_mlp=40
    ),
    "recurrent-gemma": lambda: build("RecurrentGemma", lru_width=32, head_dim=8, attention_window_size=16),
}


def error_of(model: Any, batch: Any) -> float:
    with KeepDouble():
        rows = score_rows(model, *batch.arguments)
        gram = measure_gram(model, *batch.arguments)
    reference = rows @ rows.T
    return float((gram.matrix - reference).norm() / reference.norm())


@pytest.mark.parametrize(
    ("name", "count", "tokens"),
    [
        ("blenderbot", 8, 8),  # as many rollouts as positions
        ("bigbird-pegasus", 8, 8),
        ("mvp", 5, 11),  # position embeddings expanded to the size of the batch
        ("trocr", 8, 8),
        ("llama4", 4, 11),  # as many as experts
        ("recurrent-gemma", 4, 11),  # as many as heads
    ],
)
def test_other_axes_as_long_as_the_batch(name, count, tokens):
    assert error_of(MODELS[name](), rollouts(count, tokens)) < 1e-12


@pytest.mark.parametrize("count", [5, 8])
def test_dora_on_layers_as_wide_as_the_batch(count):
    import peft

    base = build("Llama", hidden_size=16, intermediate_size=8, head_dim=8, num_attention_heads=2)
    config = peft.LoraConfig(target_modules=["down_proj", "up_proj"], r=3, use_dora=True)
    model: Any = peft.get_peft_model(base, config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    assert error_of(model, rollouts(count)) < 1e-12


class Mixed(nn.Module):
    """Activations in many layouts; each layout meets a parameter."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 6)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.layer = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 61, bias=False)
        self.layout = layout

    def forward(self, input_ids: Tensor) -> Any:  # noqa: D102
        x = self.embedding(input_ids).cumsum(1)
        n, t, h = x.shape
        if self.layout == "tokens":  # (N·T, h)
            x = self.mixed(x.reshape(n * t, h)).view(n, t, h)
        elif self.layout == "time first":  # (T, N, h)
            x = self.mixed(x.transpose(0, 1)).transpose(0, 1)
        elif self.layout == "tokens, time first":  # (T·N, h)
            x = self.mixed(x.transpose(0, 1).reshape(n * t, h)).view(t, n, h).transpose(0, 1)
        elif self.layout == "halves":  # (N·2·T, h), as the heads of a gated norm
            x = self.mixed(torch.stack([x, -x], 1).reshape(n * 2 * t, h)).view(n, 2, t, h).sum(1)
        return self.head(x)

    def mixed(self, x: Tensor) -> Tensor:
        """A product, a bias, a norm and a scale."""
        return self.norm(torch.tanh(self.layer(x))) * self.scale


@pytest.mark.parametrize("layout", ["tokens", "time first", "tokens, time first", "halves"])
@pytest.mark.parametrize("count", [1, 2, 3, 6, 11])  # 6 is the width, 11 the number of tokens
def test_layouts(layout, count):
    torch.manual_seed(0)
    model, batch = Mixed(layout).double(), rollouts(count)
    ids, mask, attention = batch.input_ids, batch.completion_mask, torch.ones_like(batch.attention_mask)
    rows = []
    for i in range(count):
        chosen = model(ids[i : i + 1]).log_softmax(-1)[0, :-1].gather(1, ids[i, 1:, None])[:, 0]
        grads = torch.autograd.grad((chosen * mask[i, 1:]).sum(), list(model.parameters()))
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    reference = torch.stack(rows) @ torch.stack(rows).T
    for _ in range(2):
        gram = measure_gram(model, ids, mask, attention)
        assert float((gram.matrix - reference).norm()) <= 1e-12 * float(reference.norm())
        assert bool(gram.replayed) == ("time first" in layout), "rollouts that are not first cannot be split"


class TimeFirst(nn.Module):
    """A model in which one module alone, the owner of its parameters, gets time as the first axis."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 6)
        self.module = module
        self.head = nn.Linear(6, 61, bias=False)

    def forward(self, input_ids: Tensor) -> Any:  # noqa: D102
        x = self.embedding(input_ids).cumsum(1)
        return self.head(self.module(x.transpose(0, 1)).transpose(0, 1).tanh())


@pytest.mark.parametrize("module", [nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.LayerNorm(6)], ids=str)
@pytest.mark.parametrize("count", [3, 11])
def test_a_module_with_time_first_is_not_split_by_rollouts(module, count):
    gram = measure_gram(TimeFirst(module).double(), *rollouts(count).arguments[:2], verify=True)
    assert all(name.startswith("module.") for name in gram.replayed) and gram.replayed


class Rarely(Mixed):
    """A layer that only rollouts with one rare token reach, with time or the rollouts as the first axis."""

    def forward(self, input_ids: Tensor) -> Any:  # noqa: D102
        x, rare = self.embedding(input_ids).cumsum(1), (input_ids == 60).any(1)[:, None, None]
        if bool(rare.any()):
            time_first = self.layout == "time first"
            y = self.mixed(x.transpose(0, 1)).transpose(0, 1) if time_first else self.mixed(x)
            x = torch.where(rare, y, x)
        return self.head(x)


def test_an_operation_that_no_probe_pass_reaches_is_not_split_by_guess():
    torch.manual_seed(0)
    model, batch = Rarely("time first").double(), rollouts(5)
    batch.input_ids[batch.input_ids == 60] = 1
    batch.input_ids[4, 1] = 60
    measure_gram(model, *batch.arguments[:2], verify=True)


def test_an_operation_that_a_later_batch_reaches_is_probed_then():
    torch.manual_seed(0)
    model, batch = Rarely("rollouts first").double(), rollouts(5)
    batch.input_ids[batch.input_ids == 60] = 1
    facts_of(model).needs_wide_pass = True  # else a wide pass, with probes of its own, would follow the narrow one
    measure_gram(model, *batch.arguments[:2])
    batch.input_ids[:, 1] = 60
    assert not measure_gram(model, *batch.arguments[:2], verify=True).replayed


class Tabled(nn.Module):
    """A parameter that meets two activations at once; the first axis of one of them is time."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:  # noqa: D102
        return torch.addcmul(x, table, self.scale)


class WithTable(Mixed):
    """A model that hands a table of positions to one of its modules."""

    def __init__(self, tokens: int) -> None:
        super().__init__("")
        self.tabled = Tabled()
        self.register_buffer("table", torch.randn(tokens, 6))

    def forward(self, input_ids: Tensor) -> Any:  # noqa: D102
        return self.head(self.tabled(self.embedding(input_ids).cumsum(1), self.table).tanh())


def test_every_activation_of_an_operation_must_have_the_rollouts_first():
    torch.manual_seed(0)
    model, batch = WithTable(8).double(), rollouts(8, tokens=8)
    measure_gram(model, *batch.arguments[:2], verify=True)
    assert not vars(model.table), "no mark stays on what the model gave to a module"


def test_what_is_known_of_a_model_is_kept_and_other_lengths_are_learned():
    model = build("Qwen3Moe", head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    passes: list[int] = []
    layer: Any = model.model.layers[0]
    layer.register_forward_pre_hook(lambda _, args: passes.append(len(args[0])))
    user: list[int] = []
    model.register_forward_pre_hook(lambda _, args: user.append(1))
    measure_gram(model, *rollouts().arguments)
    assert passes[:2] == [2, 3] and passes.count(1) == 1  # the last is a rollout without its padding
    assert len(user) == passes.count(5) + passes.count(1)
    known = dict(facts_of(model).axes)
    for count, tokens in ((5, 11), (4, 9), (7, 13)):
        passes.clear()
        gram = measure_gram(model, *rollouts(count, tokens).arguments)
        assert set(passes) == {count} and not gram.replayed
    assert facts_of(model).axes == known
