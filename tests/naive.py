"""Slow references, obviously right, sharing no code with what they check. Imports torch alone."""

import math
import statistics

import torch

# The score Gram by its definition: one backward pass per rollout.


def score_rows(model, input_ids, completion_mask, attention_mask, coefficients=None, temperature=1.0):
    """Flat gradients `(N, D)` of `Σ_t c_t log π(y_t)` over the trainable parameters, one rollout after another.

    They are taken from `.grad`: `torch.autograd.grad` misses layers that run a backward pass inside their own, as
    reversible ones do.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [parameter.grad for parameter in parameters]
    factors = completion_mask if coefficients is None else completion_mask * coefficients
    rows = []
    for i in range(len(input_ids)):
        real = attention_mask[i].bool()
        ids = input_ids[i][real][None]
        log_probs = (model(input_ids=ids).logits.double() / temperature).log_softmax(-1)
        chosen = log_probs[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        total = (chosen * factors[i][real][1:]).sum()
        for parameter in parameters:
            parameter.grad = None
        total.backward()
        grads = [parameter.grad for parameter in parameters]
        rows.append(
            torch.cat(
                [
                    torch.zeros(p.numel()).double() if g is None else g.double().flatten()
                    for p, g in zip(parameters, grads, strict=True)
                ]
            )
        )
    for parameter, grad in zip(parameters, before, strict=True):
        parameter.grad = grad
    return torch.stack(rows)


# Credit of tokens.


def discriminative_tokens_by_hand(rewards, mask, features):
    """DelTA with lists: centroids, margins, one refinement, weights in [0.8, 1.2] of mean 1."""

    def standard(values: list[float]) -> list[float]:
        mean, spread = statistics.fmean(values), statistics.stdev(values)
        return [(v - mean) / spread if spread > 1e-12 else 0.0 for v in values]

    credit: dict[tuple[int, int, int], float] = {}
    for p in range(len(rewards)):
        rows = [i for i in range(rewards.shape[1]) if bool(mask[p, i].any())]
        for i, a in zip(rows, standard([float(rewards[p, i][mask[p, i]].sum()) for i in rows]), strict=True):
            credit |= {(p, i, t): a for t in range(mask.shape[2]) if bool(mask[p, i, t])}
    vector = {place: features[place].tolist() for place in credit}

    def margins(amount: dict) -> dict:
        centroids = {}
        for sign in (1, -1):
            side = [place for place in credit if credit[place] * sign > 0]
            total = sum(amount[place] for place in side)
            width = range(features.shape[-1])
            centroids[sign] = [sum(amount[s] * vector[s][d] for s in side) / total if side else 0.0 for d in width]
        found = {}
        for place, a in credit.items():
            sign = (a > 0) - (a < 0)
            if sign:
                gaps = {s: [x - m for x, m in zip(vector[place], centroids[s], strict=True)] for s in (1, -1)}
                found[place] = sum(g * g for g in gaps[-sign]) - sum(g * g for g in gaps[sign])
        return found

    first = margins({place: abs(a) for place, a in credit.items()})
    deviation = {
        sign: max(statistics.pstdev([m for s, m in first.items() if credit[s] * sign > 0] or [0.0]), 1e-4)
        for sign in (1, -1)
    }
    share = {s: 1 / (1 + math.exp(-m / deviation[1 if credit[s] > 0 else -1])) for s, m in first.items()}
    last = margins({place: abs(a) * share.get(place, 0.0) for place, a in credit.items()})
    weight = dict.fromkeys(credit, 0.8)
    for s, m in last.items():
        weight[s] += 0.4 / (1 + math.exp(-m / deviation[1 if credit[s] > 0 else -1]))
    mean, result = statistics.fmean(weight.values()), torch.zeros(mask.shape, dtype=torch.float64)
    for place, a in credit.items():
        result[place] = a * weight[place] / mean
    return result
