"""The kernels against their plain twins, and the engine in half precision on a GPU against float32 on the CPU."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from scoregram.gram import backward_with_gram, contract, head, measure_gram
from scoregram.machine import without_cudnn_attention
from tests.cases import ARCHITECTURES, rollouts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize(
    ("count", "groups"),
    [
        (1, 1),
        (2, 1),
        (3, 1),
        (5, 1),
        (8, 1),
        (8, 2),
        (16, 1),
        (24, 3),
        (64, 1),
        (64, 8),
        (66, 1),
        (96, 8),
        (200, 2),
        (256, 32),
        (512, 1),
    ],
)
@pytest.mark.parametrize("width", [100, 8192, 100_003])
@pytest.mark.parametrize("vectors", [0, 1, 8, 9, 20])  # pairs of tiles take 8, others 16
def test_gram_and_sums_match_float64(count, groups, width, vectors):
    for dtype, out_dtype in ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16,) * 2):
        torch.manual_seed(0)
        held = torch.randn(count, width + 40, device="cuda").to(dtype)
        rows = held[:, :width]  # rows that do not follow each other in memory
        weights = torch.randn(vectors, count, device="cuda") if vectors else None
        out = torch.full((vectors, width), torch.nan, device="cuda", dtype=out_dtype) if vectors else None
        contractor = contract.Contractor(count, groups, weights)
        contractor.contract(rows, out, owner=7)
        gram = contractor.grams({7: 0}, 1)[0].cpu()  # Grams stay on the device
        size = count // groups
        exact = (rows.double() @ rows.double().T).cpu()
        for group in range(groups):
            here = slice(group * size, (group + 1) * size)
            assert float((gram[group] - exact[here, here]).norm() / exact[here, here].norm()) < 5e-5
        if weights is not None and out is not None:
            sums = weights.double() @ rows.double()
            error = float((out.double() - sums).norm() / sums.norm())
            assert error < (2e-5 if out_dtype == torch.float32 else 3e-3)


@pytest.mark.parametrize("count", [8, 64, 96, 256])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_weights_in_a_slab_keep_apart(count, out_dtype, monkeypatch):
    """Several launches, several weights each; a weight of odd size or too large for the slab goes its own way."""
    monkeypatch.setattr("scoregram.gram.slab.SLAB_ELEMENTS", count * (1 << 15))
    torch.manual_seed(0)
    weights = torch.randn(2, count, device="cuda")
    contractor = contract.Contractor(count, 1, weights)
    shapes = [(64, 128), (7, 9), (128, 192), (64, 64), (32, 32), (300, 256), (16, 1024)]
    received, expected = {}, {}
    for owner, (p, q) in enumerate(shapes):
        a, b = (torch.randn(count, 5, width, device="cuda").bfloat16() for width in (p, q))
        expected[owner] = torch.bmm(a.mT, b).flatten(1).double()
        contractor.stream(
            [contract.Factors(a, b)],
            p,
            owner=owner,
            out_dtype=out_dtype,
            receive=lambda sums, owner=owner: received.update({owner: sums}),
        )
    contractor.flush()
    grams = contractor.grams({owner: owner for owner in expected}, len(shapes))[:, 0].cpu()
    for owner, rows in expected.items():
        exact, sums = (rows @ rows.T).cpu(), weights.double() @ rows
        assert float((grams[owner] - exact).norm() / exact.norm()) < 5e-5
        assert received[owner].shape == (2, *shapes[owner]) and received[owner].dtype == out_dtype
        error = float((received[owner].flatten(1).double() - sums).norm() / sums.norm())
        assert error < (2e-5 if out_dtype == torch.float32 else 3e-3)


@pytest.mark.parametrize("count", [8, 72])
@pytest.mark.parametrize("group_size", [None, 8])
def test_float32_weights_under_autocast(count, group_size, monkeypatch):
    """Mixed precision as people train: the rows are in half precision, the sums in float32."""
    monkeypatch.setattr("scoregram.gram.leaves.KEPT_ELEMENTS_CUDA", 0)
    exact = ARCHITECTURES["llama-tied"]().float()
    low = copy.deepcopy(exact).cuda()
    batch = rollouts(count, 24)
    weights = torch.linspace(-1.0, 2.0, count)
    expected = backward_with_gram(exact, *batch.arguments, weights=weights, group_size=group_size)
    with torch.autocast("cuda", torch.bfloat16):
        given = [tensor.cuda() for tensor in batch.arguments]
        gram = backward_with_gram(low, *given, weights=weights.cuda(), group_size=group_size)
    known = ~expected.matrix.isnan()
    assert torch.equal(known, ~gram.matrix.isnan())
    apart = (gram.matrix - expected.matrix)[known].norm() / expected.matrix[known].norm()
    assert float(apart) < 3e-2
    for (name, parameter), reference in zip(low.named_parameters(), exact.parameters(), strict=True):
        assert parameter.grad is not None and reference.grad is not None and parameter.grad.dtype == torch.float32
        assert float((parameter.grad.cpu() - reference.grad).norm() / reference.grad.norm()) < 8e-2, name


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2", "mixtral"])
@pytest.mark.parametrize("half", ["bfloat16", "float16", "autocast"])
def test_a_preconditioned_gram_in_half_precision(name, half, monkeypatch):
    """Against float32 on the CPU; `√D` spans eight powers of ten, more than float16 holds."""
    monkeypatch.setattr("scoregram.gram.leaves.KEPT_ELEMENTS_CUDA", 0)
    low = ARCHITECTURES[name]()
    low = low.float() if half == "autocast" else low.to(getattr(torch, half))
    exact, batch = copy.deepcopy(low).float(), rollouts(8, 48)
    generator = torch.Generator().manual_seed(0)
    drawn = [10 ** (16 * torch.rand(p.shape, generator=generator) - 8) for p in low.parameters()]
    expected = measure_gram(
        exact, *batch.arguments, preconditioner=dict(zip(exact.parameters(), drawn, strict=True))
    ).matrix
    low, on_gpu = low.cuda(), [tensor.cuda() for tensor in batch.arguments]
    diagonal = dict(zip(low.parameters(), [one.cuda() for one in drawn], strict=True))
    with torch.autocast("cuda", torch.bfloat16) if half == "autocast" else nullcontext():
        plain = measure_gram(low, *on_gpu).matrix
        found = measure_gram(low, *on_gpu, preconditioner=diagonal).matrix
        ones = {parameter: torch.ones_like(parameter) for parameter in low.parameters()}
        same = measure_gram(low, *on_gpu, preconditioner=ones).matrix
    assert float((found - expected).norm() / expected.norm()) < 3e-2
    assert float((same - plain).norm() / plain.norm()) < 1e-3


def test_softmax_gradient_matches_its_twin():
    torch.manual_seed(0)
    logits = torch.randn(300, 50_257, device="cuda").bfloat16()
    tokens = torch.randint(0, 50_257, (300,), device="cuda")
    factors = torch.randn(300, device="cuda")
    expected = head.softmax_gradient(logits.float(), tokens, factors, 0.7)
    kept = logits.clone()
    found = head.softmax_gradient(logits, tokens, factors, 0.7)
    for value, reference in zip(found, expected, strict=True):
        assert float((value.float() - reference).norm() / reference.norm()) < 3e-3
    part = kept[:, 1000:3000].contiguous()
    head.launch_logit_gradient_(part, 1000, tokens, factors, found[2], 0.7)
    torch.testing.assert_close(part, found[0][:, 1000:3000])


def test_log_probs_of_a_million_rows():
    """No thread of a row writes a gradient over the token's logit before another has read it."""
    torch.manual_seed(0)
    rows, width = 16_384, 49_152
    logits = 20 + torch.randn(rows, width, device="cuda").bfloat16()
    tokens, factors = torch.randint(0, width, (rows,), device="cuda"), torch.rand(rows, device="cuda")
    expected = logits.gather(1, tokens[:, None])[:, 0].float() - logits.float().logsumexp(1)
    for _ in range(64):
        found, _ = head.launch_softmax_gradient_(logits.clone(), tokens, factors, 1.0)
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-bias", "nemotron", "gpt2"])
@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_half_precision_stays_at_its_noise_floor(name, checkpointing, monkeypatch):
    monkeypatch.setattr("scoregram.gram.leaves.KEPT_ELEMENTS_CUDA", 0)
    low = ARCHITECTURES[name]().bfloat16()
    exact = copy.deepcopy(low).float()
    batch = rollouts(8, 48)
    weights = torch.linspace(-1.0, 2.0, 8)
    expected = backward_with_gram(exact, *batch.arguments, weights=weights)
    low = low.cuda()
    if checkpointing is not None:
        low.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        low.train()
    on_gpu = [tensor.cuda() for tensor in batch.arguments]
    has_dropout = name == "gpt2" and low.training  # the passes run without it, and say so
    with pytest.warns(UserWarning, match="dropout was switched off") if has_dropout else nullcontext():
        gram = backward_with_gram(low, *on_gpu, weights=weights.cuda())
        measure_gram(low, *on_gpu, verify=True)
    assert float((gram.matrix - expected.matrix).norm() / expected.matrix.norm()) < 3e-2
    for (parameter_name, parameter), reference in zip(low.named_parameters(), exact.parameters(), strict=True):
        assert parameter.grad is not None and reference.grad is not None
        error = (parameter.grad.float().cpu() - reference.grad).norm() / reference.grad.norm()
        assert float(error) < 8e-2, parameter_name


