"""The formats of rollout dumps: a reader for each, and a literal table of their properties.

A reader turns one record into the rollouts that it describes. Every boolean of the table is checked in
`tests/test_dumps_formats.py` on an example of that format; `docs/dumps.md` shows one of each.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from scoregram.integrations.dumps.records import DumpedRollout, Location, RecordFields, shared_value, split_sequence
from scoregram.runs import LOSS_KIND, REWARD

_VERL_COLUMNS = ("input", "output", "gts", "score", "step", "uid", "request_id")
"""Fields of verl itself; every other number is a reward function's."""
_TRL_COLUMNS = ("step", "prompt", "completion", "advantage")
"""Columns of TRL itself; every other column of numbers is a reward function, or was logged by the user."""
_MOST_MESSAGES = 1 << 16
"""Messages on all paths of a trace of verifiers together."""
_SLIME_FINISHED = {"completed": True, "truncated": False}


def scoregram_rollouts(record: Mapping[str, Any], location: Location) -> Iterator[DumpedRollout]:
    """Run folder of scoregram, `rollouts/step-*.parquet` of `--rollouts-every`: one row with all fields."""
    row = RecordFields(record, location)
    ids, start = row.token_ids("token_ids"), row.integer("prompt_length") or 0
    if not 0 <= start <= len(ids):
        row.refuse(f"prompt_length must lie in [0, {len(ids)}]", start)
    mask = None if record.get("completion_mask") is None else row.flags("completion_mask", len(ids))[start:]
    sampled = "behaviour_log_probs" if record.get("behaviour_log_probs") is not None else "log_probs"
    log_probs, advantages = row.floats(sampled, len(ids)), row.floats("advantages", len(ids))
    prompt, completion, kind = record.get("prompt"), record.get("completion"), row.optional_text("kind")
    rewards = {name: row.number(name) for name in record if name.startswith(REWARD) and record[name] is not None}
    yield DumpedRollout(
        location=location,
        step=row.integer("step"),
        group=f"{kind}/{row.integer('group')}",
        prompt_id=row.optional_text("prompt_id"),
        prompt=prompt if isinstance(prompt, str) else None,
        completion=completion if isinstance(completion, str) else None,
        prompt_ids=ids[:start],
        completion_ids=ids[start:],
        completion_mask=mask,
        reward=row.number("reward"),
        rewards={name.removeprefix(REWARD): value for name, value in rewards.items()},
        advantage=row.finite_number("advantage"),
        advantages=None if advantages is None else advantages[start:],
        log_probs=None if log_probs is None else log_probs[start:],
        finished=row.flag("finished"),
        kind="train" if kind in (None, "", LOSS_KIND) else kind,  # rows of a loss are measured as scores
    )


def trl_rollouts(record: Mapping[str, Any], location: Location) -> Iterator[DumpedRollout]:
    """Dump of TRL, `completions_*.parquet` of `log_completions=True`: one row of text without token ids or group names.

    The file does not say how TRL weighted its reward functions: the reward is their sum.
    """
    row = RecordFields(record, location)
    rewards = row.finite_numbers(*_TRL_COLUMNS)
    yield DumpedRollout(
        location=location,
        step=row.integer("step"),
        prompt=row.text_or_messages("prompt"),
        completion=row.single_answer("completion"),
        reward=math.fsum(rewards.values()) if rewards else math.nan,
        rewards=rewards,
        advantage=row.finite_number("advantage"),
    )


def nemo_rl_rollouts(record: Mapping[str, Any], location: Location) -> Iterator[DumpedRollout]:
    """Dump of NeMo-RL, `train_data_step*.jsonl`: one line of padded token ids, masks, advantages, log-probabilities.

    NeMo-RL logs batches of one, so every value except `idx` is a list of one element.
    """
    unpacked = {name: value if name == "idx" else _single_element(value) for name, value in record.items()}
    line = RecordFields(unpacked, location)
    ids = line.token_ids("token_ids")
    length = line.integer("input_lengths") or len(ids)
    if not 0 <= length <= len(ids):
        line.refuse(f"input_lengths must lie in [0, {len(ids)}]", length)
    mask = line.flags("token_loss_mask", len(ids))[:length]
    generation, previous = line.floats("generation_logprobs", len(ids)), line.floats("prev_logprobs", len(ids))
    per_token = {
        "log_probs": previous if generation is None else generation,
        "advantages": line.floats("advantages", len(ids)),
    }
    unpadded = {name: None if value is None else value[:length] for name, value in per_token.items()}
    fields = split_sequence(ids[:length], mask, unpadded)
    advantage = shared_value(fields["advantages"], fields["completion_mask"])
    is_masked_out = line.number("sample_loss_mask") == 0
    filtered = line.number("filtered_rewards")  # with dynamic sampling, the rewards of the rollouts trained on
    yield DumpedRollout(
        location=location,
        step=_step_in_name(location.file.stem),
        reward=line.number("rewards") if math.isnan(filtered) else filtered,
        advantage=0.0 if is_masked_out else advantage,
        **({**fields, "advantages": None} if is_masked_out or advantage is not None else fields),
    )


