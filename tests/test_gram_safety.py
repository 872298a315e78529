"""A model after a measurement: exactly as before, whatever interrupted it and whoever else used it."""

import contextlib
import copy
import random
import signal
import sys
import threading
from collections.abc import Callable, Collection
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scoregram.errors import ScoregramError
from scoregram.gram import DeferredGram, backward_with_gram, measure_gram
from scoregram.gram.model import _IN_USE
from tests.cases import Opaque, build, rollouts

pytestmark = pytest.mark.filterwarnings("default")

TORCH: Any = torch._C

# Everything that a measurement might change


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything about a model, and about torch in this thread, that a measurement must leave alone."""
    found: dict[str, Any] = {
        "random": torch.get_rng_state(),
        "modes": TORCH._len_torch_function_stack(),
        "functions": str(TORCH._get_torch_function_state()),
        "grad mode": torch.is_grad_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), autocast_nesting()),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "oneDNN": TORCH._get_mkldnn_enabled(),
        "saved tensors": TORCH._autograd._top_saved_tensors_default_hooks(False),
        "vmap": TORCH._functorch.maybe_current_level(),
    }
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            found[f"{name}: {key}"] = value
        for key, buffer in module._buffers.items():
            found[f"{name}: buffer {key}"] = buffer
            if buffer is not None:
                found[f"{name}: values of buffer {key}"] = buffer.clone()
                found[f"{name}: attributes of buffer {key}"] = sorted(vars(buffer))
        if (config := vars(module).get("config")) is not None:
            found[f"{name}: settings"] = dict(vars(config))
    for name, parameter in model.named_parameters():
        found[f"{name}: parameter"] = parameter
        found[f"{name}: requires_grad"] = parameter.requires_grad
        found[f"{name}: values"] = parameter.detach().clone()
        found[f"{name}: grad"] = parameter.grad
        found[f"{name}: gradient"] = None if parameter.grad is None else parameter.grad.clone()
        found[f"{name}: attributes"] = sorted(vars(parameter))
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            found[f"{name}: {hooks}"] = None if getattr(parameter, hooks) is None else dict(getattr(parameter, hooks))
    return found


def autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


IS_COPY = ("random", ": values", ": gradient")


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what differs: tensors by value where a copy was taken, objects by identity or equality."""
    changed = [name for name in {**before, **after} if (name in before) != (name in after)]
    for name in before.keys() & after.keys():
        a, b = before[name], after[name]
        if isinstance(a, Tensor) and isinstance(b, Tensor) and any(part in name for part in IS_COPY):
            same = torch.equal(a, b)
        elif isinstance(a, Tensor | nn.Module) or isinstance(b, Tensor | nn.Module):
            same = a is b
        else:
            same = a is b or a == b
        if not same:
            changed.append(name)
    return sorted(changed)


# Models


class Peculiar(nn.Module):
    """A small language model with all that can go wrong.

    It has counters and statistics of its own, norms that behave differently in training, a weight that is used outside
    its module, so that the pass is repeated, and a parameter that is replayed.
    """

    def __init__(self, width: int = 6, vocabulary: int = 61) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))
        self.scale = nn.Linear(width, 1)
        self.batch_norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.called = 0
        self.kernel = nn.Parameter(torch.randn(width))
        self.batch_norm.requires_grad_(False)
        self.double().train()

    def forward(self, input_ids: Tensor) -> Tensor:  # noqa: D102
        self.calls += 1
        self.called += 1
        x = self.norm(self.embed(input_ids))
        x = x + torch.tanh(self.inner(x)) * self.scale.weight[0]
        x = self.batch_norm(Opaque.apply(x, self.kernel).mT).mT
        self.register_buffer("last", x.detach().mean((0, 1)))
        return self.head(x.cumsum(1))


