"""A short seeded sketch of every score, or of a whole gradient, for comparing directions between steps and runs.

The Gram of one call cannot compare its scores with those of another call. Sketches can: `s_i = S ψ_i` with one random
linear map `S` of `m` rows, so `⟨s_i, s_j⟩` estimates `⟨ψ_i, ψ_j⟩` whenever both have the same seed. The map is linear:
the sketch of an update `Σ_i w_i ψ_i` is `Σ_i w_i s_i`. `gradient_sketch` gives it from the gradient itself.

A parameter is read as a matrix `(p, q)`: `q` is its last axis, `p` all others (a vector is one row). Element `(i, j)`
is added with sign `σ(i) τ(j)` to coordinate `h(i) + k(j) mod m`; signs and places are independent and uniform, drawn
for each index `i` and `j` from SHAKE-128 of seed, name and axis. So the map depends on seed, `m`, name and shape alone:
not on the batch, the device, the rule that covered a parameter, nor the version of torch. For a gradient
`G = Σ_t a_t ⊗ b_t` it needs the factors only: the sketch of an outer product is the circular convolution of the two
sketched factors, a product after a Fourier transform (Pagh 2013; Pham and Pagh 2013).

The estimate is unbiased, with variance at most `(6 + 4/m)/m · |ψ|²|ψ'|²`, and nearly `2/m · |ψ|²|ψ'|²` for scores
spread over many parameters. `docs/gram.md` has the proof.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scoregram.checks import fail
from scoregram.gram.contract import Factors, Lookup, Use, rows_at_a_time
from scoregram.gram.head import HeadUse
from scoregram.gram.model import is_distributed, model_inside, sharded_modules, survey

BYTES = 4
"""Random bytes for each index: one bit for the sign, 31 for the place."""


@dataclass(frozen=True)
class Sketch:
    """The settings of a sketch; two sketches can be compared if their settings are equal."""

    features: int = 1024
    """Length `m` of the sketch of one rollout."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("features", "seed"):
            if not isinstance(getattr(self, name), Integral):
                fail("Sketch", f"{name} must be a whole number", repr(getattr(self, name)), "Pass an int.")
        if self.features < 1:
            fail("Sketch", "features must be at least 1", self.features, "Pass the length of a sketch, such as 1024.")


