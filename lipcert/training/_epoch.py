"""The results of an epoch of training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Epoch:
    """The results of one epoch.

    Attributes:
        number: 1 for the first epoch.
        epochs: the number of epochs.
        loss: the mean loss of the images, with the weights at the time of each.
        accuracy: the fraction of images that were predicted correctly, with the weights at the time of each.
        eps: the ε of the last update.
        seconds: the duration of the epoch.
        bound: the certified Lipschitz constant of the features before the head (or √2 times that of the logits) after
            the last update; None for losses without the global bound.
        estimate: the estimate of this constant in the loss, which is no bound.
        fitted: whether the head was fitted to this number of noisy draws of each image, in place of training.
    """

    number: int
    epochs: int
    loss: float
    accuracy: float
    eps: float
    seconds: float
    bound: float | None = None
    estimate: float | None = None
    fitted: bool = False
