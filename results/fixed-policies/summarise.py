"""Tables of the Grams in this folder: numpy computes, pyarrow reads the files.

python summarise.py            print all tables
python summarise.py --write    put them between their marks in README.md

Definitions. A group has R rollouts with rewards 0 or 1, of which k are right; it is live if 0 < k < R. Its advantages
are `A_i = r_i - mean(r)`. The singular values σ of its stacked gradient matrix (rows `A_i ψ_i`) are the square roots of
the eigenvalues of `diag(A) K diag(A)`. An eigenvalue below `(R ε₆₄ + ε₃₂)` of the trace counts as zero, as in
`scoregram.spectra.singular_values` for a float32 Gram. The effective rank is `(Σσ)² / Σσ²`. The orthogonal null is the
effective rank of orthogonal scores with the same norms, `σ_i = |A_i| √K_ii`. Groups of 2, 4 and 8 are the consecutive
blocks of the 16 rollouts, which were drawn independently. The top-1 fraction is the largest σ² over Σσ².

The noise of a prompt is `Σ_i |v_i - v̄|² / (R (R - 1))` with `v_i = A_i ψ_i R / (R - 1)`, as in `../parameters`: the
squared standard error of the prompt's gradient `v̄`, with the mean reward of the other rollouts as baseline. From K it
is `(Σ_i a_i² K_ii - aᵀKa / R) / (R (R - 1))` with `a = A R / (R - 1)`.

Intervals are 95 % percentile intervals over 1000 bootstrap resamples of prompts.
"""

import sys
from collections.abc import Callable
from functools import cache
from math import comb
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq

HERE = Path(__file__).parent
MODELS = ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "smollm2-135m-taught")
SETTINGS = ("t1-p1", "t0.7-p1", "t0.5-p1", "t0.3-p1", "t1-p0.9")
GROUP_SIZES = (2, 4, 8, 16)
SUCCESS_RATES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
RESAMPLES = 1000
PARTS = {"all parameters": "k", "embedding": "k_embed", "head": "k_head", "last block": "k_last"}
"""Parameters of a part → column of its Gram; the parts are in the layers file."""
PASS_RATES = ((0, 0), (1, 1), (2, 3), (4, 5), (6, 7), (8, 8))
"""Classes of prompts: least and largest number of right rollouts among 8."""
COOLER = ("t0.7-p1", "t0.5-p1")
"""Settings whose 32 rollouts choose the easiest prompts of `EASY_MODEL`, which are measured at temperature 1."""
EASY_MODEL = "qwen2.5-coder-1.5b"
EASY_LEAST = (28, 30, 31, 32)
"""Least numbers of right rollouts among these 32."""
PRINTED_TOP1 = {2: (0.6, 0.7), 4: (0.7, 0.8), 8: (0.5, 0.6)}
"""Group size → top-1 fraction that the paper's Table 1 prints."""
HALF_DIGIT = 0.05
"""Rounding of a fraction that is printed with one digit."""
NOISE_RIGHT = (2, 14)
"""Least and largest number of right rollouts of the prompts in `../parameters`."""
REWARD_VECTORS = 200
"""Random reward vectors for each group of `checks.npz`."""


class LiveGroups(NamedTuple):
    """The live groups of one size, one entry per group in each array."""

    prompt: np.ndarray
    """Row of the file that the group is a part of."""
    block: np.ndarray
    """Which of the blocks of its 16 rollouts it is."""
    right: np.ndarray
    """Number of right rollouts, k."""
    rank: np.ndarray
    null: np.ndarray
    top1: np.ndarray
    """Share of the largest σ² in Σσ²."""
    top1_null: np.ndarray
    groups: int
    """Number of groups, the dead ones included."""
    prompts: int


