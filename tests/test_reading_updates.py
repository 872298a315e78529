"""Cosines between the gradients of steps, against loops over pairs and over all signs."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from scoregram.reading import UpdateCosines, update_cosines, updates
from scoregram.runs import RunWriter, UpdateRecord, open_run
from tests.run_cases import create

FEATURES = 16


def write_sketches(folder: Path, sketches: dict[int, torch.Tensor]) -> UpdateCosines:
    writer: RunWriter
    with create(folder) as writer:
        for step, sketch in sketches.items():
            writer.write_updates(step, [UpdateRecord(step=step, sketch=sketch)])
    return update_cosines(open_run(folder))


def drawn(steps: list[int], seed: int = 0, common: float = 0.5) -> dict[int, torch.Tensor]:
    """Sketches of steps that share a direction."""
    generator = torch.Generator().manual_seed(seed)
    shared = common * torch.randn(FEATURES, generator=generator)
    return {step: shared + torch.randn(FEATURES, generator=generator) for step in steps}


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


def test_the_matrix_holds_the_cosine_of_every_two_steps(tmp_path):
    sketches = drawn([2, 4, 6, 9])
    found = write_sketches(tmp_path / "r", sketches)
    matrix = found.matrix(60)
    assert matrix.steps == (2, 4, 6, 9) and matrix.measured == 4 and found.sketch_error == 0.25
    for row, a in zip(matrix.values, sketches.values(), strict=True):
        assert row == pytest.approx([cosine(a, b) for b in sketches.values()], abs=1e-12)


def test_a_matrix_of_many_steps_is_thinned_evenly_with_both_ends(tmp_path):
    sketches = drawn(list(range(1, 100)))
    matrix = write_sketches(tmp_path / "r", sketches).matrix(8)
    assert matrix.steps == (1, 15, 29, 43, 57, 71, 85, 99) and matrix.measured == 99
    assert matrix.values[1][3] == pytest.approx(cosine(sketches[15], sketches[43]), abs=1e-12)


def test_zero_gradients_are_left_out_and_the_last_part_of_a_step_counts(tmp_path):
    sketches = drawn([1, 2, 3, 4])
    sketches[2] = torch.zeros(FEATURES)
    with create(tmp_path / "r") as writer:
        for step, sketch in sketches.items():
            if step == 3:
                writer.write_updates(step, [UpdateRecord(step=step, sketch=torch.ones(FEATURES))])
            writer.write_updates(step, [UpdateRecord(step=step, sketch=sketch)])
    matrix = update_cosines(open_run(tmp_path / "r")).matrix(9)
    assert matrix.steps == (1, 3, 4) and matrix.values[0][1] == pytest.approx(cosine(sketches[1], sketches[3]))


@pytest.mark.parametrize("steps", [[], [7]])
def test_a_run_with_few_or_no_sketches_has_no_pairs(steps, tmp_path):
    found = write_sketches(tmp_path / "r", drawn(steps))
    assert list(found.matrix(5).steps) == steps and found.decay().pairs == ()
    assert math.isnan(found.sketch_error) == (not steps)


def class_of(distance: float) -> int:
    """Classes of distances: 1, 2, 3, 4, 5 to 6, 7 to 8, 9 to 12, 13 to 16, 17 to 24."""
    ranges = [range(2), [2], [3], [4], [5, 6], [7, 8], range(9, 13), range(13, 17), range(17, 25), range(25, 33)]
    return next(place for place, members in enumerate(ranges) if round(distance) in members)


@pytest.mark.parametrize("rows", [3, 512])
@pytest.mark.parametrize(
    ("steps", "unit"),
    [
        (list(range(1, 30)), 1),
        (list(range(2, 61, 2)), 2),
        ([1, *range(10, 250, 10)], 10),
        ([3, 4, 5, 9, 13, 17, 21], 4),
    ],
)
def test_means_by_distance_are_those_of_a_loop_over_pairs(steps, unit, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(updates, "ROWS", rows)
    sketches = drawn(steps)
    classes: dict[int, list[tuple[int, float]]] = {}
    for a, b in itertools.combinations(steps, 2):
        classes.setdefault(class_of((b - a) / unit), []).append((b - a, cosine(sketches[a], sketches[b])))
    kept = [members for _, members in sorted(classes.items()) if len(members) >= 5]
    decay = write_sketches(tmp_path / "r", sketches).decay()
    assert decay.pairs == tuple(len(members) for members in kept) and len(kept) > 1
    for place, members in enumerate(kept):
        distances, cosines = np.array(members).T
        assert decay.distance[place] == pytest.approx(distances.mean())
        assert decay.mean[place] == pytest.approx(cosines.mean(), abs=1e-12)


def test_the_error_of_the_null_is_that_over_all_signs(tmp_path):
    sketches = drawn(list(range(6)))
    decay = write_sketches(tmp_path / "r", sketches).decay()
    means = []
    for signs in itertools.product((-1, 1), repeat=6):
        pairs = [signs[i] * signs[i + 1] * cosine(sketches[i], sketches[i + 1]) for i in range(5)]
        means.append(sum(pairs) / 5)
    assert decay.pairs[0] == 5 and abs(np.mean(means)) < 1e-12
    assert decay.null_error[0] == pytest.approx(np.std(means), rel=1e-12)


def test_noise_in_few_directions_lies_in_the_band_though_not_within_the_error_of_the_sketch():
    """As the gradients of a model do: their noise has few directions, so unrelated ones have large cosines."""
    generator = np.random.default_rng(3)
    runs, outside, sketch_outside = 40, [], []
    for _ in range(runs):
        noise = generator.normal(size=(30, 20)) @ np.eye(20, 1024)
        decay = UpdateCosines(np.arange(30), noise / np.linalg.norm(noise, axis=1, keepdims=True)).decay()
        pairs = np.array(decay.pairs)
        outside.append(np.abs(decay.mean) > 2 * np.array(decay.null_error))
        sketch_outside.append(np.abs(decay.mean) > 2 / np.sqrt(1024 * pairs))
    rates = np.mean(outside, axis=1)  # of every run, whose classes are not independent
    assert np.mean(rates) < 0.05 + 4 * np.std(rates) / math.sqrt(runs)
    assert np.mean(sketch_outside) > 0.5


def test_a_shared_direction_lies_above_the_band(tmp_path):
    decay = write_sketches(tmp_path / "r", drawn(list(range(40)), common=1.0)).decay()
    assert all(mean > 2 * error for mean, error in zip(decay.mean[:6], decay.null_error[:6], strict=True))
