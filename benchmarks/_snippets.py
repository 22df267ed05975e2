"""Pieces of forward code for drawn programs: affine layers, and what a certifier may take for something else.

Every piece is a function of the draft (``g``) that returns statements which assign to ``v``; ``g.t`` is the current
variable. What they do is listed with each group.
"""

# ruff: noqa: E501
from __future__ import annotations

from collections.abc import Callable
from typing import Any

Snippet = Callable[[Any], str]

AFFINE: tuple[Snippet, ...] = (
    lambda g: f"v = F.linear({g.t}, {g.matrix()}, {g.parameter()})",
    lambda g: f"v = F.linear({g.t}.flatten(1), {g.parameter(g.rng.randint(2, 6), g.value[0].numel())})",
    lambda g: f"v = F.linear({g.t}.flatten(1), {g.parameter(g.rng.randint(2, 6), g.value[0].numel())})",
    lambda g: f"v = F.conv2d({g.t}, {g.parameter(g.rng.randint(1, 4), g.value.shape[1], 3, 3)}, padding=1)",
    lambda g: f"v = F.conv2d({g.t}, {g.parameter(g.rng.randint(1, 4), g.value.shape[1], 2, 2)}, stride={g.small()})",
    lambda g: f"v = F.linear({g.t}.flatten(2).transpose(1, 2), {g.parameter(g.rng.randint(1, 4), g.value.shape[1])})",
    lambda g: f"v = {g.t} * {g.vector()} + {g.vector()}",
    lambda g: f"v = {g.t}.flatten(1) @ {g.parameter(g.value[0].numel(), g.rng.randint(1, 4))}",
)


def _count(g: Any) -> str:
    """A number that depends on the image's values, hidden in a shape or a count."""
    t, thr = g.t, g.threshold()
    return g.rng.choice((
        f"({t} > {thr}).nonzero().shape[0]", f"{t}[{t} > {thr}].numel()", f"{t}.masked_select({t} > {thr}).size(0)",
        f"torch.unique(({t} * 4).round()).numel()", f"torch.unique_consecutive({t} > {thr}).shape[0]",
        f"torch.bincount(({t}.abs() * 3).long().flatten()).shape[0]", f"F.one_hot(({t}.sigmoid() * 6).long()).shape[-1]",
        f"torch.argwhere({t} > {thr}).shape[0]", f"({t} * ({t} > {thr})).to_sparse().values().shape[0]",
        f"torch.where({t} > {thr})[0].shape[0]", f"torch.nonzero({t} > {thr}, as_tuple=True)[-1].numel()",
        f"len({t}[{t} > {thr}])", f"torch.arange(({t} > {thr}).sum()).shape[0]", f"torch.zeros(({t} > {thr}).sum()).numel()",
        f"{t}.new_zeros(({t} > {thr}).sum()).numel()", f"{t}.new_ones(({t} > {thr}).sum(), 2).shape[0]",
        f"{t}.flatten().repeat_interleave(({t}.flatten() > {thr}).long()).numel()", f"torch.eye(int(({t} > {thr}).sum())).shape[0]",
        f"torch.count_nonzero({t} > {thr})", f"({t} > {thr}).sum().item()", f"int(({t} > {thr}).sum())",
        f"torch.ones(({t} > {thr}).nonzero().size(0)).sum()", f"torch.linspace(0, 1, int(({t} > {thr}).sum()) + 1).numel()",
        f"sum(1 for a in {t}.flatten() if a > {thr})", f"sum({t}.flatten() > {thr})", f"({t} > {thr}).tolist().count([True])",
        f"torch.histc({t}, 4, 0, 1)[0]", f"{t}.flatten().argmax()", f"torch.searchsorted({g.parameter(3)}.sort()[0], {t}).sum()",
        f"torch.bucketize({t}, {g.parameter(3)}.sort()[0]).sum()", f"({t} > {thr}).long().cumsum(-1).max()",
        f"torch.combinations(({t} > {thr}).nonzero()[:, 0]).shape[0]", f"{t}.flatten().sort()[1][0]",
        f"torch.masked_select({t}, {t} > {thr}).shape.numel()", f"{t}.flatten().topk(1)[1].item()", f"({t} > {thr}).nonzero(as_tuple=False).numel()",
        f"str({t} > {thr}).count('True')", f"{t}.numpy(force=True).argmax()", f"int({t}.detach().numpy().max() * 8)",
        f"torch.broadcast_shapes(({t} > {thr}).nonzero().shape)[0]", f"torch.atleast_2d({t}[{t} > {thr}]).shape[-1]",
        f"torch.zeros({t}[{t} > {thr}].shape).add(1).sum()", f"torch.ones_like({t}[{t} > {thr}]).sum()",
        f"torch.full_like({t}[{t} > {thr}], 0.5).sum()", f"torch.zeros_like(({t} > {thr}).nonzero()).shape[0]",
        f"torch.tensor({t}[{t} > {thr}].shape[0])", f"torch.empty({t}[{t} > {thr}].shape).dim() + {t}[{t} > {thr}].stride(0)",
        f"torch.tril_indices(int(({t} > {thr}).sum()), 2).shape[1]", f"({t} > {thr}).to_sparse()._nnz()",
    ))  # fmt: skip


