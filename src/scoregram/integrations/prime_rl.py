"""A loss for prime-rl that records, for every sequence, the coefficient `c = ∂L/∂log π` of each token.

prime-rl takes a loss per sequence by its import path (`[trainer.loss] type = "custom"`). It gives that loss neither
token ids nor a step number; its token exports have both. A sequence is therefore recorded under a digest of its sampled
log-probabilities and advantages, which the exports contain too, and `coefficients_of` matches the two. See
`docs/verl.md`.
"""

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from scoregram.checks import fail, listed, lookup
from scoregram.objectives import OBJECTIVES, Objective, token_coefficients
from scoregram.types import LogProbs, Loss

INTERFACE = ("trainer_logprobs", "inference_logprobs", "advantages", "loss_mask")
"""Fields of prime-rl's `LossInputs` that are required; `loss_weights` is used if present."""

LOSSES: MappingProxyType[str, Objective] = MappingProxyType(
    {name: OBJECTIVES[name] for name in ("reinforce", "grpo", "dapo", "dual_clip", "gspo", "cispo")}
)
"""Objectives that can be computed one sequence at a time."""
SEQUENCE_AGGREGATIONS = ("token_sum", "sequence_mean")
"""Aggregations that need no other sequence; prime-rl then divides the sum over sequences by its number of tokens."""


def recorded_loss(
    inputs: Any,
    *,
    objective: str = "grpo",
    aggregation: str = "token_sum",
    record: str | None = None,
    limit_mb: float | int = 1024,
    **options: float | int,
) -> Any:
    """Loss of one sequence by an objective of our table; its token coefficients are recorded.

    With `token_sum`, prime-rl's division by all tokens of the step makes it the token mean over the batch. Token
    weights of a prime-rl algorithm multiply the advantages, to which every objective here is proportional.

    Args:
        inputs: prime-rl's `LossInputs`, each field `(T,)`.
        objective: A key of `LOSSES`.
        aggregation: `token_sum` or `sequence_mean`.
        record: Folder of the record, one file per rank; None records nothing. Use a new folder for every run.
        limit_mb: Recording stops, with a warning, when a file has reached this size; training continues.
        options: Options of the objective, such as `eps_low` and `eps_high`.

    Returns:
        prime-rl's `LossOutputs`, with the mean of `|c|` over the trained tokens as a metric.

    Raises:
        ScoregramError: If a name is unknown, `LossInputs` lacks a required field, a weight is negative, or
            log-probabilities or gradients are not finite.
    """
    output = _loss_outputs_class(inputs)
    log_probs = inputs.trainer_logprobs.unsqueeze(0)  # (1, T)
    loss = sequence_loss(log_probs, inputs, objective, aggregation, options)
    c = token_coefficients(loss, log_probs)[0]
    trained = inputs.loss_mask.bool()
    if record is not None and bool(trained.any()):
        _append_line(Path(record), _recorded_line(inputs, c, objective), limit_mb)
    size = c.abs()[trained].sum() / trained.sum().clamp(min=1)
    return output(loss=loss, metrics={"scoregram/mean_abs_coefficient": size})


def sequence_loss(
    log_probs: LogProbs, inputs: Any, objective: str, aggregation: str, options: Mapping[str, float | int]
) -> Loss:
    """The objective on a batch of one sequence; prime-rl divides the sum over sequences."""
    row = lookup(LOSSES, objective, kind="recorded_loss(objective=…)")
    if aggregation not in SEQUENCE_AGGREGATIONS:
        remedy = "Other aggregations need the whole batch."
        fail(
            "recorded_loss(aggregation=…)", f"must be one of {listed(SEQUENCE_AGGREGATIONS)}", repr(aggregation), remedy
        )
    advantages, weights = inputs.advantages, getattr(inputs, "loss_weights", None)
    mask = inputs.loss_mask.bool()
    if weights is not None:
        if bool((weights[mask] < 0).any()):
            fail(
                "recorded_loss",
                "weights of tokens must not be negative",
                float(weights[mask].min()),
                "Check loss_weights.",
            )
        advantages = advantages * weights
    known = {
        "log_probs": log_probs,
        "old_log_probs": inputs.inference_logprobs[None],
        "advantages": advantages[None],
        "mask": mask[None],
    }
    return row.fn(**{name: known[name] for name in row.needs}, aggregation=aggregation, **options)


