"""Per-rollout gradients that outlive their pass, so that rollouts of different passes can be compared."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from scoregram.gram.contract import Contractor, Use, rows_at_a_time, scaled_
from scoregram.gram.preconditioner import Diagonal
from scoregram.gram.sketch import flat_index


class KeptRows:
    """The per-rollout gradients of some parameters, for all rollouts of several passes.

    A collector that has one gives it every gradient instead of contracting it. `N` rollouts and `D` elements take
    `N · D` numbers, in the dtype in which the pass forms the gradient.
    """

    def __init__(self, parameters: Sequence[Tensor], rollouts: int, diagonal: Diagonal | None = None) -> None:
        """Take the parameters to keep; gradients of all others are dropped.

        With the diagonal of a preconditioner, the Grams are those of the kept rows times `√D`.
        """
        self.rollouts = rollouts
        self.diagonal = diagonal
        self._parameters = {id(parameter): parameter for parameter in parameters}
        self._rows: dict[int, Tensor | None] = {id(parameter): None for parameter in parameters}  # (N, D) each
        self._here = slice(0, rollouts)

    def begin_pass(self, here: slice) -> None:
        """Take gradients of these rollouts from now on."""
        self._here = here

    def restart_pass(self) -> None:
        """Drop what a pass delivered that did not suffice: another one over the same rollouts follows."""
        for rows in self._rows.values():
            if rows is not None:
                rows[self._here].zero_()

    @torch.no_grad()
    def add_uses(self, parameter: Tensor, view: Tensor, chosen: Tensor | None, uses: Sequence[Use]) -> None:
        """Add the gradients of a region of a parameter, the sum of its uses, which cover the `chosen` rows or all."""
        if id(parameter) not in self._rows:
            return
        rows = torch.arange(view.shape[0], device=view.device) if chosen is None else chosen
        sample = uses[0].columns
        is_stored_so = chosen is None and view.is_contiguous() and view.shape == parameter.shape
        step = rows_at_a_time(sample.shape[0] * sample.shape[2], sample.device)
        for start in range(0, len(rows), step):
            stop = min(start + step, len(rows))
            chunk = uses[0].add_to(None, start, stop)
            for use in uses[1:]:
                chunk = use.add_to(chunk, start, stop)
            kept, part = self._of(parameter, chunk)[self._here], chunk.flatten(1)
            if is_stored_so:
                kept[:, start * view.shape[1] : stop * view.shape[1]] += part
            else:
                kept.index_add_(1, flat_index(parameter, view, rows[start:stop]), part.to(kept.dtype))

    @torch.no_grad()
    def add_rows(self, parameter: Tensor, rows: Tensor) -> None:
        """Add per-rollout gradients `(n, D)` of a parameter."""
        if id(parameter) in self._rows:
            self._of(parameter, rows)[self._here] += rows

    def forget(self, parameter: Tensor) -> None:
        """Drop what this pass delivered for a parameter."""
        rows = self._rows.get(id(parameter))
        if rows is not None:
            rows[self._here].zero_()

    def _of(self, parameter: Tensor, sample: Tensor) -> Tensor:
        """`(N, D)` gradients of a parameter; 0 where nothing has arrived."""
        rows = self._rows[id(parameter)]
        if rows is None:
            rows = self._rows[id(parameter)] = sample.new_zeros(self.rollouts, parameter.numel())
        return rows

    @property
    def owners(self) -> list[int]:
        """Ids of the parameters for which a gradient has arrived."""
        return [owner for owner, rows in self._rows.items() if rows is not None]

    @torch.no_grad()
    def take_grams(self, place: Mapping[int, int], count: int) -> Tensor:
        """`(count, N, N)` float64: for each place, the Grams of all parameters that `place` maps to it; drops the rows.

        Args:
            place: Place by the id of the parameter.
            count: Number of places.
        """
        contractor = Contractor(self.rollouts, 1, None)
        for owner in self.owners:
            rows, self._rows[owner] = self._rows[owner], None
            assert rows is not None
            step = rows_at_a_time(self.rollouts, rows.device)
            roots = None if self.diagonal is None else self.diagonal.flat_root(self._parameters[owner]).split(step)
            for number, part in enumerate(rows.split(step, 1)):
                if roots is not None:
                    part = scaled_(part, roots[number])
                # GPU products number elements with 32 bits: rows far apart must come together first
                contractor.contract(part.contiguous() if part.is_cuda else part, None, owner=owner)
        return contractor.grams(place, count)[:, 0]