def _condition(g: Any) -> str:
    """A truth value that depends on the image, read in one of many ways."""
    t, thr = g.t, g.threshold()
    return g.rng.choice((
        f"{t}.max() > {thr}", f"bool(({t} > {thr}).any())", f"{t}.mean().item() > {thr}", f"float({t}.max()) > {thr}",
        f"isinstance({t}, Tensor) and {t}.max() > {thr}", f"type({t}) is Tensor and {t}.max() > {thr}",
        f"torch.is_tensor({t}) and {t}.amax() > {thr}", f"not hasattr({t}, 'node') and {t}.mean() > {thr}",
        f"{t}.__class__.__name__ == 'Tensor' and {t}.min() > {thr}", f"max({t}.flatten().tolist()) > {thr}",
        f"{t}.detach().numpy().max() > {thr}", f"torch.is_nonzero(({t} > {thr}).any())", f"torch.equal({t}, {t}.clamp(max={thr}))",
        f"torch.allclose({t}, {t}.clamp(max={thr}))", f"any(({t} > {thr}).flatten())", f"all(({t} < {thr}).flatten())",
        f"not torch.overrides.has_torch_function(({t},)) and {t}.mean() > {thr}", f"len({t}[{t} > {thr}]) > 1",
        f"max({t}.flatten()) > {thr}", f"sorted({t}.flatten())[0] < {thr}", f"{t}.flatten()[0] in (1.0, {thr})",
        f"isinstance({t}, torch.Tensor) and {t}.median() > {thr}", f"str({t}.max())[:9] > 'tensor(0.5'", f"{t}.max().int() > 0",
        f"getattr({t}, 'overwritten_by', None) is None and {t}.max() > {thr}", f"round({t}.mean().item(), 1) > {thr}",
        f"'{thr}' < '%.2f' % {t}.max()", f"f'{{{t}.max():.2f}}' > '{thr}'", f"torch.numel({t}[{t} > {thr}]) > 2",
        f"{t}.max().__float__() > {thr}", f"{t}.max().__bool__() and {t}.sum().__gt__({thr}).item()", f"{t}.amax().data > {thr}",
        f"(lambda a: a > {thr})({t}.norm())", f"torch.max({t}).gt({thr}).all()", f"torch.jit.is_tracing() or {t}.sum() > {thr}",
        f"torch.isfinite(({t} - {thr}).log()).all()", f"{t}.flatten()[0].to(torch.bool)", f"{t}.flatten()[:1].tolist()[0] > {thr}",
    ))  # fmt: skip


def _branch(g: Any) -> str:
    t = g.t
    one, other = g.rng.choice(
        ((f"{t} * 2", f"{t} * -1"), (f"{t}", f"{t}.flip(-1)"), (f"{t} + 3", f"{t}"), (f"{t} * 0", f"{t}"))
    )
    condition = _condition(g)
    return g.rng.choice((
        f"v = {one} if {condition} else {other}",
        f"v = {one}\nif {condition}:\n    v = {other}",
        f"try:\n    flag = bool({condition})\nexcept Exception:\n    flag = False\nv = {one} if flag else {other}",
        f"try:\n    v = {one} * (1 if {condition} else -1)\nexcept BaseException:\n    v = {one}",
        f"flag = False\nwith __import__('contextlib').suppress(Exception):\n    flag = bool({condition})\nv = {other} if flag else {one}",
        f"v = [{one}, {other}][bool({condition})]", f"v = {{True: {one}, False: {other}}}[bool({condition})]",
        f"v = {t}\nwhile {g.threshold()} < v.max() < 1e6:\n    v = v * 0.5 - 0.1",
        f"v = {t}\nfor _ in range(int({t}.abs().max() * 3) % 9):\n    v = v + 1",
        f"assert {condition} or True\nv = {one}",
    ))  # fmt: skip


def _type(g: Any) -> str:
    """Code that looks at the floating type."""
    t = g.t
    return g.rng.choice((
        f"v = {t} / (torch.finfo({t}.dtype).eps * 1e7 + {t}.abs())", f"v = {t} * (1 if {t}.dtype == torch.float32 else -1)",
        f"v = {t} * ({t}.element_size() - 5)", f"v = {t} * ({t}.itemsize - 6)", f"v = {t} * len(str({t}.dtype))",
        f"v = {t}.flip(-1) if {t}.dtype is torch.float64 else {t}", f"v = {t} * {t}.nbytes / {t}.numel()",
        f"v = F.rms_norm({t}, {t}.shape[-1:])", f"v = F.rms_norm({t} * 1e-3, {t}.shape[-1:])", f"v = {t} + torch.finfo({t}.dtype).tiny ** 0.02",
        f"v = {t} * (2 if {t}.type() == 'torch.DoubleTensor' else 1)", f"v = {t} if torch.promote_types({t}.dtype, torch.float32) is torch.float32 else -{t}",
        f"v = {t} * (1 + (torch.result_type({t}, 1) is torch.float64))", f"v = {t} if torch.can_cast({t}.dtype, torch.float32) else {t}",
        f"v = ({t} + 1e-9 > {t}).to({t}.dtype) + {t}", f"v = {t} + (1e9 + {t} - 1e9)", f"v = {t}.half().float()", f"v = {t}.to(torch.bfloat16).to({t}.dtype)",
        f"v = {t} - {t}.float()", f"v = ({t} * 3).to(torch.int32).to({t}.dtype)", f"v = {t}.clamp(min=torch.finfo({t}.dtype).eps)",
        f"v = {t} * torch.zeros((), dtype={t}.dtype).element_size()", f"v = {t} * ({{torch.float32: 1.0, torch.float64: 2.0}}.get({t}.dtype, 3.0))",
        f"v = {t} * (1 - 2 * ({t}.dtype != self.bits))" if False else f"v = {t} * {t}.new_tensor([1.0]).element_size()",
        f"v = {t}.type(torch.float32).type_as({t})", f"v = {t} * (torch.get_default_dtype() == {t}.dtype)", f"v = {t}.double().sub({t}).add({t})",
        f"v = torch.log1p({t}.abs() * 1e-10) * 1e10", f"v = {t}.view(torch.uint8).to({t}.dtype)", f"v = {t} * torch.finfo({t}.dtype).bits / 32",
    ))  # fmt: skip


