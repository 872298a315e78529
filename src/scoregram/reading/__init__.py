"""The only package that turns rewards and Grams into metrics and records.

```
Rollouts + advantages + Gram = Step ──► read_step ──► StepReading (scalars of metrics.jsonl) ─┐
                                └─────► read_group ─► GroupReading (one prompt's numbers)    ─┼─► records ─► run folder
run folder ──► read_run ──► RunReading: groups, series, and the last third with intervals  ◄──┘
```

The trainer, TRL and dumps each build a `Step`. Report, advice, trackers and studies start from a reading and compute no
metrics themselves. `group.Outcome` lists the outcomes of a group; `scoregram.groups` defines when a group is live. A
missing reward is `nan` throughout.
"""

from scoregram.reading.credit import CreditTruth as CreditTruth
from scoregram.reading.curves import Curve as Curve
from scoregram.reading.curves import bounded_band as bounded_band
from scoregram.reading.curves import complement as complement
from scoregram.reading.curves import entropy_curve as entropy_curve
from scoregram.reading.curves import geometric_curve as geometric_curve
from scoregram.reading.curves import group_curve as group_curve
from scoregram.reading.curves import live_curve as live_curve
from scoregram.reading.curves import mse_by_group_size as mse_by_group_size
from scoregram.reading.curves import running_curve as running_curve
from scoregram.reading.curves import scalar_curve as scalar_curve
from scoregram.reading.curves import spectrum_energies as spectrum_energies
from scoregram.reading.difficulty import HALF_RIGHT as HALF_RIGHT
from scoregram.reading.difficulty import HalfRight as HalfRight
from scoregram.reading.difficulty import OutcomeCounts as OutcomeCounts
from scoregram.reading.difficulty import SuccessLaw as SuccessLaw
from scoregram.reading.difficulty import divisors as divisors
from scoregram.reading.difficulty import group_size_for as group_size_for
from scoregram.reading.difficulty import half_right_steps as half_right_steps
from scoregram.reading.difficulty import last_outcomes as last_outcomes
from scoregram.reading.difficulty import live_rates as live_rates
from scoregram.reading.difficulty import pairs_exceed_chance as pairs_exceed_chance
from scoregram.reading.dominance import ONE_IN as ONE_IN
from scoregram.reading.dominance import PromptShare as PromptShare
from scoregram.reading.dominance import StepShares as StepShares
from scoregram.reading.dominance import returning_prompts as returning_prompts
from scoregram.reading.dominance import step_shares as step_shares
from scoregram.reading.glass import GroupDetail as GroupDetail
from scoregram.reading.glass import StepDetail as StepDetail
from scoregram.reading.glass import detailed_steps as detailed_steps
from scoregram.reading.glass import step_detail as step_detail
from scoregram.reading.group import SHARE_COLUMN as SHARE_COLUMN
from scoregram.reading.group import GroupReading as GroupReading
from scoregram.reading.group import Outcome as Outcome
from scoregram.reading.group import StoredGroup as StoredGroup
from scoregram.reading.group import alike_chance as alike_chance
from scoregram.reading.group import group_cosines as group_cosines
from scoregram.reading.group import mean_cosine as mean_cosine
from scoregram.reading.group import mean_over_groups as mean_over_groups
from scoregram.reading.group import outcomes_of as outcomes_of
from scoregram.reading.group import read_group as read_group
from scoregram.reading.group import step_stretches as step_stretches
from scoregram.reading.group_sizes import GROUP_SIZE_WINDOW as GROUP_SIZE_WINDOW
from scoregram.reading.group_sizes import group_size_decisions as group_size_decisions
from scoregram.reading.indicators import LIVE_GOOD as LIVE_GOOD
from scoregram.reading.indicators import Gain as Gain
from scoregram.reading.indicators import Indicator as Indicator
from scoregram.reading.indicators import IndicatorState as IndicatorState
from scoregram.reading.indicators import accuracy_gain as accuracy_gain
from scoregram.reading.indicators import indicators as indicators
from scoregram.reading.indicators import lost_randomness as lost_randomness
from scoregram.reading.indicators import paired_gain as paired_gain
from scoregram.reading.indicators import steps_to_show as steps_to_show
from scoregram.reading.influence import TRAINED_AND_FIXED as TRAINED_AND_FIXED
from scoregram.reading.influence import TRAINED_AND_FIXED_PRECONDITIONED as TRAINED_AND_FIXED_PRECONDITIONED
from scoregram.reading.influence import HeldOutInfluence as HeldOutInfluence
from scoregram.reading.influence import held_out_influence as held_out_influence
from scoregram.reading.influence import prompt_products as prompt_products
from scoregram.reading.interference import InterferenceMap as InterferenceMap
from scoregram.reading.interference import interference_map as interference_map
from scoregram.reading.layers import largest_layer as largest_layer
from scoregram.reading.layers import layer_energy_shares as layer_energy_shares
from scoregram.reading.layers import layer_shares as layer_shares
from scoregram.reading.layers import layer_signals as layer_signals
from scoregram.reading.noise import PHASES as PHASES
from scoregram.reading.noise import POOLED as POOLED
from scoregram.reading.noise import STEP_NAMES as STEP_NAMES
from scoregram.reading.noise import RunNoise as RunNoise
from scoregram.reading.noise import run_noise as run_noise
from scoregram.reading.nulls import shuffled_means as shuffled_means
from scoregram.reading.nulls import spectrum_columns as spectrum_columns
from scoregram.reading.nulls import stacked_spectra as stacked_spectra
from scoregram.reading.replay import REFERENCE as REFERENCE
from scoregram.reading.replay import UNWEIGHTED as UNWEIGHTED
from scoregram.reading.replay import Replay as Replay
from scoregram.reading.replay import ReplayedRun as ReplayedRun
from scoregram.reading.replay import can_replay as can_replay
from scoregram.reading.replay import replay_groups as replay_groups
from scoregram.reading.replay import wrong_over_right_energy as wrong_over_right_energy
from scoregram.reading.run import GREEDY_TEST as GREEDY_TEST
from scoregram.reading.run import SAMPLED_TEST as SAMPLED_TEST
from scoregram.reading.run import EvaluationRewards as EvaluationRewards
from scoregram.reading.run import RunReading as RunReading
from scoregram.reading.run import RunSummary as RunSummary
from scoregram.reading.run import paused_collection as paused_collection
from scoregram.reading.run import read_run as read_run
from scoregram.reading.run import split_kinds as split_kinds
from scoregram.reading.run import what_if as what_if
from scoregram.reading.run_config import OWN_TRAINER as OWN_TRAINER
from scoregram.reading.run_config import TRL_TRAINER as TRL_TRAINER
from scoregram.reading.run_config import rollouts_option as rollouts_option
from scoregram.reading.run_config import rollouts_remedy as rollouts_remedy
from scoregram.reading.run_config import stored_setting as stored_setting
from scoregram.reading.run_config import trainer_of as trainer_of
from scoregram.reading.several import FROM_GRAM as FROM_GRAM
from scoregram.reading.several import RunSet as RunSet
from scoregram.reading.several import compared_quantities as compared_quantities
from scoregram.reading.several import mean_curve as mean_curve
from scoregram.reading.several import run_sets as run_sets
from scoregram.reading.step import LayerDetail as LayerDetail
from scoregram.reading.step import Step as Step
from scoregram.reading.step import StepReading as StepReading
from scoregram.reading.step import batch_records as batch_records
from scoregram.reading.step import gram_of_passes as gram_of_passes
from scoregram.reading.step import group_readings as group_readings
from scoregram.reading.step import group_records as group_records
from scoregram.reading.step import outcome_scalars as outcome_scalars
from scoregram.reading.step import policy_scalars as policy_scalars
from scoregram.reading.step import read_step as read_step
from scoregram.reading.step import reference_scalars as reference_scalars
from scoregram.reading.step import reward_scalars as reward_scalars
from scoregram.reading.step import rollout_records as rollout_records
from scoregram.reading.step import rollout_scalars as rollout_scalars
from scoregram.reading.step import turn_scalars as turn_scalars
from scoregram.reading.step import whole_gram_scalars as whole_gram_scalars
from scoregram.reading.tally import StepTally as StepTally
from scoregram.reading.trust import CHECK_COLUMN as CHECK_COLUMN
from scoregram.reading.trust import CHECK_ERROR as CHECK_ERROR
from scoregram.reading.trust import CHECK_ROLLOUTS as CHECK_ROLLOUTS
from scoregram.reading.trust import Trust as Trust
from scoregram.reading.updates import CosineDecay as CosineDecay
from scoregram.reading.updates import CosineMatrix as CosineMatrix
from scoregram.reading.updates import UpdateCosines as UpdateCosines
from scoregram.reading.updates import update_cosines as update_cosines
