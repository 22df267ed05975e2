"""Numbers and norms rounded outward, slacks for float64, results, estimates for training, formats, memory."""

from lipcert.numerics._bound import Bound, Estimate, LayerBound
from lipcert.numerics._certificates import EVIDENCE, WORDS, Certificates
from lipcert.numerics._environment import (
    as_assumed,
    assumptions,
    check_environment,
    environment_settings,
    matmul_precision,
    without_autocast,
    without_cudnn,
)
from lipcert.numerics._estimate import (
    Estimated,
    Estimator,
    as_tensor,
    detached,
    estimated,
    estimating,
    or_estimated,
    with_slope,
)
from lipcert.numerics._formats import DTYPES, EXTRA, OWN_ROUNDING, REAL, ConstantErrors, Format
from lipcert.numerics._l2 import (
    computed_l2_norm,
    l2_norm,
    over,
    power_of_two,
    root_of_squares,
    root_sum,
    sum_squares,
    times,
    unit_vectors,
)
from lipcert.numerics._memory import give_back, is_out_of_memory, keep_freed, memory_left
from lipcert.numerics._random_states import watched
from lipcert.numerics._real import RealArithmetic, in_real_arithmetic, spelled_out
from lipcert.numerics._slack import INFLATE, ROUNDED_ANGLE, ROUNDED_SUM, SAFETY, SMALLEST_NORMAL, UNIT, at_most
from lipcert.numerics._trees import leaves, mapped
from lipcert.numerics._upper import INFINITE, Number, Upper, root_sum_squares
