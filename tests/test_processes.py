"""Several processes: fine-tuning and constraining end as they do in one process."""

import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from commands import write_images
from PIL import Image
from torch import Tensor, nn

import lipcert
from lipcert.certvit import Moments, Task, solve_layers
from lipcert.cli import _errors
from lipcert.errors import InputError
from lipcert.inputs.artifact import load_artifact
from lipcert.inputs.processes import Processes
from lipcert.workers import worker_pool

EPOCHS = 2
SETTINGS = {"epochs": EPOCHS, "max_norm": 1.0, "ema": 0.9, "temperature": 0.25}
FAILED = "another process of this run failed"


def vit() -> lipcert.Model:
    torch.manual_seed(0)
    model = lipcert.load(
        "vit_tiny_patch16_224", pretrained=False, mean=(0.3,) * 3, std=(0.4,) * 3, input_size=(3, 8, 8), img_size=8,
        patch_size=4, embed_dim=16, depth=1, num_heads=2, num_classes=10,
    )  # fmt: skip
    return lipcert.convert(model, attention="keep", norm="smooth")


def batches(rank: int = 0, count: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Four batches, or a process's share of each; the last one has a single image."""
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.rand(37, 3, 8, 8, generator=generator), torch.randint(10, (37,), generator=generator)
    part = slice(rank, None, count)
    return [(x[part], y[part]) for x, y in zip(images.split(12), labels.split(12), strict=True)]


class Branches(nn.Module):
    """Two linear branches, of which one sees zeros only and cannot be constrained."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.dead = nn.Linear(192, 3), nn.Linear(192, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.flatten(1)) + self.dead(0 * x.flatten(1))
        return out


def branches() -> lipcert.Model:
    torch.manual_seed(0)
    return lipcert.load(Branches(), mean=(0.5,) * 3, std=(0.5,) * 3, input_size=(3, 8, 8))


def pictures(rank: int = 0, count: int = 1) -> list[Tensor]:
    """Three batches of ten, the first, third, … of a process; the same images are held out either way."""
    return list(torch.rand(30, 3, 8, 8, generator=torch.Generator().manual_seed(2)).split(10))[rank::count]


def solved_here() -> list[str]:
    """The layers that this process solves, of three."""
    moments = Moments("fc", torch.eye(3, dtype=torch.float64)[None], 3)
    tasks = [Task(name, torch.eye(3), moments, {"error": 0.1, "measures": ("spectral",)}) for name in "abc"]
    seen: list[str] = []
    assert list(solve_layers(tasks, 0, seen.append)) == ["a", "b", "c"]
    return seen


def outcome(model: lipcert.Model) -> dict[str, object]:
    report = model.constraint
    layers = [(x.path, x.status, x.norm_after, x.error_reached, x.error_held_out) for x in report.layers]
    return {"weights": model.state_dict(), "layers": layers, "images": (report.images, report.held_out)}


def stop(_: object) -> None:
    raise KeyboardInterrupt


def refusal(rank: int, number: int) -> str:
    """What is said where the second process has a label that is none."""
    share = batches(rank, 2)[:1]
    if rank:
        share[0][1][0] = number
    with pytest.raises(InputError) as error:
        lipcert.finetune(vit(), share, epochs=1, loss="ce")
    return str(error.value)


def work(rank: int, folder: Path) -> None:
    """One of two processes."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found: dict[str, object] = {}
    for loss in ("adversarial", "emma"):
        model = vit()
        with pytest.raises(KeyboardInterrupt):
            lipcert.finetune(
                model, batches(rank, 2), loss=loss, checkpoint=folder / f"c{rank}", progress=stop, **SETTINGS
            )
        model, epochs = vit(), []
        lipcert.finetune(
            model, batches(rank, 2), loss=loss, checkpoint=folder / f"c{rank}", progress=epochs.append, **SETTINGS
        )
        found[loss] = model.state_dict()
        found[f"{loss} epochs"] = [(e.number, e.loss, e.accuracy) for e in epochs]
        (folder / "c0").unlink(missing_ok=True)
        Processes.connected().gather(None)
    found["refusal"] = refusal(rank, 77)
    with pytest.raises(InputError) as error:
        lipcert.finetune(vit(), batches(rank, 2), epochs=1 + rank)
    found["other"] = str(error.value)
    found["solved"] = solved_here()
    found["constrained"] = outcome(lipcert.constrain(branches(), pictures(rank, 2), 0.2))
    spoilt = pictures(rank, 2)
    spoilt[0] = spoilt[0][:, :1] if rank else spoilt[0]
    with pytest.raises(InputError) as error:
        lipcert.constrain(branches(), spoilt, 0.2)
    found["spoilt"] = str(error.value)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def close(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    # Biases of keys hardly have a gradient, and AdamW makes steps of the roundings of one.
    allowed = {name: 1e-4 if name.endswith("qkv.bias") else 1e-5 for name in left}
    return all(torch.allclose(left[name], right[name], rtol=0, atol=allowed[name]) for name in left)


def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    command = [sys.executable, __file__]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)], env=environment()) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    for loss in ("adversarial", "emma"):
        model, before, epochs = vit(), vit().state_dict(), []
        lipcert.finetune(model, batches(), loss=loss, progress=epochs.append, **SETTINGS)
        assert close(first[loss], model.state_dict())
        assert not close(first[loss], before)
        assert all(torch.equal(value, second[loss][name]) for name, value in first[loss].items())
        assert first[f"{loss} epochs"] == second[f"{loss} epochs"]
        again, (number, mean, accuracy) = first[f"{loss} epochs"]  # the first epoch was before the stop
        assert again[0] == 1
        assert (number, accuracy) == (2, epochs[1].accuracy)
        assert mean == pytest.approx(epochs[1].loss, rel=1e-5)
    assert not (tmp_path / "c1").exists()
    assert "labels must be from 0 to 9" in second["refusal"]
    assert FAILED in first["refusal"]
    assert "given different models or settings" in first["other"] == second["other"]

    assert (first["solved"], second["solved"]) == (["a", "c"], ["b"])
    alone = outcome(lipcert.constrain(branches(), pictures(), 0.2))
    for found in (first["constrained"], second["constrained"]):
        assert close(found["weights"], alone["weights"])
        assert found["images"] == alone["images"] == (24, 6)
        (head, dead), (head_alone, dead_alone) = found["layers"], alone["layers"]
        assert head[:2] == head_alone[:2] == ("head", "converged")
        assert head[2:] == pytest.approx(head_alone[2:], rel=1e-6)
        assert dead == dead_alone
        assert dead[:2] == ("dead", "failed")
    assert FAILED in first["spoilt"]
    assert "images must have shape" in second["spoilt"]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_torchrun_runs_the_commands(tmp_path: Path) -> None:
    write_images("images", 50, 8, "0123456789")
    lipcert.save(vit(), tmp_path / "small.safetensors")

    def run(processes: int, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        several = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
        command = [sys.executable, *several, "-m", "lipcert", *arguments, "--data", "images"]
        result = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
        assert (result.returncode == 0) == (code == 0), result.stderr
        return result

    training = ["finetune", "small.safetensors", "--eps", "0.1", "--epochs", "2", "--batch-size", "9", "--lr", "3e-3"]
    lowering = ["constrain", "small.safetensors", "--error", "0.1"]
    outputs = {}
    for processes in (1, 2):
        for task in (training, lowering):
            out = f"{task[0]}{processes}.safetensors"
            outputs[processes, task[0]] = run(processes, *task, "--device", "cpu", "--out", out)
    for task in ("finetune", "constrain"):
        one, two = (load_artifact(tmp_path / f"{task}{processes}.safetensors") for processes in (1, 2))
        assert close(one.state_dict(), two.state_dict())
        names = [[line.split("\t")[0] for line in outputs[n, task].stdout.splitlines()] for n in (1, 2)]
        assert names[0] == names[1]
    assert outputs[2, "finetune"].stderr.count("epoch 1 of 2: loss") == 1
    assert not list(tmp_path.glob("*.checkpoint"))
    certifying = ("certify", "small.safetensors", "--eps", "0.1", "--method", "gloro", "--out", "r.jsonl")
    assert "next\tlipcert report r.jsonl" in run(2, *certifying).stdout
    assert "no device 'tpu9'" in run(2, *lowering, "--device", "tpu9", code=2).stderr


if __name__ == "__main__":
    work(int(sys.argv[1]), Path(sys.argv[2]))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_freed_memory_is_used_again():
    code = """
import resource, sys, torch
from lipcert.numerics import keep_freed
if sys.argv[1] == "keep":
    keep_freed()
for _ in range(20):
    torch.ones(2**24)  # 64 MiB
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""

    def faults(argument):
        command = [sys.executable, "-c", code, argument]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    mapped_anew, kept = faults("no"), faults("keep")
    assert mapped_anew - kept > 5 * 2**26 / os.sysconf("SC_PAGE_SIZE")  # five tensors of twenty, at the least


def test_warnings_of_workers_are_not_printed(capfd):
    """The parent does the same work: torch's warnings about speed, which commands leave out, came from workers."""
    with worker_pool(1) as pool:
        pool.submit(warnings.warn, "There is a performance drop").result()
    assert capfd.readouterr().err == ""


def test_workers_end_when_their_parent_is_killed(tmp_path):
    script = """
        import os, time
        from lipcert.workers import worker_pool
        with worker_pool(1) as pool:
            print(pool.submit(os.getpid).result(), flush=True)
            time.sleep(1e6)
    """
    words = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        parent.kill()
    for _ in range(600):
        try:
            os.kill(worker, 0)
            ended = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0] == "Z"  # nobody waits for it
        except OSError:
            ended = True
        if ended:
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker lives on")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interruption_in_a_callback_is_not_lost(name):
    """Python drops exceptions in callbacks of weak references, of which tracing a network has thousands."""
    script = """
        import signal, sys, time, weakref
        from lipcert.cli import _models, main

        def models():
            one = set()
            callback = weakref.ref(one, lambda _: signal.raise_signal(signal.NAME))
            del one
            for _ in range(600):
                time.sleep(0.1)

        _models.models = models
        sys.argv = ["lipcert", "models"]
        main()
    """
    words = [sys.executable, "-c", textwrap.dedent(script).replace("NAME", name)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "lipcert: interrupted\n")


