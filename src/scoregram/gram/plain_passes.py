"""Plain passes without interception: logits, log-probabilities, and one backward pass per rollout.

They have three purposes. If the head is not captured, log-probabilities are computed here. If no interception rule
covers a parameter (a fused kernel, a scan), it is *replayed*: its per-rollout gradients come from one backward pass per
rollout, slow and exact. And `verify_gram` compares a measured Gram with independent plain gradients.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from scoregram.checks import fail
from scoregram.gram.batch import Batch
from scoregram.gram.model import MeasuredModel
from scoregram.gram.preconditioner import Diagonal
from scoregram.gram.undo import Undo

DROPOUTS = {torch.dropout, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
VERIFY_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Allowed disagreement relative to `Σ |w_i w_j K_ij|`, by the lowest precision among the parameters.

Many models compute norms in float32 whatever their dtype, so float64 models are little more exact than float32 ones.
"""

# Forward


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """Logits `(N, T, V)` of a forward pass.

    Raises:
        ScoregramError: If the model writes to its inputs: later passes and the targets would be other tokens.
    """
    avoid_cudnn_attention(batch)
    inputs, given = model_inputs(model, batch), (batch.input_ids, batch.attention_mask)
    versions = [tensor._version for tensor in given]
    output = model(**inputs) if "input_ids" in inputs else model(batch.input_ids)
    if [tensor._version for tensor in given] != versions:
        requirement = "the model must not change input_ids and attention_mask in place"
        fail("measure_gram", requirement, "a forward pass that does", "Let its forward work on copies of them.")
    logits = output if isinstance(output, Tensor) else output.logits
    tokens = batch.input_ids.shape[1]
    if logits.shape[1] > tokens and getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return logits[:, -tokens:]  # trained prompt vectors come before the tokens
    return logits


def avoid_cudnn_attention(batch: Batch) -> None:
    """Keep cuDNN's attention, whose gradient can be `nan` if there is a mask, from a batch with padding on a GPU.

    It stays off until the end of the measurement (`Undo.keep_torch_state`): checkpointed layers run again in the
    backward pass. See `scoregram.machine.without_cudnn_attention`.
    """
    if not batch.input_ids.is_cuda or not torch.backends.cuda.cudnn_sdp_enabled():
        return
    if not bool(batch.attention_mask.all()) if batch.static is None else batch.static.padded:
        torch.backends.cuda.enable_cudnn_sdp(False)


def model_inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Keyword arguments of a forward pass: token ids, mask and cache switch, if the model accepts them.

    It gets no `position_ids`: rows start at their first real token, and the model counts positions itself (from 0, or
    from `padding_idx + 1`).
    """
    offered = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "use_cache": False}
    if batch.static is not None and not batch.static.padded:  # the model could not look for padding in the mask
        del offered["attention_mask"]
    accepted = dict(inspect.signature(type(model).forward).parameters)
    inside: Any = getattr(model, "get_base_model", None)
    if inside is not None:  # PEFT's wrapper passes on what the model inside accepts
        accepted |= inspect.signature(type(inside()).forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    if takes_any and "input_ids" not in accepted:  # a wrapper that passes everything on
        return offered
    return {name: value for name, value in offered.items() if name in accepted}


def batch_log_probs(logits: Tensor, batch: Batch) -> Tensor:
    """`(N, T)`: log-probability of every completion token given the tokens before it, 0 elsewhere."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    predicted = logits[:, :-1].to(wide) / batch.temperature
    chosen = predicted.gather(2, batch.input_ids[:, 1:, None]).squeeze(2) - predicted.logsumexp(2)
    chosen = torch.where(batch.completion_mask[:, 1:], chosen, 0.0)
    return torch.nn.functional.pad(chosen, (1, 0))


