"""The output head fused with the log-probability, over completion positions only.

The gradient of `Σ_t c_t log π(y_t)` with respect to the logits is `c_t (onehot(y_t) - softmax)`, known as soon as the
logits are. So the head does not need autograd: one pass over token chunks gives the log-probabilities, the gradient
that flows back into the network, and the factors of the head's own weight. The logits `(N, C, V)` of the completion
tokens exist at most once, in the model's dtype. If they take more than `STORE_BYTES`, they are not kept but recomputed
by vocabulary chunk.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from scoregram import machine
from scoregram.gram.batch import Batch
from scoregram.gram.contract import Factors
from scoregram.gram.slab import KERNELS, is_half_on_gpu

STORE_BYTES = 4 << 30
"""Largest block of logit gradients that is kept for the head's Gram."""
LOGIT_CHUNK_ELEMENTS = 1 << 24
LOGIT_CHUNK_ELEMENTS_CUDA = 1 << 28
"""Logits held at a time, on a CPU and on a GPU."""


@dataclass(frozen=True)
class Targets:
    """The completion tokens with their positions and coefficients, one block per rollout, padded to `C` tokens."""

    position: Tensor  # (N, C) position whose hidden state predicts the token
    token: Tensor  # (N, C)
    coefficient: Tensor  # (N, C) factor of its log-probability; 0 where the block is padding
    real: Tensor  # (N, C) bool, False where the block is padding
    place: Tensor  # (N, T) place in the block of the token that a position predicts
    predicts: Tensor  # (N, T) bool, whether the token after a position is a target

    @staticmethod
    def of(batch: Batch) -> "Targets":
        """The targets of a batch; `C` is the longest completion, at least 1, or a bound that the batch has."""
        counts = batch.completion_mask.sum(1)
        longest = max(int(counts.max()), 1) if batch.static is None else batch.static.completion
        # A stable sort of the mask puts the completion tokens first and keeps their order.
        token_at = torch.argsort((~batch.completion_mask).to(torch.uint8), dim=1, stable=True)[:, :longest]
        real = torch.arange(longest, device=batch.input_ids.device) < counts[:, None]
        return Targets(
            position=(token_at - 1).clamp(min=0),
            token=batch.input_ids.gather(1, token_at),
            coefficient=torch.where(real, batch.coefficients.gather(1, token_at), 0.0),
            real=real,
            place=(batch.completion_mask.cumsum(1) - 1).clamp(min=0).roll(-1, 1),
            predicts=F.pad(batch.completion_mask[:, 1:], (0, 1)),
        )

    def at_positions(self, values: Tensor) -> Tensor:
        """Values `(N, C, …)` of the targets at the positions that predict them, `(N, T, …)`; 0 elsewhere."""
        every = torch.arange(len(values), device=values.device).unsqueeze(1)
        elsewhere = ~self.predicts.view(*self.predicts.shape, *[1] * (values.ndim - 2))
        return values[every, self.place].masked_fill_(elsewhere, 0.0)

    def at_tokens(self, values: Tensor) -> Tensor:
        """Values `(N, C)` of the targets at the positions of their tokens, `(N, T)`; 0 elsewhere."""
        return F.pad(self.at_positions(values)[:, :-1], (1, 0))