def _loss_outputs_class(inputs: Any) -> Any:
    """The class `LossOutputs` of prime-rl, after a check that `inputs` has the expected fields."""
    if absent := [name for name in INTERFACE if not isinstance(getattr(inputs, name, None), Tensor)]:
        got = f"prime-rl {_installed_version()}, in which {listed(absent)} changed or is absent"
        remedy = "This loss was written only from prime-rl's source code of 2026; use a loss of prime-rl instead."
        fail("recorded_loss", f"LossInputs must have the tensors {listed(INTERFACE)}", got, remedy)
    try:
        from prime_rl.trainer.rl.loss import LossOutputs  # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        fail("recorded_loss", "needs prime_rl.trainer.rl.loss.LossOutputs", missing, "Run it inside prime-rl.")
    return LossOutputs


def _installed_version() -> str:
    from importlib import metadata

    try:
        return metadata.version("prime-rl")
    except metadata.PackageNotFoundError:
        return "of unknown version"


def sequence_digest(
    mask: Bool[Tensor, " tokens"], log_probs: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"]
) -> str:
    """Digest of a sequence: positions, sampled log-probabilities and advantages of its trained tokens, in float32."""
    trained = mask.cpu()
    name = hashlib.sha256(trained.nonzero().numpy().tobytes())
    for values in (log_probs, advantages):
        name.update(values.detach().to("cpu", torch.float32)[trained].numpy().tobytes())
    return name.hexdigest()[:32]


def _recorded_line(inputs: Any, c: Float[Tensor, " tokens"], objective: str) -> dict[str, Any]:
    """The recorded line of a sequence, with the coefficients of its trained tokens in their order."""
    mask = inputs.loss_mask.bool()
    return {
        "schema_version": 1,
        "sequence": sequence_digest(mask, inputs.inference_logprobs, inputs.advantages),
        "objective": objective,
        "coefficients": c[mask].to("cpu", torch.float64).tolist(),
    }


def _append_line(folder: Path, line: Mapping[str, Any], limit_mb: float | int) -> None:
    """Append a line to the file of this rank; a full file or disk ends the recording, never the training."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    path = folder / f"rank_{rank}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size >= limit_mb * 1e6:
            warnings.warn(f"scoregram: {path} has reached {limit_mb:g} MB; recording stops.", stacklevel=3)
            return
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n")
    except OSError as reason:
        warnings.warn(f"scoregram: coefficients are not recorded: {reason}.", stacklevel=3)


def read_coefficients(folder: str | Path) -> dict[str, Float[Tensor, " trained"]]:
    """Digest of a sequence → coefficients of its trained tokens, from all ranks; the last record of a sequence counts.

    Raises:
        ScoregramError: If there is no record, or a line is broken; an incomplete last line is skipped.
    """
    files = sorted(Path(folder).glob("rank_*.jsonl"))
    if not files:
        fail("read_coefficients", "needs a folder with rank_*.jsonl", folder, "Pass the record of recorded_loss.")
    return {name: values for path in files for name, values in _recorded_sequences(path)}


def _recorded_sequences(path: Path) -> Iterator[tuple[str, Tensor]]:
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith("\n"):
                return  # the process was killed while writing
            try:
                line = json.loads(text)
                yield line["sequence"], torch.tensor(line["coefficients"], dtype=torch.float64)
            except (ValueError, KeyError, TypeError) as reason:
                remedy = "Delete the line."
                fail("read_coefficients", f"{path} line {number} must be a recorded sequence", reason, remedy)


def coefficients_of(
    export: Mapping[str, Any], recorded: Mapping[str, Float[Tensor, " trained"]]
) -> Float[Tensor, " tokens"] | None:
    """`(T,)` coefficients of the `token_ids` in a line of prime-rl's token exports; None if it was not recorded.

    Zero on tokens that the loss did not train. These are derivatives of the loss of the sequence, before prime-rl
    divides by its number of tokens.
    """
    mask = torch.tensor(export["loss_mask"], dtype=torch.bool)
    weights = export.get("rl_weights")
    if weights is not None and any(weight is not None for weight in weights):
        mask &= torch.tensor([bool(weight) for weight in weights])
    coefficients = torch.zeros(len(mask), dtype=torch.float64)
    if not bool(mask.any()):
        return coefficients
    values = recorded.get(sequence_digest(mask, _column(export["inference_logprobs"]), _column(export["advantages"])))
    if values is None:
        return None
    coefficients[mask] = values
    return coefficients


def _column(values: Sequence[float | int | None]) -> Float[Tensor, " tokens"]:
    """A column of an export, `nan` for null."""
    return torch.tensor([float("nan") if value is None else value for value in values], dtype=torch.float32)
