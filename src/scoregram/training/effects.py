"""Options of `scoregram train` that act only together with others.

On the command line an option that cannot act is refused. A comparison gives the same options to all of its methods, so
there it must act in one of them, and the trainer itself ignores it in the others. Only
`critic_warmup` is refused for a method without a critic there too: it would wait for nothing.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType

from scoregram.advantages import ESTIMATORS
from scoregram.errors import fail, option_name
from scoregram.training.config import TrainConfig
from scoregram.training.credit import compares_with_reference, has_critic, takes_clip, takes_lambda, takes_values


@dataclass(frozen=True)
class OptionEffect:
    """When an option acts."""

    acts: Callable[[TrainConfig], bool]
    needs: str
    """The same in words."""
    settings: tuple[str, ...]
    """The settings that decide it."""


def _needs(name: str) -> Callable[[TrainConfig], bool]:
    """Whether the estimator takes this input."""
    return lambda config: name in ESTIMATORS[config.chosen_method.estimator].needs


def _has_given_baseline(config: TrainConfig) -> bool:
    return _needs("baselines")(config) and not config.chosen_method.learned_baseline


def _is_cut(kind: str) -> Callable[[TrainConfig], bool]:
    """Whether Monte-Carlo values are estimated at segments of this kind."""
    return lambda config: _needs("segment_starts")(config) and config.segments == kind


def _samples_more(config: TrainConfig) -> bool:
    """Whether a step can sample more rollouts than `batch_size`."""
    method = config.chosen_method
    draws_more = method.dynamic_sampling or method.drafts or method.branches
    return draws_more or _needs("greedy_rewards")(config) or _PREFIXES.acts(config)


def _reaches_measurement(config: TrainConfig) -> bool:
    """Whether the rollouts of a run reach `every_rollouts`, as far as their number is known before it."""
    if config.rollouts:
        return config.every_rollouts <= config.rollouts
    return config.every_rollouts <= config.steps * config.batch_size or _samples_more(config)


_BY_METHOD = ("method", "estimator")
_LENGTH = ("steps", "rollouts")
_MEASURED = OptionEffect(
    lambda config: config.measure_every > 0 or config.every_rollouts > 0,
    "measured steps: --measure-every above 0",
    ("measure_every", "every_rollouts"),
)
_EVALUATED = OptionEffect(
    lambda config: config.eval_every > 0 or config.every_rollouts > 0,
    "evaluations: --eval-every above 0",
    ("eval_every", "every_rollouts"),
)
_BY_STEPS = OptionEffect(
    lambda config: not config.every_rollouts, "measurements counted by steps, not --every-rollouts", ("every_rollouts",)
)
_GRAMS = OptionEffect(
    lambda config: _MEASURED.acts(config) or config.probe_every > 0 or bool(config.controls),
    "measured steps or probes: --measure-every or --probe-every above 0",
    ("measure_every", "every_rollouts", "probe_every"),
)
_LORA = OptionEffect(lambda config: config.lora_rank > 0, "adapters: --lora-rank above 0", ("lora_rank",))
_PROBED = OptionEffect(lambda config: config.probe_every > 0, "probes: --probe-every above 0", ("probe_every",))
_VALUES = (*_BY_METHOD, "exact_values")
_CRITIC = OptionEffect(has_critic, "a method with a critic, such as ppo", _VALUES)
_DRAFTS = OptionEffect(lambda config: config.chosen_method.drafts, "a method with drafts: igrpo", ("method",))
_PREFIXES = OptionEffect(
    lambda config: _needs("prefix_values")(config) and not config.exact_values,
    "a method with Monte-Carlo values, such as vineppo",
    _VALUES,
)
_PROCESS = OptionEffect(_needs("step_ends"), "a method with process rewards: grpo-process", _BY_METHOD)
_SEGMENTS = OptionEffect(_needs("segment_starts"), "a method with Monte-Carlo values of segments", _BY_METHOD)

EFFECTS: Mapping[str, OptionEffect] = MappingProxyType(
    {
        "lora_alpha": _LORA,
        "lora_targets": _LORA,
        "gae_lambda": OptionEffect(
            lambda config: takes_lambda(config.chosen_method.estimator),
            "a method with generalised advantages, such as ppo",
            _BY_METHOD,
        ),
        "clip_low": OptionEffect(
            lambda config: config.inner_updates > 1 and takes_clip(config.chosen_method.objective, "eps_low"),
            "a loss that clips low ratios, and --inner-updates above 1",
            ("method", "objective", "inner_updates"),
        ),
        "clip_high": OptionEffect(
            lambda config: config.inner_updates > 1 and takes_clip(config.chosen_method.objective, "eps_high"),
            "a loss that clips high ratios, and --inner-updates above 1",
            ("method", "objective", "inner_updates"),
        ),
        "baseline": OptionEffect(
            _has_given_baseline, "a method with a constant baseline: reinforce-baseline", _BY_METHOD
        ),
        "baseline_decay": OptionEffect(
            lambda config: _has_given_baseline(config) and config.baseline is None,
            "a running mean of rewards: reinforce-baseline without --baseline",
            (*_BY_METHOD, "baseline"),
        ),
        "critic": _CRITIC,
        "critic_learning_rate": _CRITIC,
        "critic_updates": _CRITIC,
        "critic_clip": OptionEffect(
            lambda config: has_critic(config) and config.critic_updates > 1,
            "a critic that makes several updates per step: --critic-updates above 1",
            (*_VALUES, "critic_updates"),
        ),
        "critic_warmup": OptionEffect(
            lambda config: has_critic(config) and config.critic_warmup < config.most_steps,
            "a method with a critic, such as ppo, and more steps than --critic-warmup",
            (*_VALUES, "critic_warmup", *_LENGTH),
        ),
        "exact_values": OptionEffect(
            lambda config: takes_values(config.chosen_method),
            "a method that takes values, such as ppo or vineppo",
            _BY_METHOD,
        ),
        "drafts": _DRAFTS,
        "draft_format": _DRAFTS,
        "best_of": OptionEffect(_needs("best_of"), "the method pass-at-k", _BY_METHOD),
        "prefix_rollouts": _PREFIXES,
        "segments": _SEGMENTS,
        "segment_tokens": OptionEffect(_is_cut("even"), "--segments even", (*_BY_METHOD, "segments")),
        "segment_probability": OptionEffect(_is_cut("unlikely"), "--segments unlikely", (*_BY_METHOD, "segments")),
        "step_scores": _PROCESS,
        "steps": OptionEffect(
            lambda config: not config.rollouts, "a number of steps, not a budget of rollouts", ("rollouts",)
        ),
        "dynamic_rounds": OptionEffect(
            lambda config: config.chosen_method.dynamic_sampling, "a method with dynamic sampling: dapo", ("method",)
        ),
        "kl": OptionEffect(
            lambda config: config.beta > 0 and not compares_with_reference(config.chosen_method.objective),
            "a KL term: --beta above 0, and not agro or dpo",
            ("method", "beta"),
        ),
        "adam_betas": OptionEffect(lambda config: config.optimizer == "adamw", "--optimizer adamw", ("optimizer",)),
        "momentum": OptionEffect(lambda config: config.optimizer == "sgd", "--optimizer sgd", ("optimizer",)),
        "warmup_steps": OptionEffect(
            lambda config: config.warmup_steps <= config.most_steps or config.lr_schedule == "constant",
            "a warm-up that ends before the last step",
            ("warmup_steps", "steps"),
        ),
        "measure_every": OptionEffect(
            lambda config: _BY_STEPS.acts(config) and config.measure_every <= config.most_steps,
            "at least that many steps, and not --every-rollouts",
            ("measure_every", "every_rollouts", *_LENGTH),
        ),
        "every_rollouts": OptionEffect(
            _reaches_measurement,
            "a run that samples at least that many rollouts",
            ("every_rollouts", *_LENGTH, "batch_size"),
        ),
        "between_prompts": _GRAMS,
        "layers": _GRAMS,
        "layer_detail": OptionEffect(
            lambda config: _GRAMS.acts(config) and config.layers != "none",
            "per-layer Grams of measured steps or probes: --layers float32 or float64",
            ("layers", *_GRAMS.settings),
        ),
        "batches_every": OptionEffect(
            lambda config: config.batches_every <= config.most_steps,
            "at least that many steps",
            ("batches_every", *_LENGTH),
        ),
        "rollouts_every": OptionEffect(
            lambda config: config.rollouts_every <= config.most_steps,
            "at least that many steps",
            ("rollouts_every", *_LENGTH),
        ),
        "credit_truth": _MEASURED,
        "truth_rollouts": OptionEffect(
            lambda config: config.credit_truth == "sampled", "--credit-truth sampled", ("credit_truth",)
        ),
        "push": _MEASURED,
        "probe_problems": _PROBED,
        "probe_temperatures": _PROBED,
        "eval_every": _BY_STEPS,
        "eval_problems": _EVALUATED,
        "eval_samples": _EVALUATED,
    }
)
"""Option → when it acts. Options that are not listed always do, or are checked elsewhere."""


def require_effects(config: TrainConfig) -> None:
    """Raise if an option differs from its default and cannot act beside the others."""
    given = [field.name for field in fields(TrainConfig) if getattr(config, field.name) != field.default]
    require_some_effect(given, [config], caller="train")


def require_some_effect(options: Iterable[str], runs: Sequence[TrainConfig], *, caller: str) -> None:
    """Raise if one of these options cannot act in any of the runs."""
    for option in options:
        effect = EFFECTS.get(option)
        if effect is None or any(effect.acts(run) for run in runs):
            continue
        known = {name: list(dict.fromkeys(getattr(run, name) for run in runs)) for name in effect.settings}
        pairs = ((name, value) for name, values in known.items() for value in values if value is not None)
        got = ", ".join(f"{option_name(name).removeprefix('--')} {value}" for name, value in pairs)
        fail(f"{caller} {option_name(option)}", f"acts only with {effect.needs}", got, "Leave it out.")
