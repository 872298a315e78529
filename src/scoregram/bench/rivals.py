"""Other ways to the Gram of `bench gram`: PyTorch alone, and libraries that compute per-sample gradients.

Each library is called as its own documentation does, with the settings under which it is exact where it has any. The
libraries are imported when their way runs; none is needed otherwise.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scoregram.bench.gram_work import GramWork, gram_of_rows
from scoregram.checks import fail

BERGSON_PROJECTION = 16
"""Rows and columns to which bergson projects each gradient, its default for an index on disk."""


def one_backward_per_rollout(work: GramWork) -> Tensor:
    """One backward pass per rollout; all gradients are kept: `N × D`."""
    kept = []
    for index in range(len(work.input_ids)):
        total = work.log_probs(slice(index, index + 1)).sum()
        kept.append(torch.autograd.grad(total, work.parameters))
    return gram_of_rows(work, (torch.stack([grad.flatten() for grad in grads]) for grads in zip(*kept, strict=True)))


def vmap_of_grad(work: GramWork) -> Tensor:
    """`vmap(grad)` over a functional call, with eager attention and an explicit mask: `N × D` at once."""
    named = {name: p.detach() for name, p in work.model.named_parameters() if p.requires_grad}
    with eager_attention(work.model):
        grads: Any = torch.func.vmap(torch.func.grad(functional_score(work)), in_dims=(None, 0))(named, work.input_ids)
    return gram_of_rows(work, (grads[name].flatten(1) for name in named))


def dattri_gradients(work: GramWork) -> Tensor:
    """Per-sample gradients of dattri's `AttributionTask`, which are `vmap(grad)` of flat parameters: `N × D` at once.

    dattri's own `TracInAttributor` takes the gradients of both sides and projects them at random, in version 0.3.0
    always: the task's gradient function is its only exact way.
    """
    from dattri.task import AttributionTask  # pyright: ignore[reportMissingImports]

    score = functional_score(work)
    task = AttributionTask(
        loss_func=lambda parameters, data: score(parameters, data[0]),
        model=work.model,
        checkpoints=work.model.state_dict(),
    )
    with eager_attention(work.model):
        was_training = work.model.training
        flat, _ = task.get_param()  # loads the checkpoint, which sets the model to evaluation
        work.model.train(was_training)
        rows = task.get_grad_loss_func(in_dims=(None, 0))(flat.detach(), (work.input_ids,))  # (N, D)
    return gram_of_rows(work, rows.split([parameter.numel() for parameter in work.parameters], dim=1))


def functional_score(work: GramWork) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    """The summed log-probability of one completion, as a function of named parameters and token ids `(T,)`."""
    length = work.input_ids.shape[1]
    closed = torch.full((length, length), float("-inf"), device=work.input_ids.device).triu(1)[None, None]

    def score(parameters: dict[str, Tensor], ids: Tensor) -> Tensor:
        inputs = {"input_ids": ids[None], "attention_mask": closed.to(next(iter(parameters.values())).dtype)}
        out = torch.func.functional_call(work.model, parameters, kwargs=inputs | {"use_cache": False}, tie_weights=True)
        predicted = out.logits[0, work.prompt_length - 1 : -1].float()
        return -F.cross_entropy(predicted, ids[work.prompt_length :], reduction="sum")

    return score


@contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    """A block in which the model's attention is plain products and a softmax, which `vmap` supports."""
    implementation = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    try:
        yield
    finally:
        model.config._attn_implementation = implementation