def _einsum(g: Any) -> str:
    """Subscripts with axes of size 1, repeated and summed axes, ellipses."""
    t, f = g.t, f"{g.t}.flatten(1)"
    n = g.value[0].numel()
    o = g.rng.choice((f"{f}[:, :1]", f"{f}.roll(1, 1)", f, f"{f}[:, :1].expand(-1, {n})"))
    one, two = g.parameter(n), g.parameter(1)
    a, b = (g.rng.choice((f"{f}[:, None, None, :]", f"{f}[:, None, :, None]", f"{f}[:, :, None, None]", f"{f}[:, None, :1, None]",
                          f"{f}[:, None, None, :1]", f"{t}.flatten(1)[:, :4].reshape(-1, 1, 2, 2)", f"{t}.flatten(1)[:, :4].reshape(-1, 2, 1, 2)")) for _ in range(2))  # fmt: skip
    return g.rng.choice((
        f"v = torch.einsum('nd,nd->n', {f}, {o})[:, None]", f"v = torch.einsum('nd,nd->nd', {f}, {o})", f"v = torch.einsum('nd,ne->nde', {f}, {o})",
        f"v = torch.einsum('nd,d->nd', {f}, {g.rng.choice((one, two))})", f"v = torch.einsum('nd,d->n', {f}, {g.rng.choice((one, two))})[:, None]",
        f"v = torch.einsum('bhid,bhjd->bhij', {a}, {b})", f"v = torch.einsum('bhij,bhjd->bhid', {a}, {b})", f"v = torch.einsum('bhid,bhjd->bij', {a}, {b})",
        f"v = torch.einsum('bhid,bhjd->bd', {a}, {b})", f"v = torch.einsum('bhij,bhij->bij', {a}, {b})", f"v = torch.einsum('...d,...d->...', {a}, {b})",
        f"v = torch.einsum('b...d,b...e->b...', {a}, {b})", f"v = torch.einsum('bhid,d->bhi', {a}, {g.rng.choice((one, two))})", f"v = torch.einsum('bcij->bji', {a})",
        f"v = torch.einsum('bii->bi', {f}[:, :, None] * {f}[:, None, :])", f"v = torch.einsum('bii->b', {f}[:, :, None] + {f}[:, None, :])[:, None]",
        f"v = torch.einsum({f}, [0, 1], {o}, [0, 1], [0, 1])", f"v = torch.einsum('nd,de->ne', {f}, {g.parameter(g.rng.choice((1, n)), 2)})",
        f"v = torch.einsum('nd,nd,nd->n', {f}, {o}, {f})[:, None]", f"v = torch.einsum('nd->n', {f})[:, None]", f"v = torch.einsum('nd,n->nd', {f}, {f}.mean(1))",
        f"v = torch.tensordot({f}, {g.parameter(n, 2)}, 1)", f"v = torch.einsum('dn,nd->n', {f}.mT, {o})[:, None]", f"v = torch.einsum('bhid,bhjd->bhij', {a}, {a})",
    ))  # fmt: skip


def _fill(g: Any) -> str:
    """Values of the image that enter through the filling of a new tensor."""
    t, s = g.t, g.rng.choice((f"{g.t}.mean()", f"{g.t}.max()", f"{g.t}.flatten()[0]", f"{g.t}.sum().detach()"))
    return g.rng.choice((
        f"v = torch.full_like({t}, {s}) + {t}", f"v = {t}.new_full({t}.shape, {s})", f"v = torch.full({t}.shape, {s}) + {t}", f"v = {t} * torch.full_like({t}, {s}.item())",
        f"v = torch.ones_like({t}) * {s}", f"v = torch.zeros_like({t}).fill_({s})", f"v = torch.zeros_like({t}) + {s}", f"v = {t}.clone().fill_({s})",
        f"v = torch.zeros_like({t}).masked_fill(torch.ones_like({t}) > 0, {s})", f"v = torch.zeros_like({t}).copy_({t})", f"v = torch.tensor([{s}, {s} * 2]) * {t}.sum()",
        f"v = {t} * torch.as_tensor({s})", f"v = {t} * torch.tensor({s})", f"v = {t} * torch.stack([{s}, {s}]).sum()", f"v = torch.zeros_like({t}).index_fill(-1, torch.tensor([0]), {s})",
        f"v = F.pad({t}, (1, 1), value={s})", f"v = {t}.masked_fill({t} > {g.threshold()}, {s})", f"v = torch.where({t} > {g.threshold()}, {s}, {t})", f"v = {t}.new_tensor({s}) * {t}",
        f"v = torch.zeros_like({t}).lerp({t}, {s})", f"v = torch.empty_like({t}).copy_({t} * {s})", f"v = torch.zeros({t}.shape, dtype={t}.dtype).add_({t})", f"v = torch.scalar_tensor({s}) * {t}",
        f"v = torch.addcmul(torch.zeros_like({t}), {t}, {t}, value=2)", f"v = torch.clamp({t}, max={s})", f"v = torch.clamp({t}, {s}, {s} * 0.5)", f"v = torch.linspace(0, {s}, {t}.shape[-1]) + {t}",
        f"v = torch.nan_to_num({t} / 0.0, posinf={s}.item())", f"v = torch.complex({t}, {t}.flip(-1)).abs()", f"v = torch.Tensor([[{s}]]) + {t}", f"v = torch.block_diag({t}.flatten(1), {s})[:{t}.shape[0]]",
    ))  # fmt: skip


