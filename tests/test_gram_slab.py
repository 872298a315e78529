"""Several weights in one launch: columns, owners, sums and groups, with the kernels' arithmetic in plain PyTorch.

The kernels themselves run in `test_gram_gpu.py`. Here a slow twin of each, written from its docstring, takes its place.
"""

import pytest
import torch

from scoregram.gram import contract, slab
from scoregram.gram.slab import FUSED_VECTORS, PAIR_ROWS, TILE_COLUMNS, HalfContractor, Segment, Shares, Slab, Tile

CPU = torch.device("cpu")


class SlowContractor(HalfContractor):
    """The kernels as loops over programs, tiles and rows."""

    def launch(self, tile, rows, sums, segments):  # noqa: D102
        shares = Shares.of(segments, TILE_COLUMNS * tile.stack, 5, CPU)
        spans = -(-self.rollouts // tile.span)
        partial = torch.zeros(len(shares.first), spans, tile.size, tile.size, dtype=torch.float64)
        for program, (first, end) in enumerate(zip(shares.first.tolist(), shares.end.tolist(), strict=True)):
            assert first < end
            for span in range(spans):
                here = rows[span * tile.span :][: tile.span]
                partial[program, span] = self.program(tile, here, span, sums, first, end)
        owner = torch.repeat_interleave(torch.arange(len(segments)), shares.per_segment)
        return torch.stack([partial[owner == index].sum(0) for index in range(len(segments))])

    def program(self, tile, rows, span, sums, first, end):  # noqa: D102
        total = torch.zeros(tile.size, tile.size, dtype=torch.float64)
        for start in range(first, end, TILE_COLUMNS * tile.stack):
            values = torch.zeros(tile.size, TILE_COLUMNS, dtype=torch.float64)
            for row in range(tile.size):
                rollout, left = row % tile.padded, start + row // tile.padded * TILE_COLUMNS
                if rollout < len(rows):
                    value = rows[rollout, left : min(left + TILE_COLUMNS, end)]
                    values[row, : len(value)] = value
            total += values @ values.T
            if sums is not None and self._fused is not None:
                mixed = self._fused[:, span].double().sum(0) @ values
                for row in range(len(mixed)):
                    vector, left = row % tile.vectors, start + row // tile.vectors * TILE_COLUMNS
                    if vector < sums.shape[1]:
                        place = sums[span, vector, left : min(left + TILE_COLUMNS, end)]
                        place.copy_(mixed[row, : len(place)])
        return total

    def launch_sums(self, rows, out):  # noqa: D102
        assert self.weights is not None
        out.copy_(self.weights.double() @ rows.double())

    def launch_pairs(self, pairs, rows, sums, segments):  # noqa: D102
        found = torch.zeros(len(segments), pairs.count, PAIR_ROWS, PAIR_ROWS, dtype=torch.float64)
        for index, segment in enumerate(segments):
            values = rows[:, segment.start : segment.start + segment.width].double()
            for pair in range(pairs.count):
                limit = int(pairs.limit[pair])
                a, b = (values[int(start[pair]) : limit][:PAIR_ROWS] for start in (pairs.left, pairs.right))
                found[index, pair, : len(a), : len(b)] = a @ b.T
                tile = int(pairs.own_tile[pair])
                assert (tile >= 0) == bool(pairs.left[pair] == pairs.right[pair])
                if sums is not None and self._fused is not None and tile >= 0:
                    mixed = self._fused[int(pairs.left[pair]) : limit][:PAIR_ROWS].double().T @ a
                    place = sums.flatten(0, 1)[2 * tile * sums.shape[1] :][: 2 * sums.shape[1]]
                    place[:, segment.start : segment.start + segment.width] = mixed[: len(place)]
        return found


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(slab, "resident_programs", lambda device: 5)
    monkeypatch.setattr(slab, "SLAB_ELEMENTS", 1 << 14)
    for name, value in (
        ("is_half_on_gpu", lambda rows: rows.dtype == torch.bfloat16),
        ("HalfContractor", SlowContractor),
    ):
        monkeypatch.setattr(contract, name, value)


@pytest.mark.parametrize(
    ("rollouts", "groups"),
    [
        (1, 1),
        (2, 1),
        (3, 1),
        (8, 2),
        (16, 1),
        (24, 3),
        (64, 8),
        (66, 1),
        (80, 8),
        (96, 8),
        (130, 2),
        (257, 1),
        (390, 3),
    ],
)
@pytest.mark.parametrize("vectors", [0, 1, 8, 9, 20])
def test_grams_and_sums_of_several_weights(rollouts, groups, vectors):
    torch.manual_seed(0)
    weights = torch.randn(vectors, rollouts) if vectors else None
    contractor = contract.Contractor(rollouts, groups, weights)
    received, expected = {}, {}
    for owner, (p, q) in enumerate([(8, 16), (16, 8), (4, 16), (7, 9), (32, 40), (8, 8)]):
        # Whole numbers up to 7: sums of three products are exact in bfloat16, whatever order a machine adds them in.
        a, b = (torch.randint(-7, 8, (rollouts, 3, width)).bfloat16() for width in (p, q))
        rows = torch.einsum("ntp,ntq->npq", a.double(), b.double()).flatten(1)
        expected[owner] = rows, (p, q)
        given = {"owner": owner, "out_dtype": torch.float32}
        contractor.stream(
            [contract.Factors(a, b)], p, **given, receive=lambda sums, owner=owner: received.update({owner: sums})
        )
    contractor.forget(2)
    assert contractor.owners() == {0, 1, 3, 4, 5}
    grams = contractor.grams(dict.fromkeys(range(6), 0) | {3: 1}, 2)
    size = rollouts // groups
    for place, owners in enumerate([(0, 1, 4, 5), (3,)]):
        whole = torch.stack([expected[owner][0] @ expected[owner][0].T for owner in owners]).sum(0)
        for group in range(groups):
            here = slice(group * size, (group + 1) * size)
            torch.testing.assert_close(grams[place, group], whole[here, here], rtol=1e-5, atol=1e-5)
    assert set(received) == (set(expected) if vectors else set())
    for owner, sums in received.items():
        assert weights is not None
        rows, shape = expected[owner]
        exact = (weights.double() @ rows).view(-1, *shape)
        assert float((sums.double() - exact).norm() / exact.norm()) < 2e-5


@pytest.mark.parametrize("unit", [64, 128, 4096])
@pytest.mark.parametrize("widths", [(64,), (8192, 64, 64), (100_000,), (640,) * 9, (64, 1 << 20)])
@pytest.mark.parametrize("programs", [1, 5, 396])
def test_programs_share_the_columns(unit, widths, programs):
    starts = [sum(widths[:index]) for index in range(len(widths))]
    segments = tuple(Segment(start, width) for start, width in zip(starts, widths, strict=True))
    shares = Shares.of(segments, unit, programs, CPU)
    assert len(shares.first) <= max(programs, len(widths))
    seen = torch.zeros(sum(widths), dtype=torch.long)
    owner = torch.repeat_interleave(torch.arange(len(widths)), shares.per_segment).tolist()
    for first, end, index in zip(shares.first.tolist(), shares.end.tolist(), owner, strict=True):
        assert segments[index].start <= first < end <= segments[index].start + segments[index].width
        assert (first - segments[index].start) % unit == 0
        seen[first:end] += 1
    assert bool((seen == 1).all())


def test_a_slab_contracts_when_it_is_full_and_only_then():
    torch.manual_seed(0)
    half = SlowContractor(2, 1, torch.ones(1, 2), torch.bfloat16, CPU)
    waiting = Slab(half, torch.zeros(2, 256, dtype=torch.bfloat16), torch.float32)
    received = []
    for owner in range(3):
        waiting.reserve(2, 64, owner, received.append).fill_(owner + 1.0)
        assert half.owners == ([] if owner < 2 else [0, 1])
    assert [float(sums.mean()) for sums in received] == [2.0, 4.0]
    waiting.flush()
    waiting.flush()
    owners, grams = half.take()
    assert owners == [0, 1, 2] and [float(gram[0, 0, 1]) for gram in grams] == [128.0, 4 * 128.0, 9 * 128.0]
    assert half.take()[0] == [] and len(half.take()[1]) == 0
    waiting.reserve(2, 64, 7, received.append).fill_(1.0)
    waiting.flush()
    owners, grams = half.take()
    assert owners == [7] and len(grams) == 1 and len(received) == 4


def test_weights_of_sums_in_float16_do_not_go_through_the_tensor_cores():
    weights = torch.tensor([[1e-7, 3e-6]])
    high, low = Tile.of(2, 1).stacked_weights(weights, torch.float16)
    kept = (high.float() + low.float())[0, :1, :2]
    assert float(((kept - weights) / weights).abs().max()) > 1e-3, "float16 holds no weight this small"
    assert HalfContractor(2, 1, weights, torch.float16, CPU)._fused is None
    assert HalfContractor(2, 1, weights, torch.bfloat16, CPU)._fused is not None
    assert HalfContractor(2, 1, weights.expand(FUSED_VECTORS + 1, 2), torch.bfloat16, CPU)._fused is None