def test_an_interruption_that_comes_while_it_is_made_again_is_not_lost(monkeypatch):
    started = []

    def start():
        started.append(len(started))
        if len(started) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(_errors, "threading", SimpleNamespace(Timer=lambda *_: SimpleNamespace(start=start)))
    _errors.again_if_lost(SimpleNamespace(exc_type=KeyboardInterrupt))
    assert started == [0, 1]


@pytest.mark.slow
def test_finetune_is_interrupted_at_any_moment_and_goes_on(tmp_path, monkeypatch):
    """Fifty times, within two epochs of the one in which the signal comes."""
    monkeypatch.chdir(tmp_path)
    for i, label in enumerate(12 * "ab"):
        Path("images", label).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (10 * i,) * 3).save(Path("images", label, f"{i}.png"))
    lipcert.save(vit(), "small.safetensors")
    script = """
        import os, random, signal, sys, time
        from lipcert.cli import _finetuning, main

        sys.argv = ["lipcert", "finetune", "small.safetensors", "--data", "images", "--epochs", "100000"]
        sys.argv += ["--loss", "emma", "--lr", "1e-6", "--batch-size", "8", "--validate", "8", "--quiet"]
        sys.argv += ["--classes", "classes.txt"]
        last = 0
        for moment in range(50):
            reading, writing = os.pipe()
            if not (child := os.fork()):
                os.close(reading)
                _finetuning._say_epoch = lambda epoch, _: os.write(writing, b"%6d" % epoch.number)
                main()
            os.close(writing)
            before = int(os.read(reading, 6))
            assert before >= last, "it did not go on"
            started = time.monotonic()
            last = int(os.read(reading, 6))
            time.sleep(random.Random(moment).random() * (time.monotonic() - started))
            os.kill(child, signal.SIGINT)
            for _ in range(3):
                if not (said := os.read(reading, 6)):
                    break
                last = int(said)
            else:
                os.kill(child, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code == 130, (moment, code)
            os.close(reading)
    """
    Path("classes.txt").write_text("\n".join("abcdefghij"))
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