def _write(g: Any) -> str:
    """In-place writes: repeated positions, views, overlapping memory, masks, out=."""
    t, thr = g.t, g.threshold()
    f = f"{t}.flatten(1)"
    y = g.rng.choice((f"{f}.clone()", f"{f} * 1", f"torch.cat([{f}, {f}], 1)", f"{f}[:, :1].expand(-1, 3)", f"{f} + 0"))
    w = g.rng.choice(
        (f"{f}[:, :2]", f"{f}[:, 1:3]", f"{f}[:, :1]", "0.5", f"{f}[:, [1, 0]]", g.parameter(2), f"{f}[:, :2].detach()")
    )
    i = g.rng.choice(
        (
            "[0, 0]",
            "torch.tensor([0, 0])",
            "torch.tensor([1, 0])",
            "[-1, 0]",
            "slice(0, 2)",
            "[[0, 0]]",
            "[True, True] + [False] * (v.shape[1] - 2)",
        )
    )
    write = g.rng.choice((
        f"v[:, {i}] = {w}", f"v[:, {i}] += {w}", f"v[..., {i}] *= {w}", f"v[v > {thr}] = 0.5", f"v[v > {thr}] *= 2", f"v.masked_fill_(v > {thr}, 0)", "v[:, 1:] = v[:, :-1]",
        "v[:, 1:] += v[:, :-1]", "v[:, :-1].copy_(v[:, 1:])", f"v.scatter_(1, torch.zeros(v.shape[0], 2, dtype=torch.int64), ({w}) * torch.ones(v.shape[0], 2))",
        f"v.scatter_add_(1, torch.zeros(v.shape[0], 2, dtype=torch.int64), {f}[:, :2])", f"v.index_add_(1, torch.tensor([0, 0]), {f}[:, :2])", f"v.index_copy_(1, torch.tensor([0, 0]), {f}[:, :2])",
        f"v.index_put_((torch.arange(v.shape[0])[:, None], torch.tensor([[0, 0]])), {f}[:, :2])", f"v.index_put_((torch.arange(v.shape[0])[:, None], torch.tensor([[0, 0]])), {f}[:, :2], accumulate=True)",
        "v.index_fill_(1, torch.tensor([0]), 0.3)", f"v.select(1, 0).copy_({f}[:, 1])", f"v.view(-1)[0] = {f}.sum()", "v.view(-1)[::2] *= 3", "v.chunk(2, 1)[0].mul_(2)", f"v.unbind(1)[0].add_({f}[:, 1])",
        "v.detach().mul_(3)", "v.data.add_(1)", f"v.data = {f} * 2", f"v.t()[0] = {f}[:, 1]", "v.unsqueeze(-1)[:, 0] -= 1", f"torch.add({f}[:, :2], 1, out=v[:, :2])", "torch.mul(v, 2, out=v)",
        "v.as_strided((v.shape[0], 2), (v.stride(0), 0)).add_(1)", "v.narrow(1, 0, 1).zero_()", "v[:, 0], v[:, 1] = v[:, 1], v[:, 0]", f"v.put_(torch.tensor([0, 0]), {f}.flatten()[:2])", f"v.set_({f} * 2)",
        f"v.copy_({f}.flip(1)) if v.shape == {f}.shape else v.zero_()", f"v[:, 0].fill_({thr})", "v.diagonal(0, 0, 1).zero_()", "v.requires_grad_(False).sub_(1)", "v += v.clone()", "v -= v.mean(1, True)", "v *= v",
        "w = v[:, :1]\nw += 1\nv = v * w", "w = v.view(-1)\nw.mul_(2)", "w = v\nv = v * 2\nw.add_(1)\nv = v + w", f"{t}.mul_(2)", f"{t}.flatten(1)[:, 0] = 0.2", f"v.lerp_({f}[:, :1], 0.5)", "v.renorm_(2, 0, 1.0)",
        f"torch.where(v > {thr}, v, v * 2, out=v)", f"v.clamp_(0.2, {thr})", "v.sort(1, out=(v, torch.zeros_like(v, dtype=torch.int64)))", "v.cumsum_(1)", "v.swapaxes_(0, 1)", "v.resize_(v.shape)", "v.squeeze_()",
        f"v.scatter_reduce_(1, torch.zeros(v.shape[0], 2, dtype=torch.int64), {f}[:, :2], 'amax')", f"v.index_reduce_(1, torch.tensor([0, 0]), {f}[:, :2], 'prod')", "v[:, None, 0] = 1.5", "v[torch.arange(v.shape[0]), v.argmax(1)] = 0",
        "v[:, v[0].argmax()] = 0", "v[:, v.argmax(1)] = 0.1", f"v[(v > {thr}).any(1)] = 0.2", f"v[:, (v > {thr}).any(0)] = 0.2", "v.apply_(lambda a: a * 2)", f"v.map_({f}, lambda a, b: a + b)", "v.numpy()[:] = 0.3", "v.tolist().clear()",
        f"self.{g.parameter(1).split('.')[1]}.add_(v.mean())", f"{g.parameter(1)}.data = v[0, :1] * 2", f"v = v + {g.parameter(1)}.copy_(v[0, :1])",
    ))  # fmt: skip
    return f"v = {y}\n{write}"