def _single_element(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _step_in_name(name: str) -> int | None:
    """The number after the last `step` in the name of a file or folder, as in `train_data_step12` or `step_12`."""
    numbers = re.findall(r"step_?(\d+)", name)
    return int(numbers[-1]) if numbers else None


def prime_rl_rollouts(record: Mapping[str, Any], location: Location) -> Iterator[DumpedRollout]:
    """Dump of prime-rl, `token_exports/step_N/rank_R.jsonl` of `trainer.enable_token_export`: one line of tokens.

    Rewards, if exported, are repeated on every token. Groups have no names and are recognised by their prompt tokens.
    """
    line = RecordFields(record, location)
    ids = line.token_ids("token_ids")
    mask = line.flags("loss_mask", len(ids))
    per_token = {
        "log_probs": line.floats("inference_logprobs", len(ids)),
        "advantages": line.floats("advantages", len(ids)),
        "rewards": line.floats("rewards", len(ids)) if isinstance(record.get("rewards"), list) else None,
    }
    fields = split_sequence(ids, mask, per_token)
    reward = shared_value(fields.pop("rewards"), fields["completion_mask"])
    advantage = shared_value(fields["advantages"], fields["completion_mask"])
    if advantage is not None or fields["advantages"] is None or bool(torch.isnan(fields["advantages"]).all()):
        fields["advantages"] = None
    step = line.integer("export_step") if record.get("export_step") is not None else line.integer("step")
    yield DumpedRollout(
        location=location,
        step=_step_in_name(location.file.parent.name) if step is None else step,
        reward=math.nan if reward is None else reward,
        advantage=advantage,
        **fields,
    )


def open_instruct_rollouts(record: Mapping[str, Any], location: Location) -> Iterator[DumpedRollout]:
    """Dump of open-instruct, `{run}_rollouts_NNNNNN.jsonl`: one line with token ids of prompt and response.

    The file does not mark tool tokens: they count as the policy's.
    """
    line = RecordFields(record, location)
    response, group = line.token_ids("response_tokens"), line.integer("prompt_idx")
    reason = record.get("finish_reason")
    yield DumpedRollout(
        location=location,
        step=line.integer("step"),
        group=None if group is None else str(group),
        prompt_ids=line.token_ids("prompt_tokens"),
        completion_ids=response,
        reward=line.number("reward"),
        advantage=line.finite_number("advantage"),
        log_probs=line.floats("logprobs", len(response)),
        finished=reason == "stop" if isinstance(reason, str) else None,
    )


def verl_rollouts(record: Mapping[str, Any], location: Location) -> Iterator[DumpedRollout]:
    """Dump of verl, `{step}.jsonl` in `trainer.rollout_data_dir`: one line of decoded text without special tokens.

    Newer versions write `uid` as `{sample}_{rollout}_{output}`; older ones have none.
    """
    line = RecordFields(record, location)
    step = line.integer("step")
    if step is None and location.file.stem.isdigit():
        step = int(location.file.stem)
    uid = record.get("uid")
    yield DumpedRollout(
        location=location,
        step=step,
        group=sample_of_uid(uid) if isinstance(uid, str) else None,
        prompt=line.text("input"),
        completion=line.text("output"),
        reward=line.number("score"),
        rewards=line.finite_numbers(*_VERL_COLUMNS),
    )


def sample_of_uid(uid: str) -> str:
    """The part of verl's `uid` that the rollouts of one prompt share.

    Example:
        >>> sample_of_uid("5f1c-9a_3_0"), sample_of_uid("5f1c-9a")
        ('5f1c-9a', '5f1c-9a')
    """
    parts = uid.rsplit("_", 2)
    return parts[0] if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit() else uid


def plain_rollouts(record: Mapping[str, Any], location: Location) -> Iterator[DumpedRollout]:
    """JSONL of your own: `prompt`, `completion` and `reward`, or `prompt_ids` and `completion_ids` instead of text.

    All other fields are optional.
    """
    line = RecordFields(record, location)
    has_ids = "prompt_ids" in record and "completion_ids" in record
    completion = line.token_ids("completion_ids") if has_ids else None
    length = 0 if completion is None else len(completion)
    group, rewards = record.get("group"), record.get("rewards")
    yield DumpedRollout(
        location=location,
        step=line.integer("step"),
        group=None if group is None else str(group),
        prompt=line.text_or_messages("prompt") if not has_ids or "prompt" in record else None,
        completion=line.single_answer("completion") if not has_ids or "completion" in record else None,
        prompt_ids=line.token_ids("prompt_ids") if has_ids else None,
        completion_ids=completion,
        completion_mask=line.flags("completion_mask", length) if has_ids and "completion_mask" in record else None,
        tokens=line.integer("tokens"),
        reward=line.number("reward"),
        rewards=line.nested("rewards").finite_numbers() if rewards is not None else {},
        advantage=line.finite_number("advantage"),
        log_probs=line.floats("log_probs", length) if has_ids else None,
        finished=line.flag("finished"),
    )


def slime_rollouts(record: Mapping[str, Any], location: Location) -> Iterator[DumpedRollout]:
    """Dump of slime, `*_{rollout_id}.pt` of `--save-debug-rollout-data`: one sample with token ids.

    A sample that slime removed from the loss stays in its group, with every token masked out.
    """
    sample = RecordFields(record, location)
    ids, length = sample.token_ids("tokens"), sample.integer("response_length") or 0
    if not 0 <= length <= len(ids):
        sample.refuse(f"response_length must lie in [0, {len(ids)}]", length)
    mask = None if record.get("loss_mask") is None else sample.flags("loss_mask", length)
    if sample.flag("remove_sample"):
        mask = torch.zeros(length, dtype=torch.bool)
    reward, rewards = _slime_rewards(sample)
    prompt, response, group = record.get("prompt"), record.get("response"), sample.integer("group_index")
    yield DumpedRollout(
        location=location,
        step=sample.integer("rollout_step"),
        group=None if group is None else str(group),
        prompt=prompt if isinstance(prompt, str) else None,
        completion=response if isinstance(response, str) else None,
        prompt_ids=ids[: len(ids) - length],
        completion_ids=ids[len(ids) - length :],
        completion_mask=mask,
        reward=reward,
        rewards=rewards,
        log_probs=sample.floats("rollout_log_probs", length),
        finished=_SLIME_FINISHED.get(str(record.get("status"))),
    )


def _slime_rewards(sample: RecordFields) -> tuple[float, dict[str, float]]:
    """The reward, and its parts if it is a mapping; then `score` or `reward` is the total, or the only part."""
    if not isinstance(sample.record.get("reward"), Mapping):
        return sample.number("reward"), {}
    parts = sample.nested("reward").finite_numbers()
    total = next((parts[name] for name in ("score", "reward") if name in parts), None)
    if total is None:
        total = next(iter(parts.values())) if len(parts) == 1 else math.nan
    return total, parts


def verifiers_rollouts(record: Mapping[str, Any], location: Location) -> Iterator[DumpedRollout]:
    """Dump of verifiers, `traces.jsonl`: one episode with its `traces`, or one trace: graphs of messages with tokens.

    Every path from the first message to a last one is a rollout, as it is a training sample for prime-rl; all paths of
    a trace share its reward. Traces of agents that are not trained are left out.
    """
    line = RecordFields(record, location)
    traces = record.get("traces") if "traces" in record else [record]
    if not isinstance(traces, list) or not all(isinstance(trace, Mapping) for trace in traces):
        line.refuse("traces must be a list of mappings", traces)
    for trace in traces:
        agent = trace.get("agent")
        if not isinstance(agent, Mapping) or agent.get("trainable", True):
            yield from _trace_rollouts(line, RecordFields(trace, location))


def _trace_rollouts(episode: RecordFields, trace: RecordFields) -> Iterator[DumpedRollout]:
    nodes = trace.record.get("nodes")
    if not isinstance(nodes, list) or not all(isinstance(node, Mapping) for node in nodes):
        trace.refuse("nodes must be a list of mappings", nodes)
    reward, rewards = _trace_rewards(trace)
    for path in _message_paths(trace, nodes):
        yield DumpedRollout(
            location=trace.location,
            step=_episode_step(episode),
            group=_trace_group(episode, trace),
            prompt_id=_task_name(episode, trace),
            reward=reward,
            rewards=rewards,
            finished=path[-1].get("finish_reason") != "length" if path else None,
            **_path_tokens(trace, path),
        )


def _message_paths(trace: RecordFields, nodes: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """From the root of the graph to each leaf."""
    parents = [node.get("parent") for node in nodes]
    depths: list[int] = []
    for i, parent in enumerate(parents):
        if parent is not None and not (isinstance(parent, int) and 0 <= parent < i):
            trace.refuse("the parent of a node must be an earlier node", parent)
        depths.append(1 if parent is None else depths[parent] + 1)
    inner = set(parents)
    leaves = [i for i in range(len(nodes)) if i not in inner]
    messages = sum(depths[leaf] for leaf in leaves)  # up to the square of the size of the graph
    if messages > _MOST_MESSAGES:
        trace.refuse(f"the paths of a trace must have at most {_MOST_MESSAGES:,} messages", messages)
    for leaf in leaves:
        path, at = [], leaf
        while at is not None:
            path.append(nodes[at])
            at = parents[at]
        yield path[::-1]


def _path_tokens(trace: RecordFields, path: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The tokens of a path; its text, if it was recorded without tokens and only the last message is the policy's."""
    nodes = [RecordFields(node, trace.location) for node in path]
    if not any(node.get("token_ids") for node in path):
        return _path_text(trace, path)
    ids = [node.token_ids("token_ids") for node in nodes]
    masks = [node.flags("mask", len(own)) for node, own in zip(nodes, ids, strict=True)]
    per_token = {
        name: _path_values([_node_values(node, key, mask) for node, mask in zip(nodes, masks, strict=True)])
        for name, key in (("log_probs", "logprobs"), ("advantages", "advantages"))
    }
    fields = split_sequence(torch.cat(ids), torch.cat(masks), per_token)
    advantage = shared_value(fields["advantages"], fields["completion_mask"])
    if advantage is not None:
        fields["advantages"] = None
    return fields | {"advantage": advantage}


def _node_values(node: RecordFields, name: str, mask: Tensor) -> Tensor:
    """`(T,)` values of a node, which lists those of chosen tokens; `nan` if the list is missing. Others are 0."""
    count = int(mask.sum())
    values = node.floats(name, count) if node.record.get(name) else None
    per_token = torch.zeros(len(mask), dtype=torch.float64)
    per_token[mask] = torch.full((count,), math.nan, dtype=torch.float64) if values is None else values
    return per_token


def _path_values(parts: Sequence[Tensor]) -> Tensor | None:
    values = torch.cat(list(parts))
    return None if bool(values.isnan().any()) else values


def _path_text(trace: RecordFields, path: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    messages = [RecordFields(node, trace.location).nested("message").record for node in path]
    sampled = [bool(node.get("sampled")) for node in path]
    content = messages[-1].get("content")
    if not sampled[-1] or any(sampled[:-1]) or not isinstance(content, str):
        trace.refuse("a trace without token ids must be one answer to its prompt", f"{sum(sampled)} sampled messages")
    return {"prompt": messages[:-1], "completion": content}


def _trace_rewards(trace: RecordFields) -> tuple[float, dict[str, float]]:
    """`Σ weight · score`, and every score; `nan` for a trace that was not scored."""
    given = trace.record.get("rewards") or {}
    if not isinstance(given, Mapping):
        trace.refuse("rewards must be a mapping", given)
    scores, total = {}, 0.0
    for name, value in given.items():
        if value is None:
            continue
        row = RecordFields(value if isinstance(value, Mapping) else {"score": value}, trace.location)
        weight = row.number("weight") if "weight" in row.record else 1.0
        scores[str(name)] = row.number("score")
        total += weight * scores[str(name)]
    return (trace.moderate("the sum of rewards", total) if scores else math.nan), scores


def _trace_group(episode: RecordFields, trace: RecordFields) -> str | None:
    """The trainer's group of the episode, else the task; agents of different names are in different groups."""
    group = episode.record.get("group")
    name = group.get("id") if isinstance(group, Mapping) else None
    name = _task_name(episode, trace) if name is None else str(name)
    agent = trace.record.get("agent")
    role = agent.get("name", "agent") if isinstance(agent, Mapping) else "agent"
    return None if name is None else f"{role}/{name}"


def _task_name(episode: RecordFields, trace: RecordFields) -> str | None:
    for fields in (trace, episode):
        task = fields.record.get("task")
        if isinstance(task, Mapping) and (task.get("key") or task.get("hash")):
            return str(task.get("key") or task.get("hash"))
    return None


def _episode_step(episode: RecordFields) -> int | None:
    """The step that the episode was run for, else the number in the name of a folder."""
    run = episode.record.get("run")
    work = run.get("work") if isinstance(run, Mapping) else None
    if isinstance(work, Mapping):
        return RecordFields(work, episode.location).integer("step")
    names = reversed(episode.location.file.parts)
    return next((step for name in names if (step := _step_in_name(name)) is not None), None)


def trained_trace_files(files: Sequence[Path]) -> list[Path]:
    """The files with the episodes that were trained on: not `eval`, and `effective` instead of `all`."""
    kept = [file for file in files if "eval" not in file.parts] or list(files)
    known = set(kept)
    return [
        file for file in kept if file.parent.name != "all" or file.parents[1] / "effective" / file.name not in known
    ]


@dataclass(frozen=True, kw_only=True)
class Format:
    """One row of the table of formats."""

    about: str
    """The trainer that writes it, and the setting that enables it."""
    parse: Callable[[Mapping[str, Any], Location], Iterator[DumpedRollout]]
    """The rollouts of a record; raises `ScoregramError` for a broken one."""
    suffix: str
    """Suffix of its files; a key of `CONTAINERS`."""
    names: tuple[str, ...]
    """Patterns of its files in a folder, at any depth; the first pattern with a match is used."""
    fields: tuple[tuple[str, ...], ...]
    """A record is of this format if it has all fields of one of these tuples."""
    token_ids: bool
    """Sampled token ids are in the file, so that a measurement is exact."""
    adjacent: bool
    """The rollouts of a group are next to each other, so that a group ends where another begins."""
    repeats: bool = False
    """The same rollouts may be written again under the next step."""
    select_files: Callable[[Sequence[Path]], list[Path]] = list
    """Which of the matching files to read."""

    def recognises(self, record: Any) -> bool:
        """Whether a record has the fields of this format."""
        return isinstance(record, Mapping) and any(set(fields) <= record.keys() for fields in self.fields)


FORMATS: MappingProxyType[str, Format] = MappingProxyType(
    {
        "scoregram": Format(
            about="a run folder of scoregram (train --rollouts-every)",
            parse=scoregram_rollouts,
            suffix=".parquet",
            names=("rollouts/step-*.parquet", "step-*.parquet"),
            fields=(("token_ids", "prompt_length", "reward"),),
            token_ids=True,
            adjacent=True,
        ),
        "trl": Format(
            about="TRL (log_completions=True)",
            parse=trl_rollouts,
            suffix=".parquet",
            names=("completions_*.parquet",),
            fields=(("step", "prompt", "completion", "advantage"),),
            token_ids=False,
            adjacent=True,
            repeats=True,
        ),
        "nemo-rl": Format(
            about="NeMo-RL (train_data_step*.jsonl in the log folder)",
            parse=nemo_rl_rollouts,
            suffix=".jsonl",
            names=("train_data_step*.jsonl",),
            fields=(("token_ids", "token_loss_mask", "rewards"),),
            token_ids=True,
            adjacent=True,
        ),
        "prime-rl": Format(
            about="prime-rl (trainer.enable_token_export)",
            parse=prime_rl_rollouts,
            suffix=".jsonl",
            names=("rank_*.jsonl",),
            fields=(("token_ids", "loss_mask", "inference_logprobs"),),
            token_ids=True,
            adjacent=False,
        ),
        "verifiers": Format(
            about="verifiers and prime-rl (traces.jsonl)",
            parse=verifiers_rollouts,
            suffix=".jsonl",
            names=("traces.jsonl",),
            fields=(("traces", "task"), ("nodes", "task")),
            token_ids=True,
            adjacent=False,
            select_files=trained_trace_files,
        ),
        "open-instruct": Format(
            about="open-instruct (rollouts saved as JSONL)",
            parse=open_instruct_rollouts,
            suffix=".jsonl",
            names=("*_rollouts_*.jsonl",),
            fields=(("prompt_tokens", "response_tokens", "reward"),),
            token_ids=True,
            adjacent=True,
        ),
        "verl": Format(
            about="verl (trainer.rollout_data_dir)",
            parse=verl_rollouts,
            suffix=".jsonl",
            names=("[0-9]*.jsonl",),
            fields=(("input", "output", "score"),),
            token_ids=False,
            adjacent=False,
        ),
        "plain": Format(
            about="plain JSONL (prompt, completion, reward, optional group)",
            parse=plain_rollouts,
            suffix=".jsonl",
            names=("*.jsonl",),
            fields=(("prompt", "completion"), ("prompt_ids", "completion_ids")),
            token_ids=False,
            adjacent=False,
        ),
        "slime": Format(
            about="slime (--save-debug-rollout-data)",
            parse=slime_rollouts,
            suffix=".pt",
            names=("*.pt",),
            fields=(("tokens", "response_length"),),
            token_ids=True,
            adjacent=True,
        ),
    }
)
"""Name of a format → what is known about it. `--format auto` tries them in this order."""