def opacus_gradients(work: GramWork) -> Tensor:
    """Per-sample gradients of Opacus, kept for every parameter: `N × D`."""
    from opacus import GradSampleModule  # pyright: ignore[reportMissingImports]

    wrapped = GradSampleModule(work.model, batch_first=True, loss_reduction="sum", strict=False)
    try:
        positions = torch.arange(work.input_ids.shape[1], device=work.input_ids.device).expand_as(work.input_ids)
        logits = wrapped(input_ids=work.input_ids, position_ids=positions, use_cache=False).logits
        predicted = logits[:, work.prompt_length - 1 : -1].flatten(0, 1).float()
        (-F.cross_entropy(predicted, work.input_ids[:, work.prompt_length :].flatten(), reduction="sum")).backward()
        rows = [getattr(parameter, "grad_sample").flatten(1) for parameter in work.parameters]  # noqa: B009
    finally:
        wrapped.remove_hooks()
        for parameter in work.parameters:
            vars(parameter).pop("grad_sample", None)
    return gram_of_rows(work, rows)


def dattri_llm_gram(work: GramWork) -> Tensor:
    """dattri-llm: layer inputs and output gradients of the training step, and its inner products of them."""
    from dattri_llm.gradient import ops  # pyright: ignore[reportMissingImports]

    captured = captured_by_dattri_llm(work)
    with work.no_autocast():
        return without_weights(work, ops.layerwise_cross_dot(captured, captured))


def dattri_llm_gram_with_tied_terms(work: GramWork) -> Tensor:
    """dattri-llm, and the products between the two uses of a tied embedding, formed here from what it captured.

    dattri-llm scores a weight that is used twice as two weights: with `e_i` from the embedding and `h_i` from the head
    it returns `⟨e_i, e_j⟩ + ⟨h_i, h_j⟩`. The gradient is `e_i + h_i`, so `⟨e_i, h_j⟩ + ⟨h_i, e_j⟩` is missing.
    """
    from dattri_llm.gradient import ops  # pyright: ignore[reportMissingImports]

    captured = captured_by_dattri_llm(work)
    with work.no_autocast():
        total = ops.layerwise_cross_dot(captured, captured)
        if sites := tied_layers(work.model):
            embedding, head = (ops.materialize(captured.data[name], captured.layer_types[name]) for name in sites)
            between = embedding @ head.mT.to(embedding.dtype)  # (N, N)
            total = total + between + between.mT
        return without_weights(work, total)


def captured_by_dattri_llm(work: GramWork) -> Any:
    """dattri-llm's gradients `w_i ψ_i` of every layer, from one training step.

    Llama's norms are declared as its README describes. `capture_style="auto"` was the fastest of its three styles.
    """
    from dattri_llm import (  # pyright: ignore[reportMissingImports]
        REGISTER_ALL,
        CaptureCallback,
        HookManager,
        HookManagerConfig,
    )
    from dattri_llm.utils.module import rms_norm_module_kwargs  # pyright: ignore[reportMissingImports]

    norms = {name: module for name, module in work.model.named_modules() if hasattr(module, "variance_epsilon")}
    config = HookManagerConfig(
        linear_io=REGISTER_ALL,
        hook_types=dict.fromkeys(norms, "linear_io"),
        layer_types=dict.fromkeys(norms, "nn.RMSNorm"),
        module_kwargs={
            name: rms_norm_module_kwargs(normalized_shape=norm.weight.shape[0], eps=norm.variance_epsilon)
            for name, norm in norms.items()
        },
        capture_style="auto",
    )
    capture = CaptureCallback()
    with HookManager(work.model, config=config, callbacks=[capture]).collect(deregister_on_exit=True):
        weighted_step(work)
    if capture.record is None:
        fail("bench gram", "dattri-llm must complete a step", "no gradients", "Leave it out of --ways.")
    return capture.record.gradient


def bergson_gram(work: GramWork) -> Tensor:
    """bergson: unprojected per-sample gradients of every linear layer, the head included, all kept."""
    return gram_from_bergson(work, work.model, projection=None)


def projected_bergson_gram(work: GramWork) -> Tensor:
    """What bergson keeps in an index by default: linear layers below the head, each gradient projected to 16 × 16."""
    return gram_from_bergson(work, work.model.base_model, projection=BERGSON_PROJECTION)