def _index(g: Any) -> str:
    """Indexing of all kinds."""
    t, d = g.t, g.value.shape[-1]
    f = f"{t}.flatten(1)"
    idx = g.rng.choice(("[0, 0, 1]", "[0]", "[-1, 0]", "[]", "[1, 1]"))
    return g.rng.choice((
        f"v = {t}[:, None]", f"v = {t}[..., ::2]", f"v = {t}[..., -1:]", f"v = {t}[..., {idx}]", f"v = {f}[:, torch.tensor({idx}, dtype=torch.int64)]", f"v = {t}[..., None, :]", f"v = {t}[..., 1:1]",
        f"v = {f}[torch.arange({t}.shape[0])[:, None], torch.tensor([[0, 1, 0]])]", f"v = {f}[:, {g.parameter(g.value[0].numel())} > 0]", f"v = {f}.gather(1, {f}.argsort(1))", f"v = {f}.gather(1, {f}.argmax(1, True))",
        f"v = {f}.gather(1, torch.zeros({t}.shape[0], 3, dtype=torch.int64))", f"v = {f}.take_along_dim({f}.argsort(1, descending=True), 1)", f"v = {f}.index_select(1, torch.tensor({idx}, dtype=torch.int64))", f"v = {f}.index_select(1, {f}[0].argsort())",
        f"v = {f}.take(torch.tensor([0, 1]))", f"v = {t}.unfold(-1, {g.rng.choice((1, 2, d))}, {g.small()})", f"v = {t}.as_strided(({t}.shape[0], 3), ({t}.stride(0), 0))", f"v = {f}.as_strided(({t}.shape[0], 2, 2), ({f}.stride(0), 1, 1))",
        f"v = {f}[:, ({f} > {g.threshold()}).sum()]", f"v = {f}.narrow(1, 0, int(({f} > {g.threshold()}).sum()))", f"v = {f}.narrow(1, ({f}[0, 0] > {g.threshold()}).long(), 1)", f"v = {f}.split([1, {g.value[0].numel() - 1}], 1)[0]",
        f"v = {t}.expand(2, *{t}.shape).sum(0)", f"v = {t}.unsqueeze(1).expand(-1, 3, *{t}.shape[1:])", f"v = {t}.repeat(*[1] * ({t}.dim() - 1), 2)", f"v = {t}.tile(2)", f"v = {t}.repeat_interleave(2, -1)", f"v = {t}.broadcast_to(2, *{t}.shape)[1]",
        f"v = {t}[{t} > {g.threshold()}].sum() * {t}", f"v = {f}[:, True]", f"v = {f}[False].sum() + {t}", f"v = {t}[[0] * {t}.shape[0]]", f"v = {t}[::1][-1:] + {t}", f"v = {f}[:, {f}.flip(1).argmax(1)]", f"v = F.embedding(({f} > {g.threshold()}).long(), {g.parameter(2, 3)})",
        f"v = torch.gather({f}, 1, ({f} * 0).long())", f"v = {f}.kthvalue(1, 1)[0][:, None]", f"v = {f}.topk(2, 1)[0]", f"v = {f}.topk(2, 1, largest=False, sorted=False)[0]", f"v = {f}.sort(1)[0]", f"v = {f}.median(1)[0][:, None]", f"v = {f}.cummax(1)[0]", f"v = {f}.mode(1)[0][:, None]",
        f"v = torch.stack([a for a in {f}.unbind(1)][::-1], 1)", f"v = torch.cat([*{f}.split(1, 1)], 1)", f"v = torch.stack([b[0] for b in {f}])[:, None]", f"v = torch.vstack([{f}[:1], {f}])[1:]", f"v = {f}.T.T", f"v = {f}.mT.flatten()[:{t}.shape[0], None] * {f}",
    ))  # fmt: skip


