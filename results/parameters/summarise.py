"""Tables of the Grams in this folder, computed with numpy alone.

python summarise.py            print all tables
python summarise.py --write    put them between their marks in README.md

Definitions. A group has R rollouts with rewards 0 or 1; it is live if both occur. Its advantages are
`A_i = r_i - mean(r)`. The effective rank is `(Σσ)² / Σσ²`, where σ² are the eigenvalues of `diag(A) K diag(A)`; one
below 1.2e-7 of the trace counts as zero, since K is stored as float32. The orthogonal null is the effective rank of
orthogonal rows with the same norms, `σ_i = |A_i| √K_ii`. Groups of 8 are the halves of the groups of 16.

The noise of a prompt is `Σ_i |v_i - v̄|² / (R (R - 1))` with `v_i = A_i ψ_i R / (R - 1)`, the gradient of rollout i
with the mean reward of the others as baseline: the squared standard error of the prompt's gradient `v̄` if its terms
were independent. From K it is `(Σ_i a_i² K_ii - aᵀKa / R) / (R (R - 1))` with `a = A R / (R - 1)`.

Intervals are 95 % percentile intervals over 1000 bootstrap resamples of prompts.
"""

import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
RESAMPLES = 1000
SMALLEST_EIGENVALUE = 1.2e-7
ROWS = {
    "full": "all parameters",
    "length": "all parameters, rows divided by length",
    "lora": "LoRA, at its start",
    "lora_moved": "LoRA, moved",
    "attention": "attention weights",
    "mlp": "MLP weights",
    "norms": "norm weights",
    "embedding": "embedding, tied to the head",
    "block00": "first block",
    "block15": "middle block",
    "block29": "last block",
    "last": "last block and head",
    "head": "head alone",
    "logits": "summed logit gradients",
    "hidden": "mean hidden state",
    "hidden_centred": "mean hidden state, centred",
    "last_hidden": "last hidden state",
    "sketch1024": "projection to 1024",
    "sketch0256": "projection to 256",
    "sketch0064": "projection to 64",
    "sketch0016": "projection to 16",
}
"""Key of each kind of row → its name in the tables."""


@cache
def stored() -> Mapping[str, np.ndarray]:
    """The arrays of the file, one row per group; numbers as float64."""
    with np.load(HERE / "grams.npz") as file:
        return {name: file[name].astype(float) if file[name].dtype.kind == "f" else file[name] for name in file.files}


@cache
def grams(kind: str) -> np.ndarray:
    """`(groups, 16, 16)` Grams of one kind of row."""
    if kind == "length":
        lengths = stored()["lengths"].astype(float)
        return stored()["full"] / (lengths[:, :, None] * lengths[:, None, :])
    if kind == "last":
        return stored()["block29"] + stored()["head"]
    if kind == "hidden_centred":
        centre = np.eye(16) - 1 / 16
        return centre @ stored()["hidden"] @ centre
    return stored()[kind]


def halves(arrays: np.ndarray) -> np.ndarray:
    """Rewards `(n, 16)` or Grams `(n, 16, 16)` of the two halves of every group, half after half of one prompt."""
    if arrays.ndim == 2:
        return arrays.reshape(-1, 8)
    return np.stack([arrays[:, :8, :8], arrays[:, 8:, 8:]], 1).reshape(-1, 8, 8)


def is_live(rewards: np.ndarray) -> np.ndarray:
    """Which groups have both a right and a wrong rollout."""
    return rewards.max(1) > rewards.min(1)


def rank_and_null(gram: np.ndarray, rewards: np.ndarray) -> tuple[float, float]:
    """Effective rank of a live group, and of orthogonal rows with the same norms."""
    advantages = rewards - rewards.mean()
    energy = np.linalg.eigvalsh(advantages[:, None] * gram * advantages)
    energy = energy[energy > SMALLEST_EIGENVALUE * energy.sum()]
    alone = advantages**2 * np.diagonal(gram)
    rank, null = (float(np.sqrt(each).sum() ** 2 / each.sum()) for each in (energy, alone))
    return rank, null


def cosines(k: np.ndarray) -> np.ndarray:
    """`(groups, pairs)` cosines between different rollouts of a group."""
    norms = np.sqrt(np.diagonal(k, axis1=1, axis2=2))
    first, second = np.triu_indices(k.shape[1], 1)
    return (k / (norms[:, :, None] * norms[:, None, :]))[:, first, second]


def noise(k: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Squared standard error of the gradient of each prompt, from Grams `(n, R, R)` and rewards `(n, R)`."""
    size = rewards.shape[1]
    a = (rewards - rewards.mean(1, keepdims=True)) * size / (size - 1)
    squares = (a**2 * np.diagonal(k, axis1=1, axis2=2)).sum(1)
    total = np.einsum("ni,nij,nj->n", a, k, a)
    return (squares - total / size) / (size * (size - 1))


def ranks_of(values: np.ndarray) -> np.ndarray:
    """Ranks from 0; tied values share the mean of their ranks."""
    _, group, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count + 1) / 2)[group]


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's correlation; nan if one of the two is constant."""
    x, y = x - x.mean(), y - y.mean()
    scale = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / scale) if scale > 0 else np.nan


