"""Tables of the training runs in this folder: numpy computes, pyarrow reads the files.

python summarise.py            print all tables
python summarise.py --write    put them between their marks in README.md

Definitions. A group has 8 rollouts with rewards 0 or 1, of which k are right; it is live if 0 < k < 8. Its advantages
are `A_i = r_i - mean(r)`. The effective rank is `(Σσ)² / Σσ²`, where σ² are the eigenvalues of `diag(A) K diag(A)`;
one below 1.2e-7 of the trace counts as zero, since K is stored as float32. The orthogonal null is the effective rank
of orthogonal scores with the same norms, `σ_i = |A_i| √K_ii`: a ceiling up to unequal norms. Two rollouts of a group
are the same text if their cosine is above 0.9995; *without repeats* keeps the first of each text.

The trend is the slope b of `log(rank / null) = a_k + b · step / 1000` over all live groups of a run, with one
constant for each k, so that a changing success rate cannot make a trend. Its interval is a bootstrap over measured
steps, since the groups of a step share a policy. Over seeds: mean slope, with the t-interval of the seeds where there
are two or more. The difference of two means over seeds has two intervals: by seed, the t-interval of the differences
between runs with the same seed (same order of prompts, starts taught apart); and Welch's, which takes all runs as
independent.
"""

import json
import sys
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq

HERE = Path(__file__).parent
METHODS = {"paper": "the paper's update", "grpo": "standardised GRPO"}
RANDOM = "random"
"""Control: standardised GRPO on rewards drawn by chance."""
TRAINED = METHODS | {RANDOM: "random rewards"}
"""What trained with Grams; in a run of `RANDOM`, a *right* rollout is one that was given a reward."""
CONTINUED = "continued"
"""Control: its folders hold test rewards after the last step alone; the start is that of `paper` with the same seed."""
NAMES = TRAINED | {CONTINUED: "continued imitation"}
KINDS = {"test, greedy": "greedy", "test": "sampled"}
"""Kind of an evaluation in the files → word for it in the tables."""
LAST = 1000
"""Steps of a run."""
PAIRS = ("right–right", "wrong–wrong", "right–wrong")
WINDOW = 250
SPLIT_WINDOW = 50
"""Steps in a window of `foretelling_table`."""
RESAMPLES = 1000
SAME_TEXT = 0.9995
SMALLEST_EIGENVALUE = 1.2e-7
T_QUANTILE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571}
"""97.5 % quantile of Student's t by degrees of freedom."""


class Groups(NamedTuple):
    """The training groups of a run, one entry per group in each array."""

    step: np.ndarray
    rewards: np.ndarray
    """`(groups, 8)`."""
    gram: np.ndarray
    """`(groups, 8, 8)`."""


def run_names() -> dict[str, list[str]]:
    """Folders of the runs by method, in the order of their seeds."""
    return {method: sorted(path.parent.name for path in HERE.glob(f"{method}-seed*/config.yaml")) for method in TRAINED}


@cache
def training_groups(run: str) -> Groups:
    """The groups of all measured steps."""
    table = pq.read_table(HERE / run / "groups.parquet", filters=[("kind", "=", "train")])
    gram = np.array(table["gram"].to_pylist(), dtype=float)
    size = int(np.sqrt(gram.shape[1]))
    rewards = np.array(table["rewards"].to_pylist(), dtype=float)
    return Groups(table["step"].to_numpy(), rewards, gram.reshape(-1, size, size))


@cache
def step_metrics(run: str) -> list[dict[str, float]]:
    """The scalars of all steps that were trained."""
    lines = (HERE / run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "reward" in row]


def test_rewards(run: str, kind: str, step: int) -> np.ndarray:
    """`(problems, rollouts)` rewards of an evaluation, problems in the order of their names."""
    filters = [("kind", "=", kind), ("step", "=", step)]
    table = pq.read_table(HERE / run / "groups.parquet", columns=["prompt_id", "rewards"], filters=filters)
    return np.array(table.sort_by("prompt_id")["rewards"].to_pylist(), dtype=float)


def rank_and_null(gram: np.ndarray, rewards: np.ndarray) -> tuple[float, float]:
    """Effective rank of a group's stacked gradients, and of orthogonal scores with the same norms."""
    advantages = rewards - rewards.mean()
    energy = np.linalg.eigvalsh(advantages[:, None] * gram * advantages)
    energy = energy[energy > SMALLEST_EIGENVALUE * energy.sum()]
    alone = advantages**2 * np.diagonal(gram)
    return tuple(float(np.sqrt(each).sum() ** 2 / each.sum()) for each in (energy, alone))