@cache
def columns(model: str, setting: str) -> dict[str, np.ndarray]:
    """The columns of a file except the tokens; lists become rows of a `(groups, length)` array."""
    path = HERE / model / f"{setting}.parquet"
    names = [name for name in pq.read_schema(path).names if name != "completion_tokens"]
    arrays = {}
    for name, values in zip(names, pq.read_table(path, columns=names).combine_chunks().columns, strict=True):
        entries = values.combine_chunks()
        flat = entries.flatten() if entries.type.num_fields else entries
        array = flat.to_numpy(zero_copy_only=False)
        arrays[name] = array.reshape(len(entries), -1) if entries.type.num_fields else array
    return arrays


def grams(model: str, setting: str, name: str = "k") -> np.ndarray:
    """`(groups, 16, 16)` Grams in float64."""
    return columns(model, setting)[name].astype(np.float64).reshape(-1, 16, 16)


@cache
def part_grams(model: str, name: str) -> np.ndarray:
    """`(groups, 16, 16)` Grams over a part of the parameters at temperature 1, in float64; 0 if a model lacks it."""
    if name == "k":
        return grams(model, "t1-p1")
    stored = pq.read_table(HERE / model / "t1-p1-layers.parquet", columns=[name])[name].combine_chunks()
    k = np.zeros((len(stored), 16, 16))
    k[:, *np.triu_indices(16)] = stored.flatten().to_numpy().reshape(len(stored), -1)
    return k + np.triu(k, 1).transpose(0, 2, 1)


def pair_cosines(k: np.ndarray) -> np.ndarray:
    """`(groups, 120)`: cosine of every pair of rollouts of a group."""
    norm = np.sqrt(np.diagonal(k, axis1=1, axis2=2))
    return (k / norm[:, :, None] / norm[:, None, :])[:, *np.triu_indices(16, 1)]


