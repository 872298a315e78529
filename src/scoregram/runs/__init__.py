"""The run folder: written step by step, safe against a kill at any moment, read by everything that shows a run."""

from scoregram.runs.atomic import require_space as require_space
from scoregram.runs.environment import environment as environment
from scoregram.runs.reader import Run as Run
from scoregram.runs.reader import open_run as open_run
from scoregram.runs.records import BatchRecord as BatchRecord
from scoregram.runs.records import GroupRecord as GroupRecord
from scoregram.runs.records import RolloutRecord as RolloutRecord
from scoregram.runs.verify import changed_files as changed_files
from scoregram.runs.verify import file_hashes as file_hashes
from scoregram.runs.writer import RunWriter as RunWriter
