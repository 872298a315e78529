"""What `attach` needs from TRL and the machine: versions, names inside TRL, processes, settings and memory.

`attach` checks all of it before the training begins, so that no work is lost to a trainer that cannot be measured.
"""

import inspect
import json
import math
import re
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from types import MappingProxyType
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as torch_modules

from scoregram.checks import fail, listed
from scoregram.distributed import ALONE, Processes
from scoregram.gram import (
    MEMORY_SHARE,
    free_bytes,
    has_dropout_rate,
    model_inside,
    modules_inside,
    survey,
    text_config,
)

OLDEST_TESTED, NEWEST_TESTED = "1.0.0", "1.16.0"
"""The oldest and the newest version of TRL that the tests of this integration ran with."""

WRAPPED_METHODS: MappingProxyType[str, tuple[str, ...]] = MappingProxyType(
    {
        "_generate_and_score_completions": ("inputs",),
        "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
        "_get_per_token_logps_and_entropies": ("model", "input_ids", "attention_mask", "logits_to_keep"),
        "_compute_loss": ("model", "inputs"),
        "training_step": ("model", "inputs", "num_items_in_batch"),
    }
)
"""Methods of the trainer that `attach` wraps, and the arguments that they must begin with."""
TRL_ATTRIBUTES = ("_metrics", "_logs", "accelerator", "model", "num_generations", "reward_func_names", "reward_weights")
"""Attributes of the trainer that `attach` reads."""
RELATIVE_POSITIONS = ("rope_parameters", "rope_theta", "rope_scaling", "rotary_dim", "rotary_pct", "alibi")
"""Config entries of models whose attention depends on the distance between tokens, not on their positions."""

Mode = Literal["scores", "loss"]
"""What the rows of the Gram are: scores of rollouts, or gradients of the trainer's loss."""
ROUNDING_ERROR = 1e-5
"""Relative error in float32 up to which two gradients are taken to differ by rounding only."""


# versions and names inside TRL


def require_supported(trainer: Any) -> str:
    """The version of TRL, provided that `attach` supports this trainer.

    Raises:
        ScoregramError: TRL is absent or too old, `trainer` is of another class, or a method or attribute that `attach`
            uses is missing or takes other arguments.
    """
    try:
        import trl  # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        fail("attach", "needs TRL", missing, "Install it: pip install 'scoregram[trl]'.")
    version = str(trl.__version__)
    known = tuple(getattr(trl, name) for name in ("GRPOTrainer", "RLOOTrainer"))
    if not isinstance(trainer, known):
        got = type(trainer).__name__
        fail("attach", "trainer must be a GRPOTrainer or an RLOOTrainer of TRL", got, "Subclasses of them work too.")
    if version_numbers(version) < version_numbers(OLDEST_TESTED):
        remedy = f"Upgrade TRL; the newest tested version is {NEWEST_TESTED}."
        fail("attach", f"needs TRL {OLDEST_TESTED} or newer", version, remedy)
    if changed := [name for name in (*WRAPPED_METHODS, *TRL_ATTRIBUTES) if not _is_as_tested(trainer, name)]:
        tested = f"tested with TRL {OLDEST_TESTED} and {NEWEST_TESTED}"
        fail(
            "attach",
            f"{type(trainer).__name__} must have the methods and attributes that scoregram uses ({tested})",
            f"TRL {version}, where these are missing or take other arguments: {listed(changed)}",
            "Install a tested version, or record rollouts and measure them with `scoregram measure`.",
        )
    if version_numbers(version) > version_numbers(NEWEST_TESTED):
        warnings.warn(
            f"scoregram: TRL {version} is newer than {NEWEST_TESTED}, the newest tested version. Steps with "
            "check/rollouts above 0 are compared with TRL's own gradient; check/relative_error is the error.",
            stacklevel=3,
        )
    return version


def _is_as_tested(trainer: Any, name: str) -> bool:
    """Whether an attribute exists, and a method begins with the expected arguments."""
    if name not in WRAPPED_METHODS:
        return hasattr(trainer, name)
    method = getattr(trainer, name, None)
    if not callable(method):
        return False
    taken = inspect.signature(method).parameters
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in taken.values()):
        return True
    return tuple(taken)[: len(WRAPPED_METHODS[name])] == WRAPPED_METHODS[name]


