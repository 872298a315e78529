"""Everything that decides a training run, in one frozen config, without heavy imports."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from scoregram.errors import fail, lookup, option_name, require_field_types
from scoregram.policy import PolicyConfig, SamplerName, SamplingConfig
from scoregram.training.methods import METHODS, REFERENCE_STRENGTHS, Method

MAY_DIFFER = ("steps", "rollouts", "out", "resume", "overwrite", "report_to", "checkpoint_every", "keep_checkpoints")
"""Settings that a resumed run may change without changing its numbers.

`steps` may change only if the learning rate schedule is constant, as it is with `rollouts`.
"""


Control = Literal["group_size", "allocate", "draw", "shrink"]
"""Settings that can decide something from step to step."""

LATER_OPTIONS = frozenset(
    {
        *("sampler", "keep_evidence", "baseline", "baseline_decay", "best_of", "drafts", "draft_format"),
        "sampling_temperature",
        *("critic", "critic_learning_rate", "critic_updates", "critic_clip", "critic_warmup"),
        *("gae_lambda", "clip_low", "clip_high"),
        *("exact_values", "prefix_rollouts", "segments", "segment_tokens", "segment_probability"),
        *("rollouts", "every_rollouts", "credit_truth", "truth_rollouts", "push", "max_turns"),
        *("allocate", "train_problems", "draw", "shrink", "step_scores"),
    }
)
"""Options that older runs do not have; they are stored only if they differ from their defaults."""


@dataclass(frozen=True)
class TrainConfig:
    """Train a policy on a task with verifiable rewards, and measure what every update is made of."""

    out: Path = Path("runs/train")
    """Run folder to write."""
    resume: bool = False
    """Continue the run in `out` from its last checkpoint, with its settings. Only steps and rollouts (at a constant
    learning rate), report_to, checkpoint_every and keep_checkpoints may be changed."""
    overwrite: bool = False
    """Replace an older run in `out`."""

    model: str = "tiny"
    """Hub id, folder, `.gguf` file, or `tiny`: a small embedded Llama, built and warm-started on first use."""
    dtype: str = "float32"
    """Dtype of the weights: float32, bfloat16, float16 or float64."""
    autocast: bool = False
    """Compute under bfloat16 autocast; the weights stay in `dtype`."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    attention: str = "sdpa"
    """Attention implementation of transformers, such as sdpa or eager."""
    trust_remote_code: bool = False
    """Load a model with custom code; loading it runs that code. Never stored with a run."""
    lora_rank: int = 0
    """Rank of LoRA adapters on a frozen base; 0 trains all parameters."""
    lora_alpha: float = 32.0
    """LoRA alpha."""
    lora_targets: tuple[str, ...] = ()
    """Modules that get adapters; all linear layers by default."""
    prompt: Literal["auto", "plain", "chat"] = "auto"
    """Whether prompts go through the tokenizer's chat template; auto: if it has one."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""

    task: str = "arithmetic"
    """arithmetic[:TERMS], arithmetic-strict[:TERMS], arithmetic-compositions[:TERMS], calculator[:TERMS],
    stopping[:TURNS], forecast, gsm8k[:FOLDER], reasoning-gym:NAME[:SETTING=VALUE,…], jsonl:FILE or
    python:MODULE:FUNCTION."""
    reward: str | None = None
    """`module:function` with TRL's reward signature, instead of the task's reward."""
    step_scores: str | None = None
    """`module:function` that scores the steps of every completion, for process rewards (grpo-process) on any task of
    one turn, instead of the task's verifier. It takes what a reward function takes, and returns for each completion a
    list of (end of the step in characters, score)."""
    train_problems: int = 0
    """Train on this many problems, the first of the training split; 0 for all of them."""

    method: str = "grpo"
    """Training method; the list is above."""
    estimator: str | None = None
    """Replace the advantage estimator of the method."""
    objective: str | None = None
    """Replace the loss of the method."""
    gae_lambda: float | None = None
    """λ of generalised advantage estimation, from 0 to 1 (methods such as ppo); 0.95 by default."""
    clip_low: float | None = None
    """How far a ratio may fall below 1 before the loss clips it; the loss's own by default. Acts from the second of
    several --inner-updates on."""
    clip_high: float | None = None
    """How far a ratio may rise above 1 before the loss clips it; the loss's own by default."""

    baseline: float | None = None
    """Baseline of the estimator `constant`; the running mean of earlier rewards by default."""
    baseline_decay: float = 0.9
    """Decay of that running mean per step."""
    critic: Literal["copy", "head"] = "copy"
    """Network of the critic: a copy of the initial policy with a scalar head, or that head on the policy's own hidden
    states. With --lora-rank the copy trains its adapters and the head."""
    critic_learning_rate: float = 1e-3
    """Learning rate of the critic."""
    critic_updates: int = 1
    """Updates of the critic per step."""
    critic_clip: float = 0.2
    """Clip the change of a value per step in the critic's loss; 0 for no clipping."""
    critic_warmup: int = 0
    """Steps at the start in which the critic learns and the policy does not."""
    exact_values: bool = False
    """Compute the values from the policy itself, exactly, in place of a critic or of fresh rollouts. Needs a task that
    rewards one solution alone and a policy with one token per character: tiny on arithmetic-strict."""
    drafts: int = 4
    """Drafts per prompt of which the best is refined (method igrpo). They come on top of batch_size."""
    draft_format: str = "{prompt}{draft}\n{prompt}"
    """Prompt of a refinement; `{prompt}` is the prompt of the draft and `{draft}` the draft itself."""
    best_of: int = 2
    """Rollouts k of pass@k, in the method pass-at-k; from 2 to group_size."""
    prefix_rollouts: int = 4
    """Rollouts per prefix for Monte-Carlo values (methods such as vineppo). They come on top of batch_size."""
    segments: Literal["steps", "unlikely", "even"] = "steps"
    """Where Monte-Carlo values are estimated: after each step of the solution (a line, for tasks that verify no steps),
    after each unlikely token, or after every segment_tokens tokens."""
    segment_tokens: int = 8
    """Tokens of a segment, with --segments even."""
    segment_probability: float = 0.9
    """Tokens less likely than this are cut after, with --segments unlikely."""

    steps: int = 100
    """Training steps, inner updates not counted."""
    rollouts: int = 0
    """Train until this many rollouts are sampled, whatever the number of steps; 0 to train for `steps`. Every sampled
    rollout counts: of groups that dynamic sampling drops, of prefixes, greedy ones. Evaluations do not count."""
    every_rollouts: int = 0
    """Measure and evaluate each time this many rollouts are sampled, not at steps counted by measure_every and
    eval_every; 0 for never."""
    batch_size: int = 64
    """Rollouts per step."""
    group_size: int | Literal["auto"] = 8
    """Rollouts per prompt. auto: starts at 4 (8 with --allocate) and moves, at the same batch_size, where the measured
    noise clearly favours another size (docs/allocation.md)."""
    allocate: Literal["uniform", "success", "measured"] = "uniform"
    """How the rollouts of a step are divided among its prompts: equally, by the variance of the rewards at earlier
    visits of a prompt, or by the noise of its gradient measured then. The mean is group_size in every case."""
    draw: Literal["uniform", "measured"] = "uniform"
    """Which prompts a step gets: all in turn, or more often those whose gradient was large at earlier visits, with
    weights that keep the mean gradient unbiased."""
    shrink: bool = False
    """Weight the prompts of a step by how much of their gradient was signal at earlier visits, which biases it."""
    micro_batch_size: int = 0
    """Rollouts per forward and backward pass, whole groups; 0 for all at once. Gradients are accumulated."""
    inner_updates: int = 1
    """Updates on the same rollouts; from the second one on the importance ratio is not 1."""
    dynamic_rounds: int = 4
    """With dynamic sampling, draw prompts for a step in at most this many rounds."""

    max_new_tokens: int = 0
    """Longest completion, in tokens, of one turn if the task has several; 0 for the task's default."""
    max_turns: int = 0
    """Turns after which an episode of a task with an environment is cut off; 0 for the task's default."""
    temperature: float = 1.0
    """Temperature of the policy: rollouts are sampled, scored and trained at it."""
    sampling_temperature: float = 0.0
    """Sample the rollouts of training at this temperature instead, for a loss that takes rollouts of any policy (agro);
    0 for the temperature of the policy."""
    top_k: int = 0
    """Sample among this many of the likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together have this probability."""
    sampler: SamplerName = "auto"
    """Sampling backend: auto (fast if the model supports it, else transformers), transformers (the model's own forward
    pass and KV cache), fast (shared KV cache, fused kernels, CUDA graphs) or vllm (needs vllm and a GPU)."""

    beta: float = 0.0
    """Coefficient of the KL term to the initial policy; 0 for none. In agro and dpo, which have no such term, the
    strength of the initial policy in the loss; 0 for 0.1."""
    kl: str = "k3"
    """KL estimator that is added to the loss: k1, k2 or k3 (keys of `KL_TERMS`)."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Optimiser."""
    learning_rate: float = 1e-4
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up; linear and cosine decay to 0."""
    warmup_steps: int = 0
    """Steps of linear warm-up, after those of critic_warmup."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """Betas of AdamW."""
    momentum: float = 0.0
    """Momentum of SGD."""
    weight_decay: float = 0.0
    """Weight decay; decoupled for AdamW."""
    max_grad_norm: float = 1.0
    """Clip the gradient to this norm; 0 for no clipping."""

    measure_every: int = 1
    """Measure the Gram at every N-th step; 0 for never."""
    between_prompts: bool = True
    """Measure the Gram between prompts too, as noise and conflict require. Without it a large step costs much less."""
    layers: Literal["float64", "float32", "none"] = "float32"
    """Dtype in which per-layer Grams are stored; none leaves them out."""
    layer_detail: Literal["each", "kinds", "probes"] = "each"
    """Store the Gram of each layer, of each kind of layer summed over depth, or of each kind for probes only."""
    credit_truth: Literal["none", "auto", "exact", "sampled"] = "none"
    """At measured steps, compare the credit of every token with its true advantage: exact where a task has one right
    solution, sampled elsewhere, auto for exact or nothing."""
    truth_rollouts: int = 16
    """Rollouts per prefix, with --credit-truth sampled. They are a cost of measuring and do not count in --rollouts."""
    push: bool = False
    """At measured steps, measure by how much the update changed the log-probability of every token it trained on."""
    batches_every: int = 0
    """Store the whole Gram of a step, across prompts, at every N-th step; 0 for never."""
    keep_prompts: bool = True
    """Store the text of each prompt with its group."""
    keep_evidence: bool = False
    """Store what others need to check the run: the completion tokens of every measured group, the hash of the weights
    that the run started from, and the reward of every greedy test rollout."""
    probe_every: int = 0
    """Measure groups of the same few test problems at every N-th step and before the first; 0 for never."""
    probe_problems: int = 8
    """Test problems of a probe: the last ones of the test set."""
    probe_temperatures: tuple[float, ...] = ()
    """Temperatures to probe at; the policy's own by default."""
    probe_trained: bool = False
    """At probes, also store the Gram between the training rollouts of the step and those of the probe: which training
    prompts help held-out ones. It costs one more measurement of both, and with AdamW another one with the
    preconditioner of the step."""
    rollouts_every: int = 10
    """Store rollouts, token by token, at every N-th step; 0 for never."""
    eval_every: int = 20
    """Evaluate on test problems at every N-th step, before the first and after the last; 0 for never."""
    eval_problems: int = 200
    """Test problems per evaluation."""
    eval_samples: int = 0
    """Rollouts sampled per test problem besides the greedy one; their rewards are stored as groups of kind `test`."""
    checkpoint_every: int = 50
    """Write a checkpoint at every N-th step; 0 for none before the last step."""
    final_checkpoint: bool = True
    """Write a checkpoint after the last step; a finished run without one cannot be continued."""
    keep_checkpoints: int = 2
    """Number of newest checkpoints to keep; 0 keeps all."""
    on_not_finite: Literal["stop", "skip"] = "stop"
    """Stop the run when an advantage or a gradient is not finite, or skip that update and the rest of its step."""
    report_to: tuple[str, ...] = ()
    """Trackers to log to: tensorboard, wandb, trackio."""
    seed: int = 0
    """Seed of prompts, rollouts and initial weights."""
    threads: int = 0
    """CPU threads that torch uses during the run; 0 leaves the number as it is."""

    def __post_init__(self) -> None:
        require_field_types(self, caller="train")
        object.__setattr__(self, "out", Path(self.out))  # in Python, a text will do
        self._require_ranges()
        self._require_batches()
        self._require_control()
        for name in ("probe_temperatures", "report_to"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                got = ", ".join(map(str, values))
                fail(f"train {option_name(name)}", "must name each value once", got, "Leave out the second mention.")
        if self.probe_trained and not (self.probe_every and self.between_prompts):
            got = f"probe_every {self.probe_every} and between_prompts {self.between_prompts}"
            fail("train --probe-trained", "needs probes and the Gram between prompts", got, "Add --probe-every 10.")
        if self.probe_trained and self.temperature not in (self.probe_temperatures or (self.temperature,)):
            requirement = f"needs a probe at the policy's temperature, {self.temperature:g}"
            got = f"probe_temperatures {', '.join(f'{one:g}' for one in self.probe_temperatures)}"
            remedy = f"Leave out --probe-temperatures, or add {self.temperature:g} to them."
            fail("train --probe-trained", requirement, got, remedy)
        if self.sampler == "vllm" and self.lora_rank:
            remedy = "Choose another sampler, or --lora-rank 0."
            fail("train --sampler", "vllm needs a model without adapters", f"lora_rank {self.lora_rank}", remedy)
        if not {"{prompt}", "{draft}"} <= set(re.findall(r"\{\w+\}", self.draft_format)):
            remedy = "Leave it out, or write both."
            fail("train --draft-format", "must contain {prompt} and {draft}", repr(self.draft_format), remedy)
        if self.rollouts and self.lr_schedule != "constant":
            remedy = "Leave out --lr-schedule, or give --steps instead of --rollouts."
            fail("train --rollouts", "needs a constant learning rate", self.lr_schedule, remedy)
        lookup(METHODS, self.method, kind="train --method")
        if self.resume and self.overwrite:
            fail("train", "--resume and --overwrite must not be given together", "both", "Leave one of them out.")
        _ = self.policy  # checks its own settings

    def _require_ranges(self) -> None:
        """Raise if a number is outside its range, whatever the other settings are."""
        for name, least in LEAST.items():
            value = self.starting_group_size if name == "group_size" else getattr(self, name)
            if value is not None and not least <= value < float("inf"):
                remedy = "Choose a larger value." if value < least else "Choose a finite value."
                fail(f"train {option_name(name)}", f"must be finite and at least {least}", value, remedy)
        if not 0 < self.temperature < float("inf"):
            remedy = "Greedy rollouts of a prompt are all the same, so their advantages are 0."
            fail("train --temperature", "must be positive and finite", self.temperature, remedy)
        for temperature in self.probe_temperatures:
            if not 0 < temperature < float("inf"):
                remedy = "Leave it out to probe at the policy's temperature."
                fail("train --probe-temperatures", "must be positive and finite", temperature, remedy)
        if self.baseline is not None and not abs(self.baseline) < float("inf"):
            fail("train --baseline", "must be finite", self.baseline, "Leave it out for a running mean.")
        if self.segment_probability > 1:
            remedy = "With 1 every token that was not certain ends a segment."
            fail("train --segment-probability", "must be at most 1", self.segment_probability, remedy)
        if not self.segment_probability > 0:
            remedy = "No token is less likely than 0, so nothing would be cut."
            fail("train --segment-probability", "must be above 0", self.segment_probability, remedy)
        if self.gae_lambda is not None and self.gae_lambda > 1:
            fail("train --gae-lambda", "must be at most 1", self.gae_lambda, "Choose from 0 to 1, such as 0.95.")
        if self.clip_low is not None and self.clip_low > 1:
            fail("train --clip-low", "must be at most 1", self.clip_low, "Choose from 0 to 1, such as 0.2.")
        if self.baseline_decay >= 1:
            remedy = "0.9 averages over about ten steps."
            fail("train --baseline-decay", "must be below 1", self.baseline_decay, remedy)
        if self.momentum >= 1:
            fail("train --momentum", "must be below 1", self.momentum, "From 1 on the updates grow without limit.")

    def _require_batches(self) -> None:
        """Raise if a batch or a pass does not hold whole groups, or if a batch to be stored is not measured whole."""
        size = self.starting_group_size
        if size > self.batch_size or self.batch_size % size:
            got = f"group_size {size} and batch_size {self.batch_size}"
            remedy = "Make batch_size a multiple of group_size."
            fail("train --group-size", "a batch must hold whole groups", got, remedy)
        if self.micro_batch_size % size:
            got = f"micro_batch_size {self.micro_batch_size} and group_size {size}"
            remedy = "Make it a multiple of group_size, or 0."
            fail("train --micro-batch-size", "a pass must hold whole groups", got, remedy)
        if not self.batches_every:
            return
        if not self.measure_every or self.batches_every % self.measure_every:
            got = f"batches_every {self.batches_every} and measure_every {self.measure_every}"
            remedy = "Make it a multiple of measure_every."
            fail("train --batches-every", "only measured steps can be stored", got, remedy)
        if 0 < self.micro_batch_size < self.batch_size or not self.between_prompts:
            got = f"micro_batch_size {self.micro_batch_size} and between_prompts {self.between_prompts}"
            remedy = "Leave out --batches-every; probes store their whole Gram anyway."
            fail("train --batches-every", "a stored batch must be measured in one pass, across prompts", got, remedy)
        if self.every_rollouts:
            remedy = "Leave one of them out; probes store their whole Gram anyway."
            got = f"every_rollouts {self.every_rollouts}"
            fail("train --batches-every", "needs measured steps by number", got, remedy)

    def _require_control(self) -> None:
        """Raise if an option that decides from step to step lacks what it measures."""
        if not self.controls:
            return
        option = control_option(self.controls[0])
        size = self.starting_group_size
        if self.group_size == "auto" and self.batch_size < 2 * size:
            remedy = f"Raise --batch-size to {2 * size}."
            fail(option, f"needs at least two groups of {size} in a step", f"batch_size {self.batch_size}", remedy)
        if self.allocate == "success" and (self.draw != "uniform" or self.shrink):
            got = f"draw {self.draw} and shrink {self.shrink}"
            remedy = "Choose --allocate measured, or leave it out."
            requirement = "success cannot be combined with --draw or --shrink, which need Grams"
            fail(control_option("allocate"), requirement, got, remedy)
        if self.follows_signal and size < SMALLEST_MEASURED_GROUP:
            remedy = f"Raise --group-size to {SMALLEST_MEASURED_GROUP}."
            requirement = f"the noise of a prompt is measured from {SMALLEST_MEASURED_GROUP} rollouts on"
            fail(option, requirement, f"group_size {self.group_size}", remedy)
        if self.group_size == "auto" and self.draw == "measured":
            remedy = "Leave one of them out."
            fail(option, "measures noise over prompts that are drawn evenly", "draw measured", remedy)
        if not self.between_prompts:
            fail(option, "needs the Gram between prompts", "between_prompts false", "Leave it out.")
        if self.group_size == "auto" and 0 < self.micro_batch_size < 2 * size:
            remedy = f"Raise it to {2 * size} or more: groups grow up to half of it."
            got = f"micro_batch_size {self.micro_batch_size}"
            fail(option, f"needs at least two groups of {size} in a pass", got, remedy)
        row = METHODS.get(self.method)
        if row is not None and (row.dynamic_sampling or row.drafts or row.branches):
            remedy = f"Choose another method, or leave out {option.removeprefix('train ')}."
            fail(option, "needs a method that samples each prompt once per step", self.method, remedy)
        if self.sampling_temperature:
            got = f"sampling_temperature {self.sampling_temperature:g}"
            fail(option, "needs rollouts of the policy itself", got, "Leave --sampling-temperature out.")
        if self.allocate != "uniform" and size <= SMALLEST_MEASURED_GROUP:
            least = f"gives every prompt at least {SMALLEST_MEASURED_GROUP} rollouts"
            requirement = f"{least}, so --group-size must be above {SMALLEST_MEASURED_GROUP}"
            fail("train --allocate", requirement, f"group_size {size}", f"Raise --group-size to {STARTING_ALLOCATION}.")

    @property
    def controls(self) -> list[Control]:
        """The settings of this run that decide something from step to step."""
        chosen: dict[Control, bool] = {
            "group_size": self.group_size == "auto",
            "allocate": self.allocate != "uniform",
            "draw": self.draw != "uniform",
            "shrink": self.shrink,
        }
        return [control for control, is_chosen in chosen.items() if is_chosen]

    @property
    def follows_signal(self) -> bool:
        """Whether prompts are drawn or weighted by the signal in their gradients."""
        return self.draw == "measured" or self.shrink

    @classmethod
    def of_run(cls, out: Path | str) -> "TrainConfig":
        """The config that continues the run in `out`: its own settings, and `resume`.

        Raises:
            ScoregramError: If `out` holds no run of `scoregram train`, or a setting that this version does not know.
        """
        from scoregram.runs import open_run

        stored, known = open_run(out).config, {field.name for field in fields(cls)} - {"trust_remote_code"}
        if "method" not in stored or stored.keys() - known:
            got = ", ".join(sorted(stored.keys() - known)) or "no method"
            remedy = "Resume it with the program, or the version, that wrote it."
            fail("train --resume", f"{out} must hold only settings that scoregram train knows", got, remedy)
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()
        }
        try:
            return cls(**plain | {"out": Path(out), "resume": True, "overwrite": False})
        except TypeError as error:
            got = str(error).removesuffix(" Check the value.").removesuffix(".")
            fail("train --resume", f"the settings in {out} must have the right types", got, "Restore config.yaml.")

    @property
    def chosen_method(self) -> Method:
        """The method, with what the config replaces: estimator, loss, and their options."""
        names = ("estimator", "objective", "gae_lambda", "clip_low", "clip_high")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(METHODS[self.method], **given)

    @property
    def reference_strength(self) -> float:
        """`beta`, or the loss's own where that is 0; 0 if nothing compares the policy with the initial one."""
        return self.beta or REFERENCE_STRENGTHS.get(self.chosen_method.objective, 0.0)

    @property
    def most_steps(self) -> int:
        """`steps`, or with a budget of rollouts the steps that it allows if a step samples `batch_size` rollouts."""
        return -(-self.rollouts // self.batch_size) if self.rollouts else self.steps

    @property
    def prompts(self) -> int:
        """Prompts per step; of the first step, if the group size moves."""
        return self.batch_size // self.starting_group_size

    @property
    def starting_group_size(self) -> int:
        """Rollouts per prompt at the first step: `group_size`, or if it moves `STARTING_GROUP_SIZE`.

        With `allocate` it starts at `STARTING_ALLOCATION`: groups of 4 cannot be divided unequally.
        """
        if self.group_size != "auto":
            return self.group_size
        return STARTING_GROUP_SIZE if self.allocate == "uniform" else STARTING_ALLOCATION

    @property
    def policy(self) -> PolicyConfig:
        """The part of the config that loads the policy."""
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
            trust_remote_code=self.trust_remote_code,
        )

    def recording(self, *, is_probe: bool = False) -> dict[str, Any]:
        """Options of `group_records`: which texts and layers are stored."""
        layers = self.layer_detail if self.layer_detail != "probes" else "kinds" if is_probe else "none"
        return {"keep_prompts": self.keep_prompts, "layers": layers, "keep_tokens": self.keep_evidence}

    def sampling(self, max_new_tokens: int) -> SamplingConfig:
        """How rollouts are sampled; `max_new_tokens` is the task's default."""
        return SamplingConfig(
            max_new_tokens=self.max_new_tokens or max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            sampler=self.sampler,
        )

    def behaviour_sampling(self, max_new_tokens: int) -> SamplingConfig:
        """How the rollouts of training are sampled: as the policy, or at `sampling_temperature`."""
        return replace(self.sampling(max_new_tokens), temperature=self.sampling_temperature or self.temperature)

    def record(self) -> Mapping[str, Any]:
        """The config as plain values, for `config.yaml`."""
        plain = asdict(self) | {"out": str(self.out)}
        del plain["trust_remote_code"]  # a run from elsewhere must not grant it when it is resumed
        for field in fields(self):
            if field.name in LATER_OPTIONS and plain[field.name] == field.default:
                del plain[field.name]  # older runs lack it, behave like its default, and stay resumable
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}

    def may_differ(self) -> tuple[str, ...]:
        """Keys in which a run resumed with this config may differ."""
        return MAY_DIFFER if self.lr_schedule == "constant" else tuple(key for key in MAY_DIFFER if key != "steps")


