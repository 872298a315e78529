"""Slow references, obviously right, sharing no code with what they check. Imports torch alone."""

import torch

# The score Gram by its definition: one backward pass per rollout.


def score_rows(model, input_ids, completion_mask, attention_mask, coefficients=None, temperature=1.0):
    """Flat gradients `(N, D)` of `Σ_t c_t log π(y_t)` over the trainable parameters, one rollout after another."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    factors = completion_mask if coefficients is None else completion_mask * coefficients
    rows = []
    for i in range(len(input_ids)):
        real = attention_mask[i].bool()
        ids = input_ids[i][real][None]
        log_probs = (model(input_ids=ids).logits.double() / temperature).log_softmax(-1)
        chosen = log_probs[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        total = (chosen * factors[i][real][1:]).sum()
        grads = torch.autograd.grad(total, parameters, allow_unused=True)
        rows.append(
            torch.cat(
                [
                    torch.zeros(p.numel()).double() if g is None else g.double().flatten()
                    for p, g in zip(parameters, grads, strict=True)
                ]
            )
        )
    return torch.stack(rows)