@dataclass(frozen=True)
class HeadUse:
    """The use of the head's weight `(V, h)`: `G_i = Σ_t dl_it ⊗ h_it` with logit gradients `dl`, kept or recomputed."""

    hidden: Tensor  # (N, C, h)
    weight: Tensor  # (V, h)
    bias: Tensor | None  # (V,)
    targets: Targets
    log_normaliser: Tensor  # (N, C)
    temperature: float
    kept: Tensor | None
    """`(N, C, V)` logit gradients; None if they are recomputed."""
    without: Tensor | None = None
    """`(V,)` bool: rows of the vocabulary that another use covers; this use counts them as zero."""

    @property
    def rows(self) -> None:  # noqa: D102
        return None

    @property
    def columns(self) -> Tensor:  # noqa: D102
        return self.hidden

    def logit_gradients(self, rows: slice | Tensor) -> Tensor:
        """`(N, C, rows)`: `c (onehot - softmax) / τ` for some rows of the vocabulary."""
        if self.kept is not None:
            return self.kept[:, :, rows]
        bias = None if self.bias is None else self.bias[rows]
        logits = F.linear(self.hidden, self.weight[rows], bias)
        factors = (self.targets.coefficient / self.temperature).to(self.log_normaliser.dtype)
        if is_half_on_gpu(logits) and isinstance(rows, slice):
            known = (self.targets.token.flatten(), factors.flatten(), self.log_normaliser.flatten())
            launch_logit_gradient_(logits.flatten(0, 1), rows.start, *known, self.temperature)
            return logits
        gradients = logits.to(self.log_normaliser.dtype) / self.temperature - self.log_normaliser.unsqueeze(2)
        gradients.exp_().neg_()
        vocabulary = torch.arange(len(self.weight), device=logits.device)[rows]
        gradients += self.targets.token.unsqueeze(2) == vocabulary
        gradients *= factors.unsqueeze(2)
        return gradients.to(self.hidden.dtype)

    def add_to(self, chunk: Tensor | None, start: int, stop: int) -> Tensor:  # noqa: D102
        gradients = self.logit_gradients(slice(start, stop))
        if self.without is not None:
            gradients = gradients.masked_fill(self.without[start:stop], 0.0)
        left = gradients.mT
        return torch.bmm(left, self.hidden) if chunk is None else torch.baddbmm(chunk, left, self.hidden)

    def split(self, rows: Tensor) -> tuple["HeadUse", Factors]:
        """This use without `rows` of the vocabulary, and those rows as a use of their own; overwrites `kept`."""
        # Products of aligned operands are faster, so a multiple of 64 rows is gathered.
        gathered = self.logit_gradients(F.pad(rows, (0, -len(rows) % 64)))[:, :, : len(rows)]
        if self.kept is not None:
            self.kept.index_fill_(2, rows, 0.0)
            return self, Factors(gathered, self.hidden, rows)
        without = torch.zeros(len(self.weight), dtype=torch.bool, device=rows.device).index_fill_(0, rows, True)
        return replace(self, without=without), Factors(gathered, self.hidden, rows)

    def bias_rows(self) -> Tensor:
        """Per-rollout gradients of the bias, `(N, V)`."""
        step = max(1, LOGIT_CHUNK_ELEMENTS // max(1, self.hidden.shape[0] * self.hidden.shape[1]))
        parts = [
            self.logit_gradients(slice(start, start + step)).sum(1, dtype=self.log_normaliser.dtype)
            for start in range(0, len(self.weight), step)
        ]
        return torch.cat(parts, 1)


@dataclass(frozen=True)
class HeadForward:
    """The head's forward pass alone, for a caller that does not have the coefficients yet."""

    log_probs: Tensor
    """`(N, C)` log-probability of each completion token, 0 where the block is padding."""
    entropies: Tensor
    """`(N, C)` entropy of the model's distribution at each completion token, 0 where the block is padding."""
    normaliser: Tensor  # (N·C,) log-normaliser
    kept: Tensor | None
    """`(N·C, V)`, which `fused_head` overwrites: probabilities in float32 and wider, logits in half precision.

    In half precision a probability near 1 loses the digits that a logit keeps.
    """


def head_forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, *, temperature: float
) -> HeadForward:
    """Log-probabilities, entropies, and probabilities or logits to reuse, unless these exceed `STORE_BYTES`.

    The arguments are those of `fused_head`; coefficients are not read.
    """
    rows, tokens = hidden.reshape(-1, hidden.shape[-1]), targets.token.reshape(-1)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    fits = rows.shape[0] * len(weight) * hidden.element_size() <= STORE_BYTES
    kept = hidden.new_empty(rows.shape[0], len(weight)) if fits else None
    chosen, entropies, normaliser = (torch.empty(len(rows), dtype=wide, device=rows.device) for _ in range(3))
    step = tokens_at_a_time(rows, weight)
    for start in range(0, len(rows), step):
        here = slice(start, start + step)
        logits = rows[here] @ weight.mT
        if bias is not None:
            logits += bias
        is_wide = logits.dtype == wide
        if kept is not None and not is_wide:
            kept[here] = logits
        work = logits.to(wide)
        if temperature != 1.0:
            work /= temperature
        probabilities = torch.softmax(work, 1, out=kept[here] if kept is not None and is_wide else None)
        # log-normaliser from the largest probability: the exponentials are computed once, not again by logsumexp
        normaliser[here] = work.amax(1) - probabilities.amax(1).log()
        chosen[here] = work.gather(1, tokens[here].unsqueeze(1)).squeeze(1) - normaliser[here]
        entropies[here] = normaliser[here] - torch.linalg.vecdot(probabilities, work)
    shape = targets.token.shape
    return HeadForward(
        log_probs=torch.where(targets.real, chosen.view(shape), 0.0),
        entropies=torch.where(targets.real, entropies.view(shape), 0.0),
        normaliser=normaliser,
        kept=kept,
    )