@pytest.mark.parametrize("group_size", [None, 4])
def test_equal_rollouts_are_measured_once(group_size):
    model = ARCHITECTURES["llama-tied"]().float().cuda()
    order = torch.tensor([0, 1, 0, 0, 2, 2, 4, 1])
    given = [tensor[order].cuda() for tensor in rollouts().arguments]
    few = measure_gram(model, *(tensor.cuda() for tensor in rollouts().arguments))
    gram = backward_with_gram(model, *given, weights=torch.linspace(-1.0, 2.0, 8), group_size=group_size)
    expected = few.matrix[order][:, order]
    if group_size is not None:
        expected[:4, 4:] = expected[4:, :4] = torch.nan
    torch.testing.assert_close(gram.matrix, expected, equal_nan=True, rtol=1e-4, atol=1e-4 * float(few.matrix.max()))
    torch.testing.assert_close(gram.log_probs, few.log_probs[order.cuda()])


# Attention with a mask: cuDNN's gradient is nan at 64 tokens modulo 128 if all scores of a query are far below 0.


def model_with_low_scores() -> Any:
    """A Qwen2 in which every query has a score of about -200 with every key: the last pair of a head turns slowly."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    model: Any = Qwen2ForCausalLM(Qwen2Config(vocab_size=50, num_hidden_layers=2, **sizes))
    model.cuda().eval()
    for layer in model.model.layers:
        layer.self_attn.q_proj.bias.data[31] = 40.0
        layer.self_attn.k_proj.bias.data[31] = -40.0
    return model


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_padded_batch_of_a_model_with_low_scores_is_finite(checkpointed):
    model = model_with_low_scores()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    ids = torch.randint(0, 50, (4, 192), device="cuda")
    attention = torch.arange(192, device="cuda") < torch.tensor([[192], [150], [170], [192]], device="cuda")
    completion = attention.clone()
    completion[:, :10] = False
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with torch.autocast("cuda", torch.bfloat16):
        found = measure_gram(model, ids, completion, attention).matrix
    exact = measure_gram(model, ids, completion, attention).matrix
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
    assert bool(found.isfinite().all()) and float((found - exact).norm() / exact.norm()) < 0.1


def test_packed_groups_of_a_model_with_low_scores_have_finite_gradients_without_cudnn():
    model = model_with_low_scores()
    ids = torch.randint(0, 50, (1, 192), device="cuda")
    mask = torch.ones(192, 192, dtype=torch.bool, device="cuda").tril()[None, None]
    places = torch.arange(192, device="cuda")[None]
    with without_cudnn_attention(), torch.autocast("cuda", torch.bfloat16):
        model(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False).logits.float().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
