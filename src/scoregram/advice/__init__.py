"""What is wrong with a run and what to change, by stated rules.

```
a log of any trainer ──► formats ──► RunLog ──► reward_, completion_, gradient_, policy_rules ┐
run folder ──► reading ──► RunReading ──────────► gram_rules, prompt_rules, noise_rules ──────┴──► Diagnosis
```

A rule returns a finding, None if there is nothing to change, or what to measure where the data do not decide.
`docs/advice.md` lists every rule with its threshold and its reason.
"""

from scoregram.advice.diagnose import DEMOS as DEMOS
from scoregram.advice.diagnose import GRAM_RULES as GRAM_RULES
from scoregram.advice.diagnose import LOG_RULES as LOG_RULES
from scoregram.advice.diagnose import advise as advise
from scoregram.advice.diagnose import advise_log as advise_log
from scoregram.advice.diagnose import advise_run as advise_run
from scoregram.advice.diagnose import demo_names as demo_names
from scoregram.advice.diagnose import show_advice as show_advice
from scoregram.advice.diagnose import show_demo as show_demo
from scoregram.advice.difficulty import HARDER as HARDER
from scoregram.advice.difficulty import live_expectation as live_expectation
from scoregram.advice.difficulty import superscript as superscript
from scoregram.advice.findings import CHECKED_STEPS as CHECKED_STEPS
from scoregram.advice.findings import SEVERITIES as SEVERITIES
from scoregram.advice.findings import Change as Change
from scoregram.advice.findings import Diagnosis as Diagnosis
from scoregram.advice.findings import RunFinding as RunFinding
from scoregram.advice.findings import Severity as Severity
from scoregram.advice.gram_rules import LAYER_ALONE as LAYER_ALONE
from scoregram.advice.gram_rules import LAYER_GROWTH as LAYER_GROWTH
from scoregram.advice.gram_rules import LAYER_SHARE as LAYER_SHARE
from scoregram.advice.logs import RunLog as RunLog
from scoregram.advice.logs import run_log as run_log
from scoregram.advice.noise_rules import least_error_size as least_error_size
from scoregram.advice.noise_rules import rollouts_for_scale as rollouts_for_scale
from scoregram.advice.noise_rules import trained_estimator as trained_estimator
from scoregram.advice.prompt_filter import filter_prompts as filter_prompts
from scoregram.advice.prompt_filter import show_filter as show_filter
from scoregram.advice.settings import PROMPTS as PROMPTS
from scoregram.advice.settings import count_words as count_words
from scoregram.advice.settings import measuring_setting as measuring_setting
from scoregram.advice.settings import typed_setting as typed_setting