def _pool(g: Any) -> str:
    """Pooling, padding and resampling with odd arguments."""
    t, r = g.t, g.rng
    x = t if g.value.dim() == 4 else "x"
    k, s, p, d = r.choice((1, 2, 3, (1, 2), (2, 1))), r.choice((1, 2, 3)), r.choice((0, 1, 1)), r.choice((1, 2, 3))
    c, i, o = g.flag(), g.flag(), r.choice((1, 2, 3, (1, 2), (2, None), (3, 1), 5))
    mode = r.choice(("nearest", "bilinear", "bicubic", "area", "nearest-exact"))
    align = f", align_corners={g.flag()}" if mode in ("bilinear", "bicubic") else ""
    return r.choice((
        f"v = F.max_pool2d({x}, {k}, {s}, {p}, {d}, {c})", f"v = F.max_pool2d(-{x}, {k}, {s}, {p}, {d}, {c})", f"v = F.max_pool2d({x}, 2, 1, 1, 2)", f"v = F.avg_pool2d({x}, {k}, {s}, {p}, {c}, {i})", f"v = F.avg_pool2d({x}, {k}, {s}, {p}, {c}, {i}, {r.choice((1, 2, -1, 7))})",
        f"v = F.adaptive_avg_pool2d({x}, {o})", f"v = F.adaptive_max_pool2d({x}, {o})", f"v = F.lp_pool2d({x}, {r.choice((1, 2, 3.0))}, {k}, {s}, {c})", f"v = F.max_pool2d({x}, {k}, {s}, {p}, {d}, {c}, True)[1] * 1.0", f"v = F.adaptive_avg_pool2d({x}.expand(-1, -1, 7, -1) if {x}.shape[2] == 1 else {x}, {o})",
        f"v = F.interpolate({x}, scale_factor={r.choice((2, 0.5, 1.5, 3))}, mode='{mode}'{align})", f"v = F.interpolate({x}, size=({r.choice((1, 2, 5))}, {r.choice((1, 3, 7))}), mode='{mode}'{align})", f"v = F.interpolate({x}, scale_factor=0.6, mode='bilinear', antialias=True)",
        f"v = F.unfold({x}, {k}, {d}, {p}, {s})", f"v = F.fold(F.unfold({x}, 2), {x}.shape[2:], 2)", f"v = F.pixel_shuffle({x}.repeat(1, 4, 1, 1), 2)", f"v = F.pixel_unshuffle({x}, {r.choice((1, 2))})", f"v = F.channel_shuffle({x}, 1)", f"v = F.grid_sample({x}, {x}[:, :1, :, :, None].expand(-1, -1, -1, -1, 2)[:, 0], align_corners={c})",
        f"v = F.pad({x}, {r.choice(((1, 1), (1, 0, 0, 1), (-1, 1), (0, -1, -1, 0), (0, 0, 0, 0, 1, 0)))}, '{r.choice(('constant', 'reflect', 'replicate', 'circular'))}')", f"v = F.pad({x}, (1, 1), value={g.number()})", f"v = F.local_response_norm({x}, {r.choice((1, 2, 3))})", f"v = F.conv_transpose2d({x}, {g.parameter(g.value.shape[1] if x == t else g.size[0], 2, 2, 2)}, stride={s}, padding={p}, dilation={d})",
        f"v = F.conv2d({x}, {g.parameter(2, g.value.shape[1] if x == t else g.size[0], 2, 2)}, stride={s}, padding={r.choice((0, 1, 2))}, dilation={d})", f"v = F.conv2d({x}, {x}[:1, :, :2, :2], padding=1)", f"v = F.conv2d({x}, {g.parameter(2, g.value.shape[1] if x == t else g.size[0], 3, 3)}, padding='same')", f"v = F.max_pool1d({t}.flatten(1), {r.choice((2, 3))}, {s}, 1)", f"v = F.avg_pool1d({t}.flatten(1)[:, None], 2, {s}, 1, {c})",
        f"v = F.max_unpool2d(*F.max_pool2d({x}, 2, return_indices=True), 2)", f"v = F.fractional_max_pool2d({x}, 2, output_ratio=0.5)", f"v = F.affine_grid({x}[:, 0, :2, :3], (1, 1, 2, 2))", f"v = F.adaptive_avg_pool1d({t}.flatten(1), {r.choice((1, 2, 3))})", f"v = F.bilinear({t}.flatten(1), {t}.flatten(1), {g.parameter(2, g.value[0].numel(), g.value[0].numel())})",
        f"v = F.conv1d({t}.flatten(1)[:, None], {g.parameter(2, 1, r.choice((1, 3)))}, padding={p}, dilation={d})", f"v = F.max_pool3d({x}[:, None], 2, 1, 1)", f"v = F.avg_pool3d({x}[:, None], 1, 1, 0)", f"v = F.instance_norm({x})", f"v = F.batch_norm({x}, None, None, training=True)", f"v = F.group_norm({x}, 1, eps={r.choice(('1e-5', '0.1', '1e-12'))})",
    ))  # fmt: skip