def cosines(gram: np.ndarray) -> np.ndarray:
    """Cosines between the scores of a group; a score of length 0 has cosine 0 with all others."""
    norms = np.sqrt(np.diagonal(gram))
    return gram / np.maximum(np.outer(norms, norms), np.finfo(float).tiny)


def first_of_each_text(gram: np.ndarray) -> np.ndarray:
    """Which rollouts of a group do not repeat an earlier one."""
    return ~np.tril(cosines(gram) > SAME_TEXT, -1).any(1)


@cache
def live_groups(run: str, repeats: bool = True) -> np.ndarray:
    """`(live groups, 4)`: step, k, effective rank and null. Without repeats, k and the group's size are those left."""
    rows = []
    for step, rewards, gram in zip(*training_groups(run), strict=True):
        kept = np.ones(len(rewards), bool) if repeats else first_of_each_text(gram)
        some = rewards[kept]
        if 0 < some.sum() < len(some):
            # with repeats removed, groups of one size and one k share a constant
            cell = some.sum() + 100 * len(some)
            rows.append((step, cell, *rank_and_null(gram[np.ix_(kept, kept)], some)))
    return np.array(rows)


def slope(rows: np.ndarray) -> float:
    """Slope of `log(rank / null)` per 1000 steps, with one constant for each cell."""
    step, cell, rank, null = rows.T
    x, y = step / 1000, np.log(rank / null)
    for each in np.unique(cell):
        here = cell == each
        x, y = np.where(here, x - x[here].mean(), x), np.where(here, y - y[here].mean(), y)
    return float(x @ y / (x @ x))


def over_steps(rows: np.ndarray, statistic: Callable[[np.ndarray], float]) -> tuple[float, float]:
    """95 % interval of a statistic over resampled measured steps."""
    draw = np.random.default_rng(0)
    steps = np.unique(rows[:, 0])
    where = [np.flatnonzero(rows[:, 0] == step) for step in steps]
    found = [
        statistic(rows[np.concatenate([where[at] for at in draw.integers(len(steps), size=len(steps))])])
        for _ in range(RESAMPLES)
    ]
    return tuple(np.percentile(found, [2.5, 97.5]))


def over_seeds(values: list[float]) -> str:
    """Mean and t-interval; the mean alone for one seed."""
    mean = np.mean(values)
    if len(values) < 2:
        return f"{mean:+.3f} (one seed)"
    half = T_QUANTILE[len(values) - 1] * np.std(values, ddof=1) / np.sqrt(len(values))
    return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows))


def windows_table() -> str:
    """What changes over training, in windows of steps."""
    head = ("run", "steps", "success", "live groups", "entropy a token", "rank", "null", "rank / null", "repeats")
    head += ("rms cosine", *PAIRS)
    rows = []
    for run in (name for names in run_names().values() for name in names):
        metrics, groups, live = step_metrics(run), training_groups(run), live_groups(run)
        for start in range(0, max(row["step"] for row in metrics), WINDOW):
            here = [row for row in metrics if start < row["step"] <= start + WINDOW]
            rank, null = live[(start < live[:, 0]) & (live[:, 0] <= start + WINDOW)][:, 2:].T
            inside = (start < groups.step) & (groups.step <= start + WINDOW)
            found = pair_cosines(groups.rewards[inside], groups.gram[inside])
            repeats = 1 - np.mean([first_of_each_text(gram).mean() for gram in groups.gram[inside]])
            rows.append(
                (
                    run,
                    f"{start + 1}–{start + WINDOW}",
                    f"{np.mean([row['reward'] for row in here]):.3f}",
                    f"{np.mean([row['live_groups'] / row['groups'] for row in here]):.2f}",
                    f"{-np.mean([row['token_log_prob'] for row in here]):.3f}",
                    f"{rank.mean():.2f}",
                    f"{null.mean():.2f}",
                    f"{(rank / null).mean():.3f}",
                    f"{repeats:.3f}",
                    f"{np.sqrt(np.mean(np.concatenate(list(found.values())) ** 2)):.3f}",
                    *(f"{found[pair].mean():+.3f}" for pair in PAIRS),
                )
            )
    return table(head, rows)