def version_numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparison.

    Example:
        >>> version_numbers("1.16.0") > version_numbers("1.9.2"), version_numbers("1.17.0.dev0")
        (True, (1, 17, 0))
    """
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()


class WrappedMethods:
    """Methods of a trainer that are replaced by wrappers on the instance, until `restore`."""

    def __init__(self, trainer: Any, wrappers: Mapping[str, Callable[..., Any]]) -> None:
        assert wrappers.keys() == WRAPPED_METHODS.keys()
        self.trainer = trainer
        self.inner: dict[str, Callable[..., Any]] = {name: getattr(trainer, name) for name in wrappers}
        """The methods as they were, for the wrappers to call."""
        self._of_instance = {name: vars(trainer)[name] for name in wrappers if name in vars(trainer)}
        """Those that were attributes of the instance, not of its class."""
        self._outer = {name: self._marked(self.inner[name], wrapper) for name, wrapper in wrappers.items()}
        for name, outer in self._outer.items():
            setattr(trainer, name, outer)

    def _marked(self, inner: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
        """The wrapper with the name and signature of the method, and a mark that `is_wrapped` finds."""

        @wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            return wrapper(*args, **kwargs)

        outer.__scoregram__ = self  # type: ignore[attr-defined]
        return outer

    @property
    def are_wrapped(self) -> bool:
        """Whether `restore` was not called yet."""
        return bool(self._outer)

    def restore(self) -> None:
        """Put the methods back as they were; calling it again does nothing."""
        for name, outer in self._outer.items():
            if vars(self.trainer).get(name) is not outer:
                continue  # other code wrapped it after us; our wrapper stays inside and only passes calls on
            if name in self._of_instance:
                setattr(self.trainer, name, self._of_instance[name])
            else:
                delattr(self.trainer, name)
        self._outer = {}


def is_wrapped(trainer: Any) -> bool:
    """Whether the trainer is attached: its `training_step` is a wrapper of ours."""
    return getattr(vars(trainer).get("training_step"), "__scoregram__", None) is not None


def processes_of(trainer: Any) -> Processes:
    """The processes that train together, provided that each of them has whole rollouts of its own.

    Raises:
        ScoregramError: If parameters or rollouts are split over processes in a way that cannot be measured.
    """
    accelerator = trainer.accelerator
    kind = str(accelerator.distributed_type).rpartition(".")[2].upper()
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        remedy = "Train with DDP, or with FSDP and fsdp_version 2."
        fail("attach", "the model must be whole in every process, or sharded by FSDP2", kind, remedy)
    if kind == "FSDP" and not getattr(accelerator, "is_fsdp2", False):
        fail("attach", "a sharded model must be sharded by FSDP2", "FSDP of version 1", "Set fsdp_version to 2.")
    layout = getattr(accelerator, "parallelism_config", None)
    if split := [name for name in ("tp", "cp", "sp") if getattr(layout, f"{name}_enabled", False)]:
        got = f"a parallelism_config with {', '.join(split)}"
        fail("attach", "every process must have whole rollouts of its own", got, "Use data parallelism only.")
    if accelerator.num_processes == 1:
        return ALONE
    if not (dist.is_available() and dist.is_initialized()):
        got = f"{accelerator.num_processes} processes without torch.distributed"
        fail("attach", "several processes must be connected", got, "Start them with torchrun or accelerate launch.")
    return Processes(int(accelerator.process_index), int(accelerator.num_processes))


# settings


@dataclass(frozen=True)
class Settings:
    """The arguments of `attach`, defaults resolved."""

    every: int
    """Steps from one measurement to the next."""
    mode: Mode
    estimator: str | Callable[..., Any] | None
    """Advantages to train with; None for the trainer's own."""
    tolerance: float
    """Largest relative error of the self-check that passes."""
    memory_gb: float | int | None
    """None: `MEMORY_SHARE` of what is free when a step is measured."""
    keep_rollouts: bool
    """The run folder gets the rollouts of measured steps."""
    keep_sketches: bool = False
    """The run folder gets a sketch of the gradient of every measured step."""
    between_prompts: bool = False
    """With several processes, the first one measures all groups, so that the Gram between prompts is known too."""
    fused: bool = True
    """Gram and gradient may come from one backward pass."""
    cuda_graphs: bool = False
    """Fused passes whose shape repeats are replayed from CUDA graphs."""
    low_precision: tuple[str, ...] = ()
    """Why the trainer computes in a lower precision than float32; empty if it does not."""
    advise_every: int | None = None
    """Steps from one recommendation to the next; None for none."""
    uneven_term: str | None = None
    """The term of the loss that weights the tokens of a rollout differently, if the trainer's arguments show one."""

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or isinstance(self.every, bool):
            fail("attach", "every must be a whole number", repr(self.every), "1 measures every step.")
        if self.every < 1:
            fail("attach", "every must be at least 1", self.every, "1 measures every step.")
        if self.mode not in get_args(Mode):
            fail("attach", "mode must be one of loss, scores", repr(self.mode), "Check the spelling.")
        if self.advise_every is not None and (type(self.advise_every) is not int or self.advise_every < 1):
            remedy = "None gives no recommendation."
            fail("attach", "advise_every must be a whole number of steps, at least 1", repr(self.advise_every), remedy)
        for name in ("tolerance", "memory_gb"):
            if isinstance(getattr(self, name), str | bool):
                fail("attach", f"{name} must be a number", repr(getattr(self, name)), "Leave it out for the default.")
        if not 0 < self.tolerance < math.inf:
            remedy = "Leave it out for 1e-3, or 5e-2 in lower precision than float32."
            fail("attach", "tolerance must be positive and finite", self.tolerance, remedy)
        if self.memory_gb is not None and not self.memory_gb > 0:
            fail("attach", "memory_gb must be positive", self.memory_gb, "Leave it out to use what is free.")
        for name in ("between_prompts", "fused", "cuda_graphs"):
            if not isinstance(getattr(self, name), bool):
                fail("attach", f"{name} must be True or False", repr(getattr(self, name)), "Pass one of them.")
        if self.cuda_graphs and not self.fused:
            remedy = "Leave out fused=False: CUDA graphs replay fused passes only."
            fail("attach", "cuda_graphs=True needs fused=True", "fused=False", remedy)

    def warning_texts(self, device: torch.device, processes: int) -> Iterator[str]:
        """What `attach` warns of: settings without an effect on this device, and a loss that `scores` do not fit."""
        if self.cuda_graphs and device.type != "cuda":
            yield f"cuda_graphs=True has no effect on the device {device}: it needs a GPU."
        elif self.cuda_graphs and processes > 1:
            yield "cuda_graphs=True has no effect with several processes."
        if self.mode == "scores" and self.uneven_term is not None:
            yield (
                f"the loss has {self.uneven_term}, which weights the tokens of a rollout differently: the update is "
                "not a weighted sum of scores. Steps at which it matters fail the self-check, and no mean includes "
                "their numbers. Use mode='loss', which is exact there."
            )

    @property
    def rounding_error(self) -> float:
        """Relative error up to which two gradients are taken to differ by rounding only."""
        return self.tolerance if self.low_precision else min(ROUNDING_ERROR, self.tolerance)


