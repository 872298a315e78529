"""Every public function of the pure rooms over rewards, Grams and numbers of every sort.

An answer is finite, or it is a `nan` or `inf` that the documentation states; anything else is a `ScoregramError`.
Ordinary inputs, at every scale from 1e-6 to 1e6, must be answered.
"""

import importlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from scoregram.advantages import ESTIMATORS, LEVEL_INPUTS, estimate
from scoregram.checks import ScoregramError
from scoregram.objectives import AGGREGATIONS, KL_TERMS, OBJECTIVES, preference_pairs
from scoregram.spectra import SPECTRUM_METRICS
from scoregram.statistics import GroupMoments, NoiseComponents, disjoint_parts, recommend_group_size, split_products

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

SCALES = (1e-6, 1e-3, 1.0, 1e3, 1e6)
TOKENS = 3


@dataclass(frozen=True)
class Case:
    """Rewards, and the scores whose Gram they come with."""

    rewards: Tensor
    """`(P, R)`."""
    scores: Tensor
    """`(P·R, D)`."""

    @property
    def gram(self) -> Tensor:
        """`(P·R, P·R)`."""
        return self.scores @ self.scores.mT


def case(rewards: list[list[float]], *, dtype: torch.dtype = torch.float64, score: float = 1.0) -> Case:
    table = torch.tensor(rewards, dtype=dtype)
    if table.ndim == 1:
        table = table.reshape(len(rewards), 0)
    generator = torch.Generator().manual_seed(0)
    scores = score * torch.randn(table.numel(), 5, dtype=torch.float64, generator=generator)
    return Case(table, scores.to(dtype))


MIXED = [[1.0, 0.0, 0.5, 0.25], [0.0, 0.0, 1.0, 0.0], [0.5, 1.0, 1.0, 0.125]]


def scaled(scale: float) -> list[list[float]]:
    return [[scale * reward for reward in row] for row in MIXED]


ORDINARY = {
    f"rewards {reward:g}, scores {score:g}, {str(dtype)[6:]}": case(scaled(reward), dtype=dtype, score=score)
    for reward, score in [(scale, 1.0) for scale in SCALES] + [(1.0, 1e-6), (1.0, 1e6)]
    for dtype in (torch.float32, torch.float64)
}
ODD = {
    "tied": case([[0.1] * 4] * 3),
    "tied, float32": case([[0.1] * 4] * 3, dtype=torch.float32),
    "zero": case([[0.0] * 4] * 3),
    "one tied group": case([[0.1] * 4, *MIXED[:2]]),
    "an offset that swallows the spread": case([[1e6 + 1e-9 * i for i in range(4)]] * 3),
    "all scores zero": case(MIXED, score=0.0),
    "one rollout": case([[0.3], [0.7], [0.1]]),
    "one rollout in all": case([[0.3]]),
    "one prompt": case(MIXED[:1]),
    "two rollouts": case([row[:2] for row in MIXED]),
    "three rollouts": case([row[:3] for row in MIXED]),
    "empty groups": case([[], [], []]),
    "no prompt": Case(torch.zeros(0, 4, dtype=torch.float64), torch.zeros(0, 5, dtype=torch.float64)),
    "nothing": Case(torch.zeros(0, 0, dtype=torch.float64), torch.zeros(0, 5, dtype=torch.float64)),
}
NOT_FINITE = {
    f"a reward of {value}": case([[value, *MIXED[0][1:]], *MIXED[1:]]) for value in (math.nan, math.inf, -math.inf)
}