def pair_cosines(rewards: np.ndarray, grams: np.ndarray) -> dict[str, np.ndarray]:
    """Cosines between different texts of live groups, by which of the two are right."""
    found: dict[str, list[np.ndarray]] = {pair: [] for pair in PAIRS}
    for some, gram in zip(rewards, grams, strict=True):
        kept = first_of_each_text(gram)
        right, c = some[kept] > 0.5, cosines(gram[np.ix_(kept, kept)])
        if right.any() and not right.all():
            found["right–right"].append(c[np.ix_(right, right)][np.triu_indices(right.sum(), 1)])
            found["wrong–wrong"].append(c[np.ix_(~right, ~right)][np.triu_indices((~right).sum(), 1)])
            found["right–wrong"].append(c[np.ix_(right, ~right)].ravel())
    return {name: np.concatenate(parts) for name, parts in found.items()}


def cosine_table() -> str:
    """Mean cosines by which rollouts are right, minus their null: the same groups with the rewards permuted."""
    rows = []
    for run in (name for names in run_names().values() for name in names):
        found = permuted_differences(run)
        cells = []
        for pair in PAIRS:
            low, high = over_steps(found[pair], lambda rows: float(rows[:, 1].sum() / rows[:, 2].sum()))
            cells.append(f"{found[pair][:, 1].sum() / found[pair][:, 2].sum():+.3f} [{low:+.3f}, {high:+.3f}]")
        rows.append((run, *cells))
    return table(("run", *(f"{pair}, minus null" for pair in PAIRS)), rows)


@cache
def permuted_differences(run: str) -> dict[str, np.ndarray]:
    """For each kind of pair `(live groups, 3)`: step, sum of cosines minus its null, number of pairs.

    Under a random permutation of the rewards within a group every pair is equally likely to be of each kind, so the
    null of a mean cosine is the mean over all pairs of the group.
    """
    found: dict[str, list[tuple[float, float, int]]] = {pair: [] for pair in PAIRS}
    for step, rewards, gram in zip(*training_groups(run), strict=True):
        kept = first_of_each_text(gram)
        right, c = rewards[kept] > 0.5, cosines(gram[np.ix_(kept, kept)])
        if right.any() and not right.all():
            above = np.triu(np.ones_like(c, bool), 1)
            null = c[above].mean()
            kinds = (right[:, None] & right, ~right[:, None] & ~right, right[:, None] != right)
            for pair, kind in zip(PAIRS, kinds, strict=True):
                values = c[above & kind]
                found[pair].append((step, float((values - null).sum()), values.size))
    return {pair: np.array(rows) for pair, rows in found.items()}


def foretelling_table() -> str:
    """Rank correlation of the split in a window of steps with the change of entropy to the next one."""
    rows = []
    for run in (name for method in METHODS for name in run_names()[method]):
        split, entropy = split_and_entropy(run)
        trend = np.arange(len(split) - 1)
        change = np.diff(entropy)
        pairs = (split[:-1], change), (residuals(split[:-1], trend), residuals(change, trend))
        rows.append((run, f"{len(change)}", *(f"{rank_correlation(*pair):+.2f}" for pair in pairs)))
    return table(("run", "windows", "correlation", "without trends"), rows)


def split_and_entropy(run: str) -> tuple[np.ndarray, np.ndarray]:
    """In windows of 50 steps: minus the mean right–wrong cosine, and the entropy of a token."""
    groups, metrics = training_groups(run), step_metrics(run)
    split, entropy = [], []
    for start in range(0, LAST, SPLIT_WINDOW):
        inside = (start < groups.step) & (groups.step <= start + SPLIT_WINDOW)
        split.append(-pair_cosines(groups.rewards[inside], groups.gram[inside])["right–wrong"].mean())
        here = [row["token_log_prob"] for row in metrics if start < row["step"] <= start + SPLIT_WINDOW]
        entropy.append(-np.mean(here))
    return np.array(split), np.array(entropy)


def residuals(values: np.ndarray, trend: np.ndarray) -> np.ndarray:
    """`values` without their straight line in `trend`."""
    return values - np.polyval(np.polyfit(trend, values, 1), trend)


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's correlation of values without ties."""
    return float(np.corrcoef(*(values.argsort().argsort() for values in (first, second)))[0, 1])