def with_interval(prompts: int, statistic: Callable[[np.ndarray], float], digits: int = 2) -> str:
    """A statistic of the prompts at some places, and its interval over resampled prompts."""
    draw = np.random.default_rng(0)
    found = [statistic(draw.integers(prompts, size=prompts)) for _ in range(RESAMPLES)]
    low, high = np.nanpercentile(found, [2.5, 97.5])
    return f"{statistic(np.arange(prompts)):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def ratio_with_interval(values: np.ndarray, prompt: np.ndarray, prompts: int) -> str:
    """Mean over groups; groups of one prompt are resampled together."""
    sums = np.bincount(prompt, values, prompts)
    counts = np.bincount(prompt, minlength=prompts)
    return with_interval(prompts, lambda at: sums[at].sum() / counts[at].sum(), 3)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows))


def rank_table() -> str:
    """Effective rank beside its null for each kind of row, in groups of 8 and of 16."""
    head = ("rows", "rank, R = 8", "null", "rank / null", "rank, R = 16", "null", "rank / null", "rms cosine")
    rows = []
    for kind, name in ROWS.items():
        line = [name]
        for size in (8, 16):
            k, rewards = grams(kind), stored()["rewards"]
            prompt = np.arange(len(k))
            if size == 8:
                k, rewards, prompt = halves(k), halves(rewards), prompt.repeat(2)
            live = is_live(rewards)
            rank, null = np.array([rank_and_null(*each) for each in zip(k[live], rewards[live], strict=True)]).T
            ratio = ratio_with_interval(rank / null, prompt[live], len(grams(kind)))
            line += [f"{rank.mean():.2f}", f"{null.mean():.2f}", ratio]
        rows.append((*line, f"{np.sqrt((cosines(grams(kind)) ** 2).mean()):.3f}"))
    return table(head, rows)


def cosine_table() -> str:
    """How well the cosines and norms of each kind of row follow those over all parameters."""
    head = ("rows", "correlation of cosines", "rank correlation", "rms error", "correlation of log norms")
    full, norms = cosines(grams("full")), np.log(np.diagonal(grams("full"), axis1=1, axis2=2))
    rows = []
    for kind, name in ROWS.items():
        if kind == "full":
            continue
        these = cosines(grams(kind))
        own = np.log(np.diagonal(grams(kind), axis1=1, axis2=2))

        def of_cosines(at: np.ndarray, these: np.ndarray = these) -> float:
            return correlation(full[at].ravel(), these[at].ravel())

        def of_norms(at: np.ndarray, own: np.ndarray = own) -> float:
            return correlation(norms[at].ravel(), own[at].ravel())

        by_rank = correlation(ranks_of(full.ravel()), ranks_of(these.ravel()))
        error = np.sqrt(((these - full) ** 2).mean())
        counted = len(full)
        rows.append(
            (
                name,
                with_interval(counted, of_cosines),
                f"{by_rank:.2f}",
                f"{error:.3f}",
                with_interval(counted, of_norms),
            )
        )
    return table(head, rows)


def predictors() -> dict[str, np.ndarray]:
    """What could stand in for the noise of a prompt, by name; zero or negative in groups that are not live."""
    rewards, lengths = stored()["rewards"], stored()["lengths"].astype(float)
    p, first = rewards.mean(1), stored()["screened_right"] / 16
    norm = np.diagonal(grams("full"), axis1=1, axis2=2).mean(1)
    named = {
        "p(1 − p)": p * (1 - p),
        "p(1 − p) of the first sample": first * (1 - first),
        "mean squared norm": norm,
        "p(1 − p) · mean squared norm": p * (1 - p) * norm,
        "p(1 − p) · mean length": p * (1 - p) * lengths.mean(1),
        "p(1 − p) · mean surprise": p * (1 - p) * -stored()["log_prob"].mean(1),
    }
    return named | {f"noise: {name}": noise(grams(kind), rewards) for kind, name in ROWS.items() if kind != "full"}


def noise_table() -> str:
    """How much of the variation of log noise between live prompts each stand-in accounts for."""
    rewards = stored()["rewards"]
    live = is_live(rewards)
    target = np.log(noise(grams("full"), rewards)[live])
    head = ("stand-in", "R²", "R², slope 1", "rank correlation")
    rows = []
    for name, values in predictors().items():
        x = np.log(values[live])

        def r_squared(at: np.ndarray, x: np.ndarray = x) -> float:
            return correlation(x[at], target[at]) ** 2

        def of_ranks(at: np.ndarray, x: np.ndarray = x) -> float:
            return correlation(ranks_of(x[at]), ranks_of(target[at]))

        rows.append(
            (
                name,
                with_interval(len(x), r_squared),
                f"{1 - np.var(target - x) / np.var(target):.2f}",
                with_interval(len(x), of_ranks),
            )
        )
    return table(head, rows)


def repeat_table() -> str:
    """How well a statistic of one half of a prompt's rollouts predicts the noise of the other half, both ways."""
    both = is_live(halves(stored()["rewards"])).reshape(-1, 2).all(1)
    rewards = halves(stored()["rewards"][both])

    def by_half(values: np.ndarray) -> np.ndarray:
        return np.log(values).reshape(-1, 2)

    p = rewards.mean(1)
    of_noise = by_half(noise(halves(grams("full")[both]), rewards))
    rows = []
    for name, values in {"noise": of_noise, "p(1 − p)": by_half(p * (1 - p))}.items():

        def crossed(at: np.ndarray, values: np.ndarray = values) -> float:
            return correlation(values[at].ravel(), of_noise[at, ::-1].ravel()) ** 2

        rows.append((f"{name} of the other 8 rollouts", with_interval(len(of_noise), crossed)))
    return table((f"stand-in, {len(of_noise)} prompts", "R² with the noise of 8 rollouts"), rows)


TABLES = {"rank": rank_table, "cosine": cosine_table, "noise": noise_table, "repeat": repeat_table}


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
