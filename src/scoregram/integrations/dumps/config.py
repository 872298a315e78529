"""Every setting of `scoregram measure`, in one frozen dataclass. Imports neither torch nor transformers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from scoregram.errors import fail, option_name, require_field_types
from scoregram.policy import PolicyConfig

MAY_CHANGE_ON_RESUME = (
    "out",
    "resume",
    "overwrite",
    "max_groups",
    "device",
    "threads",
    "strict",
    "allow_pickle",
    "unpacked_mb",
    "trust_remote_code",
    "fsdp",
    "checkpointing",
)
"""Settings in which a resumed measurement may differ from the one that it continues."""


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """Measure the Gram of every group in a dump of rollouts, from any trainer, into a run folder.

    Formats: scoregram, trl, nemo-rl, prime-rl, verifiers, open-instruct, verl, plain and slime; docs/dumps.md shows an
    example of each. Dumps with token ids are measured exactly. Text is tokenised again, which is an approximation, and
    the output says so.
    """

    model: str
    """The policy that sampled the rollouts: hub id, folder, `.gguf` file, or `tiny`."""
    rollouts: Path
    """File or folder of the dump."""
    out: Path
    """Run folder to write."""
    format: str = "auto"
    """auto, or the name of a format."""
    resume: bool = False
    """Continue the measurement in `out`; groups that it holds are not measured again."""
    overwrite: bool = False
    """Replace the run in `out`."""
    strict: bool = False
    """Stop at the first broken record; by default, broken records are reported and skipped."""
    allow_pickle: bool = False
    """Load pickles; loading one runs the code inside."""
    trust_remote_code: bool = False
    """Load a model with custom code; loading it runs that code."""

    estimator: str = "auto"
    """Advantages: `dump` for those of the dump, the name of an estimator, or `auto`: those of the dump for groups in
    which every rollout has one, else reward minus the mean of the group; with `reward_columns` always the latter."""
    reward_columns: tuple[str, ...] = ()
    """Reward functions whose sum is the reward; by default, the dump's own total."""
    temperature: float | None = None
    """Sampling temperature; by default that of the dump, or 1 if it has none."""
    between_prompts: bool = False
    """Measure all groups of a step together, as noise and conflict require; in several passes if memory is short."""
    max_groups: int = 0
    """Measure at most this many groups, with `between_prompts` whole steps that have no more; 0 for all."""
    group_size: int = 0
    """Rollouts per group, if all groups have the same size; it separates two groups of one prompt. 0 if unknown."""
    group_size_limit: int = 0
    """Measure at most this many rollouts of a group, the first ones; 0 for all."""
    unpacked_mb: int = 4096
    """Largest unpacked size of a Parquet row group or of a torch file, in MB: a few KB can unpack to any size."""
    window_mb: int = 256
    """MB of memory for incomplete groups, for formats that do not write the rollouts of a group together."""

    prompt: Literal["plain", "chat"] = "plain"
    """How the text of a prompt is tokenised: as it is, or as the user's message in a chat."""
    append_end: bool = False
    """Append the end token to completions that are text; dumps of text omit it."""
    dtype: str = "float32"
    """Precision of the weights: float32, bfloat16, float16 or float64."""
    autocast: bool = False
    """Run matrix products in bfloat16; the weights stay in `dtype`."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    fsdp: bool = False
    """Shard the model over the processes of `torchrun`, if it does not fit into one GPU; see docs/scale.md."""
    checkpointing: bool = False
    """Store only the input of each layer and run the layer again in the backward pass: less memory, more time."""
    attention: str = "sdpa"
    """Attention implementation of transformers."""
    layers: Literal["float64", "float32", "none"] = "float32"
    """Precision of the stored per-layer Grams; `none` stores none."""
    threads: int = 0
    """Threads of torch on a CPU; 0 keeps the current number."""

    def __post_init__(self) -> None:
        require_field_types(self, caller="measure")
        for name in ("rollouts", "out"):
            object.__setattr__(self, name, Path(getattr(self, name)))  # in Python, a text will do
        for name, least in (
            ("max_groups", 0),
            ("group_size", 0),
            ("group_size_limit", 0),
            ("window_mb", 1),
            ("unpacked_mb", 1),
            ("threads", 0),
        ):
            value = getattr(self, name)
            if value < least:
                fail(f"measure {option_name(name)}", f"must be at least {least}", value, f"Pass {least} or more.")
        if self.temperature is not None and not 0 < self.temperature < float("inf"):
            remedy = "Pass the sampling temperature, usually 1."
            fail("measure --temperature", "must be positive and finite", self.temperature, remedy)
        if self.reward_columns and self.estimator == "dump":
            got = "both: the dump's advantages are those of its own total"
            remedy = "Omit --estimator, or name one that computes advantages, such as rloo."
            fail("measure", "--reward-columns and --estimator dump exclude each other", got, remedy)
        if self.resume and self.overwrite:
            fail("measure", "--resume and --overwrite exclude each other", "both", "Omit one of them.")
        _ = self.policy  # checks its own settings

    @property
    def policy(self) -> PolicyConfig:
        """Settings for loading the policy."""
        return PolicyConfig(
            model=self.model,
            dtype=self.dtype,
            autocast=self.autocast,
            device=self.device,
            attention=self.attention,
            prompt=self.prompt,
            trust_remote_code=self.trust_remote_code,
        )

    def record(self, format_name: str, temperature: float, measured: str = "") -> Mapping[str, Any]:
        """The config as plain values for `config.yaml`, with the format and temperature that were used.

        `measured` names the measured parameters, and is empty if they are all of the model's.
        """
        plain = asdict(self) | {"out": str(self.out), "rollouts": str(self.rollouts)}
        plain |= {
            "format": format_name,
            "temperature": temperature,
            "command": "measure",
            "resume": False,
            "overwrite": False,
        } | ({"measured": measured} if measured else {})
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}
