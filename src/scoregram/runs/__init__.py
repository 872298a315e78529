"""The run folder: written step by step, safe against a kill at any moment, and read by reports and studies.

`disk` names, atomic writes, lock · `config` config.yaml · `metrics` metrics.jsonl · `records` Parquet tables ·
`writer` · `reader`.
"""

from scoregram.runs.config import commit_tree as commit_tree
from scoregram.runs.config import config_differences as config_differences
from scoregram.runs.config import environment as environment
from scoregram.runs.config import require_run as require_run
from scoregram.runs.config import source_commit as source_commit
from scoregram.runs.disk import BATCHES as BATCHES
from scoregram.runs.disk import CHECKPOINTS as CHECKPOINTS
from scoregram.runs.disk import CHECKSUMS as CHECKSUMS
from scoregram.runs.disk import CONFIG_FILE as CONFIG_FILE
from scoregram.runs.disk import FORMAT_VERSION as FORMAT_VERSION
from scoregram.runs.disk import GROUPS as GROUPS
from scoregram.runs.disk import LARGEST_STEP as LARGEST_STEP
from scoregram.runs.disk import METRICS as METRICS
from scoregram.runs.disk import REPORT as REPORT
from scoregram.runs.disk import ROLLOUTS as ROLLOUTS
from scoregram.runs.disk import TEMPORARY as TEMPORARY
from scoregram.runs.disk import TRACKER_LOGS as TRACKER_LOGS
from scoregram.runs.disk import UPDATES as UPDATES
from scoregram.runs.disk import FolderLock as FolderLock
from scoregram.runs.disk import damaged_files as damaged_files
from scoregram.runs.disk import disk_errors as disk_errors
from scoregram.runs.disk import file_sha256 as file_sha256
from scoregram.runs.disk import make_folder as make_folder
from scoregram.runs.disk import parts as parts
from scoregram.runs.disk import require_own_folder as require_own_folder
from scoregram.runs.disk import require_path as require_path
from scoregram.runs.disk import require_space as require_space
from scoregram.runs.disk import write_atomically as write_atomically
from scoregram.runs.metrics import CHECK_PASSED as CHECK_PASSED
from scoregram.runs.metrics import OWN_PREFIX as OWN_PREFIX
from scoregram.runs.metrics import beside_foreign as beside_foreign
from scoregram.runs.metrics import has_failed_check as has_failed_check
from scoregram.runs.metrics import last_scalar as last_scalar
from scoregram.runs.metrics import needs_gram as needs_gram
from scoregram.runs.metrics import own_name as own_name
from scoregram.runs.metrics import read_metrics as read_metrics
from scoregram.runs.reader import BatchNames as BatchNames
from scoregram.runs.reader import Run as Run
from scoregram.runs.reader import open_run as open_run
from scoregram.runs.records import FIXED_PROBE as FIXED_PROBE
from scoregram.runs.records import LOSS_KIND as LOSS_KIND
from scoregram.runs.records import REWARD as REWARD
from scoregram.runs.records import STATISTIC as STATISTIC
from scoregram.runs.records import TRAINING_KINDS as TRAINING_KINDS
from scoregram.runs.records import BatchRecord as BatchRecord
from scoregram.runs.records import GroupRecord as GroupRecord
from scoregram.runs.records import LayerPrecision as LayerPrecision
from scoregram.runs.records import RolloutRecord as RolloutRecord
from scoregram.runs.records import Rows as Rows
from scoregram.runs.records import UpdateRecord as UpdateRecord
from scoregram.runs.records import read_part as read_part
from scoregram.runs.records import rows_of_kind as rows_of_kind
from scoregram.runs.records import token_hash as token_hash
from scoregram.runs.writer import RunWriter as RunWriter
from scoregram.runs.writer import require_same_config as require_same_config
