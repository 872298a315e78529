"""Everything that decides a measurement of a dump, in one frozen record. Nothing heavy is imported here."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from scoregram.policy import PolicyConfig, refuse

MAY_DIFFER = (
    "out",
    "resume",
    "overwrite",
    "max_groups",
    "device",
    "threads",
    "strict",
    "allow_pickle",
    "fsdp",
    "checkpointing",
)
"""What a resumed measurement may have otherwise than the one it continues."""
PAPER = "mean"
"""The estimator of the paper, for dumps that do not tell their advantages."""


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """Measure the Gram of every group in a dump of rollouts, from any trainer, into a run folder.

    Formats: scoregram, trl, nemo-rl, prime-rl, verifiers, open-instruct, verl, plain and slime; docs/dumps.md shows an
    example of each. Dumps with token ids are exact. Text is tokenised again: approximate, and said so.
    """

    model: str
    """The policy that the rollouts were drawn from: hub id, folder, `.gguf` file, or `tiny`."""
    rollouts: Path
    """File or folder of the dump."""
    out: Path
    """Folder of the run to write."""
    format: str = "auto"
    """auto, or the name of a format."""
    resume: bool = False
    """Go on with the measurement in `out`; groups that it holds are not measured again."""
    overwrite: bool = False
    """Replace the run in `out`."""
    strict: bool = False
    """Stop at a record that is broken; otherwise it is reported and passed over."""
    allow_pickle: bool = False
    """Read files that run code when they are read."""

    estimator: str = "auto"
    """Advantages: `dump` for those of the dump, the name of an estimator, or `auto`: those of the dump where it tells
    them, else reward minus the mean of the group."""
    reward_columns: tuple[str, ...] = ()
    """Reward functions whose sum is the reward; what the dump says if not given."""
    temperature: float | None = None
    """Of the policy; what the dump says if not given, else 1."""
    between_prompts: bool = False
    """Measure all groups of a step at once, which noise and conflict need; a whole step must fit into memory."""
    max_groups: int = 0
    """Measure so many groups at most; 0 for all."""
    group_size: int = 0
    """Rollouts of a complete group, if all have as many: it tells two groups of one prompt apart. 0 if not known."""
    group_size_limit: int = 0
    """Measure so many rollouts of a group at most, the first ones; 0 for all."""
    window_mb: int = 256
    """Memory for rollouts whose groups are not complete, where a format does not write groups in one piece."""

    prompt: Literal["plain", "chat"] = "plain"
    """How the text of a prompt is tokenised: as it is, or as what a user says in a chat."""
    append_end: bool = False
    """Put the end token after completions that are text, which dumps leave out."""
    dtype: str = "float32"
    """Precision of the weights: float32, bfloat16, float16 or float64."""
    autocast: bool = False
    """Run matrix products in bfloat16; the weights stay in `dtype`."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    fsdp: bool = False
    """Shard the model over the processes of `torchrun`, for one that does not fit into one GPU; see docs/scale.md."""
    checkpointing: bool = False
    """Keep the input of each layer only and run the layer again for the backward pass: less memory, more time."""
    attention: str = "sdpa"
    """Attention implementation of transformers."""
    layers: Literal["float64", "float32", "none"] = "float32"
    """Precision in which the Grams of single layers are stored; none leaves them out."""
    threads: int = 0
    """Threads of torch on a CPU; 0 leaves them as they are."""

    def __post_init__(self) -> None:
        for name, least in (
            ("max_groups", 0),
            ("group_size", 0),
            ("group_size_limit", 0),
            ("window_mb", 1),
            ("threads", 0),
        ):
            if getattr(self, name) < least:
                flag = f"measure --{name.replace('_', '-')}"
                refuse(flag, f"must be at least {least}", getattr(self, name), "Choose another.")
        if self.temperature is not None and not 0 < self.temperature < float("inf"):
            refuse("measure --temperature", "must be positive and finite", self.temperature, "Usually it is 1.")
        if self.resume and self.overwrite:
            refuse("measure", "resume or overwrite, not both", "both", "Leave one of them out.")

    @property
    def policy(self) -> PolicyConfig:
        """What the policy is loaded with."""
        return PolicyConfig(
            model=self.model,
            dtype=self.dtype,
            autocast=self.autocast,
            device=self.device,
            attention=self.attention,
            prompt=self.prompt,
        )

    def record(self, found: str, temperature: float) -> Mapping[str, Any]:
        """The config as plain values for `config.yaml`, with what was left to the dump filled in."""
        plain = asdict(self) | {"out": str(self.out), "rollouts": str(self.rollouts)}
        plain |= {
            "format": found,
            "temperature": temperature,
            "command": "measure",
            "resume": False,
            "overwrite": False,
        }
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}
