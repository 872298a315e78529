"""Everything that decides a training run, in one frozen record. Nothing heavy is imported here."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from scoregram.policy import PolicyConfig, SamplerName, SamplingConfig, refuse
from scoregram.training.methods import METHODS, Method

MAY_DIFFER = ("steps", "out", "resume", "overwrite", "report_to", "checkpoint_every", "keep_checkpoints")
"""What a resumed run may have otherwise than the run it continues, and still give the same numbers.

`steps` only where the learning rate does not depend on it.
"""


@dataclass(frozen=True)
class TrainConfig:
    """Train a policy on a task with verifiable rewards, and measure what every update is made of."""

    out: Path = Path("runs/train")
    """Folder of the run."""
    resume: bool = False
    """Go on with the run in `out` from its last checkpoint."""
    overwrite: bool = False
    """Replace the run in `out`."""

    model: str = "tiny"
    """Hub id, folder, `.gguf` file, or `tiny`: a small Llama that is built and warm-started here."""
    dtype: str = "float32"
    """Precision of the weights: float32, bfloat16, float16 or float64."""
    autocast: bool = False
    """Run matrix products in bfloat16; the weights stay in `dtype`."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    attention: str = "sdpa"
    """Attention implementation of transformers."""
    lora_rank: int = 0
    """Train adapters of this rank on a frozen base; 0 trains everything."""
    lora_alpha: float = 32.0
    """Scale of the adapters."""
    lora_targets: tuple[str, ...] = ()
    """Modules that get adapters; all linear layers if not given."""
    prompt: Literal["auto", "plain", "chat"] = "auto"
    """Whether prompts go through the tokenizer's chat template."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""

    task: str = "arithmetic"
    """arithmetic[:TERMS], gsm8k[:FOLDER], reasoning-gym:NAME or jsonl:FILE."""
    reward: str | None = None
    """`module:function` with TRL's signature, in place of the task's reward."""

    method: str = "grpo"
    """A row of the table of methods; `scoregram train --help` lists them."""
    estimator: str | None = None
    """Another advantage estimator than the method's."""
    objective: str | None = None
    """Another loss than the method's."""

    steps: int = 100
    """Updates of the policy, inner ones not counted."""
    batch_size: int = 64
    """Rollouts of one step."""
    group_size: int = 8
    """Rollouts of one prompt."""
    micro_batch_size: int = 0
    """Rollouts in one pass, whole groups; 0 for all at once. Gradients are accumulated."""
    inner_updates: int = 1
    """Updates on the same rollouts; from the second on the ratio is no longer 1."""
    dynamic_rounds: int = 4
    """Most times that a step with dynamic sampling draws prompts."""

    max_new_tokens: int = 0
    """Longest completion; 0 for what the task suggests."""
    temperature: float = 1.0
    """Of the policy: sampled, scored and trained at it."""
    top_k: int = 0
    """Sample among so many likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that hold this probability."""
    sampler: SamplerName = "auto"
    """Sampling backend: auto (fast if the model supports it, else transformers), transformers (the model's own forward
    pass and KV cache), fast (shared KV cache, fused kernels, CUDA graphs) or vllm (needs vllm and a GPU)."""

    beta: float = 0.0
    """Strength of the KL term to the policy of the start; 0 for none."""
    kl: str = "k3"
    """Form of that term: a key of `KL_TERMS`."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Optimiser."""
    learning_rate: float = 1e-4
    """Largest learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up; linear and cosine end at 0."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from 0."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW."""
    momentum: float = 0.0
    """Of SGD."""
    weight_decay: float = 0.0
    """Decoupled for AdamW."""
    max_grad_norm: float = 1.0
    """Longer gradients are scaled to this length; 0 for never."""

    measure_every: int = 1
    """Measure the Gram every so many steps; 0 for never."""
    between_prompts: bool = True
    """Measure the Gram between prompts too, which noise and conflict need; without, a large step costs much less."""
    layers: Literal["float64", "float32", "none"] = "float32"
    """Precision in which the Grams of single layers are stored; none leaves them out."""
    layer_detail: Literal["each", "kinds", "probes"] = "each"
    """Grams of each layer, of each kind added up over depth, or the latter for probes alone."""
    batches_every: int = 0
    """Store the Gram of all rollouts of a step, across prompts, every so many steps; 0 for never."""
    keep_prompts: bool = True
    """Store the text of a prompt with its group."""
    probe_every: int = 0
    """Measure groups of the same few test problems every so many steps, and before the first; 0 for never."""
    probe_problems: int = 8
    """How many; they are the last of the test problems."""
    probe_temperatures: tuple[float, ...] = ()
    """Temperatures to probe at; that of the policy if not given."""
    rollouts_every: int = 10
    """Store the rollouts themselves every so many steps; 0 for never."""
    eval_every: int = 20
    """Evaluate on test problems every so many steps, and before the first and after the last; 0 for never."""
    eval_problems: int = 200
    """Test problems of an evaluation."""
    eval_samples: int = 0
    """Rollouts sampled for each of them besides the greedy one; their rewards are stored as groups of kind `test`."""
    checkpoint_every: int = 50
    """Write a checkpoint every so many steps; 0 for none on the way."""
    final_checkpoint: bool = True
    """Write a checkpoint after the last step; without one, a finished run cannot be continued."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept; 0 for all."""
    on_not_finite: Literal["stop", "skip"] = "stop"
    """What to do when a loss, an advantage or a gradient is not finite."""
    report_to: tuple[str, ...] = ()
    """Trackers that get the metrics: tensorboard, wandb, trackio."""
    seed: int = 0
    """Of everything that is drawn."""
    threads: int = 0
    """Threads of torch on a CPU; 0 leaves them as they are."""

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if not least <= value < float("inf"):
                refuse(f"train --{dashed(name)}", f"must be finite and at least {least}", value, "Choose another.")
        if self.group_size > self.batch_size or self.batch_size % self.group_size:
            got = f"group_size {self.group_size} and batch_size {self.batch_size}"
            refuse("train --group-size", "a batch must hold whole groups", got, "Make batch_size a multiple of it.")
        if self.micro_batch_size % self.group_size:
            got = f"micro_batch_size {self.micro_batch_size} and group_size {self.group_size}"
            refuse("train --micro-batch-size", "a pass must take whole groups", got, "Make it a multiple, or 0.")
        if not 0 < self.temperature < float("inf"):
            remedy = "Greedy rollouts have nothing to learn from each other."
            refuse("train --temperature", "must be positive and finite", self.temperature, remedy)
        if self.batches_every and (not self.measure_every or self.batches_every % self.measure_every):
            got = f"batches_every {self.batches_every} and measure_every {self.measure_every}"
            refuse("train --batches-every", "a batch is stored where a step is measured", got, "Make it a multiple.")
        is_split = 0 < self.micro_batch_size < self.batch_size
        if self.batches_every and (is_split or not self.between_prompts):
            got = f"micro_batch_size {self.micro_batch_size} and between_prompts {self.between_prompts}"
            remedy = "Leave --batches-every out; probes store whole batches of their own."
            refuse("train --batches-every", "a batch must be measured in one pass, across prompts", got, remedy)
        for temperature in self.probe_temperatures:
            if not 0 < temperature < float("inf"):
                refuse("train --probe-temperatures", "must be positive and finite", temperature, "Leave it out.")
        if self.method not in METHODS:
            refuse("train --method", f"must be one of {', '.join(METHODS)}", repr(self.method), "Check the spelling.")
        if self.resume and self.overwrite:
            refuse("train", "resume or overwrite, not both", "both", "Leave one of them out.")

    @property
    def chosen(self) -> Method:
        """The method, with estimator and objective as asked for."""
        row = METHODS[self.method]
        return Method(
            estimator=self.estimator or row.estimator,
            objective=self.objective or row.objective,
            dynamic_sampling=row.dynamic_sampling,
            about=row.about,
        )

    @property
    def prompts(self) -> int:
        """Groups of one step."""
        return self.batch_size // self.group_size

    @property
    def policy(self) -> PolicyConfig:
        """What the policy is loaded with."""
        return PolicyConfig(
            model=self.model,
            dtype=self.dtype,
            autocast=self.autocast,
            device=self.device,
            attention=self.attention,
            lora_rank=self.lora_rank,
            lora_alpha=self.lora_alpha,
            lora_targets=self.lora_targets,
            prompt=self.prompt,
            seed=self.seed,
        )

    def recording(self, *, is_probe: bool = False) -> dict[str, Any]:
        """How much the records of groups hold."""
        layers = self.layer_detail if self.layer_detail != "probes" else "kinds" if is_probe else "none"
        return {"keep_prompts": self.keep_prompts, "layers": layers}

    def sampling(self, max_new_tokens: int) -> SamplingConfig:
        """How rollouts are drawn, with what the task suggests where nothing was asked for."""
        return SamplingConfig(
            max_new_tokens=self.max_new_tokens or max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            sampler=self.sampler,
        )

    def record(self) -> Mapping[str, Any]:
        """The config as plain values for `config.yaml`."""
        plain = asdict(self) | {"out": str(self.out)}
        if self.sampler == "auto":
            del plain["sampler"]  # the behaviour of runs from before this option, which stay resumable
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}

    def may_differ(self) -> tuple[str, ...]:
        """Keys that a run resumed with this config may have otherwise."""
        return MAY_DIFFER if self.lr_schedule == "constant" else tuple(key for key in MAY_DIFFER if key != "steps")


LEAST = {
    "steps": 1,
    "batch_size": 1,
    "group_size": 1,
    "micro_batch_size": 0,
    "inner_updates": 1,
    "dynamic_rounds": 1,
    "max_new_tokens": 0,
    "lora_rank": 0,
    "beta": 0,
    "learning_rate": 0,
    "warmup_steps": 0,
    "weight_decay": 0,
    "max_grad_norm": 0,
    "measure_every": 0,
    "rollouts_every": 0,
    "eval_every": 0,
    "eval_problems": 1,
    "eval_samples": 0,
    "batches_every": 0,
    "probe_every": 0,
    "probe_problems": 1,
    "checkpoint_every": 0,
    "keep_checkpoints": 0,
    "threads": 0,
}
"""Smallest sensible value of each number."""


def dashed(name: str) -> str:
    """A field as it is written on the command line."""
    return name.replace("_", "-")
