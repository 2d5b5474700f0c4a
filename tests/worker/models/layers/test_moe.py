"""Routers and experts against the obvious: one token at a time, one expert after the other."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from transom_kernels.launch import prefer
from transom_kernels.moe import ExpertTensors, GateRule
from transom_kernels.route import Routing
from transom_kernels.route.op import routes_of
from transom_worker.models.layers.expert_router import ExpertRouter, Routes
from transom_worker.models.layers.experts import GroupedExperts, SequentialExperts, make_experts
from transom_worker.models.layers.linear import PlainLinear
from transom_worker.models.layers.mlp import GatedMlp
from transom_worker.models.layers.moe import Moe

HIDDEN, INNER, EXPERTS, CHOSEN = 24, 16, 7, 3
SILU = GateRule()
CLAMPED = GateRule(limit=0.4, gain=1.702, up_offset=1.0)
TENSORS = ("gate_up", "down", "gate_up_bias", "down_bias")


def route(logits, routing, **kwargs):
    return Routes(*routes_of(logits, routing, **kwargs))


def reference_routes(logits, routing, correction=None):
    """Experts and weights of one token, as (expert, weight)."""
    if routing.score == "softmax":
        scores = [math.exp(v) / sum(math.exp(w) for w in logits) for v in logits]
    elif routing.score == "sigmoid":
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    else:
        scores = [math.sqrt(math.log1p(math.exp(v))) for v in logits]
    preference = scores if correction is None else [s + c for s, c in zip(scores, correction, strict=True)]
    chosen = sorted(range(len(scores)), key=lambda e: -preference[e])[: routing.num_chosen]
    total = sum(scores[e] for e in chosen) if routing.normalise else 1.0
    return [(e, scores[e] / total * routing.scale) for e in chosen]


def reference_gated(inner, rule):
    gate, up = inner[: len(inner) // 2], inner[len(inner) // 2 :]
    if rule.limit is not None:
        gate, up = gate.clamp(max=rule.limit), up.clamp(-rule.limit, rule.limit)
    return gate * torch.sigmoid(rule.gain * gate) * (up + rule.up_offset)


def reference_experts(x, routes, weights, rule, *, scales_input):
    """The weighted sum of one token's experts."""
    y = torch.zeros_like(x)
    for e, weight in routes:
        inner = weights.gate_up[e] @ (x * weight if scales_input else x)
        inner = inner if weights.gate_up_bias is None else inner + weights.gate_up_bias[e]
        out = weights.down[e] @ reference_gated(inner, rule)
        out = out if weights.down_bias is None else out + weights.down_bias[e]
        y = y + (out if scales_input else out * weight)
    return y


def make_weights(dtype=torch.float32, *, biased=True):
    torch.manual_seed(5)
    shapes: dict[str, tuple[int, ...]] = {"gate_up": (EXPERTS, 2 * INNER, HIDDEN), "down": (EXPERTS, HIDDEN, INNER)}
    if biased:
        shapes |= {"gate_up_bias": (EXPERTS, 2 * INNER), "down_bias": (EXPERTS, HIDDEN)}
    tensors: dict[str, Any] = {name: torch.randn(shape).mul(0.3).to(dtype) for name, shape in shapes.items()}
    return ExpertTensors(**tensors)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("corrected", [True, False])
def test_routes(score, normalise, corrected):
    torch.manual_seed(3)
    logits, correction = torch.randn(11, EXPERTS) * 2, torch.randn(EXPERTS)
    routing = Routing(num_chosen=CHOSEN, score=score, normalise=normalise, scale=1.5)
    got = route(logits, routing, correction=correction if corrected else None)
    for t, row in enumerate(logits.tolist()):
        wanted = reference_routes(row, routing, correction.tolist() if corrected else None)
        assert got.experts_TK[t].tolist() == [e for e, _ in wanted]
        torch.testing.assert_close(got.weights_TK[t], torch.tensor([w for _, w in wanted]))


def test_a_softmax_after_the_choice_is_the_normalised_one():
    logits = torch.randn(9, EXPERTS) * 30
    got = route(logits, Routing(num_chosen=CHOSEN))
    best = logits.topk(CHOSEN)
    assert got.experts_TK.equal(best.indices)
    torch.testing.assert_close(got.weights_TK, best.values.softmax(-1))


def test_given_experts_are_weighed_by_their_scores():
    logits, chosen = torch.randn(4, EXPERTS), torch.tensor([[6, 0], [1, 2], [3, 3], [5, 4]])
    got = route(logits, Routing(num_chosen=2, score="sigmoid"), chosen=chosen)
    scores = logits.sigmoid().gather(1, chosen)
    assert got.experts_TK.equal(chosen)
    torch.testing.assert_close(got.weights_TK, scores / scores.sum(-1, keepdim=True))


