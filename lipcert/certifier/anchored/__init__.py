"""The anchored certificate, and what lofast shares with it.

To read from top to bottom:

- :mod:`.network`: the captured network, its stages and the remainder rules of its operations;
- :mod:`.plan`: which norms of Jacobians are taken, in which order and at what cost;
- :mod:`.jacobians`: products with Jacobians, and norms from them;
- :mod:`.norms`: the norms of a plan at images, and what they are charged with;
- :mod:`.walk`: how far values move for perturbations of size ε, from norms and remainders;
- :mod:`.margin`: what is left of a margin;
- :mod:`.method`: the certificate with its proof, and the order in which rival classes are looked at;
- :mod:`.deployed`: the same for the deployed network, with rounding errors as a hook of the walk.

Beside them stand :mod:`.chains` (products in place of norms), :mod:`.secants` (other derivatives at kinks) and
:mod:`.rounding` (what float64 does to the certifier's own numbers). :mod:`lipcert.certifier._search` looks for radii.
"""

from lipcert.certifier.anchored.deployed import DeployedAnchored
from lipcert.certifier.anchored.method import Anchor, Anchored
from lipcert.certifier.anchored.norms import NormOptions

__all__ = ["Anchor", "Anchored", "DeployedAnchored", "NormOptions"]
