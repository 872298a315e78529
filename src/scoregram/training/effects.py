"""Options of `scoregram train` that act only together with others.

On the command line an option that cannot act is refused. A comparison gives the same options to all of its methods, so
the trainer itself ignores it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from scoregram.advantages import ESTIMATORS
from scoregram.errors import fail
from scoregram.training.config import TrainConfig, dashed
from scoregram.training.credit import compares_with_reference


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
    return lambda config: name in ESTIMATORS[config.chosen.estimator].needs


def _has_critic(config: TrainConfig) -> bool:
    needs = ESTIMATORS[config.chosen.estimator].needs
    return "values" in needs or ("baselines" in needs and config.chosen.learned_baseline)


def _has_given_baseline(config: TrainConfig) -> bool:
    return _needs("baselines")(config) and not config.chosen.learned_baseline


def _is_cut(kind: str) -> Callable[[TrainConfig], bool]:
    """Whether Monte-Carlo values are estimated at segments of this kind."""
    return lambda config: _needs("segment_starts")(config) and config.segments == kind


_BY_METHOD = ("method", "estimator")
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
_LORA = OptionEffect(lambda config: config.lora_rank > 0, "adapters: --lora-rank above 0", ("lora_rank",))
_PROBED = OptionEffect(lambda config: config.probe_every > 0, "probes: --probe-every above 0", ("probe_every",))
_CRITIC = OptionEffect(_has_critic, "a method with a critic, such as ppo", _BY_METHOD)
_DRAFTS = OptionEffect(lambda config: config.chosen.drafts, "a method with drafts: igrpo", ("method",))
_PREFIXES = OptionEffect(_needs("prefix_values"), "a method with Monte-Carlo values, such as vineppo", _BY_METHOD)
_SEGMENTS = OptionEffect(_needs("segment_starts"), "a method with Monte-Carlo values of segments", _BY_METHOD)

EFFECTS: Mapping[str, OptionEffect] = MappingProxyType(
    {
        "lora_alpha": _LORA,
        "lora_targets": _LORA,
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
        "critic_clip": _CRITIC,
        "critic_warmup": _CRITIC,
        "drafts": _DRAFTS,
        "draft_format": _DRAFTS,
        "best_of": OptionEffect(_needs("best_of"), "the method pass-at-k", _BY_METHOD),
        "prefix_rollouts": _PREFIXES,
        "segments": _SEGMENTS,
        "segment_tokens": OptionEffect(_is_cut("even"), "--segments even", (*_BY_METHOD, "segments")),
        "segment_probability": OptionEffect(_is_cut("unlikely"), "--segments unlikely", (*_BY_METHOD, "segments")),
        "steps": OptionEffect(
            lambda config: not config.rollouts, "a number of steps, not a budget of rollouts", ("rollouts",)
        ),
        "dynamic_rounds": OptionEffect(
            lambda config: config.chosen.dynamic_sampling, "a method with dynamic sampling: dapo", ("method",)
        ),
        "kl": OptionEffect(
            lambda config: config.beta > 0 and not compares_with_reference(config.chosen.objective),
            "a KL term: --beta above 0, and not agro or dpo",
            ("method", "beta"),
        ),
        "adam_betas": OptionEffect(lambda config: config.optimizer == "adamw", "--optimizer adamw", ("optimizer",)),
        "momentum": OptionEffect(lambda config: config.optimizer == "sgd", "--optimizer sgd", ("optimizer",)),
        "measure_every": _BY_STEPS,
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
    for field in fields(TrainConfig):
        effect = EFFECTS.get(field.name)
        if effect is None or getattr(config, field.name) == field.default or effect.acts(config):
            continue
        known = {name: getattr(config, name) for name in effect.settings}
        got = ", ".join(f"{dashed(name)} {value}" for name, value in known.items() if value is not None)
        fail(f"train --{dashed(field.name)}", f"acts only with {effect.needs}", got, "Leave it out.")
