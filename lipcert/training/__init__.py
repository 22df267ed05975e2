"""Fine-tuning for certificates: losses that ask for margins, and matrices held at a norm.

Nothing here certifies. Norms and bounds are differentiable estimates for training; what a trained model is worth is
what :func:`lipcert.certify` then says.
"""

from lipcert.training._batches import Batches
from lipcert.training._finetune import LOSSES, Epoch, finetune
from lipcert.training._gloro import TrainingBound
from lipcert.training._losses import anchored_loss, emma_loss, trades_loss, twice_differentiable
from lipcert.training._matrices import NormHold, hold_projections
from lipcert.training._muon import Muon

__all__ = [
    "LOSSES",
    "Batches",
    "Epoch",
    "Muon",
    "NormHold",
    "TrainingBound",
    "anchored_loss",
    "emma_loss",
    "finetune",
    "hold_projections",
    "trades_loss",
    "twice_differentiable",
]
