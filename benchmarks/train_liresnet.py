"""Trains ``cifar10-liresnet-w128`` and ``cifar10-liresnet-108``, LiResNets of width 128, on one GPU.

    python -m benchmarks.train_liresnet --data ../shared/data/cifar10 --out liresnet-w128.safetensors
    python -m benchmarks.train_liresnet --recipe far --data ../shared/data/cifar10 --out far.safetensors

A teacher, a small ResNet without constraints that is trained for a few epochs, gives probabilities that are mixed into
the labels. The loss is cross-entropy after every wrong class is given ε times a slope more, at most until it has won.
``cut`` trains a smooth end for a certificate after the blocks, with the slope of ``finetune --loss cut``: K‖∇_c m‖,
where c is the output of the blocks, m the margin to the runner-up, and K the Lipschitz constant of the layers up to c.
``far`` trains for ``gloro`` at large ε: the slope is the global bound K‖w_y − w_j‖ of EMMA, with K of all layers before
the head. K is estimated by subspace iteration in training; the certificate computes a bound.

A step is one CUDA graph, without which the GPU waits for Python most of the time; one epoch takes a second on an H100.
Without a GPU the same steps run one by one. With ``--minutes`` the schedule of each training follows the clock in place
of the number of epochs. Of ``cut``, the last images of a shuffle are held out of the first training; the second, which
starts from its weights, takes all. What epochs said goes to benchmarks/results/train_liresnet.json by recipe.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.optim.muon import zeropower_via_newtonschulz
from torch import Tensor, nn

import lipcert
from benchmarks._cifar import EPS, read
from benchmarks._env import environment
from benchmarks.liresnet_cifar import rounded

RESULT = Path(__file__).parent / "results" / "train_liresnet.json"
BATCH = 512
DECAY = 0.5  # of the matrices, times the learning rate
STD = 0.25  # of the pixels, by which the network divides them
AVERAGED = 0.998  # decay of the averages of the weights, which are what is kept


class Training(NamedTuple):
    """One training.

    Attributes:
        images: how many are trained on.
        epochs: the number of epochs.
        lr: the largest learning rate of the matrices.
        ramp: ε in the loss, relative to 36/255, at the start and from the middle on.
        slope: the slope of the loss, of the layers after the ``cut`` or ``global``.
        flipped: the part at the end in which images are flipped and neither shifted nor blackened.
        teacher: the weight of the teacher's probabilities in the labels.
        teacher_epochs: the number of epochs of the teacher.
    """

    images: int
    epochs: int
    lr: float
    ramp: tuple[float, float]
    slope: str
    flipped: float
    teacher: float
    teacher_epochs: int


RECIPES = {
    "cut": (
        Training(45_000, 154, 1e-2, (0.1, 2.0), "cut", 0.07, 0.5, 14),
        Training(50_000, 244, 5e-3, (2.3, 2.3), "cut", 0.04, 0.6, 24),
    ),
    "far": (Training(50_000, 187, 1e-2, (0.1, 4.0), "global", 0.0, 0.6, 30),),
}


def augmented(images: Tensor, order: Tensor, most: int, blackened: float) -> Tensor:
    """Images in this order, mirrored at random, shifted by up to ``most`` pixels, that share with a black rectangle."""
    parts = []
    side = torch.arange(32, device=images.device)
    for places in order.split(10_000):
        draw = torch.rand(len(places), 8, device=images.device)
        rows = side + (draw[:, :1] * (2 * most + 1)).long()
        columns = torch.where(draw[:, 1:2] < 0.5, side, 31 - side) + (draw[:, 2:3] * (2 * most + 1)).long()
        padded = F.pad(images[places], (most,) * 4)
        part = padded.gather(2, rows[:, None, :, None].expand(len(places), 3, 32, padded.shape[3]))
        part = part.gather(3, columns[:, None, None, :].expand(len(places), 3, 32, 32))
        # area from 2 to 33 % of the image, aspect ratio from 0.3 to 3.3, as timm's random erasing
        area, aspect = (0.02 + 0.31 * draw[:, 3]) * 1024, torch.exp((2 * draw[:, 4] - 1) * math.log(3.3))
        box = torch.ones(len(places), 1, 1, dtype=torch.bool, device=images.device)
        for size, start, dim in ((area * aspect, draw[:, 5], 2), (area / aspect, draw[:, 6], 1)):
            length = size.sqrt().clamp(max=31).round()
            first = (start * (33 - length)).floor()
            inside = (side >= first[:, None]) & (side < (first + length)[:, None])
            box = box & inside.unsqueeze(dim)
        parts.append(part.masked_fill((box & (draw[:, 7] < blackened)[:, None, None])[:, None], 0))
    return torch.cat(parts)


class Norms:
    """Estimates of the norms of the layers by subspace iteration; all blocks in one convolution."""

    vectors = 4

    def __init__(self, net: Any, device: torch.device):
        self.net = net
        self.blocks = [block for block in net.blocks if hasattr(block, "beta")]
        self.channels = self.blocks[0].conv.weight.shape[0]
        generator = torch.Generator().manual_seed(0)
        shapes = [(self.vectors, len(self.blocks), self.channels * 256), (self.vectors, 1, 3 * 32 * 32)]
        # the convolution of the neck takes patches that do not overlap, so that its matrix is that of one patch
        shapes += [(self.vectors, 1, net.neck[place].weight[0].numel()) for place in (0, 3)]
        self.starts = [torch.randn(shape, generator=generator).to(device) for shape in shapes]

    def _of_blocks(self, v: Tensor, weight: Tensor) -> Tensor:
        x = v.view(v.shape[0], -1, 16, 16)
        return (x + F.conv2d(x, weight, padding=1, groups=len(self.blocks))).reshape(v.shape)

    def _of_blocks_back(self, u: Tensor, weight: Tensor) -> Tensor:
        x = u.view(u.shape[0], -1, 16, 16)
        return (x + F.conv_transpose2d(x, weight, padding=1, groups=len(self.blocks))).reshape(u.shape)

    @staticmethod
    def _of_stem(v: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(v.view(-1, 3, 32, 32), weight, padding=2, stride=2).reshape(v.shape[0], 1, -1)

    def _of_stem_back(self, u: Tensor, weight: Tensor) -> Tensor:
        x = u.view(u.shape[0], self.channels, 16, 16)
        back = F.conv_transpose2d(x, weight, padding=2, stride=2, output_padding=1)
        return back.reshape(u.shape[0], 1, -1)

    def _norm(
        self,
        v: Tensor,
        apply: Callable[[Tensor, Tensor], Tensor],
        back: Callable[[Tensor, Tensor], Tensor],
        weight: Tensor,
        steps: int,
    ) -> Tensor:
        """The norms of all maps, differentiable in ``weight``; ``v`` keeps the vectors for the next call."""
        with torch.no_grad():
            fixed = weight.detach()
            for _ in range(steps):
                vectors: list[Tensor] = []
                for one in back(apply(v, fixed), fixed).unbind(0):  # Gram-Schmidt: torch.linalg.qr has no CUDA graph
                    for known in vectors:
                        one = one - (one * known).sum(1, keepdim=True) * known
                    vectors.append(one / one.norm(dim=1, keepdim=True).clamp_min(1e-20))
                v.copy_(torch.stack(vectors))
            image = apply(v, fixed)
            flat = image.transpose(0, 1)  # (maps, vectors, size)
            power = flat @ flat.mT
            for _ in range(10):  # the 1024th power has the rank of the largest singular value
                power = power / power.diagonal(dim1=1, dim2=2).sum(1)[:, None, None].clamp_min(1e-30)
                power = power @ power
            weights = F.normalize(power.sum(2) + 1e-3 * power[:, :, 0], dim=1)
            best = torch.einsum("mw,wms->ms", weights, v)
            u = F.normalize(torch.einsum("mw,wms->ms", weights, image), dim=1)
        return (u * apply(best[None], weight)[0]).sum(1)

    def to_head(self, steps: int = 1) -> Tensor:
        """K from pixels to the input of the head, differentiable."""
        found = self.constant(steps)
        for start, layer in zip(self.starts[2:], (self.net.neck[0], self.net.neck[3]), strict=True):
            weight = layer.weight.flatten(1)
            found = found * self._norm(start, lambda v, w: v @ w.mT, lambda u, w: u @ w, weight, steps)[0]
        return found

    def constant(self, steps: int = 1) -> Tensor:
        """K from pixels to the output of the blocks, differentiable."""
        weight = torch.cat([b.conv.weight * (b.beta * b.scale).view(-1, 1, 1, 1) for b in self.blocks])
        blocks = self._norm(self.starts[0], self._of_blocks, self._of_blocks_back, weight, steps)
        stem = self._norm(self.starts[1], self._of_stem, self._of_stem_back, self.net.stem[0].weight, steps)
        return (stem.log().sum() + blocks.log().sum()).exp() / STD  # the gradient of prod would wait for the device


class Updates:
    """Muon for matrices, Adam for the rest; the learning rate is a tensor, which a CUDA graph reads anew."""

    def __init__(self, net: nn.Module, rate: Tensor):
        self.rate = rate
        self.groups: dict[torch.Size, list[nn.Parameter]] = {}
        rest = []
        for p in net.parameters():
            if p.dim() > 1:
                self.groups.setdefault(p.shape, []).append(p)
            else:
                rest.append(p)
        self.momentum = {shape: torch.zeros(len(ps), *shape, device=rate.device) for shape, ps in self.groups.items()}
        self.adam = torch.optim.AdamW(rest, lr=rate, weight_decay=0.0, capturable=rate.is_cuda)
        self.parameters = [p for ps in self.groups.values() for p in ps] + rest

    @torch.no_grad()
    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, 3.0, foreach=False)
        for shape, ps in self.groups.items():
            gradient = torch.stack([p.grad for p in ps if p.grad is not None])
            ahead = gradient.lerp(self.momentum[shape].lerp_(gradient, 0.05), 0.95).flatten(2)
            update = zeropower_via_newtonschulz(
                ahead, steps=5, coefficients=[(3.4445, -4.7750, 2.0315)], eps=1e-30, dtype=torch.bfloat16
            )
            size = self.rate * 0.2 * max(ahead.shape[1:]) ** 0.5
            for p, one in zip(ps, update.float(), strict=True):
                p.mul_(1 - self.rate * DECAY)
                p.sub_(one.view_as(p) * size)
        self.adam.step()


class Teacher(nn.Module):
    """A small ResNet without constraints."""

    def __init__(self) -> None:
        super().__init__()

        def conv(before: int, after: int, pool: bool = False) -> nn.Sequential:
            layers = [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
            return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))

        self.start = nn.Sequential(conv(3, 64), conv(64, 128, True))
        self.first = nn.Sequential(conv(128, 128), conv(128, 128))
        self.middle = nn.Sequential(conv(128, 256, True), conv(256, 512, True))
        self.second = nn.Sequential(conv(512, 512), conv(512, 512))
        self.head = nn.Linear(512, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start((x - 0.47) / 0.25)
        x = self.middle(x + self.first(x))
        x = x + self.second(x)
        logits: Tensor = 0.125 * self.head(x.amax((2, 3)))
        return logits


def teacher_of(images: Tensor, labels: Tensor, epochs: int) -> Teacher:
    """A teacher trained on these images."""
    device = images.device
    net = Teacher().to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.4, momentum=0.9, weight_decay=5e-4, nesterov=True)
    per = len(images) // BATCH
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.4, total_steps=epochs * per + 1, pct_start=0.2)
    for _ in range(epochs):
        order = torch.randperm(len(images), device=device)
        batches = zip(augmented(images, order, 4, 0.3).split(BATCH), labels[order].split(BATCH), strict=True)
        for (x, y), _step in zip(batches, range(per), strict=False):
            with torch.autocast(device.type, torch.bfloat16):
                logits = net(x.float().div(255).to(memory_format=torch.channels_last))
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(logits.float(), y, label_smoothing=0.1).backward()
            optimizer.step()
            rates.step()
    return net.eval().requires_grad_(False)


class Student:
    """The network in training, its averaged weights, and one step."""

    def __init__(self, model: lipcert.Model, teacher: Teacher, plan: Training, device: torch.device):
        self.model, self.teacher, self.plan, self.device = model, teacher, plan, device
        self.blocks: Any = model.net.blocks
        self.rate, self.eps, self.keep = (torch.zeros((), device=device) for _ in range(3))
        self.norms, self.updates = Norms(model.net, device), Updates(model.net, self.rate)
        self.norms.to_head(30)
        self.average = [p.detach().clone() for p in self.updates.parameters]
        self.images = torch.zeros(BATCH, 3, 32, 32, dtype=torch.uint8, device=device)
        self.labels = torch.zeros(BATCH, dtype=torch.int64, device=device)
        self.sums = torch.zeros(3, device=device)  # loss, right, and certified to first order
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self) -> None:
        """One step on ``images`` and ``labels``."""
        for p in self.updates.parameters:
            p.grad = None
        x = self.images.float().div(255).to(memory_format=torch.channels_last)
        with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False):
            probabilities = self.teacher(x).float().softmax(1)
        at_cut: list[Tensor] = []
        with (
            self.blocks.register_forward_hook(lambda module, inputs, output: at_cut.append(output)),
            torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False),
        ):
            logits = self.model(x).float()
        is_label = F.one_hot(self.labels, 10).bool()
        margins = logits.gather(1, self.labels[:, None]) - logits
        if self.plan.slope == "cut":
            runner = logits.detach().masked_fill(is_label, -1e9).argmax(1, keepdim=True)
            (gradient,) = torch.autograd.grad(margins.gather(1, runner).sum(), at_cut, create_graph=True)
            slope = self.norms.constant() * gradient.float().flatten(1).norm(dim=1, keepdim=True)
        else:
            head: Any = self.model.net.head
            rows = F.normalize(head.weight)
            slope = self.norms.to_head() * (rows[self.labels, None] - rows + 1e-12).norm(dim=2)
        reach = self.eps * slope * ~is_label
        moved = logits + (margins / reach.clamp_min(1e-30)).clamp(0, 1).detach() * reach
        given = self.plan.teacher
        loss = F.cross_entropy(moved, (1 - given) * is_label.float() + given * probabilities)
        loss.backward()
        self.updates.step()
        with torch.no_grad():
            for mean, p in zip(self.average, self.updates.parameters, strict=True):
                mean.lerp_(p, self.keep)
            sure = ((margins > slope * EPS) | is_label).all(1)
            right = logits.argmax(1) == self.labels
            self.sums.add_(torch.stack([loss.detach(), right.float().mean(), sure.float().mean()]))

    def capture(self) -> None:
        """Makes :meth:`step` one CUDA graph; the weights stay as they are."""
        saved = [p.detach().clone() for p in self.updates.parameters]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()
        with torch.no_grad():  # the rate was 0, but the steps changed averages and momentum
            for p, mean, known in zip(self.updates.parameters, self.average, saved, strict=True):
                p.copy_(known)
                mean.copy_(known)
            for momentum in self.updates.momentum.values():
                momentum.zero_()

    def train(self, images: Tensor, labels: Tensor, seconds: float | None = None) -> dict[str, Any]:
        """Trains by the plan, takes the averaged weights, and returns the number of epochs and what some of them said.

        With ``seconds`` there are as many epochs as they suffice for.
        """
        said: list[dict[str, float]] = []
        plan, epochs, epoch = self.plan, self.plan.epochs, 0
        per, number, started = len(images) // BATCH, 0, time.perf_counter()
        while epoch < epochs:
            last = epoch >= (1 - plan.flipped) * epochs
            order = torch.randperm(len(images), device=self.device)
            moved, classes = augmented(images, order, 0 if last else 4, 0.0 if last else 0.3), labels[order]
            self.sums.zero_()
            for x, y in zip(moved.split(BATCH)[:per], classes.split(BATCH)[:per], strict=True):
                done = min(1.0, number / (epochs * per))
                warm, decayed = 0.04 + 0.96 * done / 0.03, 0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2
                self.rate.fill_(plan.lr * min(1.0, warm, decayed))
                first, then = plan.ramp
                self.eps.fill_(EPS * (first + (then - first) * min(done / 0.5, 1.0)))
                number += 1
                self.keep.fill_(1 - min(AVERAGED, (1 + number) / (10 + number)))
                self.images.copy_(x)
                self.labels.copy_(y)
                self.step() if self.graph is None else self.graph.replay()
            epoch += 1
            loss, right, sure = (self.sums / per).tolist()
            spent = time.perf_counter() - started
            if seconds is not None:
                epochs = max(epoch, int(epoch * seconds / spent))
            if epoch * 12 // epochs > len(said):
                row = {"epoch": epoch, "loss": loss, "accuracy": right, "sure": sure, "seconds": spent}
                said.append({key: round(value, 4) for key, value in row.items()})
                print(json.dumps(said[-1]), flush=True)
        with torch.no_grad():
            for p, mean in zip(self.updates.parameters, self.average, strict=True):
                p.copy_(mean)
        return {"epochs": epoch, "said": said}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", required=True, help="folder with train.tar")
    parser.add_argument("--out", type=Path, required=True, help="the artifact")
    parser.add_argument("--recipe", choices=RECIPES, default="cut")
    parser.add_argument("--minutes", type=float, help="of each training, in place of its epochs")
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--epochs", type=int, help="of each training and teacher, for a trial")
    parser.add_argument("--images", type=int, help="of the training images, for a trial")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    images, labels = read(args.data, "train")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(7))[: args.images]
    images, labels = images[order].to(device), labels[order].to(device)
    torch.manual_seed(1)
    beta = 4.0 if args.recipe == "cut" else 0.0
    model = lipcert.load("liresnet_l6w128", pretrained=False, beta=beta, neck=128, num_features=512)
    model = model.to(device).to(memory_format=torch.channels_last)
    said = []
    for plan in RECIPES[args.recipe]:
        if args.epochs:
            plan = plan._replace(epochs=args.epochs, teacher_epochs=args.epochs)
        x, y = images[: plan.images], labels[: plan.images]
        student = Student(model, teacher_of(x, y, plan.teacher_epochs), plan, device)
        if device.type == "cuda":
            student.capture()
        seconds = args.minutes and 60 * args.minutes
        said.append({**plan._asdict(), **student.train(x, y, seconds)})
    model = model.cpu()
    model.recipe.append({"step": "train", "with": f"benchmarks.train_liresnet --recipe {args.recipe}"})
    lipcert.save(rounded(model), args.out)
    known = json.loads(args.result.read_text()) if args.result.exists() else {}
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    result = {args.recipe: {"device": name, "trainings": said, "environment": environment()}}
    args.result.write_text(json.dumps({**known, **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