def by_definition(model: nn.Module) -> Tensor:
    """The Gram of a copy in evaluation mode, one backward pass per rollout."""
    model = copy.deepcopy(model).eval()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rows = []
    for ids, mask, real in zip(*BATCH.arguments, strict=True):
        log_probs = model(ids[None, real.bool()])[0, :-1].log_softmax(-1)
        chosen = log_probs.gather(1, ids[real.bool()][1:, None]).squeeze(1)
        total = (chosen * mask[real.bool()][1:]).sum()
        grads = torch.autograd.grad(total, parameters, allow_unused=True)
        rows.append(torch.cat([(p * 0 if g is None else g).flatten() for g, p in zip(grads, parameters, strict=True)]))
    return torch.stack(rows).detach() @ torch.stack(rows).detach().T


def peculiar() -> Any:
    return Peculiar()


def llama() -> Any:
    """A language model in training mode with active dropout, norms, checkpointed layers, gradients and hooks."""
    model = build("Llama", num_hidden_layers=1, attention_dropout=0.1)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    return model.train()


MODELS = {"peculiar": peculiar, "llama": llama}
BATCH = rollouts(3, 7)


def with_gradients(model: nn.Module) -> nn.Module:
    """Every second parameter gets a gradient."""
    for parameter in list(model.parameters())[::2]:
        parameter.grad = torch.ones_like(parameter)
    return model


# Calls


def measured(model: nn.Module) -> None:
    measure_gram(model, *BATCH.arguments, verify=True)


def deferred(model: nn.Module) -> None:
    gram = DeferredGram(model, *BATCH.arguments)
    gram.finish(BATCH.completion_mask.double(), torch.ones(1, 3))


CALLS = {"measured": measured, "deferred": deferred}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_measurement_leaves_no_trace(make, call):
    model = with_gradients(make())
    before = state_of(model)
    call(model)
    assert changes(before, state_of(model)) == []


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_an_error_in_the_middle_leaves_no_trace(make, call):
    def fails(*_: object) -> None:
        raise ValueError("in the middle")

    def fails_later(_: object, __: object, out: Tensor) -> None:
        out.register_hook(fails)

    model = with_gradients(make())
    embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    for hook in (fails, fails_later):
        handle = embedding.register_forward_hook(hook)
        before = state_of(model)
        with pytest.raises(ValueError, match="in the middle"):
            call(model)
        assert changes(before, state_of(model)) == []
        handle.remove()


def test_a_scale_that_autograd_sees_has_its_exact_rows():
    """The cases above do take every route: the pass is repeated, and a parameter is replayed."""
    model = peculiar()
    gram = measure_gram(model, *BATCH.arguments)
    assert gram.replayed == ("kernel",)
    torch.testing.assert_close(gram.matrix, by_definition(model))


# Interrupts


class Interrupt(KeyboardInterrupt):
    """Ctrl-C of a test."""


def traced_lines(call: Callable[[], object], within: str, at: Collection[int] = ()) -> list[tuple[str, int]]:
    """Files and numbers of the lines that `call` runs in files whose path contains `within`; raises at some of them."""
    lines: list[tuple[str, int]] = []

    def trace(frame: Any, event: str, _: object) -> Any:
        if within not in frame.f_code.co_filename:
            return None
        if event == "line":
            lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(lines) - 1 in at:
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