def batch_entropies(logits: Tensor, batch: Batch) -> Tensor:
    """`(N, T)`: entropy of the model's distribution at every completion token, 0 elsewhere."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    predicted = torch.log_softmax(logits[:, :-1].to(wide) / batch.temperature, 2)
    entropies = torch.where(batch.completion_mask[:, 1:], -(predicted.exp() * predicted).sum(2), 0.0)
    return torch.nn.functional.pad(entropies, (1, 0))


class DropoutOff(TorchFunctionMode):
    """Runs a model without dropout, whatever its training mode, and records whether dropout was active.

    A score needs the policy's own distribution, and two passes with different dropout masks would not agree.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dropped = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "__get__":
            return self.read(func, args)
        if func in DROPOUTS:
            return self.without_dropout(args, kwargs)
        if func is F.scaled_dot_product_attention:
            args, kwargs = self.attention_without_dropout(args, kwargs)
        return self.run(func, args, kwargs)

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation unchanged."""
        return func(*args, **kwargs)

    def read(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Read an attribute; if its value is a tensor (`.T`, `.data`), the read counts as an operation."""
        value = func(*args)
        return self.run(func, args, {}) if isinstance(value, Tensor) else value

    def without_dropout(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The input of a dropout operation."""
        bound = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
        self.dropped |= bool(bound.get("p", 0.5)) and bool(bound.get("training", bound.get("train", True)))
        return bound["input"]

    def attention_without_dropout(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of an attention with its dropout (the fifth argument, or `dropout_p`) set to zero."""
        rate = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        self.dropped |= bool(rate)
        if len(args) > 4:
            return (*args[:4], 0.0, *args[5:]), kwargs
        return args, kwargs | {"dropout_p": 0.0}


# Backward


def run_backward(tensor: Tensor, grad: Tensor, parameters: Sequence[Tensor]) -> None:
    """Add the gradients of `⟨tensor, grad⟩` to `.grad` of all leaves; `parameters` get theirs at the end.

    A hook takes each gradient of `parameters` as soon as it arrives. So an optimiser in a hook finds none, and neither
    does FSDP, which averages gradients over the processes at the end of each layer's backward pass.

    `torch.autograd.backward` and `grad` are themselves torch functions, and a `TorchFunctionMode` is off while it
    handles one: checkpointed layers would be recomputed without the mode, with dropout. So this function calls
    autograd's engine directly.
    """
    arrived: dict[int, tuple[Tensor, Tensor]] = {}

    def take(parameter: Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        if grad is not None:  # autograd also calls the hook for a leaf whose gradient is None
            before = arrived.get(id(parameter))
            arrived[id(parameter)] = parameter, grad if before is None else before[1] + grad

    hooks, name = OrderedDict({0: take}), "_post_accumulate_grad_hooks"
    with Undo() as undo, undo:
        undo.operations.append((hooks.clear,))  # torch keeps the last dict if it is replaced by None
        for parameter in parameters:  # one dict for all, in place of the parameter's own
            undo.operations.append((setattr, parameter, name, getattr(parameter, name)))
            setattr(parameter, name, hooks)
        _engine_run_backward((tensor,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    for parameter, found in arrived.values():
        parameter.grad = found


def gradients(total: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of a scalar for `parameters`, all leaves that it depends on; `.grad` is None before and after.

    `torch.autograd.grad` visits only paths on which a chosen parameter is an input of the graph, so it misses layers
    with reentrant checkpointing. This function lets autograd accumulate in `.grad`, and takes the gradients from there.
    """
    run_backward(total, torch.ones_like(total), parameters)
    grads = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return grads


def loss_gradients(measured: MeasuredModel, batch: Batch) -> tuple[dict[int, Tensor], Tensor]:
    """Gradient of `Σ c log π` for each trainable parameter, by its id, and `log π` `(N, T)`; dropout is off.

    `.grad` of the parameters must be None before (`Undo.put_gradients_aside`) and is None afterwards.
    """
    parameters = list(measured.parameters.values())
    with DropoutOff(), torch.enable_grad():
        log_probs = batch_log_probs(logits_of(measured.model, batch), batch)
        total = (log_probs * batch.coefficients).sum()
        grads = gradients(total, parameters) if total.requires_grad else [torch.zeros_like(p) for p in parameters]
    return {id(parameter): grad for parameter, grad in zip(parameters, grads, strict=True)}, log_probs.detach()


def replayed_rows(measured: MeasuredModel, batch: Batch, wanted: Sequence[Tensor]) -> list[Tensor]:
    """Per-rollout gradients `(N, *shape)` of the wanted parameters, from one forward and backward pass per rollout.

    A pass of a sharded model needs every process, so a process with fewer rollouts repeats its last one.
    """
    rows: list[list[Tensor]] = [[] for _ in wanted]
    for index in range(measured.survey.shards.largest_count(batch.rollouts)):
        own = min(index, batch.rollouts - 1)
        grads, _ = loss_gradients(measured, batch.at(slice(own, own + 1)))
        for collected, parameter in zip(rows, wanted, strict=True):
            collected.append(grads[id(parameter)])
    return [torch.stack(collected[: batch.rollouts]) for collected in rows]


PADDING_LIMIT = 1e-3
"""Largest median change of log-probabilities that padding may cause in float32 and float64."""
HALF_PADDING_LIMITS = (4, 13, 0.5)
"""In lower precision: from so many units of rounding (`finfo.eps`) a note, from so many an error; the last is absolute.

Rounding alone moves a log-probability by about one unit: in the median 0.0085 in bfloat16 (1.1 units), 0.0064 under
bfloat16 autocast and 0.0008 in float16 (0.8), for a Llama of four layers with logits up to 3, against float32. So an
error means a change by more than 0.1 in bfloat16 and 0.013 in float16, and by more than five times what the rounding of
this model on this device does to the same rollout in another batch.
"""


def padding_dependence(measured: MeasuredModel, batch: Batch, log_probs: Tensor) -> str | None:
    """Raise if removing the padding of the most padded rollout changes most of its log-probabilities.

    The check takes one forward pass over that rollout alone, and is not repeated once a model has passed it. Rounding
    changes log-probabilities a little, and a changed choice of experts changes some of them a lot, but not most.

    Returns:
        A note for the result if they change in half precision, by too little for an error; None otherwise.
    """
    facts = measured.facts
    if facts.ignores_padding or batch.keeps_padding:
        return None
    padding = torch.where(batch.completion_mask.any(1), (batch.attention_mask == 0).sum(1), 0)
    row = int(padding.argmax())
    if not int(padding[row]):
        return None
    one = batch.alone(row)
    alone = log_probs_or_none(measured, one)
    if alone is None:  # the model accepts only certain lengths
        return None
    moved = float((log_probs.detach()[row][batch.completion_mask[row]] - alone[0]).abs().median())
    got = f"log-probabilities that change by {moved:.2g} when {int(padding[row])} tokens of padding are removed"
    unit = rounding_unit(measured)
    noted = limit = PADDING_LIMIT
    if unit is not None:
        noted, limit = (unit * units for units in HALF_PADDING_LIMITS[:2])
    if unit is not None and moved > limit:
        copies = log_probs_or_none(measured, one.at(torch.zeros(batch.rollouts, dtype=torch.long)))
        noise = 0.0 if copies is None else float((copies - alone).abs().median())
        limit = min(max(limit, 5 * noise), HALF_PADDING_LIMITS[2])
    if moved > limit:
        remedy = "Measure rollouts of one length together, or pass keep_padding=True to measure the padded model."
        fail("measure_gram", "the model's output must not depend on padding", got, remedy)
    if moved > noted:
        return f"{got}: rounding, or a model that depends on padding; verify=True compares every rollout alone"
    facts.ignores_padding = True
    return None


def log_probs_or_none(measured: MeasuredModel, batch: Batch) -> Tensor | None:
    """`(N, C)` log-probabilities of the completion tokens of equal rows; None if the model fails."""
    try:
        with DropoutOff(), torch.no_grad():
            log_probs = batch_log_probs(logits_of(measured.model, batch), batch)
    except Exception as error:
        measured.undo.raise_interrupt_behind(error)
        return None
    return log_probs[:, batch.completion_mask[0]]


def rounding_unit(measured: MeasuredModel) -> float | None:
    """`finfo.eps` of the products of a model in half precision, under autocast or in TF32; None if they are exact."""
    parameters = list(measured.model.parameters())
    device = parameters[0].device.type
    if torch.is_autocast_enabled(device):
        return torch.finfo(torch.get_autocast_dtype(device)).eps
    kinds = {parameter.dtype for parameter in parameters}
    if not kinds <= {torch.float32, torch.float64}:
        return max(torch.finfo(kind if kind.is_floating_point else torch.bfloat16).eps for kind in kinds)
    is_tf32 = device == "cuda" and torch.float32 in kinds and torch.get_float32_matmul_precision() != "highest"
    return torch.finfo(torch.float16).eps if is_tf32 else None  # TF32 has as many digits as float16


def verify_gram(
    measured: MeasuredModel,
    batch: Batch,
    matrix: Tensor,
    log_probs: Tensor,
    group_size: int | None,
    diagonal: Diagonal | None = None,
    seed: int = 0,
) -> None:
    """Raise unless `wᵀKw = ‖Σ w_i ψ_i‖²` for a random `w` on each group, with every `ψ_i` by its definition.

    With the diagonal of a preconditioner the right side is `gᵀDg` with `g = Σ w_i ψ_i`.

    Each `ψ_i` comes from a plain backward pass over rollout `i` alone, without padding. So the comparison also finds a
    model whose output depends on padding or on the other rollouts of a batch.
    """
    size = batch.rollouts if group_size is None else group_size
    weights = torch.randn(batch.rollouts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    allowed = max(VERIFY_TOLERANCE.get(parameter.dtype, 1e-4) for parameter in measured.parameters.values())
    unit, powers = batch.of_unit_size()
    sums: dict[int, Tensor] = {}
    moved = 0.0  # largest change of a log-probability, relative to `1 + |log π|`
    for index in range(measured.survey.shards.largest_count(batch.rollouts)):  # the same number in every process
        row = min(index, batch.rollouts - 1)
        one = unit.alone(row)
        grads, alone = loss_gradients(measured, one)
        if index > row:
            continue
        factor = float(weights[row] * powers[row])
        for key, grad in grads.items():
            grad = grad.to(torch.promote_types(grad.dtype, torch.float32)) * factor
            sums[key] = sums[key].add_(grad) if key in sums else grad
        log_probs_in_batch = log_probs[row][batch.completion_mask[row]]
        if len(log_probs_in_batch):
            alone = alone[one.completion_mask]
            moved = max(moved, float(((log_probs_in_batch - alone).abs() / (1 + alone.abs())).max()))
        if (row + 1) % size:
            continue
        here = slice(row + 1 - size, row + 1)
        squares = {key: total.double().square() for key, total in sums.items()}
        if diagonal is not None:
            squares = {key: square * diagonal.of(key) for key, square in squares.items()}
        plain = sum(float(square.sum()) for square in squares.values())
        compare_with_plain(matrix[here, here], weights[here], plain, allowed, f"{here.start} to {row}", moved)
        sums, moved = {}, 0.0


def compare_with_plain(block: Tensor, w: Tensor, plain: float, allowed: float, rollouts: str, moved: float) -> None:
    """Raise unless `wᵀKw` is `plain`; `moved` is the largest change of a log-probability when rollouts are alone."""
    disagreement = abs(float(w @ block @ w) - plain) / max(float(w.abs() @ block.abs() @ w.abs()), 1e-300)
    if disagreement <= allowed:
        return
    got = f"a disagreement of {disagreement:.2e} for rollouts {rollouts}"
    remedy = "A layer is not batch first; please report the architecture."
    if moved > allowed:
        got += f", and log-probabilities that differ by {moved:.1e}"
        remedy = (
            "The model's output depends on padding (then measure rollouts of one length together) or on the other "
            "rollouts of a batch (then it has no per-rollout score)."
        )
    fail(
        "measure_gram", f"wᵀKw must agree with a plain backward pass of each rollout alone to {allowed:g}", got, remedy
    )