@dataclass(frozen=True)
class Hash:
    """Place and sign of every index along one axis of a parameter."""

    place: Tensor  # (n,) in 0 … m-1
    sign: Tensor  # (n,) int8, 1 or -1

    @staticmethod
    def of(sketch: Sketch, name: str, axis: str, size: int, device: torch.device) -> "Hash":
        """The hash of `size` indices; a longer axis of the same name starts with the same values."""
        key = f"scoregram sketch|{sketch.seed}|{axis}|{name}".encode()
        stream = bytearray(hashlib.shake_128(key).digest(BYTES * max(size, 1)))
        words = torch.frombuffer(stream, dtype=torch.int32)[:size].to(torch.int64) & 0xFFFFFFFF
        sign = (1 - 2 * (words & 1)).to(torch.int8)
        return Hash(_on_device((words >> 1).remainder(sketch.features), device), _on_device(sign, device))

    @staticmethod
    def of_matrix(sketch: Sketch, name: str, parameter: Tensor) -> "tuple[Hash, Hash]":
        """The hashes of the rows and columns of a parameter, read as a matrix `(p, q)`; `q` is its last axis."""
        width = parameter.shape[-1] if parameter.ndim else 1
        rows = Hash.of(sketch, name, "rows", parameter.numel() // max(width, 1), parameter.device)
        return rows, Hash.of(sketch, name, "columns", width, parameter.device)

    def at(self, index: slice | Tensor) -> "Hash":
        """The hash of some of the indices."""
        return Hash(self.place[index], self.sign[index])

    def sketched(self, values: Tensor, features: int) -> Tensor:
        """Values `(…, n)` added with their signs at their places: `(…, m)`, in float32 or wider."""
        flat = values.reshape(-1, values.shape[-1])
        signed = flat.to(torch.promote_types(flat.dtype, torch.float32)) * self.sign
        sums = signed.new_zeros(len(flat), features).index_add_(1, self.place, signed)
        return sums.view(*values.shape[:-1], features)


def _on_device(values: Tensor, device: torch.device) -> Tensor:
    """Values of the CPU on a device. From pinned memory, the copy to a GPU does not wait for the work before it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


class Sketcher:
    """Sketches of one pass, parameter by parameter, so that those of a replayed parameter can be dropped."""

    def __init__(self, sketch: Sketch, parameters: Mapping[str, Tensor], rollouts: int) -> None:
        """Take the settings, the trainable parameters by name, and the number of rollouts."""
        self.sketch = sketch
        self.rollouts = rollouts
        self.made: dict[int, Tensor] = {}
        """`(N, m)` sketch of each parameter's part of the scores, by the parameter's id."""
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._hashes: dict[int, tuple[Hash, Hash]] = {}

    def hashes(self, parameter: Tensor) -> tuple[Hash, Hash]:
        """The hashes of the rows and columns of a parameter, read as a matrix `(p, q)`; `q` is its last axis."""
        if id(parameter) not in self._hashes:
            self._hashes[id(parameter)] = Hash.of_matrix(self.sketch, self._names[id(parameter)], parameter)
        return self._hashes[id(parameter)]

    @torch.no_grad()
    def add_uses(self, parameter: Tensor, view: Tensor, uses: Sequence[Use]) -> None:
        """Add the gradients of a region of a parameter, which are the sum of its uses."""
        sides = self.sides(parameter, view)
        for use in uses:
            if sides is None:
                self._add(parameter, self._element_by_element(parameter, view, use))
            elif isinstance(use, HeadUse):
                self._add(parameter, self._convolved(self._of_vocabulary(use, sides[0]), use.hidden, sides[1]))
            elif isinstance(use, Lookup):
                self._add(parameter, self._convolved(self._of_ids(use, sides[0]), use.g, sides[1]))
            elif isinstance(use, Factors):
                left = sides[0] if use.rows is None else sides[0].at(use.rows)
                self._add(parameter, self._convolved(use.a, use.b, sides[1], left))
            else:
                self._add(parameter, self._element_by_element(parameter, view, use))

    @torch.no_grad()
    def add_rows(self, parameter: Tensor, rows: Tensor) -> None:
        """Add per-rollout gradients `(N, D)` of a parameter."""
        step = rows_at_a_time(self.rollouts, rows.device)
        for start in range(0, rows.shape[1], step):
            part = rows[:, start : start + step]
            index = torch.arange(start, start + part.shape[1], device=rows.device)
            self._add(parameter, self.elements(parameter, index).sketched(part, self.sketch.features))

    def forget(self, parameter: Tensor) -> None:
        """Drop the sketch of a parameter."""
        self.made.pop(id(parameter), None)

    def total(self) -> Tensor:
        """The sketch `(N, m)` of every score, float32 on the CPU."""
        total = torch.zeros(self.rollouts, self.sketch.features, dtype=torch.float64)
        if self.made:
            first = next(iter(self.made.values()))
            total = torch.stack([part.to(first.device) for part in self.made.values()]).sum(0, dtype=torch.float64)
        return total.cpu().to(torch.float32)

    # Where a region lies in its parameter

    def elements(self, parameter: Tensor, index: Tensor) -> Hash:
        """The hash of single elements of a parameter, given by their indices in its flattened form."""
        rows, columns = self.hashes(parameter)
        row, column = rows.at(index // len(columns.place)), columns.at(index % len(columns.place))
        return Hash((row.place + column.place) % self.sketch.features, row.sign * column.sign)

    def sides(self, parameter: Tensor, view: Tensor) -> tuple[Hash, Hash] | None:
        """The hashes along the two axes of a view; None if one of them mixes rows and columns of the parameter."""
        rows, columns = self.hashes(parameter)
        if parameter.ndim == 2 and view.shape == parameter.shape and view.stride() == parameter.stride():
            return rows, columns
        if not parameter.is_contiguous():
            return None
        width = len(columns.place)
        row, column = divmod(int(view.storage_offset()) - int(parameter.storage_offset()), width)
        for first, second in ((0, 1), (1, 0)):  # as it is stored, or transposed
            down, along = view.stride(first), view.stride(second)
            high, wide = view.shape[first], view.shape[second]
            if down % width == 0 and column + (wide - 1) * along < width:
                at_row = row + torch.arange(high, device=view.device) * (down // width)
                at_column = column + torch.arange(wide, device=view.device) * along
                down_side, along_side = rows.at(at_row), columns.at(at_column)
                return (down_side, along_side) if first == 0 else (along_side, down_side)
        return None

    # The sketch of one use

    def _add(self, parameter: Tensor, part: Tensor) -> None:
        known = self.made.get(id(parameter))
        self.made[id(parameter)] = part if known is None else known + part

    def _convolved(self, a: Tensor, b: Tensor, right: Hash, left: Hash | None = None) -> Tensor:
        """`Σ_t` of the circular convolutions of the sketches of `a` and `b` `(N, T, …)`.

        Without `left`, `a` is a sketch already. Tokens are summed in Fourier space, so one inverse transform suffices.
        """
        m = self.sketch.features
        step = rows_at_a_time(self.rollouts * (a.shape[2] + b.shape[2] + 4 * m), b.device)
        spectrum = None
        for start in range(0, b.shape[1], step):
            here = slice(start, start + step)
            sketched = a[:, here] if left is None else left.sketched(a[:, here], m)
            product = torch.fft.rfft(sketched) * torch.fft.rfft(right.sketched(b[:, here], m))
            spectrum = product.sum(1) if spectrum is None else spectrum + product.sum(1)
        if spectrum is None:
            return b.new_zeros(self.rollouts, m, dtype=torch.promote_types(b.dtype, torch.float32))
        return torch.fft.irfft(spectrum, n=m)

    def _of_vocabulary(self, use: HeadUse, rows: Hash) -> Tensor:
        """Sketched logit gradients `(N, C, m)`, without the rows that the use of a tied embedding covers."""
        if use.without is not None:
            rows = Hash(rows.place, rows.sign.masked_fill(use.without, 0))
        step = rows_at_a_time(use.hidden.shape[0] * use.hidden.shape[1], use.hidden.device)
        total = None
        for start in range(0, len(use.weight), step):
            here = slice(start, min(start + step, len(use.weight)))
            part = rows.at(here).sketched(use.logit_gradients(here), self.sketch.features)
            total = part if total is None else total.add_(part)
        assert total is not None, "a vocabulary is not empty"
        return total

    def _of_ids(self, use: Lookup, rows: Hash) -> Tensor:
        """Sketched unit vectors `(N, T, m)` of the rows that were looked up."""
        chosen = rows.at(use.ids.clamp(min=0))
        wide = torch.promote_types(use.g.dtype, torch.float32)
        sign = torch.where(use.ids >= 0, chosen.sign, 0).to(wide).unsqueeze(2)
        units = torch.zeros(*use.ids.shape, self.sketch.features, dtype=wide, device=use.g.device)
        return units.scatter_(2, chosen.place.unsqueeze(2), sign)

    def _element_by_element(self, parameter: Tensor, view: Tensor, use: Use) -> Tensor:
        """The sketch of any use of any view, from the gradients themselves, some rows at a time."""
        height, width = view.shape
        rows = torch.arange(height, device=view.device) if use.rows is None or isinstance(use, Lookup) else use.rows
        step = rows_at_a_time(self.rollouts * width, view.device)
        total = None
        for start in range(0, len(rows), step):
            stop = min(start + step, len(rows))
            element = self.elements(parameter, flat_index(parameter, view, rows[start:stop]))
            part = element.sketched(use.add_to(None, start, stop).flatten(1), self.sketch.features)
            total = part if total is None else total.add_(part)
        assert total is not None, "a weight is not empty"
        return total


def flat_index(parameter: Tensor, view: Tensor, rows: Tensor) -> Tensor:
    """Indices in the flattened parameter of the elements of some rows of a 2-D view, row after row."""
    offset = int(view.storage_offset()) - int(parameter.storage_offset())
    columns = torch.arange(view.shape[1], device=rows.device)
    stored = (offset + rows[:, None] * view.stride(0) + columns * view.stride(1)).reshape(-1)
    index = torch.zeros_like(stored)
    for size, stride in zip(parameter.shape, parameter.stride(), strict=True):
        index = index * size + stored // max(stride, 1) % size
    return index


# The sketch of a gradient


@torch.no_grad()
def gradient_sketch(gradients: Mapping[str, Tensor | None], sketch: Sketch | None = None) -> Float[Tensor, " features"]:
    """The sketch `S g` of a gradient, given parameter by parameter.

    The map is that of the scores: for `g = Σ_i w_i ψ_i` it is `Σ_i w_i s_i`. Element `(i, j)` of every parameter is
    first added to entry `h(i), k(j)` of one table `(m, m)`; the sketch is the sums over the entries of that table with
    the same `h + k mod m`. So each axis is hashed once per index and not once per element.

    Besides the gradients it needs `m²` float64 and one chunk of rows. It runs on the devices of the gradients, and the
    host waits for them once, at the end.

    Args:
        gradients: Name of a parameter, as in `named_parameters`, → its gradient in any floating dtype. None counts as
            zero.
        sketch: The settings; `Sketch()` if not given.

    Returns:
        `(m,)`, float64 on the CPU; all zeros without a gradient.

    Example:
        >>> gradient = {"w": torch.tensor([[3.0, 0.0], [0.0, 4.0]]), "b": None}
        >>> float(gradient_sketch(gradient, Sketch(features=64)).norm())
        5.0
    """
    sketch = Sketch() if sketch is None else sketch
    sums = [one.cpu() for one in _sums_by_device(gradients, sketch)]
    return sum(sums, torch.zeros(sketch.features, dtype=torch.float64))


def _sums_by_device(gradients: Mapping[str, Tensor | None], sketch: Sketch) -> list[Tensor]:
    """The sketch `(m,)` of the gradients on each device, there."""
    tables: dict[torch.device, Tensor] = {}
    for name, gradient in gradients.items():
        if gradient is None or not gradient.numel():
            continue
        whole = gradient if gradient.layout is torch.strided else gradient.to_dense()
        table = tables.get(whole.device)
        if table is None:
            table = whole.new_zeros(sketch.features, sketch.features, dtype=torch.float64)
            tables[whole.device] = table
        _add_to_table(table, whole, *Hash.of_matrix(sketch, name, whole))
    return [_coordinate_sums(table) for table in tables.values()]


def _add_to_table(table: Tensor, gradient: Tensor, rows: Hash, columns: Hash) -> None:
    """Add element `(i, j)` of a gradient, with its signs, to entry `h(i), k(j)` of a table, or to `k(j), h(i)`.

    The longer axis is summed first, a chunk of the shorter one at a time: what remains are `m` numbers for each index
    of the shorter axis, which costs little more than reading the gradient. Both entries lead to the same coordinate.
    """
    matrix, short, long = gradient.reshape(len(rows.place), len(columns.place)), rows, columns
    if len(rows.place) > len(columns.place):
        matrix, short, long = matrix.mT, columns, rows
    step = rows_at_a_time(4 * max(matrix.shape[1], len(table)), table.device)
    for start in range(0, len(matrix), step):
        here = short.at(slice(start, start + step))
        part = long.sketched(matrix[start : start + step], len(table))  # (step, m)
        table.index_add_(0, here.place, part.double() * here.sign[:, None])


def _coordinate_sums(table: Tensor) -> Tensor:
    """`(m,)`: for every `c`, the sum of the entries `a, b` of a table with `a + b ≡ c mod m`."""
    place = torch.arange(len(table), device=table.device)
    return table.gather(1, (place - place[:, None]).remainder(len(table))).sum(0)


def update_sketch(model: nn.Module, *, scale: float = 1.0) -> Float[Tensor, " features"] | None:
    """The sketch of the gradient that a model's next update applies: that in `.grad`, before clipping.

    Args:
        model: The model after its backward pass.
        scale: Factor of the loss in the backward pass; the gradient is divided by it.

    Returns:
        `(m,)`, float64 on the CPU. None if the parameters are sharded, so that no process holds the gradient, if no
        parameter has one, or if it is not finite.
    """
    inside = model_inside(model)
    if sharded_modules(inside):
        return None
    parameters = survey(inside).parameters
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    if all(gradient is None for gradient in gradients.values()) or any(map(is_distributed, parameters.values())):
        return None
    made = gradient_sketch(gradients) / scale
    return made if bool(made.isfinite().all()) else None