def spectra(k: np.ndarray, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Singular values of groups `(n, R, R)` with advantages `(n, R)`, and those of their orthogonal null."""
    rows = k * a[:, :, None] * a[:, None, :]
    energy = np.trace(rows, axis1=1, axis2=2)[:, None]
    eigenvalues = np.linalg.eigvalsh(rows)
    rounding = (k.shape[1] * np.finfo(np.float64).eps + np.finfo(np.float32).eps) * energy
    sigma = np.sqrt(np.where(eigenvalues > rounding, eigenvalues, 0.0))
    return sigma, np.abs(a) * np.sqrt(np.diagonal(k, axis1=1, axis2=2))


def effective_rank(sigma: np.ndarray) -> np.ndarray:
    """`(Σσ)² / Σσ²` of each row."""
    return sigma.sum(1) ** 2 / (sigma**2).sum(1)


def top1_fraction(sigma: np.ndarray) -> np.ndarray:
    """`max σ² / Σσ²` of each row."""
    return (sigma**2).max(1) / (sigma**2).sum(1)


@cache
def live_groups(model: str, setting: str, size: int, name: str = "k") -> LiveGroups:
    """Effective rank and null of every live group of `size` rollouts."""
    k, rewards = grams(model, setting, name), columns(model, setting)["rewards"].astype(np.float64)
    blocks = np.arange(16).reshape(-1, size)
    k_blocks = k[:, blocks[:, :, None], blocks[:, None, :]].reshape(-1, size, size)
    rewards = rewards.reshape(-1, size)
    right = rewards.sum(1).astype(int)
    live = (right > 0) & (right < size)
    a = rewards[live] - rewards[live].mean(1, keepdims=True)
    sigma, null = spectra(k_blocks[live], a)
    prompt, block = (place.ravel()[live] for place in np.indices((len(k), len(blocks))))
    ranks, tops = ([of(values) for values in (sigma, null)] for of in (effective_rank, top1_fraction))
    return LiveGroups(prompt, block, right[live], *ranks, *tops, len(right), len(k))


@cache
def resampled_counts(prompts: int) -> np.ndarray:
    """`(RESAMPLES, prompts)`: how often each prompt occurs in each bootstrap resample; seed 0."""
    rng = np.random.default_rng(0)
    draws = (rng.integers(prompts, size=prompts) for _ in range(RESAMPLES))
    return np.stack([np.bincount(draw, minlength=prompts) for draw in draws]).astype(np.float64)


def cell_sums(groups: LiveGroups, size: int, values: np.ndarray) -> np.ndarray:
    """`(prompts, R - 1)`: sums of `values` over the live groups of each prompt that have k = 1 … R - 1 right."""
    place = groups.prompt * (size - 1) + groups.right - 1
    return np.bincount(place, values, groups.prompts * (size - 1)).reshape(groups.prompts, size - 1)


def percentiles(values: np.ndarray, digits: int = 2) -> str:
    """The 95 % interval of bootstrap values; NaN, a resample without such a group, is left out."""
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return f"[{low:.{digits}f}, {high:.{digits}f}]"


def resampled_means(groups: LiveGroups, values: np.ndarray) -> np.ndarray:
    """`(RESAMPLES,)`: mean of `values` over the live groups of each resample; NaN where it has none."""
    weights = resampled_counts(groups.prompts)
    total, count = (weights @ np.bincount(groups.prompt, of, groups.prompts) for of in (values, np.ones_like(values)))
    return np.divide(total, count, out=np.full(len(weights), np.nan), where=count > 0)


def mean_and_interval(groups: LiveGroups) -> str:
    """Mean effective rank over live groups with its interval."""
    return f"{groups.rank.mean():.2f} {percentiles(resampled_means(groups, groups.rank))}"


@cache
def cell_means(model: str, size: int, quantity: str = "rank") -> tuple[np.ndarray, ...]:
    """At temperature 1, per k = 1 … R - 1: number of live groups, mean, mean null, and resampled means.

    The quantity is the effective rank or `"top1"`. The last array has shape `(RESAMPLES, R - 1)`. A mean is NaN where
    there is no group.
    """
    groups = live_groups(model, "t1-p1", size)
    named = {"rank": (groups.rank, groups.null), "top1": (groups.top1, groups.top1_null)}
    of = (np.ones_like(groups.rank), *named[quantity])
    counts, measured, nulls = (cell_sums(groups, size, values) for values in of)
    weights = resampled_counts(groups.prompts)
    with np.errstate(invalid="ignore"):
        total = counts.sum(0)
        resampled = (weights @ measured) / (weights @ counts)
        return total, measured.sum(0) / total, nulls.sum(0) / total, resampled


def standardised(means: np.ndarray, size: int, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean over live groups if k were Binomial(R, rate), and the share of that weight on cells that have groups.

    `Σ_k w_k m_k / Σ_k w_k` over 0 < k < R, where the sums skip cells without a group (NaN).
    """
    weight = np.array([comb(size, k) * rate**k * (1 - rate) ** (size - k) for k in range(1, size)])
    measured = ~np.isnan(means)
    covered = (weight * measured).sum(-1)
    return (weight * np.where(measured, means, 0.0)).sum(-1) / covered, covered / weight.sum()


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rows])


def collected_table() -> str:
    """What each file holds."""
    header = ["model", "setting", "groups", "live", "right", "cut off", "tokens", "nats per token"]
    header += ["repeated texts", "distinct texts", "rms cosine", "float32"]
    return markdown(header, [collected_row(model, setting) for model in MODELS for setting in SETTINGS])


def collected_row(model: str, setting: str) -> list[str]:
    """Counts and means of one file."""
    stored = columns(model, setting)
    rewards, lengths = stored["rewards"], stored["lengths"]
    right = rewards.sum(1)
    texts = np.array([len(set(group.tolist())) for group in stored["same_text_as"]])
    cosine = pair_cosines(grams(model, setting))
    numbers = [
        f"{len(rewards)}",
        f"{((right > 0) & (right < 16)).sum()}",
        f"{rewards.mean():.3f}",
        f"{stored['truncated'].mean():.3f}",
        f"{lengths.mean():.0f}",
        f"{-stored['log_prob'].sum() / lengths.sum():.3f}",
        f"{(texts < 16).mean():.3f}",
        f"{texts.mean():.2f}",
        f"{np.sqrt((cosine**2).mean()):.3f}",
        f"{(stored['measured_in'] == 'float32').sum()}",
    ]
    return [model, setting, *numbers]


