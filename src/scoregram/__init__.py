"""scoregram: the exact Gram matrix of per-rollout policy-gradient scores, and everything that follows from it.

Importing this package imports nothing heavy; the public names below load their module when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:  # what `__getattr__` finds, for readers that do not run the code
    from scoregram.advantages import ESTIMATORS as ESTIMATORS
    from scoregram.advantages import Estimator as Estimator
    from scoregram.advantages import estimate as estimate
    from scoregram.errors import ScoregramError as ScoregramError
    from scoregram.gram import Gram as Gram
    from scoregram.gram import Sketch as Sketch
    from scoregram.gram import backward_with_gram as backward_with_gram
    from scoregram.gram import cross_gram as cross_gram
    from scoregram.gram import measure_gram as measure_gram
    from scoregram.gram import segment_rows as segment_rows
    from scoregram.objectives import AGGREGATIONS as AGGREGATIONS
    from scoregram.objectives import KL_TERMS as KL_TERMS
    from scoregram.objectives import OBJECTIVES as OBJECTIVES
    from scoregram.objectives import Objective as Objective
    from scoregram.objectives import token_coefficients as token_coefficients
    from scoregram.policy import PolicyConfig as PolicyConfig
    from scoregram.policy import SamplingConfig as SamplingConfig
    from scoregram.policy import load_policy as load_policy
    from scoregram.policy import sample as sample
    from scoregram.policy import token_log_probs as token_log_probs
    from scoregram.runs import open_run as open_run
    from scoregram.spectra import SPECTRUM_METRICS as SPECTRUM_METRICS
    from scoregram.spectra import SpectrumReading as SpectrumReading
    from scoregram.spectra import SpectrumSummary as SpectrumSummary
    from scoregram.spectra import feasible_interval as feasible_interval
    from scoregram.spectra import singular_values as singular_values
    from scoregram.spectra import spectrum_summary as spectrum_summary
    from scoregram.spectra import spectrum_with_nulls as spectrum_with_nulls
    from scoregram.statistics import NoiseComponents as NoiseComponents
    from scoregram.statistics import baseline_saving as baseline_saving
    from scoregram.statistics import cosine_matrix as cosine_matrix
    from scoregram.statistics import group_outcomes as group_outcomes
    from scoregram.statistics import held_out_effect as held_out_effect
    from scoregram.statistics import mse_curve as mse_curve
    from scoregram.statistics import noise_components as noise_components
    from scoregram.statistics import noise_scale as noise_scale
    from scoregram.statistics import optimal_group_size as optimal_group_size
    from scoregram.statistics import optimal_group_size_interval as optimal_group_size_interval
    from scoregram.statistics import prompt_conflict as prompt_conflict
    from scoregram.statistics import prompt_shares as prompt_shares
    from scoregram.statistics import rollout_shares as rollout_shares
    from scoregram.statistics import signal_to_noise as signal_to_noise
    from scoregram.statistics import update_coherence as update_coherence
    from scoregram.statistics import update_norm as update_norm
    from scoregram.tasks import TASKS as TASKS
    from scoregram.tasks import load_task as load_task
    from scoregram.training.config import TrainConfig as TrainConfig
    from scoregram.training.loop import train as train
    from scoregram.training.methods import METHODS as METHODS
    from scoregram.training.supervised import warm_start as warm_start

_HOME = {
    "AGGREGATIONS": "scoregram.objectives",
    "ESTIMATORS": "scoregram.advantages",
    "Estimator": "scoregram.advantages",
    "Gram": "scoregram.gram",
    "KL_TERMS": "scoregram.objectives",
    "METHODS": "scoregram.training.methods",
    "NoiseComponents": "scoregram.statistics",
    "OBJECTIVES": "scoregram.objectives",
    "Objective": "scoregram.objectives",
    "PolicyConfig": "scoregram.policy",
    "SPECTRUM_METRICS": "scoregram.spectra",
    "SamplingConfig": "scoregram.policy",
    "ScoregramError": "scoregram.errors",
    "Sketch": "scoregram.gram",
    "SpectrumReading": "scoregram.spectra",
    "SpectrumSummary": "scoregram.spectra",
    "TASKS": "scoregram.tasks",
    "TrainConfig": "scoregram.training.config",
    "backward_with_gram": "scoregram.gram",
    "baseline_saving": "scoregram.statistics",
    "cosine_matrix": "scoregram.statistics",
    "cross_gram": "scoregram.gram",
    "estimate": "scoregram.advantages",
    "feasible_interval": "scoregram.spectra",
    "group_outcomes": "scoregram.statistics",
    "held_out_effect": "scoregram.statistics",
    "load_policy": "scoregram.policy",
    "load_task": "scoregram.tasks",
    "measure_gram": "scoregram.gram",
    "mse_curve": "scoregram.statistics",
    "noise_components": "scoregram.statistics",
    "noise_scale": "scoregram.statistics",
    "open_run": "scoregram.runs",
    "optimal_group_size": "scoregram.statistics",
    "optimal_group_size_interval": "scoregram.statistics",
    "prompt_conflict": "scoregram.statistics",
    "prompt_shares": "scoregram.statistics",
    "rollout_shares": "scoregram.statistics",
    "sample": "scoregram.policy",
    "segment_rows": "scoregram.gram",
    "signal_to_noise": "scoregram.statistics",
    "singular_values": "scoregram.spectra",
    "spectrum_summary": "scoregram.spectra",
    "spectrum_with_nulls": "scoregram.spectra",
    "token_coefficients": "scoregram.objectives",
    "token_log_probs": "scoregram.policy",
    "train": "scoregram.training.loop",
    "update_coherence": "scoregram.statistics",
    "update_norm": "scoregram.statistics",
    "warm_start": "scoregram.training.supervised",
}
"""Where each public name lives."""

__all__ = [
    "AGGREGATIONS",
    "ESTIMATORS",
    "KL_TERMS",
    "METHODS",
    "OBJECTIVES",
    "SPECTRUM_METRICS",
    "TASKS",
    "Estimator",
    "Gram",
    "NoiseComponents",
    "Objective",
    "PolicyConfig",
    "SamplingConfig",
    "ScoregramError",
    "Sketch",
    "SpectrumReading",
    "SpectrumSummary",
    "TrainConfig",
    "__version__",
    "backward_with_gram",
    "baseline_saving",
    "cosine_matrix",
    "cross_gram",
    "estimate",
    "feasible_interval",
    "group_outcomes",
    "held_out_effect",
    "load_policy",
    "load_task",
    "measure_gram",
    "mse_curve",
    "noise_components",
    "noise_scale",
    "open_run",
    "optimal_group_size",
    "optimal_group_size_interval",
    "prompt_conflict",
    "prompt_shares",
    "rollout_shares",
    "sample",
    "segment_rows",
    "signal_to_noise",
    "singular_values",
    "spectrum_summary",
    "spectrum_with_nulls",
    "token_coefficients",
    "token_log_probs",
    "train",
    "update_coherence",
    "update_norm",
    "warm_start",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'scoregram' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
