"""Tables of influence.npz, computed with numpy alone.

python summarise.py            print the table
python summarise.py --write    put it between its marks in README.md

All steps, seeds and held-out problems of a setting are pooled. *Correlation* is Pearson's between prediction and
change. *Slope* is that of the regression of the change on the prediction through the origin, 1 if the prediction is
calibrated. *Share explained* is `1 − Σ(change − prediction)² / Σ change²`: 1 if exact, 0 if no better than predicting
no change. *Same sign* is the share of steps in which the mean over held-out problems moved in the predicted direction.
Intervals are 95 % percentile intervals over 1000 bootstrap resamples of steps. The second table is about the expected
reward `π(solution)` in place of its logarithm.
"""

import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
RESAMPLES = 1000
PREDICTIONS = {"plain": "plain K", "preconditioned": "preconditioned K", "first_order": "first order, the step itself"}


def stored() -> dict[str, dict[str, np.ndarray]]:
    """Setting → name → `(steps of all seeds, H)`; `gap` has one entry per seed."""
    found: dict[str, dict[str, list[np.ndarray]]] = {}
    with np.load(HERE / "influence.npz") as file:
        for key in file.files:
            setting, _, name = key.split("/")
            found.setdefault(setting, {}).setdefault(name, []).append(np.atleast_1d(file[key]).astype(float))
    return {setting: {n: np.concatenate(rows) for n, rows in arrays.items()} for setting, arrays in found.items()}


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
    return float((np.sign(x.mean(1)) == np.sign(y.mean(1))).mean())


MEASURES = {"correlation": correlation, "slope": slope, "share explained": explained, "same sign": same_sign}


def as_reward(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Predicted and realised change of the expected reward, if the stored solution is the only right one.

    The expected reward is then `J = π(solution)`. To first order `ΔJ = π Δ log π`; it changed by `π (e^{Δ log π} - 1)`.
    """
    chance = np.exp(arrays["start"])
    predicted = {key: chance * arrays[key] for key in PREDICTIONS}
    return predicted | {"realised": chance * np.expm1(arrays["realised"])}


def calibration_table(of_reward: bool = False) -> str:
    """Every prediction of every setting against the realised change, of log-probability or of expected reward."""
    lines = [["setting", "prediction", *MEASURES], ["---"] * (2 + len(MEASURES))]
    for setting, arrays in stored().items():
        arrays = as_reward(arrays) if of_reward else arrays
        change = arrays["realised"]
        draws = np.random.default_rng(0).integers(len(change), size=(RESAMPLES, len(change)))
        for key, name in PREDICTIONS.items():
            if key == "preconditioned" and setting.startswith("sgd"):
                continue  # the same as plain
            cells = [setting, name]
            for measure in MEASURES.values():
                ends = np.percentile([measure(arrays[key][at], change[at]) for at in draws], [2.5, 97.5])
                cells.append(f"{measure(arrays[key], change):.2f} [{ends[0]:.2f}, {ends[1]:.2f}]")
            lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def runs_table() -> str:
    """Size of the changes, and the check against the engine."""
    head = [
        "setting",
        "steps",
        "held-out log π, first and last step",
        "rms change per step",
        "largest gap to `cross_gram`",
    ]
    lines = [head, ["---"] * len(head)]
    for setting, arrays in stored().items():
        seeds = len(arrays["gap"])
        start = arrays["start"].reshape(seeds, -1, arrays["start"].shape[1]).mean((0, 2))
        rms = np.sqrt((arrays["realised"] ** 2).mean())
        values = [f"{len(arrays['realised'])}", f"{start[0]:.2f}, {start[-1]:.2f}", f"{rms:.3f}"]
        lines.append([setting, *values, f"{arrays['gap'].max():.0e}"])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


TABLES = {"calibration": calibration_table, "reward": lambda: calibration_table(of_reward=True), "runs": runs_table}


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
