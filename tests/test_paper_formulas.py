"""The formulas of the LoFAST paper against brute force and attacks, and where its print is wrong."""

import itertools

import pytest
import torch

from benchmarks.papers import lofast
from benchmarks.papers.attention import AttentionLayer, attention_sensitivity

N, D = 5, 8


def tokens(norm=1.0, seed=0):
    x = torch.randn(N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return norm * x / x.norm(dim=1, keepdim=True)


def linear(seed=0, scale=0.6):
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(D, D, dtype=torch.float64, generator=generator) for _ in range(4)]


def largest(function, seed=0, rounds=300):
    """The norm of a linear map of (n, d) matrices, by power iteration through autograd."""
    gamma = torch.randn(N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    for _ in range(rounds):
        gamma = (gamma / gamma.norm()).requires_grad_()
        norm = function(gamma).norm()
        (gamma,) = torch.autograd.grad(norm, gamma)
    return float(norm)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("residual", [False, True])
def test_zeta_is_the_norm_at_frozen_attention(heads, residual):
    layer = AttentionLayer(*linear(heads), heads=heads)
    x = tokens(seed=heads)
    weights = layer.weights(x)

    def frozen(gamma):
        mixed = weights @ layer.project(gamma, layer.wv, None)
        out = mixed.movedim(-3, -2).flatten(-2) @ layer.wo
        return out + gamma if residual else out

    assert lofast.theorem_1(x, layer, 0.1, residual=residual).zeta == pytest.approx(largest(frozen), rel=1e-6)


def test_m_is_the_norm_of_lemma_2_and_not_as_printed():
    for seed in range(4):
        x, (wq, wk, _, _) = tokens(seed=seed), linear(seed)
        form = wq @ wk.mT
        reached = largest(lambda gamma, form=form, x=x: gamma @ form @ x.mT + x @ form @ gamma.mT)
        assert lofast.scores(x, form) == pytest.approx(reached, rel=1e-6)
        assert lofast.scores(x, form) <= lofast.xi(x, form)
    # Equation 25 as printed is below what a perturbation reaches, for a form that maps tokens out of their span.
    x, form = torch.zeros(2, D, dtype=torch.float64), torch.zeros(D, D, dtype=torch.float64)
    x[:, 0], form[0, 1] = 1.0, 1.0  # x A = e₁, A xᵀ = 0
    gamma = torch.zeros(2, D, dtype=torch.float64)
    gamma[0, 1] = 1.0
    change = float((gamma @ form @ x.mT + x @ form @ gamma.mT).norm())
    assert lofast.scores(x, form, as_printed=True) < 0.99 * change <= 0.99 * lofast.scores(x, form) * (1 + 1e-12)


@pytest.mark.parametrize(("heads", "residual", "norm"), list(itertools.product((1, 2), (False, True), (0.5, 2.0))))
def test_no_attack_passes_theorem_1(heads, residual, norm):
    layer = AttentionLayer(*linear(7), heads=heads)
    x = tokens(norm)
    for eps in (0.01, 0.3, 2.0):
        bound = lofast.theorem_1(x, layer, eps, residual=residual)
        found = max(lofast.attack(x, layer, eps, residual=residual, seed=seed) for seed in range(2))
        assert found <= bound.change <= bound.loose <= bound.by_norms * (1 + 1e-12)
        if not residual:
            ours = float(attention_sensitivity(x[None], layer, eps).change)
            assert found <= ours * (1 + 1e-12)


def test_specformer_grows_as_in_table_3_of_lofast():
    """The quotients of bound and ε in table 3 are those of (‖X‖_F + ε)² for one ‖X‖_F."""
    quoted = {0.01: 16.901, 0.03: 52.515, 0.05: 90.600, 0.07: 131.219, 0.09: 174.436, 0.10: 197.036}
    size = (0.1 - 0.01 * (root := (quoted[0.1] / 0.1 / (quoted[0.01] / 0.01)) ** 0.5)) / (root - 1)
    x = tokens()
    x = size * x / x.norm()
    layer = AttentionLayer(*linear())
    unit = lofast.specformer(x, layer, 0.01) / quoted[0.01]
    for eps, value in quoted.items():
        assert lofast.specformer(x, layer, eps) == pytest.approx(unit * value, rel=2e-4)
    assert lofast.specformer(x, layer, 0.1) > 10 * lofast.attack(x, layer, 0.1, residual=False)
