"""One attention layer: no attack gets past its bounds, and they are close to the attack."""

import numpy as np
import pytest
import torch
from modules import scaled_to, seeded

from benchmarks.papers import attention as of_attention
from benchmarks.papers.attention import AttentionLayer, attention_sensitivity, ball_change, naive_change
from lipcert.errors import InputError


def attention(dim, heads, width, *, biases=True, out=True, orthogonal=False, seed=0):
    def weight(rows, columns, key):
        matrix = seeded(rows, columns, seed=seed + key)
        return torch.linalg.qr(matrix)[0] if orthogonal else matrix / rows**0.5

    bq, bk, bv = (seeded(heads * width, seed=seed + key) / 2 if biases else None for key in (7, 8, 9))
    wq, wk, wv = (weight(dim, heads * width, key) for key in (1, 2, 3))
    return AttentionLayer(wq, wk, wv, weight(heads * width, dim, 4) if out else None, heads, bq, bk, bv)


def attacked_change(layer, x, eps, steps=60, restarts=2):
    """The largest ‖Attn(X + Δ) − Attn(X)‖_F that ascent finds on ‖Δ‖_F = ε, shape (N,)."""
    base = layer(x)
    best = torch.zeros(len(x), dtype=torch.float64)
    for restart in range(restarts):
        delta = scaled_to(seeded(*x.shape, seed=100 + restart), eps)
        for _ in range(steps):
            delta = delta.detach().requires_grad_()
            change = (layer(x + delta) - base).flatten(1).norm(dim=1)
            best = torch.maximum(best, change.detach())
            (gradient,) = torch.autograd.grad(change.sum(), delta)
            delta = scaled_to(gradient, eps)
    return best


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("size", [0.1, 1.0, 5.0])
def test_no_perturbation_passes_the_sensitivity(heads, biases, size):
    layer = attention(8, heads, 3, biases=biases, out=heads > 1)
    x = size * seeded(3, 5, 8, seed=20)
    for eps in (1e-3, 0.1, 1.0, 10.0):
        found = attention_sensitivity(x, layer, eps)
        change = attacked_change(layer, x, eps, steps=25)
        forms = [found.zeta * eps + delta2 * eps**2 for delta2 in found.delta2]
        for bound in (*forms, found.change, naive_change(x, layer, eps), ball_change(x, layer, eps)):
            assert bool((change <= bound * (1 + 1e-9)).all())
        assert bool((found.change <= naive_change(x, layer, eps)).all())


@pytest.mark.parametrize("size", [0.3, 3.0])
def test_each_form_bounds_what_is_beyond_the_jacobian(size):
    """The second-order terms alone, along random directions and along the one that bends most."""
    layer = attention(8, 2, 4)
    x = size * seeded(3, 5, 8, seed=21)
    for eps in (1e-2, 0.3, 3.0):
        found = attention_sensitivity(x, layer, eps)
        delta = scaled_to(seeded(*x.shape, seed=22), eps)
        for _ in range(25):
            delta = delta.detach().requires_grad_()
            base, linear = torch.func.jvp(layer, (x,), (delta,))
            rest = (layer(x + delta) - base - linear).flatten(1).norm(dim=1)
            for delta2 in found.delta2:
                assert bool((rest.detach() <= delta2 * eps**2 * (1 + 1e-6) + 1e-13).all())
            (gradient,) = torch.autograd.grad(rest.sum(), delta)
            delta = scaled_to(gradient, eps)


def test_within_five_percent_of_an_attack_at_a_tenth():
    layer = attention(64, 4, 16, biases=False, orthogonal=True)
    x = seeded(3, 16, 64, seed=23)
    x = x / x.norm(dim=-1, keepdim=True)
    found = attention_sensitivity(x, layer, 0.1)
    change = attacked_change(layer, x, 0.1, steps=150, restarts=1)
    assert bool((change <= found.change).all())
    assert bool((found.change <= 1.05 * change).all())
    assert bool((naive_change(x, layer, 0.1) > 2 * found.change).all())


@pytest.mark.parametrize(("tokens", "dim", "heads", "width"), [(4, 8, 2, 4), (17, 64, 2, 8)])
def test_zeta_is_the_norm_of_the_jacobian(tokens, dim, heads, width):
    layer, x = attention(dim, heads, width), seeded(2, tokens, dim, seed=24)
    size = tokens * dim
    exact = torch.stack([torch.linalg.svdvals(torch.func.jacrev(layer)(point).reshape(size, size))[0] for point in x])
    found = attention_sensitivity(x, layer, 0.1).zeta
    assert bool(((exact <= found) & (found <= 1.01 * exact)).all())


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_products_of_attention_are_off_by_no_more_than_is_said(scale):
    """Against the same products in twice the precision, also where the scores are large."""
    layer, x = attention(6, 2, 3), scale * seeded(1, 5, 6, seed=25)
    double = [w.numpy().astype(np.longdouble) for w in (layer.wq, layer.wk, layer.wv, layer.wo, x[0])]
    biases = [b.numpy().astype(np.longdouble) for b in (layer.bq, layer.bk, layer.bv)]

    def moved(u):
        """J u, exact."""
        wq, wk, wv, wo, tokens = double
        found = np.zeros_like(tokens)
        for head in range(2):
            cut = slice(3 * head, 3 * head + 3)
            q, k, v = (tokens @ w[:, cut] + b[cut] for w, b in zip((wq, wk, wv), biases, strict=True))
            scores = q @ k.T / np.sqrt(np.longdouble(3))
            weights = np.exp(scores - scores.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            change = (u @ wq[:, cut] @ k.T + q @ (u @ wk[:, cut]).T) / np.sqrt(np.longdouble(3))
            change = weights * (change - (weights * change).sum(1, keepdims=True))
            found += (weights @ (u @ wv[:, cut]) + change @ v) @ wo[cut]
        return found

    error = float(of_attention._product_error(x, layer))
    for seed in range(5):
        u = seeded(5, 6, seed=seed)
        u /= u.norm()
        ours = torch.func.jvp(layer, (x[0],), (u,))[1].numpy()
        assert 0 < np.linalg.norm(moved(u.numpy()) - ours) <= error


def test_impossible_layers_and_radii_are_refused():
    with pytest.raises(InputError, match="wq and wk"):
        AttentionLayer(seeded(4, 4), seeded(4, 2), seeded(4, 4))
    with pytest.raises(InputError, match="eps"):
        attention_sensitivity(seeded(1, 2, 4), AttentionLayer(*[seeded(4, 4)] * 3), 0.0)