def tensors_of(room: str, at: Case) -> dict[str, object]:
    """What a function of a room may ask for, by the name of the parameter."""
    (prompts, size), n = at.rewards.shape, at.rewards.numel()
    flat = at.rewards.flatten()
    mask = torch.ones(n, TOKENS, dtype=torch.bool)
    if n > 1:
        mask[0, 1:] = mask[-1] = False  # one short rollout and one without tokens
    log_probs = -torch.arange(1.0, n * TOKENS + 1, dtype=flat.dtype).reshape(n, TOKENS) / 7
    energies = at.scores.double().square().sum(dim=-1)
    shared: dict[str, object] = {
        "rewards": at.rewards,
        "gram": at.gram,
        "weights": flat,
        "prompt_of": torch.arange(prompts).repeat_interleave(size),
        "squared_norms": energies.reshape(prompts, size),
        "lengths": torch.arange(1, n + 1).reshape(prompts, size),
        "advantages": at.rewards,
    }
    if room == "spectra":
        own = at.scores[:size]
        shared |= {
            "gram": own @ own.mT,
            "grams": (own @ own.mT).repeat(prompts, 1, 1),
            "factors": at.rewards,
            "advantages": flat[:size],
            "singular_values": at.rewards.abs(),
            "spectrum": flat[:size].abs(),
        }
    if room == "statistics":
        grouped = at.scores.reshape(prompts, size, 5)
        shared |= {
            "blocks": grouped @ grouped.mT,
            "cross_gram": at.gram,
            "held_weights": flat,
            "held_prompt_of": shared["prompt_of"],
            "generator": torch.Generator().manual_seed(0),
            "baseline": flat,
            "optimal": flat * 0,
            "fisher_trace": energies,
            "credit": flat,
            "truth": flat / 2,
        }
    if room == "advantages":
        shared["mask"] = mask.reshape(prompts, size, TOKENS)
    if room == "objectives":
        pairs = preference_pairs(at.rewards) if bool(at.rewards.isfinite().all()) else torch.tensor([[0, 1]])
        shared |= {
            "log_probs": log_probs,
            "old_log_probs": log_probs - 0.1,
            "ref_log_probs": log_probs - 0.2,
            "advantages": flat,
            "rewards": flat,
            "length": TOKENS,
            "mask": mask,
            "pairs": pairs,
        }
    return shared


def inputs_of_estimators(at: Case) -> dict[str, Tensor]:
    """Everything an estimator of any level may need, its rewards apart."""
    (prompts, size), shared = at.rewards.shape, tensors_of("advantages", at)
    mask = shared["mask"]
    assert isinstance(mask, Tensor)
    per_prompt = at.rewards.sum(dim=-1)
    return {
        "mask": mask,
        "lengths": shared["lengths"],  # type: ignore[dict-item]
        "score_energies": shared["squared_norms"],  # type: ignore[dict-item]
        "score_grams": torch.eye(size, dtype=torch.float64).expand(prompts, size, size) + 0.5,
        "token_features": torch.ones(prompts, size, TOKENS, 2).cumsum(2) * torch.tensor([1.0, -0.5]),
        "baselines": per_prompt,
        "best_of": torch.full((prompts,), 2),
        "greedy_rewards": per_prompt,
        "outcomes": at.rewards,
        "outcome_rewards": at.rewards,
        "values": step_rewards(at),
        "prefix_values": step_rewards(at),
        "segment_starts": mask & (torch.arange(TOKENS) == 0),
        "step_ends": mask,
        "path_energies": mask * torch.arange(1.0, TOKENS + 1).to(at.rewards.dtype),
        "anchors": torch.zeros(prompts, size, TOKENS, dtype=torch.long),
    }


def step_rewards(at: Case) -> Tensor:
    return at.rewards[..., None].expand(*at.rewards.shape, TOKENS) * torch.arange(1, TOKENS + 1)


NUMBERS = MappingProxyType(
    {
        "success": (0.0, 0, 1e-300, 0.3, 0.5, 1.0, 1, 1.5, -0.1, math.nan, math.inf),
        "success_rate": (0.0, 1e-300, 0.3, 1.0, 1.5, -0.1, math.nan, math.inf),
        "group_size": (-1, 0, 1, 2, 8, 5000),
        "rollouts": (-1, 0, 1, 2, 8, 5000),
        "right": (-1, 0, 1, 8, 9),
        "prompts": (0, 1, 8),
        "epsilon": (0.0, 1e-200, 1e-6, 0.5, 1e6, -1.0, math.nan, math.inf),
        "reward_variance": (0.0, 1e-12, 0.25, 1e12, -1.0, math.nan, math.inf),
        "top1_fraction": (0.0, 1e-6, 0.3, 0.5, 1.0, 1.1, math.nan, math.inf),
        "max_rank": (0, 1, 2, 4, 1000),
        "metric": (*SPECTRUM_METRICS, "nonsense"),
        "first_norm": (0.0, 1e-6, 1e6, -1.0, math.nan, math.inf),
        "second_norm": (0.0, 1e-6, 1e6, -1.0, math.nan, math.inf),
        "cosine": (-1.0, 0.0, 1.0, 1.1, math.nan),
    }
)
OPTIONS = MappingProxyType(
    {
        "epsilon": 0.1,
        "limit": 10,
        "margin": 4,
        "beta": 0.1,
        "aggregation": "token_sum",
        "resamples": 20,
        "draws": 20,
        "term": "k2",
    }
)
"""What is not a tensor in a function of tensors."""


