"""A model after a measurement: exactly as before, whatever interrupted it and whoever else used it."""

import contextlib
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
from scoregram.gram import backward_with_gram, measure_gram
from scoregram.gram.model import _IN_USE
from tests.cases import build
from tests.safety_cases import (
    BATCH,
    CALLS,
    MODELS,
    Peculiar,
    by_definition,
    changes,
    deferred,
    llama,
    measured,
    peculiar,
    state_of,
    with_gradients,
)

pytestmark = pytest.mark.filterwarnings("default")


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
    raised_again = False
    try:
        raise Interrupt
    except Interrupt:
        try:
            measure_gram(FailsInEvaluation(), *BATCH.arguments, keep_padding=True)
        except Interrupt:
            raised_again = True
    assert not raised_again


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