def gram_from_bergson(work: GramWork, root: nn.Module, projection: int | None) -> Tensor:
    """The Gram of the per-sample gradients that bergson's in-memory collector keeps for linear layers below `root`."""
    from bergson import GradientProcessor  # pyright: ignore[reportMissingImports]
    from bergson.collector.gradient_collectors import TraceCollector  # pyright: ignore[reportMissingImports]

    place, kind = work.input_ids.device, next(root.parameters()).dtype
    processor = GradientProcessor(projection_dim=projection)
    collector = TraceCollector(model=root, processor=processor, device=place, dtype=kind)
    with collector.with_batch():
        weighted_step(work)
    with work.no_autocast():
        grams = [(rows @ rows.mT).float() for (rows,) in collector.mod_grads.values()]
        return without_weights(work, torch.stack(grams).sum(0))


def weighted_step(work: GramWork) -> None:
    """The training step under a library's hooks: it sees the gradients `w_i ψ_i` and leaves their sum in `.grad`."""
    loss = work.weighted_loss()
    with work.no_autocast():  # as PyTorch recommends for the backward pass
        loss.backward()


def without_weights(work: GramWork, weighted: Tensor) -> Tensor:
    """`K_ij` in float64 from `⟨w_i ψ_i, w_j ψ_j⟩ = w_i w_j K_ij`. No weight of the benchmark is zero."""
    weights = work.weights.double()
    return (weighted.double() / weights.outer(weights)).cpu()


def tied_layers(model: Any) -> tuple[str, ...]:
    """Names of the embedding and the head if they share a trained weight, otherwise none."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is not embedding.weight or not head.weight.requires_grad:
        return ()
    names = {module: name for name, module in model.named_modules()}
    return names[embedding], names[head]


@dataclass(frozen=True)
class Rival:
    """Another way to the Gram."""

    gram: Callable[[GramWork], Tensor]
    package: str = ""
    """Name under which the library is imported; empty for PyTorch alone."""
    install: str = ""
    """Name under which pip installs it."""
    leaves_out: str = ""
    """Terms of the Gram that it does not compute, in words; empty if it computes all."""
    keeps_gradients: bool = True
    """Whether it holds `N` gradients of all parameters at once."""


_TIED_TERMS = "products between the two uses of a tied embedding"
RIVALS: MappingProxyType[str, Rival] = MappingProxyType(
    {
        "n-backwards": Rival(one_backward_per_rollout),
        "vmap": Rival(vmap_of_grad),
        "opacus": Rival(opacus_gradients, "opacus", "opacus"),
        "dattri": Rival(dattri_gradients, "dattri", "dattri"),
        "dattri-llm": Rival(dattri_llm_gram, "dattri_llm", "dattri-llm", _TIED_TERMS, keeps_gradients=False),
        "dattri-llm-tied": Rival(dattri_llm_gram_with_tied_terms, "dattri_llm", "dattri-llm", keeps_gradients=False),
        "bergson": Rival(bergson_gram, "bergson", "bergson", "embeddings and norms"),
        "bergson-projected": Rival(
            projected_bergson_gram, "bergson", "bergson", "embeddings, norms and the head", keeps_gradients=False
        ),
    }
)
"""Name of a way of `bench gram` → how it gets the Gram."""


def rival_versions(names: Iterable[str]) -> dict[str, str]:
    """Version of every library among these ways that is installed, by the name under which pip installs it."""
    chosen = [RIVALS[name] for name in names if name in RIVALS and RIVALS[name].package]
    return {rival.install: version(rival.install) for rival in chosen if find_spec(rival.package) is not None}


def require_installed(name: str) -> None:
    """Raise if the library of a rival is not installed."""
    rival = RIVALS[name]
    if rival.package and find_spec(rival.package) is None:
        fail("bench gram", f"{name} needs the package {rival.install}", "none", f"pip install {rival.install}.")
