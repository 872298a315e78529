"""verifiers' `traces.jsonl`: conversations as graphs of messages, each with the tokens that it added."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scoregram.integrations.dumps.fields import Source
from scoregram.integrations.dumps.nemo_rl import step_in
from scoregram.integrations.dumps.record import DumpedRollout, Where, one_advantage, split_sequence


def verifiers_traces(record: Mapping[str, Any], where: Where) -> Iterator[DumpedRollout]:
    """The rollouts of one line: an episode with its `traces`, or one trace alone.

    Every path from the first message to a last one is a rollout, as it is a training sample for prime-rl; all paths of
    a trace share its reward. Traces of agents that are not trained are left out.
    """
    line = Source(record, where)
    traces = record.get("traces") if "traces" in record else [record]
    if not isinstance(traces, list) or not all(isinstance(trace, Mapping) for trace in traces):
        line.refuse("traces must be a list of mappings", traces)
    for trace in traces:
        agent = trace.get("agent")
        if not isinstance(agent, Mapping) or agent.get("trainable", True):
            yield from trace_rollouts(line, Source(trace, where))


def trace_rollouts(episode: Source, trace: Source) -> Iterator[DumpedRollout]:
    """One rollout for each path of a trace."""
    nodes = trace.record.get("nodes")
    if not isinstance(nodes, list) or not all(isinstance(node, Mapping) for node in nodes):
        trace.refuse("nodes must be a list of mappings", nodes)
    reward, rewards = rewards_of(trace)
    for path in paths(trace, nodes):
        yield DumpedRollout(
            where=trace.where,
            step=step_of(episode),
            group=group_of(episode, trace),
            prompt_id=task_of(episode, trace),
            reward=reward,
            rewards=rewards,
            finished=path[-1].get("finish_reason") != "length" if path else None,
            **tokens_of(trace, path),
        )


def paths(trace: Source, nodes: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """From the root to every leaf of the graph."""
    parents = [node.get("parent") for node in nodes]
    if any(
        parent is not None and not (isinstance(parent, int) and 0 <= parent < i) for i, parent in enumerate(parents)
    ):
        trace.refuse("the parent of a node must be one that stands before it", str(parents))
    for leaf in [i for i in range(len(nodes)) if i not in parents]:
        path, at = [], leaf
        while at is not None:
            path.append(nodes[at])
            at = parents[at]
        yield path[::-1]


def tokens_of(trace: Source, path: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The tokens of a path; of one that was recorded without tokens, its messages, if only the last is the policy's."""
    sources = [Source(node, trace.where) for node in path]
    if not any(node.get("token_ids") for node in path):
        return messages_of(trace, path)
    ids = [node.ids("token_ids") for node in sources]
    masks = [node.flags("mask", len(own)) for node, own in zip(sources, ids, strict=True)]
    spread = {
        name: joined([on_chosen(node, key, mask) for node, mask in zip(sources, masks, strict=True)])
        for name, key in (("log_probs", "logprobs"), ("advantages", "advantages"))
    }
    fields = split_sequence(torch.cat(ids), torch.cat(masks), spread)
    advantage = one_advantage(fields["advantages"], fields["completion_mask"])
    if advantage is not None:
        fields["advantages"] = None
    return fields | {"advantage": advantage}


def on_chosen(node: Source, name: str, mask: Tensor) -> Tensor:
    """`(T,)` values of a node that are written for its chosen tokens alone; `nan` on them where there are none."""
    count = int(mask.sum())
    values = node.floats(name, count) if node.record.get(name) else None
    spread = torch.zeros(len(mask), dtype=torch.float64)
    spread[mask] = torch.full((count,), math.nan, dtype=torch.float64) if values is None else values
    return spread


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Parts in one row; None if nothing in it is known."""
    whole = torch.cat(list(parts))
    return None if bool(whole.isnan().any()) else whole


def messages_of(trace: Source, path: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Prompt and completion as messages and text."""
    messages = [Source(node, trace.where).within("message").record for node in path]
    sampled = [bool(node.get("sampled")) for node in path]
    content = messages[-1].get("content")
    if not sampled[-1] or any(sampled[:-1]) or not isinstance(content, str):
        trace.refuse("a trace without token ids must be one answer to its prompt", f"{sum(sampled)} sampled messages")
    return {"prompt": messages[:-1], "completion": content}


def rewards_of(trace: Source) -> tuple[float, dict[str, float]]:
    """`Σ weight · score`, and every score; `nan` for a trace that was not scored."""
    given = trace.record.get("rewards") or {}
    if not isinstance(given, Mapping):
        trace.refuse("rewards must be a mapping", given)
    scores, total = {}, 0.0
    for name, value in given.items():
        if value is None:
            continue
        row = Source(value if isinstance(value, Mapping) else {"score": value}, trace.where)
        weight = row.number("weight") if "weight" in row.record else 1.0
        scores[str(name)] = row.number("score")
        total += weight * scores[str(name)]
    return (total if scores else math.nan), scores


def group_of(episode: Source, trace: Source) -> str | None:
    """The group that the trainer put the episode in, else the task; agents of different names do not compare."""
    group = episode.record.get("group")
    name = group.get("id") if isinstance(group, Mapping) else None
    name = task_of(episode, trace) if name is None else str(name)
    agent = trace.record.get("agent")
    role = agent.get("name", "agent") if isinstance(agent, Mapping) else "agent"
    return None if name is None else f"{role}/{name}"


def task_of(episode: Source, trace: Source) -> str | None:
    """Stable name of the task."""
    for source in (trace, episode):
        task = source.record.get("task")
        if isinstance(task, Mapping) and (task.get("key") or task.get("hash")):
            return str(task.get("key") or task.get("hash"))
    return None


def step_of(episode: Source) -> int | None:
    """The step for which the episode was run; else the one in the name of a folder."""
    run = episode.record.get("run")
    work = run.get("work") if isinstance(run, Mapping) else None
    if isinstance(work, Mapping):
        return Source(work, episode.where).whole("step")
    return next((step for part in reversed(episode.where.file.parts) if (step := step_in(part)) is not None), None)


def trained_on(files: Sequence[Path]) -> list[Path]:
    """Of files about the same episodes, those the trainer used: not `eval`, and `effective` in place of `all`."""
    kept = [file for file in files if "eval" not in file.parts] or list(files)
    known = set(kept)
    return [
        file for file in kept if file.parent.name != "all" or file.parents[1] / "effective" / file.name not in known
    ]