STARTING_GROUP_SIZE = 4
"""Rollouts per prompt with which `--group-size auto` starts: the best fixed size of `results/allocation`."""
STARTING_ALLOCATION = 8
"""The same with `--allocate`, which gives a prompt at least 4."""
SMALLEST_MEASURED_GROUP = 4
"""Rollouts from which on the noise of a prompt can be measured."""

LEAST = {
    "steps": 1,
    "rollouts": 0,
    "every_rollouts": 0,
    "batch_size": 1,
    "group_size": 1,
    "micro_batch_size": 0,
    "inner_updates": 1,
    "dynamic_rounds": 1,
    "baseline_decay": 0,
    "gae_lambda": 0,
    "clip_low": 0,
    "clip_high": 0,
    "critic_learning_rate": 0,
    "critic_updates": 1,
    "critic_clip": 0,
    "critic_warmup": 0,
    "drafts": 1,
    "sampling_temperature": 0,
    "best_of": 2,
    "prefix_rollouts": 1,
    "truth_rollouts": 2,
    "segment_tokens": 1,
    "train_problems": 0,
    "max_new_tokens": 0,
    "max_turns": 0,
    "lora_rank": 0,
    "beta": 0,
    "learning_rate": 0,
    "momentum": 0,
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
"""Smallest allowed value of each number."""


def control_option(control: Control) -> str:
    """A control as it is written on the command line, for error messages.

    Example:
        >>> control_option("group_size"), control_option("draw")
        ('train --group-size auto', 'train --draw')
    """
    return f"train {option_name(control)}{' auto' if control == 'group_size' else ''}"


def is_due(step: int, every: int) -> bool:
    """Whether an action with the period `every` is due at this step; 0 means never."""
    return every > 0 and step % every == 0