def test_a_router_computes_in_float32():
    """Logits here are multiples of 1 / 64 up to 2 ** 8: exact in float32 in any order of the sum, and not in bfloat16."""
    weight, bias = (torch.randint(-64, 65, shape).bfloat16() / 64 for shape in ((EXPERTS, HIDDEN), (EXPERTS,)))
    x = torch.randint(-8, 9, (5, HIDDEN)).bfloat16()
    got = ExpertRouter(weight, Routing(num_chosen=2), bias_E=bias)(x)
    wanted = route(F.linear(x.float(), weight.float(), bias.float()), Routing(num_chosen=2))
    assert got.experts_TK.equal(wanted.experts_TK)
    assert got.weights_TK.dtype == torch.float32
    torch.testing.assert_close(got.weights_TK, wanted.weights_TK, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("scales_input", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 40])
@pytest.mark.parametrize("rule", [SILU, CLAMPED], ids=["silu", "clamped"])
def test_experts(scales_input, biased, num_tokens, rule):
    weights = make_weights(biased=biased)
    x = torch.randn(num_tokens, HIDDEN)
    routes = route(torch.randn(num_tokens, EXPERTS), Routing(num_chosen=CHOSEN))
    experts = make_experts(weights, rule, quantization="none", scales_input=scales_input)
    got = experts(x, routes)
    assert got.shape == x.shape
    for t in range(num_tokens):
        pairs = list(zip(routes.experts_TK[t].tolist(), routes.weights_TK[t].tolist(), strict=True))
        wanted = reference_experts(x[t], pairs, weights, rule, scales_input=scales_input)
        torch.testing.assert_close(got[t], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "quantization"), [("bfloat16", "none"), ("float32", "int8"), ("bfloat16", "int8")])
def test_experts_in_other_formats_stay_close(dtype, quantization):
    weights, x = make_weights(getattr(torch, dtype)), torch.randn(30, HIDDEN).to(getattr(torch, dtype))
    routes = route(torch.randn(30, EXPERTS), Routing(num_chosen=CHOSEN))
    got = make_experts(weights, SILU, quantization=quantization)(x, routes).float()
    wide = replace(weights, **{name: getattr(weights, name).float() for name in TENSORS})
    wanted = make_experts(wide, SILU, quantization="none")(x.float(), routes)
    assert (got - wanted).norm() / wanted.norm() < 0.03


def test_a_token_alone_has_the_result_that_it_has_in_a_batch():
    weights, x = make_weights(), torch.randn(50, HIDDEN)
    routes = route(torch.randn(50, EXPERTS), Routing(num_chosen=CHOSEN))
    experts = make_experts(weights, SILU, quantization="none")
    together = experts(x, routes)
    for t in range(50):
        alone = experts(x[t : t + 1], Routes(routes.experts_TK[t : t + 1], routes.weights_TK[t : t + 1]))
        torch.testing.assert_close(together[t], alone[0], atol=2e-6, rtol=0)


def test_all_tokens_may_choose_the_same_expert():
    weights, x = make_weights(), torch.randn(6, HIDDEN)
    routes = Routes(torch.full((6, 1), EXPERTS - 1), torch.ones(6, 1))
    got = make_experts(weights, SILU, quantization="none")(x, routes)
    wanted = reference_experts(x[0], [(EXPERTS - 1, 1.0)], weights, SILU, scales_input=False)
    torch.testing.assert_close(got[0], wanted)


def test_weights_are_held_once():
    weights = make_weights(biased=False)
    with prefer("reference"):
        experts = make_experts(weights, SILU, quantization="none")
    assert experts.weight_bytes == weights.gate_up.nbytes + weights.down.nbytes
    assert isinstance(experts, SequentialExperts)
    down = experts._down[3]
    assert isinstance(down, PlainLinear)
    assert down.weight_NK.data_ptr() == weights.down[3].data_ptr()


def test_packed_weights_take_no_more_memory():
    gate_up, down = torch.randn(3, 64, 128), torch.randn(3, 128, 32)
    experts = make_experts(ExpertTensors(gate_up=gate_up, down=down), SILU, quantization="none")
    assert isinstance(experts, GroupedExperts)
    assert experts.weight_bytes == gate_up.nbytes + down.nbytes


@pytest.mark.parametrize("shared", [False, True])
def test_a_mixture_adds_router_experts_and_the_shared_expert(shared):
    weights = make_weights(biased=False)
    x, residual, gate = torch.randn(9, HIDDEN), torch.randn(9, HIDDEN), torch.randn(EXPERTS, HIDDEN)
    matrices = [torch.randn(shape) for shape in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))]
    dense = GatedMlp(matrices, None, quantization="none") if shared else None
    router = ExpertRouter(gate, Routing(num_chosen=CHOSEN))
    experts = make_experts(weights, SILU, quantization="none")
    moe = Moe(router, experts, dense)
    kept = residual.clone()
    got = moe.add_to(residual, x)
    assert residual.equal(kept)
    wanted = residual + experts(x, router(x))
    wanted = wanted if dense is None else dense.add_to(wanted, x)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(moe(x), wanted - residual)
    parts = gate.nbytes + experts.weight_bytes + (dense.weight_bytes if dense else 0)
    assert moe.weight_bytes == parts
