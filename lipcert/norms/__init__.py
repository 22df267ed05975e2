"""Rigorous upper bounds on operator norms of matrices and convolutions."""

from lipcert.norms._dense import dense_norm
from lipcert.norms._explicit import explicit_norm, explicit_row_norms, row_norms, row_norms_by_adjoint
from lipcert.norms._geometry import Geometry
from lipcert.norms._lanczos import SMALLEST, lanczos_error, lanczos_norm, start_vectors
from lipcert.norms._operator import COMPOSED, Operator, conv_norm, conv_transpose_norm
from lipcert.norms._scale import KNOWN_NORMS
from lipcert.norms._verify import dot_error, factor, verified_norms
from lipcert.norms.budget import Budget, Draw, Ledger, Rigor

__all__ = ["conv_norm", "dense_norm", "lanczos_norm"]
