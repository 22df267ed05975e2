"""Bounds on rounding errors, for the deployed float32, float16 or bfloat16 network.

Certificates are computed for the network F in real arithmetic. The deployed network is F̂ = ``model.to(dtype)`` on
``images.to(dtype)``. This package bounds their difference for every image within a radius, operation by operation
(running error analysis; Murray, "Lipschitz-Based Robustness Certification Under Floating-Point Execution", arXiv
2603.13334, does it for layers of ReLU networks). There are two ways. :class:`Roundoff` bounds the error of the margins
and subtracts it before any method uses them. ``lipcert.certifier.DeployedAnchored`` is the anchored certificate with
rounding errors as further remainders; it is far tighter for deep networks.

The bounds assume the following, and nothing else, about the machine that runs F̂. :mod:`lipcert.numerics` checks
these assumptions as far as it can, and refuses a process that violates them:

* Every operation of the captured network rounds to nearest, |fl(a) − a| ≤ u|a| + η. Numbers below the normal range may
  be flushed to zero, as operands and as results (float16: below the subnormal range).
* Matrix products, convolutions, sums and means are sums of the products in their definition, in any order, with or
  without fused multiplication, with a bias inside the sum or after it: no Winograd, FFT or Strassen transforms, no TF32
  (on CUDA cuDNN and, in float32, memory-efficient attention must be off).
* float16 and bfloat16: sums and functions inside one operation are computed in float32, truncated or rounded. The
  result is rounded to the format, and before it at most a product to which a bias is added, a sum that is divided,
  parts of ``sum``, scaled queries and keys, attention weights, and the terms of a normalisation (on CUDA:
  ``torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction`` and its bfloat16 counterpart off).
  ``Format(dtype, sums=dtype)`` drops this assumption, but then most networks have no bound.
* exp, tanh, log, powers, square roots and rsqrt err by at most 4 ulp; gelu and silu by 4 ulp of |x|; sigmoid,
  sine and cosine by 4 ulp of 1. In softmax and attention, exp may err by 20 ulp, or by 2⁻¹³ in float16 and bfloat16, as
  in torch's kernels for AVX512.
* Interpolation computes positions in the arithmetic of sums, and weights and sums in the format or better.
* Softmax subtracts the largest score, or the running maximum of online softmax. Fused attention is softmax with two
  matrix products.
* Variances may be computed by two passes, by updates, or as E[x²] − E[x]². Normalisations may be multiplied out, as in
  xα + (β − μα).
* Casts in the network's code are operations of it, and every operation rounds in the type of its result: no autocast.

With the format ``REAL``, F̂ is F as the certifier evaluates it in float64. Constants that the network computes from its
weights are then part of F as float64 has them.

There is no bound in case of overflow, NaN, operations without a rule, or constants that the network computes from its
weights in an unknown way.
"""

from lipcert.bounds import Operand, local_error
from lipcert.numerics import DTYPES, REAL, Format
from lipcert.roundoff._chains import Chains, Link, Pair
from lipcert.roundoff._constants import deployed_graph
from lipcert.roundoff._operations import Errors, OperationRounding
from lipcert.roundoff._paths import PathBounds, RoundingBounds, bound_rounding
from lipcert.roundoff._roundoff import (
    ENTRIES_AT_ONCE,
    NEGLIGIBLE,
    Evaluated,
    Gains,
    Radii,
    Roundoff,
    error_norm,
    passes,
)
