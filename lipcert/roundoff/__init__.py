"""What rounding can do: bounds for the deployed float32, float16 or bfloat16 network.

Certificates are computed for the network F in real arithmetic. What runs is F̂ = ``model.to(dtype)`` on
``images.to(dtype)``. This package bounds their difference for every image within a radius, operation by operation
(running error analysis; Murray, "Lipschitz-Based Robustness Certification Under Floating-Point Execution", arXiv
2603.13334, does it for layers of ReLU networks), in two ways: :class:`Roundoff` bounds the error of the margins, which
is then taken off them before any method looks at them, and ``lipcert.certifier.DeployedAnchored`` is the anchored
certificate with rounding errors as further remainders, far tighter for deep networks.

What is assumed of the machine that runs F̂, and nothing else; :mod:`lipcert._environment` reads and probes what it can
of it, and refuses what contradicts it:

* Every operation of the captured network rounds to nearest, |fl(a) − a| ≤ u|a| + η. Numbers below the normal range may
  be flushed to zero, as operands and as results (float16: below the subnormal range).
* Matrix products, convolutions, sums and means are sums of the products in their definition, in any order, with or
  without fused multiplication: no Winograd, FFT or Strassen transforms, no TF32 (torch: ``allow_tf32`` off).
* float16 and bfloat16: sums and functions inside one operation are computed in float32, truncated or rounded, and the
  result is rounded once (on CUDA: ``torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction`` and its
  bfloat16 counterpart off). ``Format(dtype, sums=dtype)`` does without, at the price of no answer for most networks.
* exp, erf, tanh, log, square roots and rsqrt are off by at most 4 ulp; gelu, silu and mish by 4 ulp of |x|, sigmoid
  by 4 ulp of 1.
* Softmax subtracts the largest score, or what online softmax has seen of it; fused attention is that and two products.
* Variances may be computed by two passes, by updates, or as E[x²] − E[x]².
* The whole network runs in one format: no autocast.

Overflow, NaN, operations without a rule, and constants that the network computes from its weights in a way that is not
known here have no bound.
"""

from lipcert._format import DTYPES, Format
from lipcert.bounds import Operand, local_error
from lipcert.roundoff._roundoff import Gains, Radii, RadiusMethod, Roundoff, error_norm, passes

__all__ = [
    "DTYPES",
    "Format",
    "Gains",
    "Operand",
    "Radii",
    "Roundoff",
    "RadiusMethod",
    "error_norm",
    "local_error",
    "passes",
]
