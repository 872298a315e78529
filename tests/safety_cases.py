"""Two models with all that can go wrong, calls that measure them, and all that a measurement must leave alone."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from scoregram.gram import DeferredGram, measure_gram
from tests.cases import Opaque, build, rollouts

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
        "cuDNN attention": torch.backends.cuda.cudnn_sdp_enabled(),
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
