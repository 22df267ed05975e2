"""The anchored certificate, and the parts that it shares with LoFAST.

Read the modules in this order:

- :mod:`.network`: the captured network, its stages and the remainder rules of its operations;
- :mod:`.plan`: which norms of Jacobians are computed, and at what cost;
- :mod:`.jacobians`: products with Jacobians, and norms from them;
- :mod:`.norms`: the norms of a plan at images, and their failure probability;
- :mod:`.ray`: perturbations split along the gradient of a margin;
- :mod:`.walk`: the deviation of every value for perturbations of norm ε, from norms and remainders;
- :mod:`.margin`: lower bounds on a margin;
- :mod:`.method`: the certificate, and the order in which rival classes are examined;
- :mod:`.behind`: the certificate behind a cut, with the Lipschitz constant of the layers before it;
- :mod:`.layer`: how far the last layer before the cut lets the first-order part of a margin fall;
- :mod:`.deployed`: the same for the deployed network, whose rounding errors are added to the remainders.

They use :mod:`.gradients`, autograd through a part of the network. :mod:`lipcert.roundoff` bounds the rounding errors
of the certifier's own numbers in float64, and :mod:`lipcert.certifier._search` searches for radii.
"""

from lipcert.certifier.anchored.behind import Behind, anchored, cut_of
from lipcert.certifier.anchored.deployed import DeployedAnchored
from lipcert.certifier.anchored.method import Anchor, Anchored
from lipcert.certifier.anchored.norms import NormOptions

__all__ = ["Anchor", "Anchored", "Behind", "DeployedAnchored", "NormOptions", "anchored", "cut_of"]
