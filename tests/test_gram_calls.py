"""Parameters in calls of every form: by keyword, in place, cast, expanded; and adapters that replace products."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scoregram.checks import ScoregramError
from scoregram.gram import DeferredGram, Gram, backward_with_gram, leaves, measure_gram
from scoregram.gram.axis import PROBE_ROLLOUTS
from scoregram.gram.intercept import Interceptor
from scoregram.gram.undo import SAVED_BUFFER_BYTES
from tests.cases import KeepDouble, build, rollouts

pytestmark = pytest.mark.filterwarnings("default")


class Called(nn.Module):
    """A small model that passes its hidden states through one call."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 8)
        self.layer = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.number = nn.Parameter(torch.tensor([0.7]))
        self.positions = nn.Parameter(torch.randn(16, 8))
        self.head = nn.Linear(8, 61, bias=False)
        self.call = call

    def get_output_embeddings(self) -> nn.Module:
        """The head, as Hugging Face models tell it."""
        return self.head

    def forward(self, input_ids: Tensor) -> Tensor:  # noqa: D102
        x = CALLS[self.call](self, self.embedding(input_ids).cumsum(1))
        return F.linear(x, weight=self.head.weight) if self.call == "head by keyword" else self.head(x)


def needs_training(m: Any, x: Tensor) -> Tensor:
    assert m.training, "use model.train()"
    return x


class TrainedBackward(torch.autograd.Function):
    """The identity, with a backward pass in training mode alone, as in a reversible network."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: nn.Module) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # noqa: D102
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]  # noqa: D102
        assert ctx.model.training, "gradients are computed in training mode only"
        return grad, None


def added_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.layer(x)
    y += x
    return y


def pairs_of_positions(x: Tensor) -> Tensor:
    """Ids `(N, T)`: two tokens share each."""
    return (torch.arange(x.shape[1]) // 2).expand(len(x), -1)


CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "linear by keyword": lambda m, x: F.linear(x, weight=m.layer.weight, bias=m.layer.bias),
    "linear by keywords alone": lambda m, x: F.linear(input=x, weight=m.layer.weight),
    "matmul by keywords": lambda m, x: torch.matmul(input=x, other=m.layer.weight),
    "multiplied by keywords": lambda m, x: torch.mul(input=x, other=m.scale),
    "selected by keywords": lambda m, x: m.layer(torch.index_select(input=x, dim=0, index=torch.arange(len(x)))),
    "head by keyword": lambda m, x: x,
    "relu in place": lambda m, x: m.layer(x).relu_(),
    "added in place": added_in_place,
    "cast like its input": lambda m, x: F.linear(x, m.layer.weight.type_as(x), m.layer.bias) * m.scale.type_as(x),
    "expanded scale": lambda m, x: x * m.number.expand(8),
    "expanded weight": lambda m, x: F.linear(x, m.scale.expand(8, 8)),
    "expanded to the batch": lambda m, x: torch.cat([x[..., 1:], m.number.expand(*x.shape[:2], 1)], -1),
    "positions for each rollout": lambda m, x: (
        x + F.embedding(torch.arange(x.shape[1]).expand(len(x), -1), m.positions)
    ),
    "padding row": lambda m, x: x + F.embedding(pairs_of_positions(x), m.positions, padding_idx=2),
    "second lookup": lambda m, x: x + F.embedding(pairs_of_positions(x), m.embedding.weight),
    "derived bias": lambda m, x: F.linear(x, m.layer.weight, m.positions[3]),
    "training mode": needs_training,
    "training mode backward": lambda m, x: m.layer(TrainedBackward.apply(x, m)),
}


def reference(model: Any, batch: Any) -> Tensor:
    """The Gram from one backward pass per rollout; trained prompt vectors before the tokens have no targets."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rows = []
    for i in range(len(batch.input_ids)):
        real = batch.attention_mask[i].bool()
        ids = batch.input_ids[i][real][None]
        output = model(ids)
        logits = (output if isinstance(output, Tensor) else output.logits)[0, -ids.shape[1] :]
        chosen = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        total = (chosen * batch.completion_mask[i][real][1:]).sum()
        grads = torch.autograd.grad(total, parameters, allow_unused=True)
        pairs = zip(parameters, grads, strict=True)
        rows.append(torch.cat([(torch.zeros_like(p) if grad is None else grad).flatten() for p, grad in pairs]))
    return torch.stack(rows) @ torch.stack(rows).T