def rank_table() -> str:
    """Effective rank against its null by R, temperature 1."""
    rows = []
    for model in MODELS:
        for size in GROUP_SIZES:
            groups = live_groups(model, "t1-p1", size)
            numbers = [
                f"{len(groups.rank)} of {groups.groups}",
                mean_and_interval(groups),
                f"{groups.null.mean():.2f}",
                f"{(groups.rank / groups.null).mean():.3f}",
                f"{groups.top1.mean():.3f}",
            ]
            rows.append([model, str(size), *numbers])
    return markdown(["model", "R", "live of all", "effective rank", "null", "ratio", "top-1"], rows)


def standardised_table(model: str) -> str:
    """Effective rank [interval] (null) at Binomial(R, p), temperature 1, R > 2."""
    sizes = GROUP_SIZES[1:]
    rows = [[f"{rate:g}", *(standardised_cell(model, size, rate) for size in sizes)] for rate in SUCCESS_RATES]
    return markdown(["p", *(f"R = {size}" for size in sizes)], rows)


def standardised_cell(model: str, size: int, rate: float) -> str:
    """One entry of `standardised_table`."""
    _, ranks, nulls, resampled = cell_means(model, size)
    rank, covered = standardised(ranks, size, rate)
    null, _ = standardised(nulls, size, rate)
    interval = percentiles(standardised(resampled, size, rate)[0])
    note = "" if covered > 0.995 else f", {100 * covered:.0f} % of the weight"
    return f"{rank:.2f} {interval} ({null:.2f}){note}"


def chosen_table() -> str:
    """Effective rank [interval] (null) of prompts chosen by the pass rate of other rollouts, temperature 1, R ≤ 8."""
    rows = []
    for model in MODELS:
        halves = columns(model, "t1-p1")["rewards"].reshape(-1, 2, 8).sum(2)
        for least, most in PASS_RATES:
            chosen = (least <= halves[:, ::-1]) & (halves[:, ::-1] <= most)  # each half by the other one
            if not chosen.any():
                continue
            label = f"{least}" if least == most else f"{least} to {most}"
            cells = (chosen_cell(live_groups(model, "t1-p1", size), size, chosen) for size in GROUP_SIZES[:3])
            rows.append([model, label, f"{chosen.sum()}", f"{halves[chosen].mean() / 8:.2f}", *cells])
    header = ["model", "right of the other 8", "halves", "success"]
    return markdown([*header, *(f"R = {size}" for size in GROUP_SIZES[:3])], rows)


