"""The anchored certificate, and the parts that it shares with LoFAST.

Read the modules in this order:

- :mod:`.network`: the captured network, its stages and the remainder rules of its operations;
- :mod:`.jacobians`: gradients and products with Jacobians by autograd, and norms from them;
- :mod:`.plan`: which norms of Jacobians are computed, and at what cost;
- :mod:`.norms`: the norms of a plan at images, and their failure probability;
- :mod:`.deviations`: the deviation of every value for perturbations of norm ε, from norms and remainders;
- :mod:`.ray`: perturbations split along the gradient of a margin;
- :mod:`.margin`: lower bounds on a margin;
- :mod:`.method`: the certificate, and the order in which rival classes are examined;
- :mod:`.prefix`: the certificate after a cut, with the Lipschitz constant of the layers before it;
- :mod:`.layer`: how much the last layer before the cut lets the first-order part of a margin decrease;
- :mod:`.deployed`: the same for the deployed network, whose rounding errors are added to the remainders.

:mod:`lipcert.roundoff` bounds the rounding errors of the certifier's own numbers in float64, and
:mod:`lipcert.certifier._search` searches for radii.
"""

from lipcert.certifier.anchored.deployed import DeployedAnchored
from lipcert.certifier.anchored.method import Anchor, Anchored
from lipcert.certifier.anchored.norms import NormOptions
from lipcert.certifier.anchored.prefix import PrefixedAnchored, anchored, cut_of

__all__ = ["Anchor", "Anchored", "DeployedAnchored", "NormOptions", "PrefixedAnchored", "anchored", "cut_of"]