def public_functions(room: str) -> dict[str, Callable[..., object]]:
    module = importlib.import_module(f"scoregram.{room}")
    return {name: fn for name in module.__all__ if inspect.isfunction(fn := getattr(module, name))}


def parameters(fn: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(fn).parameters


def numbers_of(value: object) -> Iterator[float]:
    """Every number inside an answer."""
    if isinstance(value, Tensor):
        yield from value.double().flatten().tolist()
    elif isinstance(value, (bool, int, float)):
        yield float(value)
    elif is_dataclass(value):
        yield from (x for field in fields(value) for x in numbers_of(getattr(value, field.name)))
    elif isinstance(value, Mapping):
        yield from (x for entry in value.values() for x in numbers_of(entry))
    elif isinstance(value, (tuple, list)):
        yield from (x for entry in value for x in numbers_of(entry))
    else:
        assert value is None, f"{type(value)} in an answer"


def stated(word: str, fn: Callable[..., object], answer: object) -> bool:
    """Whether the function, its module or the record it returns speaks of `nan`, or of `inf`."""
    told = [inspect.getdoc(fn) or "", inspect.getmodule(fn).__doc__ or ""]  # type: ignore[union-attr]
    if is_dataclass(answer):
        told.append(inspect.getsource(type(answer)))
    return any(f"`{word}`" in text for text in told)


def answer_to(fn: Callable[..., object], *args, **options) -> tuple[object, str]:
    """What `fn` answers, or the words of its error; any other exception is a failure of the test."""
    try:
        return fn(*args, **options), ""
    except ScoregramError as error:
        return None, str(error)


def answered(fn: Callable[..., object], *args, **options) -> bool:
    """Whether there was an answer, and not an error in our wording; what was answered is finite or stated."""
    answer, error = answer_to(fn, *args, **options)
    if error:
        assert ", got " in error
        return False
    for number in numbers_of(answer):
        if not math.isfinite(number):
            word = "nan" if math.isnan(number) else "inf"
            assert stated(word, fn, answer), f"{fn.__name__} gave {number} and does not say so: {answer}"
    return True


def arguments(room: str, fn: Callable[..., object], at: Case) -> dict[str, object] | None:
    """What `fn` asks for, from a case; `None` if it asks for something that is not made of rewards and scores."""
    given = tensors_of(room, at) | {"group_size": max(at.rewards.shape[1], 1)} | OPTIONS
    if fn is preference_pairs:
        given["rewards"] = at.rewards
    wanted = {
        name: parameter
        for name, parameter in parameters(fn).items()
        if parameter.default is inspect.Parameter.empty or name in ("draws", "resamples", "advantages")
    }
    return {name: given[name] for name in wanted} if wanted.keys() <= given.keys() else None


OF_TENSORS = [
    (room, name)
    for room in ("spectra", "statistics", "advantages", "objectives")
    for name, fn in public_functions(room).items()
    if arguments(room, fn, ORDINARY["rewards 1, scores 1, float64"]) is not None
]
OF_NUMBERS = [
    (room, name)
    for room in ("spectra", "statistics")
    for name, fn in public_functions(room).items()
    if parameters(fn).keys() <= NUMBERS.keys()
]
NEEDS_MORE = {
    "advantages": {row.fn.__name__ for row in ESTIMATORS.values()} | {"estimate"},
    "statistics": {
        "batch_mse",
        "signal_to_noise",
        "noise_scale",
        "mse_curve",
        "optimal_group_size",
        "leave_one_out_mse",
        "mean_baseline_mse",
        "vanilla_mse",
        "split_products",
        "unequal_prompt_estimates",
        "components_of_estimates",
        "allocation_error",
        "allocated_rollouts",
        "recommend_group_size",
        "inclusion_probabilities",
        "systematic_draw",
        "shrunk_weights",
    },
    "objectives": {"token_weights", "token_coefficients"},
    "spectra": set(),
}
"""Functions that have a walk of their own below."""


def test_no_public_function_is_left_out():
    walked = {*OF_TENSORS, *OF_NUMBERS, *((room, name) for room, names in NEEDS_MORE.items() for name in names)}
    every = {(room, name) for room in NEEDS_MORE for name in public_functions(room)}
    assert every - walked == set()


@pytest.mark.parametrize(("room", "name"), OF_TENSORS)
def test_ordinary_rewards_are_answered_at_every_scale(room, name):
    fn = public_functions(room)[name]
    for label, at in ORDINARY.items():
        given = arguments(room, fn, at) or {}
        assert answered(fn, **given), label
        assert not any(map(math.isnan, numbers_of(fn(**given)))), label


@pytest.mark.parametrize(("room", "name"), OF_TENSORS)
def test_odd_rewards_give_what_is_stated_or_an_error(room, name):
    fn = public_functions(room)[name]
    for at in ODD.values():
        answered(fn, **(arguments(room, fn, at) or {}))


READS_NO_REWARDS = {
    "group_blocks",
    "cosine_matrix",
    "centred_gram",
    "mean_pairwise_cosine",
    "overlong_penalty",
    "kl_values",
    "kl_penalty",
    "pair_preference",
    "pair_preference_weights",
    "excess_variance",
    "spread_over_tokens",
    "token_weights",
}
"""What takes no rewards, or hands on what it is given."""
TAKES_MISSING_REWARDS = {"mixed_groups", "group_outcomes"}
"""What reads NaN as a reward that is missing; infinite rewards are refused here too."""


@pytest.mark.parametrize(("room", "name"), [key for key in OF_TENSORS if key[1] not in READS_NO_REWARDS])
def test_rewards_that_are_not_finite_are_refused(room, name):
    fn = public_functions(room)[name]
    for label, at in NOT_FINITE.items():
        missing = name in TAKES_MISSING_REWARDS and bool(at.rewards.isnan().any())
        assert answered(fn, **(arguments(room, fn, at) or {})) is missing, label


def broken_grams(gram: Tensor) -> Iterator[Tensor]:
    """Grams that are none: not finite, not symmetric, a negative square."""
    for value in (math.nan, math.inf, -math.inf):
        yield gram.index_put((torch.tensor(0), torch.tensor(1)), torch.tensor(value, dtype=gram.dtype))
    yield gram.triu()
    yield gram - 2 * torch.diag(gram.diagonal())
    yield gram[:, :-1]
    yield gram[0]


@pytest.mark.parametrize(
    ("room", "name"), [(room, name) for room, name in OF_TENSORS if "gram" in parameters(public_functions(room)[name])]
)
def test_what_is_no_gram_is_refused(room, name):
    fn = public_functions(room)[name]
    given = arguments(room, fn, ORDINARY["rewards 1, scores 1, float64"]) or {}
    gram = given["gram"]
    assert isinstance(gram, Tensor)
    for broken in broken_grams(gram):
        assert not answered(fn, **(given | {"gram": broken}))


@pytest.mark.parametrize(("room", "name"), OF_NUMBERS)
def test_numbers_of_every_sort(room, name):
    fn = public_functions(room)[name]
    names = tuple(parameters(fn))
    rows = itertools.product(*(NUMBERS[name] for name in names))
    told = [answered(fn, **dict(zip(names, row, strict=True))) for row in rows]
    assert any(told) and not all(told)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@pytest.mark.parametrize("cases", ["ordinary", "odd", "not finite"])
def test_estimators(name, cases):
    def rewards(at: Case) -> Tensor:
        return at.rewards if ESTIMATORS[name].level == "group" else step_rewards(at)

    for label, at in {"ordinary": ORDINARY, "odd": ODD, "not finite": NOT_FINITE}[cases].items():
        found = answered(estimate, name, rewards(at), **inputs_of_estimators(at))
        # NaN is a missing reward, for the rows that take no other input made of it; infinite rewards are refused.
        missing = ESTIMATORS[name].level == "group" and bool(at.rewards.isnan().any())
        missing &= not {"baselines", "greedy_rewards"} & set(ESTIMATORS[name].needs)
        assert found is {"ordinary": True, "not finite": missing}.get(cases, found), label
        if ESTIMATORS[name].level == "group" and cases == "not finite":  # said to be missing, they are no obstacle
            given = inputs_of_estimators(ORDINARY["rewards 1, scores 1, float64"])
            assert answered(estimate, name, at.rewards.nan_to_num(math.nan, math.nan, math.nan), **given)


def advantages_of(name: str, rewards: Tensor, fn: Callable[..., object] | None = None) -> Tensor:
    """Advantages by `estimate`, or by `fn`; a reward per token or turn stands at the first one."""
    row, exact = ESTIMATORS[name], rewards.double()
    given = inputs_of_estimators(Case(exact, torch.eye(rewards.numel()).double()))
    given |= {"outcomes": rewards, "outcome_rewards": rewards}
    taken = {key: given[key] for key in (*row.needs, *LEVEL_INPUTS[row.level])}
    steps = rewards if row.level == "group" else torch.stack([rewards, *[torch.zeros_like(rewards)] * (TOKENS - 1)], -1)
    answer = estimate(name, steps, **taken) if fn is None else fn(steps, **taken)
    assert isinstance(answer, Tensor)
    return answer


INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_every_dtype_of_rewards_gives_the_advantages_of_its_numbers(name):
    """Integers as in the default dtype, half precision rounded once from float64; through the table and directly."""
    for dtype, fn in itertools.product((*INTEGERS, *HALVES), (None, ESTIMATORS[name].fn)):
        rewards = torch.tensor([[1, 0, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]], dtype=dtype)
        returned = dtype if dtype in HALVES else torch.get_default_dtype()
        expected = advantages_of(name, rewards.double()).to(returned)
        actual = advantages_of(name, rewards, fn)
        assert actual.dtype == returned
        torch.testing.assert_close(actual, expected, rtol=2 * torch.finfo(returned).eps, atol=1e-12)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_rewards_that_no_float_holds_are_refused(name):
    given, rewards = inputs_of_estimators(case([[1.0, 0.0, 0.0]])), torch.tensor([[1.0, 0.0, 0.0]])
    for refused in (torch.tensor([[2**24 + 1, 0, 1]]), rewards.to(torch.complex64), rewards.to(torch.float8_e4m3fn)):
        steps = refused if ESTIMATORS[name].level == "group" else refused[..., None].expand(1, 3, TOKENS)
        with pytest.raises(ScoregramError, match=r"must be (integers or one of|at most 16777216)"):
            estimate(name, steps, **given)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_rewards_as_large_as_the_dtype_allows_give_the_advantages_or_an_error(name):
    """The largest rewards of each dtype: advantages in proportion to them or independent of their size, never `inf`."""
    base = torch.tensor([[1.0, -0.25, 0.5, -1.0], [0.0, 0.75, -0.5, 0.25]], dtype=torch.float64)
    of_ordinary = advantages_of(name, base * 1024)
    for dtype, part in itertools.product((*HALVES, torch.float32, torch.float64), (2**-500, 1 / 64, 1 / 8, 1 / 2, 1)):
        scale = torch.finfo(dtype).max * part
        if scale < 1024:
            continue
        answer, error = answer_to(advantages_of, name, (base * scale).to(dtype))
        assert not error or (part > 1 / 64 and "must be finite, got " in error), error
        if isinstance(answer, Tensor):
            eps, in_proportion = torch.finfo(dtype).eps, (answer.double() - of_ordinary).abs().max() > 0.1
            actual = answer.double() / scale * 1024 if in_proportion else answer.double()
            torch.testing.assert_close(actual, of_ordinary, rtol=4 * eps + 1e-6, atol=4096 * eps)


def test_weights_whose_sum_overflows_are_refused():
    huge = torch.full((1, 2), 1e308, dtype=torch.float64)
    with pytest.raises(ScoregramError, match="the sum of score_energies must be finite"):
        estimate("optimal", torch.tensor([[1.0, 0.0]]), score_energies=huge)
    tiny = torch.full((1, 2), 5e-324, dtype=torch.float64)
    assert estimate("optimal", torch.tensor([[1.0, 0.0]]), score_energies=tiny).tolist() == [[0.5, -0.5]]


COMPONENTS = [NoiseComponents(*row) for row in itertools.product((0.0, 1e-12, 1e12, -1.0), repeat=4)]


@pytest.mark.parametrize("name", ["batch_mse", "signal_to_noise", "noise_scale", "optimal_group_size", "mse_curve"])
def test_noise_components_of_every_sort(name):
    fn = public_functions("statistics")[name]
    given = {"prompts": 4, "group_size": 4, "rollouts": 64, "group_sizes": torch.arange(2, 9)}
    options = {key: value for key, value in given.items() if key in parameters(fn)}
    for components in COMPONENTS:
        assert answered(fn, components, **options)


@pytest.mark.parametrize("name", ["leave_one_out_mse", "mean_baseline_mse", "vanilla_mse"])
@pytest.mark.parametrize("scale", [0.0, 1e-12, 1.0, 1e12, -1.0])
def test_moments_of_every_sort(name, scale):
    fn = public_functions("statistics")[name]
    moments = GroupMoments(*[torch.full((3,), scale, dtype=torch.float64)] * 6)
    assert [answered(fn, moments, size) for size in (0, 1, 2, 5000)] == [False, name != "leave_one_out_mse", True, True]


@pytest.mark.parametrize("label", [*ORDINARY, *ODD, *NOT_FINITE])
def test_unequal_groups_of_every_sort(label):
    at, room = (ORDINARY | ODD | NOT_FINITE)[label], public_functions("statistics")
    given = {"flat_rewards": at.rewards.flatten(), "prompt_of": tensors_of("statistics", at)["prompt_of"]}
    is_answered = answered(room["unequal_prompt_estimates"], at.gram, **given)
    assert is_answered or label not in ORDINARY
    if is_answered:
        estimates = room["unequal_prompt_estimates"](at.gram, **given)
        assert answered(room["components_of_estimates"], estimates) or len(at.rewards) < 2


@pytest.mark.parametrize("scale", [0.0, 1e-300, 1e-12, 1.0, 1e12, 1e300, -1.0, math.nan, math.inf])
def test_allocations_of_noises_of_every_sort(scale):
    room, noise = public_functions("statistics"), torch.tensor([1.0, scale], dtype=torch.float64)
    assert answered(room["allocated_rollouts"], noise, noise, 9) == math.isfinite(scale)
    assert answered(room["allocation_error"], noise, noise, torch.tensor([2, 7])) == math.isfinite(scale)
    assert answered(room["inclusion_probabilities"], noise, 1) == (math.isfinite(scale) and scale >= 0)
    assert answered(room["shrunk_weights"], noise, noise) == math.isfinite(scale)
    assert answered(room["systematic_draw"], noise, torch.Generator()) == (0 <= scale <= 1)


def test_advice_from_components_of_every_sort():
    for components in COMPONENTS:
        given = {"generator": torch.Generator().manual_seed(0), "resamples": 10}
        advice = recommend_group_size([components] * 10, 8, (4, 8, 16), **given)
        assert advice.recommended in (4, 8, 16) and "group size" in advice.sentence


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize("shape", [(3, 4), (1, 1), (3, 0), (0, 4), (0, 0)])
def test_token_weights(aggregation, shape):
    fn = public_functions("objectives")["token_weights"]
    for filled in (True, False):
        mask = torch.full(shape, filled)
        length = 4 if AGGREGATIONS[aggregation].needs_length else None
        assert answered(fn, mask, aggregation, length=length)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_objectives_and_their_gradients(name):
    row = OBJECTIVES[name]
    coefficients = public_functions("objectives")["token_coefficients"]
    for label, at in (ORDINARY | ODD | NOT_FINITE).items():
        given = tensors_of("objectives", at) | {"group_size": max(at.rewards.shape[1], 1), "beta": 0.1}
        log_probs = given["log_probs"]
        assert isinstance(log_probs, Tensor)
        given["log_probs"] = log_probs.requires_grad_()
        if answered(row.fn, **{need: given[need] for need in row.needs}):
            assert answered(coefficients, row.fn(**{need: given[need] for need in row.needs}), log_probs)
        else:
            assert label not in ORDINARY
        answered(row.weight, **{need: given[need] for need in row.weight_needs})


@pytest.mark.parametrize("term", sorted(KL_TERMS))
@pytest.mark.parametrize("apart", [0.0, 1e-6, 1.0, 700.0, 1e30])
def test_divergence_terms_far_apart(term, apart):
    mask, here = torch.ones(2, 3, dtype=torch.bool), torch.full((2, 3), -1.0)
    for log_probs, other in ((here, here - apart), (here - apart, here)):
        answered(public_functions("objectives")["kl_penalty"], log_probs, other, mask, term=term)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_updates_of_parts_are_refused_unless_finite(bad):
    parts = disjoint_parts(4, 2)
    grams, advantages = torch.eye(4).double().expand(2, 4, 4).clone(), torch.ones(1, 2, len(parts), 2, 2).double()
    assert bool(split_products(grams, advantages, parts).squared.isfinite().all())
    for place, name in enumerate(("grams", "advantages")):
        given = [grams.clone(), advantages.clone()]
        given[place].view(-1)[1] = bad
        with pytest.raises(ScoregramError, match=f"{name} must be finite"):
            split_products(given[0], given[1], parts)
