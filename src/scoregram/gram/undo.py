"""Undo every change that a measurement makes to a model, also after Ctrl-C."""

import sys
import traceback
from collections import deque
from collections.abc import Sequence
from itertools import starmap
from operator import call
from typing import Any

import torch
from torch import Tensor, nn

SAVED_BUFFER_BYTES = 1 << 22
"""Largest buffer whose values are saved; larger ones are masks and quantised weights, which few forward passes change.

`MeasuredModel.changed_buffers` finds those that do.
"""

_ABSENT = object()
_TORCH: Any = torch._C
"""Functions of torch that have no public name."""


class Undo:
    """Operations that undo changes, run at the end of a `with` block; each is added before its change is made.

    Ctrl-C may arrive while they run. An operation leaves the list only after it was called, so the interrupted one runs
    again, the others follow, and the interrupt is raised at the end. Calling an operation twice is harmless. Enter the
    block twice, `with Undo() as undo, undo:`, in case that Ctrl-C arrives where the first `__exit__` starts: the second
    one goes on where the first stopped.
    """

    def __init__(self) -> None:
        self.operations: list[tuple[Any, ...]] = []
        """Functions and their arguments; the last one is called first."""
        self.handled = sys.exception()
        """What the caller is handling: an interrupt in it is an old one."""

    def __enter__(self) -> "Undo":
        return self

    def __exit__(self, _: object = None, error: BaseException | None = None, __: object = None) -> None:
        interrupt = None
        while self.operations:
            try:
                self.run(error)
            except Exception:
                raise
            except BaseException as another:  # no call here: after a call, Python raises the next interrupt
                interrupt = another
        interrupt = interrupt or self.interrupt_behind(error)
        if interrupt is not None and interrupt is not error:
            raise interrupt

    def run(self, error: BaseException | None) -> None:
        """Call the operations, the last one first, and remove each from the list when it has returned."""
        clear_frames(self.interrupt_behind(error))
        while self.operations:
            function, *arguments = self.operations[-1]
            function(*arguments)
            self.operations.pop()

    def interrupt_behind(self, error: BaseException | None) -> BaseException | None:
        """The interrupt in an error's chain of `__context__`, which starts with the error; None if there is none."""
        while isinstance(error, Exception) and error is not self.handled:
            error = error.__context__
        return None if error is self.handled else error

    def raise_interrupt_behind(self, error: Exception) -> None:
        """Raise the interrupt that an error hides: Ctrl-C at the end of a block of torch may become a `RuntimeError`.

        Call it where an error means that the model cannot be measured in one way, before another way is tried.
        """
        interrupt = self.interrupt_behind(error)
        if interrupt is not None:
            raise interrupt

    def set_attribute(self, owner: Any, name: str, value: object) -> None:
        """Set an attribute of an object until the end of the block; then restore or remove it."""
        state = owner.__dict__
        before = state.get(name, _ABSENT)
        undo_operation = (dict.pop, state, name, None) if before is _ABSENT else (dict.__setitem__, state, name, before)
        self.operations.append(undo_operation)
        state[name] = value

    def put_gradients_aside(self, parameters: Sequence[Tensor]) -> None:
        """Set `.grad` to None until the end of the block; then restore the same tensors."""
        self.operations += [(setattr, parameter, "grad", parameter.grad) for parameter in parameters]
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = None

    def keep_random_state(self, device: torch.device) -> None:
        """Restore the state of the random generators at the end of the block."""
        saved = random_state(device)
        self.operations.append((torch.default_generator.set_state, saved[0]))
        if device.type == "cuda":
            self.operations.append((torch.cuda.set_rng_state, saved[1], device))

    def keep_modules(self, modules: Sequence[nn.Module]) -> None:
        """Restore attributes and buffers of modules, attributes and values of buffers, at the end of the block."""
        buffers = [module._buffers for module in modules if module._buffers]
        found_buffers = buffers_of(modules)  # a pass in training mode may mark them as activations
        for state in [*(module.__dict__ for module in modules), *buffers, *map(vars, found_buffers)]:
            self.operations += [(dict.update, state, state.copy()), (dict.clear, state)]
        small = [buffer for buffer in found_buffers if buffer.nbytes <= SAVED_BUFFER_BYTES]
        self.operations += [(put_values_back, buffer, buffer._version, buffer.detach().clone()) for buffer in small]

    def keep_torch_state(self, device: torch.device) -> None:
        """Restore torch's modes in this thread at the end of the block, for operations on the CPU and on `device`.

        Torch and Python enter them in `with` blocks of their own, and Ctrl-C may skip the `__exit__` of these.
        """
        for kind in {"cpu", device.type}:
            self.operations += [
                (torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind)),
                (torch.set_autocast_dtype, kind, torch.get_autocast_dtype(kind)),
            ]
        if _TORCH._get_mkldnn_enabled():  # if it is off, another thread may be in `plain_products`
            self.operations.append((_TORCH._set_mkldnn_enabled, True))
        hooks = _TORCH._autograd._top_saved_tensors_default_hooks(False)
        vmap = _TORCH._functorch.get_dynamic_layer_stack_depth()
        self.operations += [
            (torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled()),
            (torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()),
            (leave_autocast, autocast_depth()),
            (pop_saved_tensor_hooks, hooks),
            (_TORCH._set_grad_enabled, torch.is_grad_enabled()),
            (_TORCH._functorch.pop_dynamic_layer_stack_and_undo_to_depth, vmap),
            (pop_function_modes, _TORCH._len_torch_function_stack()),
            (_TORCH._set_torch_function_state, _TORCH._get_torch_function_state()),
        ]