def low_precision_causes(trainer: Any) -> tuple[str, ...]:
    """Why the trainer rounds more coarsely than float32: autocast, the dtype of its parameters; empty if not."""
    autocast = trainer.accelerator.mixed_precision
    stored = {parameter.dtype for parameter in trainer.model.parameters() if parameter.requires_grad}
    causes = {
        f"autocast to {autocast}": autocast in ("bf16", "fp16", "fp8"),
        "parameters in bfloat16 or float16": bool(stored & {torch.bfloat16, torch.float16}),
    }
    return tuple(cause for cause, holds in causes.items() if holds)


def uneven_term(trainer: Any) -> str | None:
    """A KL term in the loss, which weights the tokens of a rollout differently; RLOO has its KL in the rewards."""
    beta = float(getattr(trainer, "beta", 0.0) or 0.0)
    return f"a KL term (beta={beta:g})" if beta and not is_rloo(trainer) else None


def is_rloo(trainer: Any) -> bool:
    """Whether the trainer is TRL's RLOOTrainer or a subclass."""
    return any(base.__name__ == "RLOOTrainer" for base in type(trainer).__mro__)


def default_tolerance(is_low_precision: bool) -> float:
    """1e-3 in float32, 5e-2 in lower precision."""
    return 5e-2 if is_low_precision else 1e-3


MAY_CHANGE_WHEN_ATTACHED_AGAIN = (
    "integration",
    "model",
    "processes",
    "answer_column",
    "measure_every",
    "advise_every",
    "tolerance",
    "fused",
    "arguments",
)
"""Entries of `run_config` in which a resumed run may differ from the one that it continues. A model that is loaded from
a checkpoint has the checkpoint's path for a name."""


def run_config(trainer: Any, settings: Settings, version: str, processes: Processes) -> dict[str, Any]:
    """The config of the run folder: how the run was made. The trainer's `to_dict` masks secrets in its arguments."""
    estimator = settings.estimator
    model = getattr(trainer.model, "config", None)
    return {
        "integration": {"name": "trl", "version": version, "trainer": type(trainer).__name__},
        "model": str(getattr(model, "_name_or_path", "") or type(trainer.model).__name__),
        "group_size": int(trainer.num_generations),
        "temperature": float(trainer.temperature),
        "seed": int(trainer.args.seed),
        "processes": processes.count,
        "measure_every": settings.every,
        "advise_every": settings.advise_every,
        "mode": settings.mode,
        "estimator": estimator if isinstance(estimator, str | None) else getattr(estimator, "__name__", "own"),
        "tolerance": settings.tolerance,
        "fused": settings.fused,
        "reward_functions": [str(name) for name in trainer.reward_func_names],
        "answer_column": answer_column(getattr(trainer.train_dataset, "column_names", None) or ()),
        "arguments": json.loads(json.dumps(trainer.args.to_dict(), default=str)),
    }