@pytest.mark.parametrize("kept", [0, 1 << 17])
@pytest.mark.parametrize("call", sorted(CALLS))
def test_calls(call, kept, monkeypatch):
    monkeypatch.setattr(leaves, "KEPT_ELEMENTS", kept)
    torch.manual_seed(0)
    model, batch = Called(call).double().train(), rollouts()
    expected = reference(model, batch)
    gram = measure_gram(model, *batch.arguments)
    assert float((gram.matrix - expected).norm()) < 1e-12 * float(expected.norm())
    assert not gram.replayed
    model = copy.deepcopy(model)  # nothing is known about this one
    deferred = DeferredGram(model, *batch.arguments)
    later, _ = deferred.finish(batch.completion_mask.double(), torch.ones(1, 5))
    assert float((later.matrix - expected).norm()) < 1e-12 * float(expected.norm())


def scaled_in_place(m: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y *= m.scale
    return y


def written_in_place(m: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 2:5] = m.scale
    return y


def looked_up_and_averaged(m: Any, x: Tensor) -> Tensor:
    return x * m.embedding.weight.mean(0)


def put_into_last_rows(m: Any, x: Tensor) -> Tensor:
    """The index has one entry per rollout, the rows that it counts are those of all tokens."""
    last = (0 * x[:, 0, 0]).long() + x.shape[1] * torch.arange(1, len(x) + 1) - 1
    return x.flatten(0, 1).index_put((last,), m.scale).view_as(x)


@pytest.mark.parametrize(
    ("call", "parameter"),
    [
        (scaled_in_place, "scale"),
        (written_in_place, "scale"),
        (put_into_last_rows, "scale"),
        (looked_up_and_averaged, "embedding.weight"),
    ],
)
def test_parameters_whose_uses_cannot_be_added_are_replayed(call, parameter, monkeypatch):
    monkeypatch.setitem(CALLS, "replayed", call)
    torch.manual_seed(0)
    model, batch = Called("replayed").double(), rollouts()
    gram, expected = measure_gram(model, *batch.arguments), reference(model, batch)
    assert float((gram.matrix - expected).norm()) < 1e-12 * float(expected.norm())
    assert gram.replayed == (parameter,)
    assert gram.notes == (f"rows of {parameter} came from one backward pass per rollout",)


def test_a_weight_that_is_cast_is_streamed(monkeypatch):
    monkeypatch.setattr(leaves, "KEPT_ELEMENTS", 0)
    monkeypatch.setattr(leaves, "MOST_LEAF_ELEMENTS", 0)
    monkeypatch.setitem(CALLS, "cast", lambda m, x: F.linear(x, m.layer.weight.to(x.dtype)))
    torch.manual_seed(0)
    model, batch = Called("cast").double(), rollouts()
    model.layer.float()
    gram, expected = measure_gram(model, *batch.arguments), reference(model, batch)
    assert float((gram.matrix - expected).norm()) < 1e-6 * float(expected.norm())
    assert not gram.replayed


class FunctionalDropout(nn.Module):
    """A model with dropout in its own forward function, where no module owns parameters, whatever its mode."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(61, 8), nn.Linear(8, 8), nn.Linear(8, 61, bias=False)
        self.rate = rate

    def get_output_embeddings(self) -> nn.Module:
        """The head, as Hugging Face models tell it."""
        return self.head

    def forward(self, input_ids: Tensor) -> Tensor:  # noqa: D102
        x = self.embedding(input_ids).cumsum(1)
        return self.head(F.dropout(self.layer(x), self.rate, training=True) if self.rate else self.layer(x))


@pytest.mark.parametrize("is_deferred", [True, False])
def test_dropout_outside_every_module_is_switched_off(is_deferred):
    torch.manual_seed(0)
    model, batch = FunctionalDropout(0.5).double(), rollouts()
    plain = FunctionalDropout(0.0).double()
    plain.load_state_dict(model.state_dict())

    def measured() -> Gram:
        if not is_deferred:
            return measure_gram(model, *batch.arguments)
        return DeferredGram(model, *batch.arguments).finish(batch.completion_mask.double(), torch.ones(1, 5))[0]

    state = torch.get_rng_state()
    with pytest.warns(UserWarning, match="dropout was switched off"):
        gram = measured()
    assert torch.equal(torch.get_rng_state(), state)
    expected = reference(plain, batch)
    assert float((gram.matrix - expected).norm()) < 1e-12 * float(expected.norm())


class Overwriting(FunctionalDropout):
    """A model that writes to one of its inputs, as if a placeholder stood among the tokens."""

    written = "input_ids"

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # noqa: D102
        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        if len(input_ids) > max(PROBE_ROLLOUTS):  # not in the probe passes, which have copies of the rollouts
            given[self.written][:, 0] = 1
        return super().forward(input_ids)


@pytest.mark.parametrize("written", ["input_ids", "attention_mask"])
@pytest.mark.parametrize("measure", [measure_gram, DeferredGram])
def test_a_model_that_writes_to_its_inputs_is_refused(written, measure):
    """Its later passes would see other tokens; the Gram would be wrong, also under `verify`."""
    model, batch = Overwriting(0.0).double(), rollouts()
    model.written = written
    before = [given.clone() for given in batch.arguments]
    with pytest.raises(ScoregramError, match="must not change input_ids and attention_mask in place, got a forward"):
        measure(model, *batch.arguments)
    assert all(torch.equal(given, same) for given, same in zip(batch.arguments, before, strict=True))
    assert not any(vars(given) for given in batch.arguments)  # nor a mark


def test_trainable_parameters_on_two_devices_are_refused():
    model, batch = FunctionalDropout(0.0).double(), rollouts()
    model.head = model.head.to("meta")
    message = "trainable parameters must be on one device, got embedding.weight on cpu and head.weight on meta."
    with pytest.raises(ScoregramError, match=message):
        measure_gram(model, *batch.arguments)


class Wary(FunctionalDropout):
    """A model that refuses to run under interception."""

    message: tuple[str, ...] = ("a mark",)

    def forward(self, input_ids: Tensor) -> Tensor:  # noqa: D102
        x = self.embedding(input_ids)
        if hasattr(x, "_scoregram"):
            raise AssertionError(*self.message)
        return self.head(self.layer(x.cumsum(1)))


@pytest.mark.parametrize(("message", "note"), [(("a mark",), "a mark"), (("two\nlines",), "two"), ((), "")])
def test_a_model_that_refuses_interception_is_measured_by_plain_passes(message, note):
    torch.manual_seed(0)
    model, batch = Wary(0.0).double(), rollouts()
    model.message = message
    gram, expected = measure_gram(model, *batch.arguments), reference(model, batch)
    assert float((gram.matrix - expected).norm()) < 1e-12 * float(expected.norm())
    assert set(gram.replayed) == {name for name, _ in model.named_parameters()}
    assert gram.notes[0] == f"measured without interception: AssertionError: {note}"


class Sorted(Called):
    """Rows of all rollouts, those of one rare token behind the others, as experts sort them; selected twice."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.norm = nn.LayerNorm(8)

    def forward(self, input_ids: Tensor) -> Tensor:  # noqa: D102
        x = self.embedding(input_ids).cumsum(1)
        rare = (input_ids == 60).any(1) if self.call == "rollouts" else (input_ids == 60).flatten()
        order = rare.long().argsort(stable=True)
        rows = (x if self.call == "rollouts" else x.flatten(0, 1))[order][torch.arange(len(order))]
        rows = self.norm(self.layer(rows) * self.scale)
        return self.head(rows[order.argsort()].view_as(x).cumsum(1).tanh())


@pytest.mark.parametrize("kind", ["rollouts", "tokens"])
@pytest.mark.parametrize("kept", [0, 1 << 17])
def test_rows_that_were_selected_keep_their_rollouts(kind, kept, monkeypatch):
    """In the probe passes, which do not reach the rare token, all rows stay in the order of the rollouts."""
    monkeypatch.setattr(leaves, "KEPT_ELEMENTS", kept)
    torch.manual_seed(0)
    model, batch = Sorted(kind).double(), rollouts()
    batch.input_ids[batch.input_ids == 60] = 1
    batch.input_ids[3, 0] = 60
    expected = reference(model, batch)
    gram = measure_gram(model, *batch.arguments)
    assert float((gram.matrix - expected).norm()) < 1e-12 * float(expected.norm())


@pytest.mark.parametrize("how", [{"scale_grad_by_freq": True}, {"max_norm": 0.5}], ids=str)
def test_embeddings_that_change_their_weight_or_its_gradient(how, monkeypatch):
    monkeypatch.setitem(CALLS, "embedding", lambda m, x: x + F.embedding(pairs_of_positions(x), m.positions, **how))
    torch.manual_seed(0)
    model, batch = Called("embedding").double(), rollouts()
    expected = reference(copy.deepcopy(model), batch)
    gram = measure_gram(model, *batch.arguments)
    assert float((gram.matrix - expected).norm()) < 1e-12 * float(expected.norm())


@pytest.mark.parametrize("kind", ["boft", "hra", "prompt tuning", "p-tuning", "prefix tuning"])
def test_adapters(kind):
    import peft

    targets = ["q_proj", "down_proj"]
    task: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    configs: dict[str, Callable[[], Any]] = {
        "boft": lambda: peft.BOFTConfig(boft_block_size=4, target_modules=targets),
        "hra": lambda: peft.HRAConfig(r=2, target_modules=targets),
        "prompt tuning": lambda: peft.PromptTuningConfig(**task),
        "p-tuning": lambda: peft.PromptEncoderConfig(encoder_hidden_size=8, **task),
        "prefix tuning": lambda: peft.PrefixTuningConfig(**task),
    }
    torch.manual_seed(0)
    model: Any = peft.get_peft_model(build("Llama"), configs[kind]()).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    batch = rollouts()
    with KeepDouble():
        expected = reference(model, batch)
        for _ in range(2):
            gram = measure_gram(model, *batch.arguments)
            assert float((gram.matrix - expected).norm()) < 1e-12 * float(expected.norm())


def test_logits_of_another_length_are_refused():
    class Longer(Called):
        def forward(self, input_ids: Tensor) -> Tensor:
            return super().forward(F.pad(input_ids, (2, 0)))

    with pytest.raises(ScoregramError, match="must return logits for 11 tokens, got 13"):
        measure_gram(Longer("training mode").train(), *rollouts().arguments)


# Models that need training mode


class TrainedOnly(Called):
    """Fails in evaluation mode, in its forward or in its backward pass; has dropout, which the engine switches off."""

    def __init__(self, part: str) -> None:
        super().__init__("training mode" if part == "forward" else "training mode backward")
        self.dropout = nn.Dropout(0.5)

    def forward(self, input_ids: Tensor) -> Tensor:  # noqa: D102
        return self.dropout(super().forward(input_ids))


def trained_only(part: str) -> tuple[Any, Any, Tensor]:
    """The model in training mode, a batch, and the Gram without dropout."""
    torch.manual_seed(0)
    model, batch = TrainedOnly(part).double().train(), rollouts()
    model.dropout.p = 0.0
    expected = reference(model, batch).detach()
    model.dropout.p = 0.5
    return model, batch, expected


ENTRIES = {
    "measured": lambda model, batch: measure_gram(model, *batch.arguments),
    "verified": lambda model, batch: measure_gram(model, *batch.arguments, verify=True),
    "in passes": lambda model, batch: measure_gram(model, *batch.arguments, plan="auto"),
    "step": lambda model, batch: backward_with_gram(model, *batch.arguments, weights=torch.ones(len(batch.input_ids))),
    "deferred": lambda model, batch: DeferredGram(model, *batch.arguments).finish(
        batch.completion_mask.double(), torch.ones(1, len(batch.input_ids))
    )[0],
}


@pytest.mark.filterwarnings("ignore:scoregram. active dropout")
@pytest.mark.parametrize("part", ["forward", "backward"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_model_that_needs_training_mode_is_measured_again_and_again(entry, part):
    model, batch, expected = trained_only(part)
    for _ in range(3):
        gram = ENTRIES[entry](model, batch)
        torch.testing.assert_close(gram.matrix, expected)
        assert "measured in training mode: the model fails in evaluation mode" in gram.notes
        assert all(module.training for module in model.modules())


@pytest.mark.filterwarnings("ignore:scoregram. active dropout")
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_model_that_needs_training_mode_is_measured_by_one_entry_after_another(part):
    model, batch, expected = trained_only(part)
    for entry in (*ENTRIES.values(), *reversed(ENTRIES.values())):
        torch.testing.assert_close(entry(model, batch).matrix, expected)


@pytest.mark.filterwarnings("ignore:scoregram. active dropout")
@pytest.mark.parametrize("first", ["train", "eval"])
def test_a_model_that_needs_training_mode_says_so_in_evaluation_mode(first):
    model, batch, expected = trained_only("backward")
    if first == "train":
        measure_gram(model, *batch.arguments)
    with pytest.raises(AssertionError, match="training mode only") as caught:
        measure_gram(model.eval(), *batch.arguments)
    assert any("call model.train() first" in note for note in caught.value.__notes__)
    torch.testing.assert_close(measure_gram(model.train(), *batch.arguments).matrix, expected)


def test_a_model_that_failed_in_both_modes_is_measured_in_evaluation_mode_once_it_runs():
    class Unready(Called):
        is_ready = False

        def forward(self, input_ids: Tensor) -> Tensor:
            if not self.is_ready:
                raise RuntimeError("not ready")
            return super().forward(input_ids) * (3.0 if self.training else 1.0)

    torch.manual_seed(0)
    model, batch = Unready("linear by keyword").double().train(), rollouts()
    with pytest.raises(RuntimeError, match="not ready"):
        measure_gram(model, *batch.arguments)
    model.is_ready = True
    expected = reference(model.eval(), batch).detach()
    torch.testing.assert_close(measure_gram(model.train(), *batch.arguments).matrix, expected)


def test_a_model_that_fails_in_one_pass_alone_is_measured_in_evaluation_mode():
    """A pass that fails under interception does not mean that the model needs training mode."""

    class Unlike(Called):
        def forward(self, input_ids: Tensor) -> Tensor:
            modes = torch.overrides._get_current_function_mode_stack()
            if "forward" in vars(self.layer) or any(isinstance(mode, Interceptor) for mode in modes):
                raise RuntimeError("not under interception")
            return super().forward(input_ids) * (3.0 if self.training else 1.0)

    torch.manual_seed(0)
    model, batch = Unlike("linear by keyword").double(), rollouts()
    expected = reference(model.eval(), batch).detach()
    for _ in range(2):
        gram = measure_gram(model.train(), *batch.arguments)
        torch.testing.assert_close(gram.matrix, expected)
        assert not any("training mode" in note for note in gram.notes)


# Buffers


class Counting(Called):
    """Counts its calls in a buffer."""

    def __init__(self, size: int) -> None:
        super().__init__("relu in place")
        self.register_buffer("counts", torch.zeros(size))

    def forward(self, input_ids: Tensor) -> Tensor:  # noqa: D102
        self.counts += 1
        return super().forward(input_ids)


@pytest.mark.parametrize("call", ["measure_gram", "backward_with_gram", "DeferredGram"])
def test_a_buffer_is_put_back_or_the_result_names_it(call):
    batch = rollouts()

    def notes(model: nn.Module) -> tuple[str, ...]:
        if call == "measure_gram":
            return measure_gram(model, *batch.arguments).notes
        if call == "backward_with_gram":
            return backward_with_gram(model, *batch.arguments, weights=torch.ones(5)).notes
        return DeferredGram(model, *batch.arguments).finish(batch.completion_mask.double(), torch.ones(1, 5))[0].notes

    largest = SAVED_BUFFER_BYTES // 4
    for size, is_named in ((largest, False), (largest + 1, True)):
        model: Any = Counting(size)
        said = "the model changed counts; the values of buffers over 4 MiB are not restored"
        with pytest.warns(UserWarning, match=said) if is_named else contextlib.nullcontext():
            found = notes(model)
        assert (said in found) == is_named
        assert bool((model.counts != 0).any()) == is_named