def tokens_at_a_time(rows: Tensor, weight: Tensor) -> int:
    """Number of tokens whose logits are held at a time."""
    return max(1, (LOGIT_CHUNK_ELEMENTS_CUDA if rows.is_cuda else LOGIT_CHUNK_ELEMENTS) // len(weight))


@dataclass(frozen=True)
class HeadPass:
    """Forward and backward pass of the head."""

    log_probs: Tensor
    """`(N, C)` log-probability of each completion token, 0 where the block is padding."""
    grad_hidden: Tensor
    """`(N, C, h)` gradient of `Σ c log π` with respect to the hidden states."""
    use: HeadUse


def fused_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Targets,
    *,
    temperature: float,
    keep: bool,
    forward: HeadForward | None = None,
) -> HeadPass:
    """Log-probabilities and the gradient of `Σ c log π`, in one pass over token chunks.

    Args:
        hidden: `(N, C, h)` hidden states that predict the completion tokens, detached.
        weight: `(V, h)`.
        bias: `(V,)` or None.
        targets: The completion tokens, with coefficients.
        temperature: Logits are divided by it.
        keep: Whether the head's weight or bias is trainable, so that its logit gradients are needed again.
        forward: `head_forward` of the same arguments, to reuse; its `kept` is overwritten.
    """
    rollouts, longest, width = hidden.shape
    wide = torch.promote_types(hidden.dtype, torch.float32)
    rows, tokens = hidden.reshape(-1, width), targets.token.reshape(-1)
    factors = (targets.coefficient / temperature).to(wide).reshape(-1)
    fits = keep and rows.shape[0] * len(weight) * hidden.element_size() <= STORE_BYTES
    known = None if forward is None else forward.kept
    kept = known if known is not None else hidden.new_empty(rows.shape[0], len(weight)) if fits else None
    log_probs, normaliser = (torch.empty(len(rows), dtype=wide, device=rows.device) for _ in range(2))
    grad = torch.empty_like(rows)
    step = tokens_at_a_time(rows, weight)
    for start in range(0, len(rows), step):
        here = slice(start, start + step)
        if known is not None and known.dtype == wide:
            grad[here] = gradient_of_probabilities_(known[here], tokens[here], factors[here]) @ weight
            continue
        if known is not None:
            logits = known[here]
        else:
            logits = torch.mm(rows[here], weight.mT, out=None if kept is None else kept[here])
            if bias is not None:
                logits += bias
        # In float32 and wider the gradient overwrites the logits, inside `kept` if that exists. In half precision on a
        # CPU the gradient is computed in float32 and copied.
        gradient, log_probs[here], normaliser[here] = softmax_gradient(logits, tokens[here], factors[here], temperature)
        if kept is not None and gradient is not logits:
            kept[here] = gradient
        grad[here] = gradient @ weight
    shape = (rollouts, longest)
    if forward is not None:
        log_probs, normaliser = forward.log_probs.flatten(), forward.normaliser
    use = HeadUse(
        hidden=hidden,
        weight=weight,
        bias=bias,
        targets=targets,
        log_normaliser=normaliser.view(shape),
        temperature=temperature,
        kept=kept.view(*shape, -1) if kept is not None and keep else None,
    )
    real_log_probs = torch.where(targets.real, log_probs.view(shape), 0.0)
    return HeadPass(real_log_probs, grad.view_as(hidden), use)


def gradient_of_probabilities_(probabilities: Tensor, tokens: Tensor, factors: Tensor) -> Tensor:
    """`f (onehot - p)` `(n, V)`, in place."""
    gradient = probabilities.neg_()
    gradient.scatter_add_(1, tokens.unsqueeze(1), torch.ones_like(gradient[:, :1]))
    return gradient.mul_(factors.unsqueeze(1))


def softmax_gradient(
    logits: Tensor, tokens: Tensor, factors: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`f (onehot - softmax(logits / τ))` `(n, V)` in the dtype of the logits, which are overwritten.

    Returns:
        The gradient, the log-probability of each token and the log-normaliser.
    """
    if is_half_on_gpu(logits):
        return logits, *launch_softmax_gradient_(logits, tokens, factors, temperature)
    work = logits.to(factors.dtype)  # no copy in float32 and wider
    if temperature != 1.0:
        work /= temperature
    normaliser = work.logsumexp(1)
    chosen = tokens.unsqueeze(1)
    log_probs = work.gather(1, chosen).squeeze(1) - normaliser
    work -= normaliser.unsqueeze(1)
    work.exp_().neg_()
    work.scatter_add_(1, chosen, torch.ones_like(work[:, :1]))
    work *= factors.unsqueeze(1)
    return work.to(logits.dtype), log_probs, normaliser


def launch_softmax_gradient_(
    logits: Tensor, tokens: Tensor, factors: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Turn logits `(n, V)` into `f (onehot - softmax(logits / τ))` in place, by a kernel.

    Returns:
        Log-probability of each token and the log-normaliser, both `(n,)` float32.
    """
    log_probs, normaliser = (torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(2))
    machine.kernel(KERNELS, "softmax_gradient_kernel")[(len(logits),)](
        logits, tokens, factors, log_probs, normaliser, logits.shape[1], 1.0 / temperature, BLOCK=8192, num_warps=16
    )
    return log_probs, normaliser


def launch_logit_gradient_(
    logits: Tensor, first: int, tokens: Tensor, factors: Tensor, normaliser: Tensor, temperature: float
) -> None:
    """Turn logits `(n, columns)`, contiguous, into `f (onehot - softmax(logits / τ))` in place, by a kernel.

    The columns are the vocabulary rows `first …`; `normaliser` `(n,)` belongs to `logits / τ` of the whole vocabulary.
    """
    width = logits.shape[1]
    machine.kernel(KERNELS, "logit_gradient_kernel")[(len(logits), -(-width // 4096))](
        logits, tokens, factors, normaliser, width, first, 1.0 / temperature, BLOCK=4096, num_warps=8
    )