ANSWER_COLUMNS = ("answer", "expected_answer", "final_answer", "ground_truth", "solution", "target")
"""Columns of a dataset that hold the expected answer; the first one that exists is used."""


def answer_column(columns: Container[str]) -> str | None:
    """The column that holds the expected answer; None if there is none."""
    return next((name for name in ANSWER_COLUMNS if name in columns), None)


def loss_scale(trainer: Any) -> float:
    """The factor by which the trainer multiplies its loss before the backward pass, against underflow in float16."""
    scaler = getattr(trainer.accelerator, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None else 1.0


# the model, and the memory that is free


_UNWRAPPED: WeakKeyDictionary[nn.Module, ref[nn.Module]] = WeakKeyDictionary()
"""The model inside each trainer's model: accelerate walks over all modules to find it."""


def unwrapped_model(trainer: Any) -> nn.Module:
    """The trainer's model without wrappers, as `accelerator.unwrap_model` returns it."""
    known = _UNWRAPPED.get(trainer.model, lambda: None)()
    if known is None:
        known = trainer.accelerator.unwrap_model(trainer.model)
        _UNWRAPPED[trainer.model] = ref(known)
    return known


def has_relative_positions(model: nn.Module) -> bool:
    """Whether a model depends only on distances between tokens, so that padding may be moved from left to right."""
    config = text_config(model)
    return any(getattr(config, name, None) for name in RELATIVE_POSITIONS)


def memory_limit(model: nn.Module, settings: Settings, processes: Processes) -> float:
    """Bytes that a measurement may take in this process."""
    if settings.memory_gb is not None:
        return settings.memory_gb * 1e9
    return free_bytes(model, processes.count) * MEMORY_SHARE


# fused steps


def reason_not_fused(model: nn.Module, inside: nn.Module, processes: int = 1) -> str | None:
    """Why no step with this model can be fused, whatever its loss; None if steps can be.

    `model` is what the trainer's loss gets, `inside` the same model unwrapped.
    """
    wrapper = model if isinstance(model, nn.parallel.DistributedDataParallel) else None
    if wrapper is not None and (reason := reason_not_averaged(wrapper, processes)) is not None:
        return reason
    if (model if wrapper is None else wrapper.module) is not inside or model_inside(inside) is not inside:
        return f"the model is wrapped in {type(model).__name__}"
    if not may_not_be_fused(inside):  # the walks below take longer
        return None
    for name, module in inside.named_modules():
        place = f"`{name}`" if name else "the model"
        if getattr(module, "_compiled_call_impl", None) is not None:
            return f"{place} is compiled"
        if module._backward_hooks or module._backward_pre_hooks:
            return f"a backward hook is registered on {place}"
    if dropping := survey(inside).dropping:
        names = {id(module): name for name, module in inside.named_modules()}
        return f"dropout is active in `{names.get(id(dropping[0]), type(dropping[0]).__name__)}`"
    if torch_modules._global_backward_hooks or torch_modules._global_backward_pre_hooks:
        return "a backward hook is registered on all modules"
    for name, parameter in inside.named_parameters():
        if parameter.requires_grad and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
            return f"a gradient hook is registered on parameter `{name}`"
    return None


def reason_not_averaged(model: nn.parallel.DistributedDataParallel, processes: int) -> str | None:
    """Why this wrapper does more, or less, than average the gradients of all processes; None if it does just that."""
    ignored, group = set(model.parameters_to_ignore), model.process_group
    facts = {
        "a communication hook is registered on DistributedDataParallel": bool(getattr(model, "_comm_hooks", ())),
        "DistributedDataParallel has a mixed precision of its own": getattr(model, "mixed_precision", None) is not None,
        "DistributedDataParallel averages over a part of the processes": group is None or group.size() != processes,
        "DistributedDataParallel ignores a trainable parameter": any(
            name in ignored for name, parameter in model.module.named_parameters() if parameter.requires_grad
        ),
        "a hook is registered on DistributedDataParallel": any(
            (model._forward_hooks, model._forward_pre_hooks, model._backward_hooks, model._backward_pre_hooks)
        ),
    }
    return next((fact for fact, holds in facts.items() if holds), None)


def may_not_be_fused(model: nn.Module) -> bool:
    """Whether a model has anything that `reason_not_fused` looks for; from one walk, without names."""
    if torch_modules._global_backward_hooks or torch_modules._global_backward_pre_hooks:
        return True
    for module in modules_inside(model):
        state = module.__dict__
        if state.get("_compiled_call_impl") is not None or state["_backward_hooks"] or state["_backward_pre_hooks"]:
            return True
        if state["training"] and has_dropout_rate(module):
            return True
        for parameter in state["_parameters"].values():
            if parameter is not None and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
                return True
    return False
