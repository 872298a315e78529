"""Tables of influence.npz, computed with numpy alone.

python summarise.py            print the table
python summarise.py --write    put it between its marks in README.md

All steps, seeds and held-out problems of a setting are pooled. *Correlation* is Pearson's between prediction and
change. *Slope* is that of the regression of the change on the prediction through the origin, 1 if the prediction is
calibrated. *Share explained* is `1 − Σ(change − prediction)² / Σ change²`: 1 if exact, 0 if no better than predicting
no change. *Same sign* is the share of steps in which the mean over held-out problems moved in the predicted direction.
Intervals are 95 % percentile intervals over 1000 bootstrap resamples of seeds, and of steps within each drawn seed.
The second table is about the expected reward `π(solution)` in place of its logarithm. The third compares preconditioned
with plain K on the same resamples; *within a step* is Pearson's over held-out problems in one step, averaged over
steps: whether the prediction orders the problems.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
RESAMPLES = 1000
PREDICTIONS = {"plain": "plain K", "preconditioned": "preconditioned K", "first_order": "first order, the step itself"}


def stored() -> dict[str, dict[str, np.ndarray]]:
    """Setting → name → `(S, T, H)`: seeds, steps, held-out problems; the gaps are `(S,)`."""
    found: dict[str, dict[str, list[np.ndarray]]] = {}
    with np.load(HERE / "influence.npz") as file:
        for key in file.files:
            setting, _, name = key.split("/")
            found.setdefault(setting, {}).setdefault(name, []).append(file[key].astype(float))
    return {setting: {n: np.stack(rows) for n, rows in arrays.items()} for setting, arrays in found.items()}


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's, over all entries."""
    return float(np.corrcoef(x.ravel(), y.ravel())[0, 1])


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """Of the regression of `y` on `x` through the origin."""
    return float((x * y).sum() / (x * x).sum())


def explained(x: np.ndarray, y: np.ndarray) -> float:
    """`1 − Σ(y − x)² / Σ y²`."""
    return float(1 - ((y - x) ** 2).sum() / (y * y).sum())


def same_sign(x: np.ndarray, y: np.ndarray) -> float:
    """Share of steps whose mean has the sign of the predicted mean."""
    return float((np.sign(x.mean(-1)) == np.sign(y.mean(-1))).mean())


def correlation_within(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's over the held-out problems of each step; the mean over steps."""
    x, y = (values - values.mean(-1, keepdims=True) for values in (x, y))
    return float(((x * y).sum(-1) / np.sqrt((x * x).sum(-1) * (y * y).sum(-1))).mean())


MEASURES = {"correlation": correlation, "slope": slope, "share explained": explained, "same sign": same_sign}


def as_reward(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Predicted and realised change of the expected reward, if the stored solution is the only right one.

    The expected reward is then `J = π(solution)`. To first order `ΔJ = π Δ log π`; it changed by `π (e^{Δ log π} - 1)`.
    """
    chance = np.exp(arrays["start"])
    predicted = {key: chance * arrays[key] for key in PREDICTIONS}
    return predicted | {"realised": chance * np.expm1(arrays["realised"])}


def resamples(seeds: int, steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Indices of drawn seeds `(S, 1)` and of steps drawn for each `(S, T)`."""
    rng = np.random.default_rng(0)
    return [(rng.integers(seeds, size=(seeds, 1)), rng.integers(steps, size=(seeds, steps))) for _ in range(RESAMPLES)]


def with_interval(values: Sequence[float] | np.ndarray, value: float) -> str:
    """A value and the interval of its resamples."""
    low, high = np.percentile(values, [2.5, 97.5])
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def calibration_table(of_reward: bool = False) -> str:
    """Every prediction of every setting against the realised change, of log-probability or of expected reward."""
    lines = [["setting", "prediction", *MEASURES], ["---"] * (2 + len(MEASURES))]
    for setting, arrays in stored().items():
        arrays = as_reward(arrays) if of_reward else arrays
        change = arrays["realised"]
        draws = resamples(*change.shape[:2])
        for key, name in PREDICTIONS.items():
            if key == "preconditioned" and setting.startswith("sgd"):
                continue  # the same as plain
            cells = [setting, name]
            for measure in MEASURES.values():
                values = [measure(arrays[key][at], change[at]) for at in draws]
                cells.append(with_interval(values, measure(arrays[key], change)))
            lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def comparison_table() -> str:
    """Preconditioned minus plain K for AdamW, of log-probability and of reward, and in how many seeds it is higher."""
    head = ["setting", "change of", "measure", "plain K", "preconditioned K", "difference", "higher in"]
    lines = [head, ["---"] * len(head)]
    for setting, arrays in stored().items():
        for of, known in (("log π", arrays), ("reward", as_reward(arrays))):
            for name, measure in {"correlation": correlation, "correlation within a step": correlation_within}.items():
                if setting.startswith("adamw"):
                    lines.append([setting, of, name, *compared(known, measure)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def compared(arrays: dict[str, np.ndarray], measure: Callable[[np.ndarray, np.ndarray], float]) -> list[str]:
    """A measure of plain K, that of preconditioned K, their difference, and the seeds in which it is above 0."""
    change = arrays["realised"]
    plain, conditioned = (
        np.array(
            [measure(arrays[key][at], change[at]) for at in [..., *range(len(change)), *resamples(*change.shape[:2])]]
        )
        for key in ("plain", "preconditioned")
    )  # all seeds, each seed, each resample
    gain = conditioned - plain
    alone, drawn = gain[1 : len(change) + 1], gain[len(change) + 1 :]
    higher = f"{(alone > 0).sum()} of {len(change)} seeds"
    return [f"{plain[0]:.2f}", f"{conditioned[0]:.2f}", with_interval(drawn, gain[0]), higher]


def runs_table() -> str:
    """Size of the changes, and the checks against central differences."""
    head = [
        "setting",
        "seeds × steps",
        "held-out log π, first and last step",
        "rms change per step",
        "largest gap, plain K",
        "largest gap, preconditioned K",
    ]
    lines = [head, ["---"] * len(head)]
    for setting, arrays in stored().items():
        seeds, steps, _ = arrays["realised"].shape
        start, rms = arrays["start"].mean((0, 2)), np.sqrt((arrays["realised"] ** 2).mean())
        gaps = [f"{arrays[f'gap_{key}'].max():.0e}" for key in ("plain", "preconditioned")]
        lines.append([setting, f"{seeds} × {steps}", f"{start[0]:.2f}, {start[-1]:.2f}", f"{rms:.3f}", *gaps])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


TABLES = {
    "calibration": calibration_table,
    "reward": lambda: calibration_table(of_reward=True),
    "comparison": comparison_table,
    "runs": runs_table,
}


def filled(text: str) -> str:
    """The page with every table computed anew between its marks."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{make()}\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    """Print the tables, or write them into README.md."""
    page = HERE / "README.md"
    if "--write" in sys.argv:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n\n".join(f"## {name}\n\n{make()}" for name, make in TABLES.items()))


if __name__ == "__main__":
    main()