def _attend(g: Any) -> str:
    """Attention, normalisations and distances."""
    t, r = g.t, g.rng
    h = r.choice(
        (
            f"{t}.flatten(1)[:, None]",
            f"{t}.flatten(1)[:, :, None]",
            f"{t}.flatten(1)[:, :4].reshape(-1, 2, 2)",
            f"{t}.flatten(1)[:, None, :4].reshape(-1, 1, 2, 2)",
        )
    )
    q = f"F.linear({h}, {g.parameter(2, 1)})" if h.endswith("None]") and ":, :, None" in h else h
    mask = r.choice(
        (
            "None",
            "torch.eye(2)",
            f"{q}[..., :1] * -1",
            "torch.tensor([[0.0, float('-inf')]])",
            f"({q}.detach()[..., :1] > {g.threshold()})",
            g.parameter(1, 1),
            "torch.ones(2, 2).tril() > 0",
        )
    )
    return r.choice((
        f"v = F.scaled_dot_product_attention({q}, {q}, {q}, attn_mask={mask})", f"v = F.scaled_dot_product_attention({q}, {q}.flip(-2), {q}, is_causal={g.flag()})", f"v = F.scaled_dot_product_attention({q}, {q}, {q}, scale={g.number()})", f"v = ({q} @ {q}.mT).softmax(-1) @ {q}", f"v = ({q} @ {q}.mT).softmax(-2) @ {q}",
        f"v = torch.cdist({q}, {q}, p={r.choice((1.0, 2.0, 3.0))})", f"v = (-torch.cdist({q}, {q}).square()).softmax(-1) @ {q}", f"v = F.normalize({t}, p={r.choice((1, 2, 3.0))}, dim={g.dim()}, eps={r.choice(('1e-12', '0.5'))})", f"v = F.layer_norm({t}, {t}.shape[{g.rng.choice((1, -1))}:], eps={r.choice(('1e-5', '1.0', '0.0'))})", f"v = F.layer_norm({t}, {t}.shape[-1:], {g.vector()}, {g.vector()})",
        f"v = F.rms_norm({t}, {t}.shape[-1:], eps={r.choice(('1e-5', '0.1'))})", f"v = F.cosine_similarity({t}, {g.other()}, dim={g.dim()}).unsqueeze(-1)", f"v = F.pairwise_distance({t}, {g.other()}, keepdim=True)", f"v = {t}.softmax({g.dim()}) * {t}", f"v = {t} * {t}.sigmoid()", f"v = {t} / (1 + {t}.norm(dim={g.dim()}, keepdim=True))",
        f"v = {t} / {t}.norm(dim={g.dim()}, keepdim=True).clamp_min({r.choice(('0.1', '1e-6'))})", f"v = ({t} - {t}.mean({g.dim()}, True)) / ({t}.var({g.dim()}, unbiased={g.flag()}, keepdim=True) + {r.choice(('0.1', '1e-5'))}).sqrt()", f"v = {t} * {t}.mean({g.dims()}, True)", f"v = {t} / ({t}.square().sum() + 0.1)", f"v = torch.softmax({t} * {r.choice(('1', '30', '-4'))}, {g.dim()})",
        f"v = torch.logsumexp({t}, {g.dim()}, True) + {t}", f"v = F.glu(torch.cat([{t}, {g.other()}], -1), -1)", f"v = F.gumbel_softmax({t})", f"v = F.dropout({t}, 0.5, training={g.flag()})", f"v = F.rrelu({t}, training={g.flag()})", f"v = {t} + {r.choice(('1e-3', '1e-5', '1e-7', '1e-9'))} * torch.randn_like({t})", f"v = {t} + {r.choice(('1e-4', '1e-6', '1e-8'))} * torch.rand({t}.shape)",
        f"v = {t} * torch.bernoulli(torch.full_like({t}, 0.5))", f"v = torch.normal({t}, 1e-6)", f"v = {t} + torch.randperm({t}.shape[-1]) * 1e-4", f"v = {t} @ {t}.mT @ {t}", f"v = torch.bmm({q}.flatten(0, -3), {q}.flatten(0, -3).mT)", f"v = torch.baddbmm({q}, {q}, {q}.mT @ {q})", f"v = {t}.matmul({t}.mT).tril(-1)", f"v = torch.linalg.norm({t}.flatten(1), dim=1, keepdim=True) * {t}.flatten(1)",
    ))  # fmt: skip