def trend_table() -> str:
    """Slope of `log(rank / null)` at fixed k, run by run and over seeds."""
    rows = []
    for method, names in run_names().items():
        for repeats, label in ((True, "kept"), (False, "removed")):
            slopes = []
            for run in names:
                live = live_groups(run, repeats)
                slopes.append(slope(live))
                low, high = over_steps(live, slope)
                rows.append((run, label, str(len(live)), f"{slopes[-1]:+.3f} [{low:+.3f}, {high:+.3f}]"))
            if slopes:
                rows.append((f"**{TRAINED[method]}, over seeds**", label, "", over_seeds(slopes)))
    return table(("run", "repeated texts", "live groups", "slope per 1000 steps"), rows)


def t_quantile(freedom: float) -> float:
    """97.5 % quantile of Student's t for any positive degrees of freedom.

    With `t = √ν tan θ` the density is proportional to `cos(θ)^(ν - 1)`; its integral is taken on a fine grid.
    """
    angle = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angle).clip(0) ** (freedom - 1)
    mass = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    return float(np.sqrt(freedom) * np.tan(np.interp(0.95 * mass[-1], mass, angle)))


def welch(some: list[float], others: list[float]) -> str:
    """Difference of two means with Welch's t-interval."""
    parts = [np.var(values, ddof=1) / len(values) for values in (some, others)]
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (some, others), strict=True)
    )
    difference = np.mean(some) - np.mean(others)
    half = t_quantile(float(freedom)) * np.sqrt(sum(parts))
    return f"{difference:+.3f} [{difference - half:+.3f}, {difference + half:+.3f}]"


def random_trend_table() -> str:
    """Slopes with true rewards minus those with random ones, by seed and over seeds."""
    rows = []
    for method, (repeats, label) in product(METHODS, ((True, "kept"), (False, "removed"))):
        own, control = ([slope(live_groups(run, repeats)) for run in run_names()[made]] for made in (method, RANDOM))
        by_seed = [one - other for one, other in zip(own, control, strict=True)]
        each = ", ".join(f"{difference:+.3f}" for difference in by_seed)
        rows.append((f"{NAMES[method]} − {NAMES[RANDOM]}", label, each, over_seeds(by_seed), welch(own, control)))
    return table(("difference of slopes", "repeated texts", "by seed", "over seeds, by seed", "Welch"), rows)


def runs_and_controls() -> dict[str, list[str]]:
    """Folders of all runs that were evaluated, by what made them."""
    return run_names() | {CONTINUED: sorted(path.name for path in HERE.glob(f"{CONTINUED}-seed*"))}


@cache
def accuracies(run: str, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """`(problems,)` accuracies in per cent, at the start and after the last step."""
    start = run.replace(CONTINUED, "paper")
    before, after = (100 * test_rewards(name, kind, step).mean(1) for name, step in ((start, 0), (run, LAST)))
    return before, after


def gain_table() -> str:
    """Test accuracy before and after, in per cent, with the interval of the gain over problems."""
    rows = []
    for method, names in runs_and_controls().items():
        for kind, label in KINDS.items():
            gains = []
            for run in names:
                before, after = accuracies(run, kind)
                gain = after - before
                half = 1.96 * gain.std(ddof=1) / np.sqrt(len(gain))
                gains.append(float(gain.mean()))
                shown = f"{gain.mean():+.2f} [{gain.mean() - half:+.2f}, {gain.mean() + half:+.2f}]"
                rows.append((run, label, f"{before.mean():.2f}", f"{after.mean():.2f}", shown))
            rows.append((f"**{NAMES[method]}, over seeds**", label, "", "", over_seeds(gains)))
    return table(("run", "rollouts", "start", "end", "gain, points"), rows)


def control_table() -> str:
    """Accuracy after the last step minus that of a control with the same seed."""
    rows = []
    for method, control, (kind, label) in product(METHODS, (CONTINUED, RANDOM), KINDS.items()):
        ends = (
            [float(accuracies(run, kind)[1].mean()) for run in runs_and_controls()[made]] for made in (method, control)
        )
        by_seed = [own - other for own, other in zip(*ends, strict=True)]
        each = ", ".join(f"{difference:+.2f}" for difference in by_seed)
        rows.append((f"{NAMES[method]} − {NAMES[control]}", label, each, over_seeds(by_seed)))
    return table(("difference", "rollouts", "points by seed", "over seeds"), rows)


TABLES = {
    "windows": windows_table,
    "cosines": cosine_table,
    "foretelling": foretelling_table,
    "trend": trend_table,
    "trend against random": random_trend_table,
    "gain": gain_table,
    "control": control_table,
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
