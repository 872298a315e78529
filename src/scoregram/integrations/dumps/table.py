"""The literal table of formats: what each is, how its files are called, and what is claimed about them.

Every boolean is checked in `tests/test_dumps_formats.py` on an example of that format.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from scoregram.integrations.dumps.nemo_rl import nemo_rl
from scoregram.integrations.dumps.open_instruct import open_instruct
from scoregram.integrations.dumps.plain_jsonl import plain_jsonl
from scoregram.integrations.dumps.prime_rl import prime_rl
from scoregram.integrations.dumps.record import DumpedRollout, Where
from scoregram.integrations.dumps.scoregram_run import scoregram_run
from scoregram.integrations.dumps.slime_debug import slime_debug
from scoregram.integrations.dumps.trl_completions import trl_completions
from scoregram.integrations.dumps.verifiers_traces import trained_on, verifiers_traces
from scoregram.integrations.dumps.verl_jsonl import verl_jsonl

Parse = Callable[[Mapping[str, Any], Where], Iterator[DumpedRollout]]


@dataclass(frozen=True, kw_only=True)
class Format:
    """One way in which rollouts are written."""

    about: str
    """Who writes it, and which setting makes them."""
    parse: Parse
    """From a record to its rollouts; raises `ScoregramError` for one that is broken."""
    suffix: str
    """Of its files; a key of `CONTAINERS`."""
    names: tuple[str, ...]
    """Patterns of its files in a folder, at any depth; the first one that matches counts."""
    fields: tuple[tuple[str, ...], ...]
    """A record is of this format if it has all fields of one of these."""
    token_ids: bool
    """The very tokens are written, so that a measurement is exact."""
    adjacent: bool
    """The rollouts of a group stand next to each other, so that a group ends where another begins."""
    repeats: bool = False
    """The same rollouts may be written again under the next step."""
    chosen: Callable[[Sequence[Path]], list[Path]] = list
    """Which of the files that were found to read."""

    def recognises(self, record: Any) -> bool:
        """Whether a record has the fields of this format."""
        return isinstance(record, Mapping) and any(set(fields) <= record.keys() for fields in self.fields)


FORMATS: MappingProxyType[str, Format] = MappingProxyType(
    {
        "scoregram": Format(
            about="a run folder of scoregram (train --rollouts-every)",
            parse=scoregram_run,
            suffix=".parquet",
            names=("rollouts/step-*.parquet", "step-*.parquet"),
            fields=(("token_ids", "prompt_length", "reward"),),
            token_ids=True,
            adjacent=True,
        ),
        "trl": Format(
            about="TRL (log_completions=True)",
            parse=trl_completions,
            suffix=".parquet",
            names=("completions_*.parquet",),
            fields=(("step", "prompt", "completion", "advantage"),),
            token_ids=False,
            adjacent=True,
            repeats=True,
        ),
        "nemo-rl": Format(
            about="NeMo-RL (train_data_step*.jsonl in the log folder)",
            parse=nemo_rl,
            suffix=".jsonl",
            names=("train_data_step*.jsonl",),
            fields=(("token_ids", "token_loss_mask", "rewards"),),
            token_ids=True,
            adjacent=True,
        ),
        "prime-rl": Format(
            about="prime-rl (trainer.enable_token_export)",
            parse=prime_rl,
            suffix=".jsonl",
            names=("rank_*.jsonl",),
            fields=(("token_ids", "loss_mask", "inference_logprobs"),),
            token_ids=True,
            adjacent=False,
        ),
        "verifiers": Format(
            about="verifiers and prime-rl (traces.jsonl)",
            parse=verifiers_traces,
            suffix=".jsonl",
            names=("traces.jsonl",),
            fields=(("traces", "task"), ("nodes", "task")),
            token_ids=True,
            adjacent=False,
            chosen=trained_on,
        ),
        "open-instruct": Format(
            about="open-instruct (rollouts saved as JSONL)",
            parse=open_instruct,
            suffix=".jsonl",
            names=("*_rollouts_*.jsonl",),
            fields=(("prompt_tokens", "response_tokens", "reward"),),
            token_ids=True,
            adjacent=True,
        ),
        "verl": Format(
            about="verl (trainer.rollout_data_dir)",
            parse=verl_jsonl,
            suffix=".jsonl",
            names=("[0-9]*.jsonl",),
            fields=(("input", "output", "score"),),
            token_ids=False,
            adjacent=False,
        ),
        "plain": Format(
            about="plain JSONL (prompt, completion, reward, optional group)",
            parse=plain_jsonl,
            suffix=".jsonl",
            names=("*.jsonl",),
            fields=(("prompt", "completion"), ("prompt_ids", "completion_ids")),
            token_ids=False,
            adjacent=False,
        ),
        "slime": Format(
            about="slime (--save-debug-rollout-data)",
            parse=slime_debug,
            suffix=".pt",
            names=("*.pt",),
            fields=(("tokens", "response_length"),),
            token_ids=True,
            adjacent=True,
        ),
    }
)
