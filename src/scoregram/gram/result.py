"""Stage 6, the result: Grams by parameter become K and its split by layer; weighted sums become gradients."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from scoregram.checks import not_finite
from scoregram.gram.batch import DistinctRollouts
from scoregram.gram.collect import Collector
from scoregram.gram.model import MeasuredModel, local_part
from scoregram.gram.undo import Undo, run_operations


@dataclass(frozen=True)
class Gram:
    """Inner products of per-rollout scores over all trainable parameters."""

    matrix: Float[Tensor, "rollouts rollouts"]
    """`K_ij = ⟨ψ_i, ψ_j⟩`, float64, on the CPU; `nan` between groups if the call had a `group_size`.

    With a preconditioner, `⟨ψ_i, D ψ_j⟩`.
    """
    by_layer: Mapping[str, Float[Tensor, "rollouts rollouts"]]
    """The same for every module that owns trainable parameters; they add up to `matrix`.

    A tied parameter counts for the first module that owns it, including the cross terms between its uses.
    """
    log_probs: Float[Tensor, "sequences tokens"]
    """Log-probability of every completion token of `input_ids`, 0 elsewhere."""
    replayed: tuple[str, ...] = ()
    """Parameters whose gradients came from one backward pass per rollout."""
    notes: tuple[str, ...] = ()
    """Remarks, for example that dropout was switched off or that parameters were replayed."""
    sketch: Float[Tensor, "rollouts features"] | None = None
    """A seeded sketch of each score, if the call had a `sketch`; see `scoregram.gram.sketch`."""


class LayerGrams(Mapping[str, Tensor]):
    """`(N, N)` Gram of every layer by name, float64 on the CPU; copied from the device when one is first asked for.

    Most steps of a training need the Gram of all layers alone, and copying every layer's takes longer than the rest.
    """

    def __init__(self, layers: tuple[str, ...], blocks: Tensor, rollouts: DistinctRollouts) -> None:
        """Take the names of the layers, their blocks `(L, P, R, R)` and the rollouts of these."""
        self._place = {layer: index for index, layer in enumerate(layers)}
        self._blocks = blocks
        self._rollouts = rollouts

    def blocks(self) -> Tensor:
        """`(L, P, R, R)` on the CPU."""
        self._blocks = self._blocks.cpu()
        return self._blocks

    def __getitem__(self, layer: str) -> Tensor:
        place = self._place[layer]  # before anything is copied: a missing layer is a KeyError
        return self._rollouts.expanded_matrix(block_diagonal_matrix(self.blocks()[place]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)

    def __reduce__(self) -> tuple[type, tuple[dict[str, Tensor]]]:
        """Another process gets a plain dict on the CPU."""
        return dict, (dict(self),)


class ChangedLayers(Mapping[str, Tensor]):
    """The Grams of layers, each transformed when it is read."""

    def __init__(self, layers: Mapping[str, Tensor], change: Callable[[Tensor], Tensor]) -> None:
        self._layers = layers
        self._change = change

    def __getitem__(self, layer: str) -> Tensor:
        return self._change(self._layers[layer])

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __reduce__(self) -> tuple[type, tuple[dict[str, Tensor]]]:
        """Pickles as a plain dict."""
        return dict, (dict(self),)


@dataclass(frozen=True)
class CollectedScores:
    """What one measurement collected about the scores of a batch; tensors stay on the device."""

    measured: MeasuredModel
    rollouts: DistinctRollouts
    layers: tuple[str, ...]
    """Modules that own a used parameter; all other parameters have zero scores."""
    blocks: Tensor
    """`(L, P, R, R)` Grams of the layers within groups, of scores divided by `rollouts.powers`."""
    sums: dict[Tensor, Tensor]
    """The sums `Σ_i w_mi ψ_i`, `(M, *shape)` for every parameter that was used."""
    sketches: Tensor | None
    """`(rows, features)`"""
    log_probs: Tensor
    """`(rows, T)`"""
    replayed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(
        measured: MeasuredModel, rollouts: DistinctRollouts, collector: Collector, log_probs: Tensor
    ) -> "CollectedScores":
        """The results of a collector that has finished; it drops them."""
        contractor = collector.contractor
        used_ids = contractor.owners()
        layer_by_id = {id(p): layer_of(name) for name, p in measured.parameters.items() if id(p) in used_ids}
        place = {layer: index for index, layer in enumerate(dict.fromkeys(layer_by_id.values()))}
        sums = {parameter: collector.take_sums(parameter) for parameter in measured.parameters.values()}
        return CollectedScores(
            measured,
            rollouts,
            tuple(place),
            contractor.grams({owner: place[layer] for owner, layer in layer_by_id.items()}, len(place)),
            {parameter: taken for parameter, taken in sums.items() if taken is not None},
            None if collector.sketcher is None else collector.sketcher.total(),
            log_probs.detach(),
        )

    def gram(self) -> Gram:
        """The Gram of all the caller's rollouts, duplicates included; the first call that waits for the device.

        Raises:
            NotFiniteError: If a parameter or a gradient is NaN or infinite; names the parameter, or layer and rollouts.
        """
        rollouts, stacked = self.rollouts, self.blocks
        by_group = rollouts.powers.to(stacked.device).view(rollouts.groups, -1)
        stacked = stacked * by_group[:, :, None] * by_group[:, None, :]  # (L, P, R, R)
        stacked = (stacked + stacked.mT) / 2  # matrix products round asymmetrically
        total = stacked.sum(0).cpu()
        by_layer = LayerGrams(self.layers, stacked, rollouts)
        if not bool(total.isfinite().all()):
            self.refuse_not_finite(by_layer)
        sketch = None if self.sketches is None else (self.sketches * rollouts.powers.cpu()[:, None]).float()
        return Gram(
            matrix=rollouts.expanded_matrix(block_diagonal_matrix(total)),
            by_layer=by_layer,
            log_probs=rollouts.expanded_rows(self.log_probs),
            replayed=self.replayed,
            notes=self.notes,
            sketch=None if sketch is None else rollouts.expanded_rows(sketch),
        )

    def refuse_not_finite(self, by_layer: "LayerGrams") -> None:
        """Raise an error that names the first parameter, or else the layer and the rollouts, with NaN or infinity."""
        for name, parameter in (self.measured.survey.shards.sharded or self.measured.parameters).items():
            if not bool(local_part(parameter).isfinite().all()):
                not_finite(
                    "measure_gram", "parameters must be finite", f"nan or inf in {name}", "Restore a checkpoint."
                )
        blocks = dict(zip(by_layer, by_layer.blocks().unbind(), strict=True))
        broken = {layer: gram for layer, gram in blocks.items() if not bool(gram.isfinite().all())}
        layer, gram = list(broken.items())[-1]  # the last layer: the backward pass went through it first
        rows = (~gram.diagonal(dim1=1, dim2=2).reshape(-1).isfinite()).nonzero().squeeze(1).tolist()
        named = sorted(member for row in rows for member in self.rollouts.members(row))
        not_finite(
            "measure_gram",
            "gradients must be finite",
            f"nan or inf for rollout {', '.join(map(str, named))} in {layer} and {len(broken) - 1} other layers",
            "Look at these rollouts; low precision may have overflowed.",
        )

    def gram_and_gradients(self) -> Gram:
        """The Gram; adds `Σ_i w_i ψ_i` to `.grad`, before waiting for the device if every `.grad` is None."""
        parameters = self.measured.parameters.values()
        if any(parameter.grad is not None for parameter in parameters):  # an addition could not be undone on an error
            gram = self.gram()
            self.write_gradients(None)
            return gram
        with Undo() as undo, undo:
            undo.put_gradients_aside(list(parameters))
            self.write_gradients(None)
            gram = self.gram()
            undo.operations.clear()  # from here on the gradients stay
        return gram

    def write_gradients(self, factors: Tensor | None) -> None:
        """Add `Σ_m f_m Σ_i w_mi ψ_i` to `.grad`, of all parameters or none.

        `factors` is None for a single weight vector, with the factor 1.
        """
        additions = []
        for parameter, sums in self.sums.items():
            grad = sums[0] if factors is None else torch.tensordot(factors.to(sums), sums, dims=1)
            if parameter.grad is None:
                additions.append((setattr, parameter, "grad", grad.to(parameter.dtype)))
            else:
                additions.append((Tensor.add_, parameter.grad, grad))
        with Undo() as undo, undo:
            self.measured.claim(undo)  # another measurement would put these gradients aside
            run_operations(additions)


def layer_of(name: str) -> str:
    """The name of the module that owns a parameter; a parameter of the model itself counts as its own layer."""
    return name.rpartition(".")[0] or name


def block_diagonal_matrix(blocks: Tensor) -> Tensor:
    """Blocks `(P, R, R)` on the diagonal of an `(N, N)` matrix, `nan` between groups."""
    groups, size, _ = blocks.shape
    if groups == 1:
        return blocks[0]
    matrix = blocks.new_full((groups, size, groups, size), torch.nan)
    for group in range(groups):
        matrix[group, :, group] = blocks[group]
    return matrix.reshape(groups * size, groups * size)