def every_line(lines: list[tuple[str, int]]) -> list[int]:
    """The first, a middle and the last visit of every line."""
    visits: dict[tuple[str, int], list[int]] = {}
    for k, line in enumerate(lines):
        visits.setdefault(line, []).append(k)
    return sorted({k for found in visits.values() for k in (found[0], found[len(found) // 2], found[-1])})


def interrupts(
    make: Callable[[], nn.Module],
    call: Callable[[nn.Module], object],
    within: str,
    points: int | None,
    also: Callable[[int], int] | None = None,
) -> None:
    """Interrupt `call` at so many lines, at every line for None, and compare the model each time.

    `also(k)` is the number of a second line, for an interrupt that meets the handling of the first.
    """
    model = with_gradients(make())
    call(model)  # what was learned is remembered: later calls take the same lines
    lines = traced_lines(lambda: call(model), within)
    before = state_of(model)
    for k in every_line(lines) if points is None else range(0, len(lines), -(-len(lines) // points)):
        with contextlib.suppress(Interrupt):
            traced_lines(lambda: call(model), within, {k} if also is None else {k, also(k)})
        assert changes(before, state_of(model)) == [], f"after an interrupt at {lines[k]}, visit {k}"


EVERYWHERE = "/"
ENGINE = "scoregram/gram"
AUTOCAST = "torch/amp/autocast_mode.py"


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_interrupts_leave_no_trace(make, call):
    interrupts(make, call, ENGINE, 10)


@pytest.mark.parametrize("within", ["gram/contract.py", "scoregram/machine.py", AUTOCAST])
def test_interrupts_at_every_line_around_a_product(within):
    """The engine switches autocast and oneDNN off for its own products."""
    interrupts(peculiar, deferred, within, None)


@pytest.mark.parametrize("within", ["gram/undo.py", "gram/model.py", "contextlib.py"])
def test_interrupts_while_the_model_is_changed_or_put_back(within):
    interrupts(llama, deferred, within, 20)


def test_a_second_interrupt_while_the_first_is_handled():
    interrupts(peculiar, measured, ENGINE, 10, also=lambda k: k + 1 + k % 7)


class InterruptedOnce(Peculiar):
    """Ctrl-C in one of its passes, which the end of a block of torch turns into another error."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.passes = count()  # a measurement restores attributes, but not what an iterator has given
        self.at = at

    def forward(self, input_ids: Tensor) -> Tensor:  # noqa: D102
        if next(self.passes) == self.at:
            try:
                raise Interrupt
            finally:
                raise RuntimeError("trying to pop from empty mode stack")
        return super().forward(input_ids)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_interrupt_that_became_an_error_does_not_say_what_the_model_needs(call):
    """Else the model would be taken for one that fails in evaluation mode, and measured in training mode ever after."""
    whole = InterruptedOnce(-1)
    call(whole)
    expected, passes = by_definition(peculiar()), next(whole.passes)
    assert passes > 3
    for at in range(passes):
        model = InterruptedOnce(at)
        with pytest.raises(Interrupt):
            call(model)
        torch.testing.assert_close(measure_gram(model, *BATCH.arguments, verify=True).matrix, expected)


class FailsInEvaluation(Peculiar):
    """A model that needs training mode."""

    def forward(self, input_ids: Tensor) -> Tensor:  # noqa: D102
        if not self.training:
            raise RuntimeError("evaluation mode is not implemented")
        return super().forward(input_ids)


def test_an_interrupt_that_the_caller_handles_is_not_raised_again():
    try:
        raise Interrupt
    except Interrupt:
        measure_gram(FailsInEvaluation(), *BATCH.arguments, keep_padding=True)


def test_interrupts_at_every_line_of_contextlib():
    interrupts(peculiar, measured, "contextlib.py", None)


@pytest.mark.slow
@pytest.mark.parametrize("within", [ENGINE, "contextlib.py"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_interrupts_at_every_line(make, call, within):
    interrupts(make, call, within, None)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_interrupts_in_other_libraries(make, call):
    interrupts(make, call, EVERYWHERE, 1500)


def interrupted_by_signals(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real signals from a timer: one; or one every 1 ms until the call ends; or three, one every 0.1 ms."""
    model, generator = with_gradients(llama()), random.Random(0)
    measured(model)
    before = state_of(model)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest's own would be interrupted as well
    for _ in range(count):
        pause, most = generator.choice([(0, 1), (1e-3, 10_000), (1e-4, 3)])
        arrived = iter(range(most))

        def handler(number: int, frame: Any, arrived: Any = arrived) -> None:
            if next(arrived, None) is not None:
                signal.default_int_handler(number, frame)

        with contextlib.suppress(KeyboardInterrupt):
            try:
                signal.signal(signal.SIGALRM, handler)
                signal.setitimer(signal.ITIMER_REAL, generator.uniform(1e-4, 0.05), pause)
                measured(model)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # one may still be on its way
        assert changes(before, state_of(model)) == [], f"after signals every {pause} s, at most {most}"
        assert not _IN_USE


def test_a_few_signals_at_random_moments(monkeypatch):
    interrupted_by_signals(30, monkeypatch)


@pytest.mark.slow
def test_signals_at_random_moments(monkeypatch):
    interrupted_by_signals(1000, monkeypatch)


def test_an_optimiser_step_after_an_interrupt_reaches_products_under_autocast():
    """Torch keeps the weights that it has cast for as long as it counts an autocast block."""
    model, layer, x = peculiar(), nn.Linear(3, 3), torch.ones(1, 3)
    visits = traced_lines(lambda: measured(model), AUTOCAST)
    for k in every_line(visits)[::3]:
        with contextlib.suppress(Interrupt):
            traced_lines(lambda: measured(model), AUTOCAST, {k})
        for factor in (1.0, 3.0):
            with torch.no_grad():
                layer.weight.mul_(factor)
            with torch.autocast("cpu", torch.bfloat16):
                found = layer(x)
            expected = nn.functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
            torch.testing.assert_close(found, expected, msg=f"after an interrupt at {visits[k]}")
        layer.weight.data.div_(3.0)


@pytest.mark.parametrize("is_empty", [True, False])
def test_interrupts_leave_all_gradients_of_a_step_or_none(is_empty):
    """`.grad` of every parameter is as before, or of every parameter complete."""
    model, weights = peculiar(), torch.linspace(-1.0, 1.0, 3)

    def step() -> object:
        return backward_with_gram(model, *BATCH.arguments, weights=weights)

    def start() -> None:
        model.zero_grad()
        _ = is_empty or with_gradients(model)

    def grads() -> dict[str, Tensor]:
        return {f"{name}: gradient": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    start()
    step()
    start()
    before = grads()
    total = len(traced_lines(step, ENGINE))
    after = grads()
    seen = set()
    for k in [total // 2, *range(total - 100, total, 11)]:
        start()
        with contextlib.suppress(Interrupt):
            traced_lines(step, ENGINE, {k})
        found = grads()
        assert [] in (changes(before, found), changes(after, found))
        seen.add(changes(after, found) == [])
    assert seen == {True, False}


# Hooks on parameters


def step_of(parameter: Tensor) -> Callable[..., None]:
    """A hook that runs an optimiser and drops the gradient."""
    optimiser = torch.optim.SGD([parameter], lr=0.1)

    def step(*_: object) -> None:
        optimiser.step()
        optimiser.zero_grad()

    return step


def optimiser_in_backward(parameter: Tensor) -> None:
    parameter.register_post_accumulate_grad_hook(step_of(parameter))


NODES: list[Any] = []
"""A hook on a node of autograd lives as long as the node."""


def optimiser_on_the_node(parameter: Tensor) -> None:
    """As `torch.distributed.optim` does it."""
    made_by: Any = parameter.view_as(parameter).grad_fn
    NODES.append(made_by.next_functions[0][0])
    NODES[-1].register_hook(step_of(parameter))


def gradient_taken_away(parameter: Tensor) -> None:
    parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))


def gradient_halved(parameter: Tensor) -> None:
    parameter.register_hook(lambda grad: grad / 2)


HOOKS = [optimiser_in_backward, optimiser_on_the_node, gradient_taken_away, gradient_halved]


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_on_parameters_do_not_run(hook):
    model = peculiar()
    expected = by_definition(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            hook(parameter)
    before = state_of(model)
    gram = measure_gram(model, *BATCH.arguments, verify=True)
    torch.testing.assert_close(gram.matrix, expected)
    assert changes(before, state_of(model)) == []


def test_hooks_on_parameters_run_again_afterwards():
    model, ran = peculiar(), []
    model.head.weight.register_post_accumulate_grad_hook(lambda _: ran.append("accumulated"))
    model.head.weight.register_hook(lambda _: ran.append("arrived"))
    measured(model)
    assert not ran
    model(BATCH.input_ids).sum().backward()
    assert ran == ["arrived", "accumulated"]


# Threads


def measured_during(model: nn.Module, other: nn.Module, *, in_a_thread: bool = True) -> Tensor:
    """The Gram of `other`, measured from the middle of a measurement of `model`, whose own Gram must be right.

    Raises:
        ScoregramError: The one that measuring `other` raised.
    """
    expected, found = by_definition(model), []

    def run() -> None:
        try:
            found.append(measure_gram(other, *BATCH.arguments).matrix)
        except ScoregramError as error:
            found.append(error)

    def hook(*_: object) -> None:
        if in_a_thread:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        else:
            run()

    handle = next(model.children()).register_forward_hook(hook)
    before = state_of(model)
    gram = measure_gram(model, *BATCH.arguments)
    torch.testing.assert_close(gram.matrix, expected)
    assert changes(before, state_of(model)) == []
    handle.remove()
    if isinstance(found[0], ScoregramError):
        raise found[0]
    return found[0]


def test_two_threads_measure_two_models():
    model, other = peculiar(), peculiar()
    other.load_state_dict({name: value + 1 for name, value in other.state_dict().items()})
    torch.testing.assert_close(measured_during(model, other), by_definition(other))


def test_two_threads_measure_two_models_that_share_what_is_frozen():
    model, other = peculiar(), peculiar()
    for each in (model, other):
        each.embed.weight = model.embed.weight.requires_grad_(False)
    torch.testing.assert_close(measured_during(model, other), by_definition(other))


def shares_itself(model: Any) -> nn.Module:
    return model


def shares_a_wrapper(model: Any) -> nn.Module:
    return nn.Sequential(model)


def shares_a_module(model: Any) -> nn.Module:
    other = peculiar()
    other.norm = model.norm
    return other


def shares_a_parameter(model: Any) -> nn.Module:
    other = peculiar()
    other.head.weight = model.head.weight
    return other


@pytest.mark.parametrize("in_a_thread", [True, False])
@pytest.mark.parametrize("shares", [shares_itself, shares_a_wrapper, shares_a_module, shares_a_parameter])
def test_what_is_being_measured_is_refused(shares, in_a_thread):
    model = peculiar()
    got = "a second thread" if in_a_thread else "a call from inside another measurement"
    with pytest.raises(ScoregramError, match=f"one measurement at a time, got {got}"):
        measured_during(model, shares(model), in_a_thread=in_a_thread)


def test_two_adapters_over_one_base_are_refused():
    peft = pytest.importorskip("peft")
    base = build("Llama", num_hidden_layers=1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    first, second, errors = peft.get_peft_model(base, config), peft.PeftModel(base, config, "second"), []

    def hook(*_: object) -> None:
        with pytest.raises(ScoregramError) as caught:
            measure_gram(second, *BATCH.arguments)
        errors.append(caught.value)

    base.model.norm.register_forward_hook(hook)
    measure_gram(first, *BATCH.arguments)
    assert errors


def test_many_threads_on_one_model_give_right_numbers_or_an_error():
    model = peculiar()
    expected, before, found = by_definition(model), state_of(model), []

    def run() -> None:
        for _ in range(5):
            try:
                found.append(measure_gram(model, *BATCH.arguments).matrix)
            except ScoregramError as error:
                found.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    grams = [each for each in found if isinstance(each, Tensor)]
    assert len(found) == 20
    assert grams
    for gram in grams:
        torch.testing.assert_close(gram, expected)
    assert changes(before, state_of(model)) == []