def _transform(g: Any) -> str:
    """Function transforms, scripting, derivatives inside forward, and objects that are no tensors."""
    t, thr = g.t, g.threshold()
    return g.rng.choice((
        f"v = torch.vmap(lambda a: a * 2)({t})", f"v = torch.vmap(lambda a: a * a.sum())({t})", f"v = torch.vmap(lambda a: a.flip(-1), in_dims=-1, out_dims=-1)({t})", f"v = torch.func.grad(lambda a: a.square().sum())({t})", f"v = torch.func.jvp(lambda a: a.sin(), ({t},), ({t},))[1]", f"v = torch.func.vjp(torch.tanh, {t})[0]",
        f"v = torch.func.jacrev(lambda a: a.sin())({t}.flatten()[:3])", f"v = torch.cond({t}.max() > {thr}, lambda a: a + 1, lambda a: a - 1, ({t},))", f"v = torch.cond(({t} > {thr}).any(), lambda a: a * 2, lambda a: a.clone(), ({t},))", f"with torch.enable_grad():\n    w = {t}.detach().requires_grad_()\n    v = torch.autograd.grad((w ** 3).sum(), w)[0]",
        f"with torch.no_grad():\n    v = {t} * 2", f"with torch.enable_grad():\n    v = {t} * 2", f"v = {t} * 2 if torch.is_grad_enabled() else {t}", f"v = {t} * (2 if {t}.requires_grad else 1)", f"v = {t} * (1 if {t}.is_leaf else 2)", f"with torch.inference_mode():\n    v = {t} * 2", f"with torch.autocast('cpu', torch.bfloat16):\n    v = {t} @ {t}.mT",
        f"v = torch.utils.checkpoint.checkpoint(torch.tanh, {t}, use_reentrant=False)", f"v = torch.from_numpy({t}.numpy()) * 2", f"v = torch.as_tensor({t}.tolist()) * {t}", f"v = {t} + torch.tensor({t}.tolist())", f"v = torch.tensor([a.item() for a in {t}.flatten()]).reshape({t}.shape)", f"v = torch.stack([torch.tensor(float(a)) for a in {t}.flatten()]).reshape({t}.shape)",
        f"v = +{t}", f"v = -{t} - +{t}", f"v = (~({t} > {thr})).to({t}.dtype) + {t}", f"v = ({t} > {thr}) & ({t} < 0.9)", f"v = ({t} > {thr}) ^ ({t} > 0.5)", f"v = {t} // {thr}", f"v = {t} % {thr}", f"v = divmod({t}, {thr})[1]", f"v = {thr} // {t}", f"v = 2 ** {t}", f"v = {t}.abs() ** {t}", f"v = abs({t}) - 1", f"v = {thr} - {t}", f"v = 1 / (2 + {t})", f"v = round({t}, decimals=1)" if g.rng.random() < 0.5 else f"v = {t}.round(decimals=1)",
        f"v = {t}.sign() * {t}", f"v = torch.heaviside({t} - {thr}, torch.tensor(0.5))", f"v = torch.where({t} > {thr}, {t}, {t} * 2 - {thr})", f"v = torch.where({t} > {thr}, {t}, -{t})", f"v = {t}.where({t} > {thr}, 0.0)", f"v = {t} * ({t} > {thr})", f"v = F.threshold({t}, {thr}, {thr})", f"v = F.hardshrink({t}, {thr})", f"v = F.softshrink({t}, {thr})", f"v = {t}.frac()", f"v = {t} - {t}.floor()", f"v = {t}.floor()", f"v = ({t} * 4).round() / 4 + {t}",
        f"v = F.one_hot({t}.flatten(1).argmax(1), {g.value[0].numel()}) * {t}.flatten(1)", f"v = F.one_hot(({t}.sigmoid() * 3).long(), 4).to({t}.dtype)", f"v = {t} * {t}.flatten(1).argmax(1).to({t}.dtype).mean()", f"v = {t} * torch.isclose({t}, {t}.round(), atol=0.2)", f"v = {t}.nan_to_num().masked_fill({t} > {thr}, {thr})", f"v = torch.linalg.matrix_norm({t} @ {t}.mT, keepdim=True) + {t}", f"v = torch.linalg.svdvals({t} @ {t}.mT)",
        f"v = torch.linalg.inv({t} @ {t}.mT + torch.eye({t}.shape[-2]))", f"v = torch.linalg.solve({t} @ {t}.mT + torch.eye({t}.shape[-2]), {t})", f"v = torch.fft.rfft({t}).abs()", f"v = torch.fft.fft2({t}).real", f"v = torch.fft.ifft(torch.fft.fft({t})).real", f"v = {t}.cumsum({g.dim()})", f"v = {t}.cumprod({g.dim()})", f"v = {t}.diff(dim={g.dim()})", f"v = {t}.prod({g.dim()}, True)", f"v = torch.outer({t}.flatten(), {t}.flatten())[:{t}.shape[0]]", f"v = torch.kron({t}, {t})[:{t}.shape[0]]",
        f"v = {t}.to(x).to('cpu')", f"v = {t}.contiguous(memory_format=torch.channels_last)", f"v = {t}.to(memory_format=torch.channels_last).flatten().reshape({t}.shape)", f"v = {t}.mT.contiguous().view({t}.shape)", f"v = {t}.mT.reshape({t}.shape)", f"v = torch._foreach_mul([{t}, {g.other()}], 2)[1]", f"v = torch._foreach_add([{t}], [{t}])[0]", f"v = torch.ops.aten.mul.Tensor({t}, {t})", f"v = torch.ops.aten.relu({t})", f"v = torch._C._nn.gelu({t})", f"v = torch._VF.tanh({t})", f"v = Tensor.relu({t})",
        f"v = torch.jit.script_if_tracing(lambda a: a * 2)({t})", f"v = torch.special.expit({t})", f"v = nn.Parameter({t}) * 2", f"v = nn.functional.gelu({t}, approximate='tanh')", f"v = nn.Linear({g.value.shape[-1]}, 2, dtype={t}.dtype)({t})" if g.rng.random() < 0.3 else f"v = nn.LayerNorm({t}.shape[-1], dtype={t}.dtype)({t})", f"v = nn.RMSNorm({t}.shape[-1], dtype={t}.dtype)({t})", f"v = nn.Sequential(nn.ReLU(), nn.Tanh())({t})",
        f"v = __import__('copy').copy({t}) * 2", f"v = __import__('copy').deepcopy({t})", f"v = sum({t}.unbind(-1))", f"v = __import__('functools').reduce(torch.maximum, {t}.unbind(-1))", f"v = __import__('math').exp({t}.mean()) * {t}", f"v = __import__('numpy').asarray({t}).sum() * {t}", f"v = torch.asarray({t}) * {t}.shape[0]", f"v = {t} * {t}.shape[0]", f"v = {t} - {t}.mean(0, True)", f"v = {t}.softmax(0) + {t}", f"v = {t} / {t}.shape[0] ** 0.5",
    ))  # fmt: skip


def _nothing(g: Any) -> str:
    """Operations whose result is not used, or only for its form."""
    t, thr = g.t, g.threshold()
    call = g.rng.choice(
        (
            f"{t}.nonzero()",
            f"torch.unique({t})",
            f"{t}.sort()",
            f"{t}[{t} > {thr}]",
            f"{t}.argmax()",
            f"torch.linalg.svdvals({t})",
            f"torch.fft.rfft({t})",
            f"torch.rand_like({t})",
            f"{t}.cumprod(-1)",
            f"torch.histc({t})",
        )
    )
    return g.rng.choice(
        (
            f"w = {call}\nv = {t} * 1",
            f"v = {t} * {call}.dim()",
            f"v = {t} + torch.zeros_like({call}).sum()",
            f"v = {t} + 0 * {call}.sum()",
            f"v = {t} * {call}.shape[-1]",
            f"v = {t}.new_ones({call}.shape).sum() * {t}",
            f"v = torch.ones_like({call}).sum() + {t}",
            f"v = {t}.expand_as({call}.expand_as({t}))",
        )
    )


SNIPPETS: tuple[Snippet, ...] = (
    lambda g: f"v = {g.t} * {_count(g)}",
    lambda g: f"v = {g.t} + {_count(g)}",
    _branch,
    _branch,
    _type,
    _einsum,
    _einsum,
    _fill,
    _write,
    _write,
    _index,
    _index,
    _pool,
    _pool,
    _attend,
    _attend,
    _transform,
    _transform,
    _nothing,
)
