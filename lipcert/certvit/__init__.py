"""CertViT: lowers the norms of the layers of a pretrained network and keeps their outputs on given images."""

from lipcert.certvit.blockwise import constrain_blockwise
from lipcert.certvit.moments import Moments, stream
from lipcert.certvit.network import constrain
from lipcert.certvit.report import ConstraintReport, LayerConstraint, LayerFigures, NetworkFigures
from lipcert.certvit.solve import Solution, constrain_layer
from lipcert.certvit.tasks import Failure, Task, solve_layers
from lipcert.settings import ENGINES, MEASURE_NAMES, ConstrainSettings

__all__ = ["ConstrainSettings", "ConstraintReport", "LayerConstraint", "LayerFigures"]
