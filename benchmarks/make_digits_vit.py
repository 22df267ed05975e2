"""Makes the bundled checkpoint and its images: a timm ViT on scikit-learn's digits.

    python -m benchmarks.make_digits_vit

1. ``lipcert.convert`` puts smooth projections in place of the LayerNorms of a small timm ViT; dot-product attention
stays. 2. The projections are set to one radius and scale 1, and every weight matrix is held at spectral norm 1.
3. Margin training: cross-entropy of logits to which ε‖∇(f_y − f_j)‖, j the runner-up, is added for every wrong class.

Writes lipcert/assets/digits_vit.safetensors and, with the first 120 of the 360 images held out of training,
lipcert/assets/digits.safetensors; prints clean and certified accuracy on the held-out ones. Takes a few minutes on a
core.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

import lipcert
from lipcert.surgery import SmoothProject
from lipcert.training import NormLimits, twice_differentiable

ASSETS = Path(lipcert.__file__).parent / "assets"
EPS = 36 / 255
BUNDLED = 120  # images that are shipped, of the 360 held out


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and held-out images, uint8 (N, 3, 8, 8), the 17 grey levels spread over 0 to 255, and their classes."""
    data = load_digits()
    images = torch.from_numpy(data.images / 16 * 255).round().to(torch.uint8)[:, None].expand(-1, 3, -1, -1)
    labels = torch.from_numpy(data.target).long()
    train, test = train_test_split(range(len(labels)), test_size=360, random_state=0, stratify=data.target)
    return images[train], labels[train], images[test].contiguous(), labels[test]


def margin_loss(model: lipcert.Model, images: Tensor, labels: Tensor, eps: float, temperature: float) -> Tensor:
    """Step 3 above; the gradient is differentiated again."""
    images = images.detach().requires_grad_()
    logits = model(images)
    is_label = F.one_hot(labels, logits.shape[1]).bool()
    rival = logits.detach().masked_fill(is_label, -torch.inf).argmax(1, keepdim=True)
    margin = logits.gather(1, labels[:, None]) - logits.gather(1, rival)
    (gradient,) = torch.autograd.grad(margin.sum(), images, create_graph=True)
    reach = eps * gradient.flatten(1).norm(dim=1, keepdim=True)
    return F.cross_entropy((logits + reach * ~is_label) / temperature, labels)


def train(model: lipcert.Model, images: Tensor, labels: Tensor, epochs: int, lr: float, eps: float) -> None:
    """Margin training in place with AdamW and a one-cycle schedule, ε rising over the first third."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=epochs * -(-len(images) // 64))
    hold = NormLimits(model)
    for epoch in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            pixels = images[batch].float() / 255
            optimizer.zero_grad()
            with twice_differentiable():
                loss = margin_loss(model, pixels, labels[batch], eps * min(1.0, 3 * epoch / epochs), 0.1)
                loss.backward()
            optimizer.step()
            schedule.step()
            hold()
        if epoch % 10 == 9:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--eps", type=float, default=0.4, help="ε of the margin training")
    parser.add_argument("--limit", type=int, help="certify that many of the held-out images only")
    parser.add_argument("--assets", type=Path, default=ASSETS)
    args = parser.parse_args()
    torch.manual_seed(0)
    images, labels, held_images, held_labels = digits()

    model = lipcert.load(
        "vit_tiny_patch16_224", pretrained=False, mean=(0.3, 0.3, 0.3), std=(0.4, 0.4, 0.4), input_size=(3, 8, 8),
        img_size=8, patch_size=4, embed_dim=64, depth=2, num_heads=4, mlp_ratio=2.0, class_token=False, fc_norm=False,
        global_pool="avg", num_classes=10,
    )  # fmt: skip

    lipcert.convert(model, attention="keep", norm="smooth", images=images[:256].float() / 255)
    for part in model.modules():
        if isinstance(part, SmoothProject):
            part.radius.fill_(5.0)
            part.weight.data.fill_(1.0)
            part.weight.requires_grad_(False)
    train(model, images, labels, args.epochs, 3e-3, args.eps)
    args.assets.mkdir(exist_ok=True)
    lipcert.save(model, args.assets / "digits_vit.safetensors")
    save_file({"images": held_images[:BUNDLED], "labels": held_labels[:BUNDLED]}, args.assets / "digits.safetensors")
    count = args.limit or len(held_images)
    result = lipcert.certify(model, held_images[:count].float() / 255, held_labels[:count], eps=EPS)
    assert result.correct is not None
    print(
        f"{count} held-out images: clean {result.correct.double().mean():.3f}, certified at 36/255 "
        f"{result.certified_accuracy:.3f}, median radius {result.radius.median():.3f}, by {Counter(result.method)}"
    )


if __name__ == "__main__":
    main()