def kept_groups(groups: LiveGroups, size: int, chosen: np.ndarray) -> LiveGroups:
    """The live groups in chosen halves of prompts; `chosen` has shape `(prompts, 2)`."""
    inside = chosen[groups.prompt, groups.block * size // 8]
    return LiveGroups(*(values[inside] for values in groups[:-2]), *groups[-2:])


def chosen_cell(groups: LiveGroups, size: int, chosen: np.ndarray, fewest: int = 10) -> str:
    """One entry of `chosen_table` or `easy_table`. A dash for fewer live groups than `fewest`."""
    kept = kept_groups(groups, size, chosen)
    if len(kept.rank) < fewest:
        return "–"
    return f"{mean_and_interval(kept)} ({kept.null.mean():.2f}), {len(kept.rank)} live"


def easy_prompts(least: int) -> np.ndarray:
    """`(prompts,)`: which prompts of `EASY_MODEL` have at least so many right among the 32 rollouts of `COOLER`."""
    cooler = sum(columns(EASY_MODEL, setting)["rewards"].sum(1) for setting in COOLER)
    prompts = len(columns(EASY_MODEL, "t1-p1")["rewards"])
    return np.pad(cooler >= least, (0, prompts - len(cooler)))  # the files are paired by row, the cooler ones shorter


def easy_table() -> str:
    """Effective rank [interval] (null) at temperature 1 of prompts that are nearly always right at lower ones."""
    rows, rewards = [], columns(EASY_MODEL, "t1-p1")["rewards"]
    for least in EASY_LEAST:
        chosen = easy_prompts(least)
        halves = np.repeat(chosen[:, None], 2, axis=1)
        cells = [chosen_cell(live_groups(EASY_MODEL, "t1-p1", size), size, halves, 2) for size in GROUP_SIZES[:3]]
        live = ((rewards.sum(1) > 0) & (rewards.sum(1) < 16) & chosen).sum()
        rows.append([f"{least}", f"{chosen.sum()}", f"{live}", f"{rewards[chosen].mean():.2f}", *cells])
    header = ["right of 32, at least", "prompts", "of them live", "success"]
    return markdown([*header, *(f"R = {size}" for size in GROUP_SIZES[:3])], rows)


def top1_cells(means: list[float], nulls: list[float], resampled: list[np.ndarray]) -> list[str]:
    """Top-1 fractions at R = 2, 4 and 8 [interval] (null), and the two differences that make the order of Figure 2."""
    shown = [
        f"{mean:.3f} {percentiles(draws, 3)} ({null:.3f})"
        for mean, null, draws in zip(means, nulls, resampled, strict=True)
    ]
    for one, other in ((1, 0), (0, 2)):
        shown.append(f"{means[one] - means[other]:+.3f} {percentiles(resampled[one] - resampled[other], 3)}")
    return shown


TOP1_HEADER = [*(f"R = {size}" for size in PRINTED_TOP1), "R 4 − R 2", "R 2 − R 8"]


def standardised_top1(model: str, rate: float) -> tuple[list[float], list[float], list[np.ndarray]]:
    """Top-1 fractions at R = 2, 4 and 8 at Binomial(R, rate): measured, null, and resampled."""
    found = []
    for size in PRINTED_TOP1:
        _, tops, nulls, resampled = cell_means(model, size, "top1")
        found.append([standardised(means, size, rate)[0] for means in (tops, nulls, resampled)])
    measured, nulls, draws = (list(each) for each in zip(*found, strict=True))
    return measured, nulls, draws


def standardised_top1_table(model: str) -> str:
    """Top-1 fraction [interval] (null) at Binomial(R, p), temperature 1, R ≤ 8."""
    rows = [[f"{rate:g}", *top1_cells(*standardised_top1(model, rate))] for rate in SUCCESS_RATES]
    return markdown(["p", *TOP1_HEADER], rows)


def chosen_top1_table() -> str:
    """Top-1 fraction [interval] (null) of prompts chosen by the pass rate of other rollouts; see `chosen_table`."""
    rows = []
    for model in MODELS:
        halves = columns(model, "t1-p1")["rewards"].reshape(-1, 2, 8).sum(2)
        for least, most in ((0, 8), *PASS_RATES):  # all prompts first
            chosen = (least <= halves[:, ::-1]) & (halves[:, ::-1] <= most)
            kept = [kept_groups(live_groups(model, "t1-p1", size), size, chosen) for size in PRINTED_TOP1]
            if min(len(groups.top1) for groups in kept) < 10:
                continue
            label = f"{least}" if least == most else f"{least} to {most}"
            tops, nulls = ([float(groups[at].mean()) for groups in kept] for at in (5, 6))
            draws = [resampled_means(groups, groups.top1) for groups in kept]
            rows.append([model, label, f"{halves[chosen].mean() / 8:.2f}", *top1_cells(tops, nulls, draws)])
    return markdown(["model", "right of the other 8", "success", *TOP1_HEADER], rows)


def order_table() -> str:
    """Success rates, in steps of 0.01, at which the standardised top-1 fractions have the order or the printed ranges.

    The order is that of Figure 2: R = 4 above R = 2 above R = 8. *Resolved* means that the intervals of both
    differences exclude 0.
    """
    rates, rows = np.arange(1, 100) / 100, []
    for model in MODELS:
        found = {name: np.zeros(len(rates), bool) for name in ("measured", "resolved", "null", "strict", "half")}
        for place, rate in enumerate(rates):
            tops, nulls, draws = standardised_top1(model, rate)
            found["measured"][place] = tops[1] > tops[0] > tops[2]
            found["null"][place] = nulls[1] > nulls[0] > nulls[2]
            lows = [np.nanpercentile(draws[one] - draws[other], 2.5) for one, other in ((1, 0), (0, 2))]
            found["resolved"][place] = min(lows) > 0
            for name, slack in (("strict", 0.0), ("half", HALF_DIGIT)):
                pairs = zip(tops, PRINTED_TOP1.values(), strict=True)
                found[name][place] = all(low - slack <= top <= high + slack for top, (low, high) in pairs)
        rows.append([model, *(stretches(rates, inside) for inside in found.values())])
    header = ["model", "order", "order, resolved", "order under the null", "printed ranges", "printed ranges ± 0.05"]
    return markdown(header, rows)


def stretches(rates: np.ndarray, inside: np.ndarray) -> str:
    """The stretches of neighbouring rates that are inside, as text."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], inside, [False]]).astype(int)))
    ends = [(rates[start], rates[stop - 1]) for start, stop in edges.reshape(-1, 2)]
    return ", ".join(f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}" for low, high in ends) or "none"


def noise(k: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Squared standard error of the gradient of each prompt, from Grams `(n, R, R)` and rewards `(n, R)`."""
    size = rewards.shape[1]
    a = (rewards - rewards.mean(1, keepdims=True)) * size / (size - 1)
    squares = (a**2 * np.diagonal(k, axis1=1, axis2=2)).sum(1)
    total = np.einsum("ni,nij,nj->n", a, k, a)
    return (squares - total / size) / (size * (size - 1))


def shared_variation(x: np.ndarray, y: np.ndarray) -> str:
    """Squared correlation of `(prompts, values)` over all values, in per cent, with its interval over prompts."""
    weights = np.concatenate([np.ones((1, len(x))), resampled_counts(len(x))])
    one = np.ones_like(x)
    count, sx, sy, sxx, syy, sxy = (weights @ of.sum(1) for of in (one, x, y, x * x, y * y, x * y))
    shared = (count * sxy - sx * sy) ** 2 / ((count * sxx - sx**2) * (count * syy - sy**2))
    low, high = np.percentile(100 * shared[1:], [2.5, 97.5])
    return f"{100 * shared[0]:.0f} % [{low:.0f}, {high:.0f}]"


def noise_table() -> str:
    """How much of the variation of log noise between live prompts `p(1 − p)` accounts for, temperature 1."""
    rows = []
    for model in MODELS:
        k, rewards = grams(model, "t1-p1"), columns(model, "t1-p1")["rewards"].astype(np.float64)
        right = rewards.sum(1)
        classes = {"1 to 15": (1, 15), f"{NOISE_RIGHT[0]} to {NOISE_RIGHT[1]}": NOISE_RIGHT}
        for label, (least, most) in classes.items():
            chosen = (least <= right) & (right <= most)
            target, spread, norm = (np.log(of)[:, None] for of in noise_and_proxies(k[chosen], rewards[chosen]))
            shared = [shared_variation(x, target) for x in (spread, norm, spread + norm)]
            rows.append([model, label, f"{chosen.sum()}", *shared])
    header = ["model", "right of 16", "prompts", "p(1 − p)", "mean squared norm", "p(1 − p) · mean squared norm"]
    return markdown(header, rows)


def noise_and_proxies(k: np.ndarray, rewards: np.ndarray) -> tuple[np.ndarray, ...]:
    """Noise, `p(1 − p)` and mean squared norm of live groups."""
    p = rewards.mean(1)
    return noise(k, rewards), p * (1 - p), np.diagonal(k, axis1=1, axis2=2).mean(1)


def noise_halves_table() -> str:
    """How well a statistic of one half of a prompt's rollouts predicts the noise of the other half, both ways."""
    rows = []
    for model in MODELS:
        k, rewards = grams(model, "t1-p1"), columns(model, "t1-p1")["rewards"].astype(np.float64)
        right = rewards.reshape(-1, 2, 8).sum(2)
        both = ((right > 0) & (right < 8)).all(1)
        parts = [noise_and_proxies(k[both][:, at, at], rewards[both][:, at]) for at in (slice(0, 8), slice(8, 16))]
        target, spread, norm = (np.log(np.stack(of, axis=1)) for of in zip(*parts, strict=True))
        shared = [shared_variation(x[:, ::-1], target) for x in (target, spread, norm, spread + norm)]
        rows.append([model, f"{both.sum()}", *shared])
    header = ["model", "prompts", "noise", "p(1 − p)", "mean squared norm", "p(1 − p) · mean squared norm"]
    return markdown(header, rows)


def temperature_table() -> str:
    """Effective rank [interval] / null = ratio of groups of 16 for every setting."""
    rows = []
    for setting in SETTINGS:
        for name, policy in (("k", "as sampled"), ("k_plain", "T = 1")):
            if name not in columns(MODELS[0], setting):
                continue
            cells = []
            for model in MODELS:
                groups = live_groups(model, setting, 16, name)
                ratio = (groups.rank / groups.null).mean()
                cells.append(f"{mean_and_interval(groups)} / {groups.null.mean():.2f} = {ratio:.3f}")
            rows.append([setting, policy, *cells])
    return markdown(["setting", "scored policy", *MODELS], rows)


def parts_table() -> str:
    """Groups of 16 at temperature 1: rank / null [interval] and cosines over one part of the parameters."""
    rows = []
    for model in MODELS:
        whole = part_grams(model, "k")
        for part, name in PARTS.items():
            if part_grams(model, name).any():
                rows.append([model, part, *part_numbers(part_grams(model, name), whole, model)])
    return markdown(["model", "part", "energy", "rank / null", "rms cosine", "correlation of cosines"], rows)


def part_numbers(k: np.ndarray, whole: np.ndarray, model: str) -> list[str]:
    """Share in the squared norms, rank over null, and cosines of one part against those over all parameters."""
    rewards = columns(model, "t1-p1")["rewards"].astype(np.float64)
    live = (rewards.sum(1) > 0) & (rewards.sum(1) < 16)
    a = rewards - rewards.mean(1, keepdims=True)
    ratio = np.zeros(len(k))
    rank, null = (effective_rank(sigma) for sigma in spectra(k[live], a[live]))
    ratio[live] = rank / null
    weights = resampled_counts(len(k))
    low, high = np.percentile((weights @ ratio) / (weights @ live), [2.5, 97.5])
    cosines = pair_cosines(k)
    energy = np.trace(k, axis1=1, axis2=2).sum() / np.trace(whole, axis1=1, axis2=2).sum()
    return [
        f"{energy:.3f}",
        f"{ratio[live].mean():.3f} [{low:.3f}, {high:.3f}]",
        f"{np.sqrt((cosines**2).mean()):.3f}",
        f"{np.corrcoef(cosines.ravel(), pair_cosines(whole).ravel())[0, 1]:.2f}",
    ]


def cells_table() -> str:
    """Effective rank [interval] (null) by R and k, temperature 1."""
    rows = []
    for size in GROUP_SIZES:
        measured = [cell_means(model, size) for model in MODELS]
        for k in range(1, size):
            shown = []
            for counts, ranks, nulls, resampled in measured:
                count = int(counts[k - 1])
                interval = f" {percentiles(resampled[:, k - 1])}" if count > 1 else ""
                shown += [str(count), f"{ranks[k - 1]:.2f}{interval} ({nulls[k - 1]:.2f})" if count else ""]
            rows.append([str(size), str(k), f"{4 * k * (size - k) / size:.2f}", *shown])
    header = ["R", "k", "equal norms", *(name for model in MODELS for name in ("groups", model))]
    return markdown(header, rows)


def checks_table() -> str:
    """K in bfloat16 against K in float32 and against plain backward passes, from `checks.npz`."""
    rows = []
    with np.load(HERE / "checks.npz") as stored:
        for model, name in zip(MODELS, ("qwen05", "qwen15", "smollm2"), strict=True):
            low, exact, plain = (stored[f"{name}_k_{kind}"] for kind in ("bfloat16", "float32", "plain_backward"))
            rows.append([model, *check_numbers(low, exact, plain)])
    header = ["model", "groups × rollouts", "float32 − backward", "K_ii, median", "K_ii, largest", "cosine, largest"]
    return markdown([*header, "effective rank, largest"], rows)


def check_numbers(low: np.ndarray, exact: np.ndarray, plain: np.ndarray) -> list[str]:
    """Differences of `(groups, n, n)` Grams in bfloat16 and float32, and of the first one and `plain`."""
    count, size = exact.shape[:2]
    few = len(plain)
    norms = [np.diagonal(k, axis1=1, axis2=2) for k in (low, exact)]
    off = np.abs(norms[0] / norms[1] - 1)
    cosines = [k / np.sqrt(n[:, :, None] * n[:, None, :]) for k, n in zip((low, exact), norms, strict=True)]
    rng = np.random.default_rng(0)
    rewards = rng.integers(0, 2, size=(REWARD_VECTORS, size)).astype(np.float64)
    rewards = rewards[(rewards.sum(1) > 0) & (rewards.sum(1) < size)]
    a = np.tile(rewards - rewards.mean(1, keepdims=True), (count, 1))
    ranks = [effective_rank(spectra(np.repeat(k, len(rewards), axis=0), a)[0]) for k in (low, exact)]
    return [
        f"{count} × {size}",
        f"{np.abs(exact[0, :few, :few] - plain).max() / np.abs(plain).max():.0e} ({few} rollouts)",
        f"{100 * np.median(off):.1f} %",
        f"{100 * off.max():.1f} %",
        f"{np.abs(cosines[0] - cosines[1]).max():.3f}",
        f"{100 * np.abs(ranks[0] / ranks[1] - 1).max():.1f} %",
    ]


TABLES: dict[str, Callable[[], str]] = {
    "collected": collected_table,
    "rank by R": rank_table,
    **{f"standardised {model}": (lambda model=model: standardised_table(model)) for model in MODELS},
    **{f"top-1 {model}": (lambda model=model: standardised_top1_table(model)) for model in MODELS},
    "order": order_table,
    "by pass rate": chosen_table,
    "easy prompts": easy_table,
    "top-1 by pass rate": chosen_top1_table,
    "by temperature": temperature_table,
    "by part": parts_table,
    "noise": noise_table,
    "noise of halves": noise_halves_table,
    "by k": cells_table,
    "checks": checks_table,
}
"""Mark in README.md → table."""


def filled(text: str) -> str:
    """`text` with every table put between its marks.

    Raises:
        ValueError: If a mark is missing.
    """
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"filled: README.md must have the marks of table {name!r}, got none. Put them back.")
        text = before + begin + table() + end + after
    return text


def main() -> None:
    """Print the tables, or write them into README.md."""
    if "--write" in sys.argv[1:]:
        page = HERE / "README.md"
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
        return
    for name, table in TABLES.items():
        print(f"{name}\n\n{table()}\n")


if __name__ == "__main__":
    main()