def clear_frames(error: BaseException | None) -> None:
    """End the generators that an interrupt, and those before it, left suspended in torch: now, not later."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def run_operations(operations: Sequence[tuple[Any, ...]]) -> None:
    """Call each function with its arguments, from C code: no interrupt comes between two calls."""
    deque(starmap(call, operations), maxlen=0)


def buffers_of(modules: Sequence[nn.Module]) -> list[Tensor]:
    """The buffers of modules, each once. Those made under `torch.inference_mode` cannot change and are left out."""
    found = {id(b): b for module in modules for b in module._buffers.values() if b is not None}
    return [buffer for buffer in found.values() if not buffer.is_inference()]


def put_values_back(buffer: Tensor, version: int, values: Tensor) -> None:
    """Restore the values of a buffer that were saved when its version counter was `version`.

    Autograd rejects a graph that saved the buffer if the counter has changed since. If it has not changed (nothing
    happened, or a batch norm wrote its statistics, which does not count), the values are written without counting.
    """
    (buffer.data if buffer._version == version else buffer.detach()).copy_(values)  # no mode is entered


def pop_function_modes(depth: int) -> None:
    """Remove the innermost `TorchFunctionMode`s until `depth` are left."""
    while _TORCH._len_torch_function_stack() > depth:
        _TORCH._pop_torch_function_stack()


def pop_saved_tensor_hooks(top: object) -> None:
    """Remove the innermost saved-tensor hooks until `top` are the innermost."""
    autograd = _TORCH._autograd
    while (hooks := autograd._top_saved_tensors_default_hooks(False)) is not None and hooks != top:
        autograd._pop_saved_tensors_default_hooks()


def autocast_depth() -> int:
    """Number of autocast blocks around the current operation, disabled ones included.

    Torch has no function that reads it. Both calls are made from C code: no interrupt comes between them.
    """
    _, depth = map(call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting))
    return depth


def leave_autocast(depth: int) -> None:
    """Count `depth` autocast blocks again, after an interrupt that skipped the end of one.

    Torch keeps the weights that autocast has cast until the count is 0, and does not notice if an optimiser changes the
    weights themselves.
    """
    while autocast_depth() > depth:
        torch.autocast_decrement_nesting()
    if depth == 0:
        torch.clear_autocast_cache()


def is_recording() -> bool:
    """Whether launches on the current stream are recorded for a CUDA graph; then the device cannot be read."""
    return torch.cuda.is_available() and bool(_TORCH._cuda_isCurrentStreamCapturing())


def random_state(device: torch.device) -> list[Tensor]:
    """The state of the random generators that a forward pass on `device` would draw from.

    While a CUDA graph is captured, the state on the device cannot be read and is left out.
    """
    states = [torch.get_rng_state()]
    if device.type != "cuda" or is_recording():
        return states
    return [*states, torch.cuda.get_rng_state(device)]
