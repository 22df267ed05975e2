"""Fine-tuning for certificates: losses that enlarge margins, and constraints on the norms of matrices.

Nothing here certifies. Norms and bounds are differentiable estimates for training; :func:`lipcert.certify` certifies
the trained model.
"""

from lipcert.settings import LOSSES, FinetuneSettings, MaxNorm
from lipcert.training._batches import Augmentation, Batches, Mixed
from lipcert.training._bound import TrainingBound
from lipcert.training._finetune import check_trainable, finetune
from lipcert.training._local import LocalBound, local_loss
from lipcert.training._losses import (
    adversarial_loss,
    annealed_loss,
    cut_loss,
    emma_loss,
    fixed_loss,
    gloro_loss,
    noise_loss,
    teacher_loss,
    trades_loss,
    twice_differentiable,
)
from lipcert.training._matrices import NormLimits
from lipcert.training._muon import Muon
from lipcert.training._recipe import denoised, recipe_for, settings_for
from lipcert.training._validation import Epoch, Log, Validation

__all__ = [
    "Augmentation", "Epoch", "FinetuneSettings", "LocalBound", "Log", "TrainingBound", "Validation", "adversarial_loss",
    "annealed_loss", "emma_loss", "fixed_loss", "gloro_loss", "local_loss", "teacher_loss", "trades_loss",
]  # fmt: skip
