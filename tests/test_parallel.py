"""Long runs: killed, divided, short of memory; the rows are always those of one run that nothing disturbed."""

import contextlib
import itertools
import json
import multiprocessing
import os
import pickle
import random
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import facts, read_summary, run, timeless
from torch import nn

import lipcert
from lipcert.certifier import Certifier, _certifier, _global
from lipcert.cli import _certify, _parse
from lipcert.errors import BrokenCertificate, InputError
from lipcert.inputs.data import Batch, open_images
from lipcert.inputs.loading import load
from lipcert.inputs.processes import Processes
from lipcert.numerics import is_out_of_memory, memory_left
from lipcert.results import _parallel
from lipcert.results.progress import Remaining
from lipcert.workers import default_workers, worker_pool

EPS = "36/255"
GLORO = ["--eps", EPS, "--method", "gloro", "--limit", "60"]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_rows_do_not_depend_on_the_number_of_workers(monkeypatch):
    """To the last byte, whether this process certifies a block or a worker."""
    served = []

    class Patient:
        """Waits for every task, so that the worker certifies all blocks but the first."""

        def __init__(self, pool):
            self.pool = pool

        def submit(self, *task):
            future = self.pool.submit(*task)
            served.append(future.result(600))
            return future

    @contextlib.contextmanager
    def patient(*arguments):
        with worker_pool(*arguments) as pool:
            yield Patient(pool)

    monkeypatch.setattr("lipcert.workers.worker_pool", patient)
    monkeypatch.setattr(_parallel, "_WORTH", 0.0)
    for workers in ("1", "2"):
        command = ["certify", "--eps", "36/255", "--limit", "5", "--workers", workers, "--out", f"{workers}.jsonl"]
        run(*command)
    assert len(served) > 2
    one, two = timeless("1.jsonl"), timeless("2.jsonl")
    assert json.dumps(one) == json.dumps(two)
    assert any(row["method"] == "anchored" for row in two)


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("staged", [], 1),
        ("staged", ["--limit", "19"], 0),
        ("staged", ["--workers", "1"], 0),
        ("gloro", [], 0),
    ],
)
def test_a_worker_starts_while_torch_is_imported(method, options, expected, monkeypatch):
    started = []
    monkeypatch.setattr(_certify, "default_workers", lambda: 2)
    monkeypatch.setattr(_certify, "workers_ahead", lambda count: started.append(count) or contextlib.nullcontext([]))
    monkeypatch.setattr(_certify, "start", lambda *_, **__: sys.exit(3))
    run("certify", "--eps", "0.1", "--method", method, *options, code=3)
    assert started == [expected]


def test_workers_start_without_torch():
    script = """
        import sys
        from lipcert.workers import workers_ahead
        with workers_ahead(1) as (pool,):
            assert "torch" not in sys.modules
            print(pool.submit(eval, "'torch' in __import__('sys').modules").result())
    """
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert found.stdout == "True\n"


@pytest.mark.parametrize("obstacle", ["daemonic", "semaphores"])  # as under Celery and in AWS Lambda
def test_where_no_process_can_be_started_there_are_no_workers(obstacle, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4), raising=False)
    assert default_workers() > 1
    if obstacle == "daemonic":
        monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    else:
        monkeypatch.setattr(multiprocessing, "Lock", lambda: Path("missing").read_bytes())  # an OSError
    assert default_workers() == 0
    with pytest.raises(InputError, match=f"{obstacle}.*; use --workers 0"), worker_pool(2):
        pass


@pytest.mark.parametrize("seconds", [0.0, 1e6], ids=["workers start after a batch", "workers start at once"])
def test_whoever_is_free_takes_a_batch_and_they_come_back_in_order(seconds, monkeypatch):
    """An error of reading images, which may occur in a thread of the pool, comes after the batches before it."""

    def read(end):
        for number in range(40):
            if number == end:
                raise InputError("not an image")
            yield Batch((number,), torch.zeros(1, 1), None)

    def certified(where):
        time.sleep(0.02)
        return where, _parallel.Seconds(0.02, 0.02)

    monkeypatch.setattr("lipcert.workers.worker_pool", lambda count, *_: ThreadPoolExecutor(count))
    monkeypatch.setattr(_parallel, "_WORTH", 0.02 * 30 / 4)
    monkeypatch.setattr(_parallel, "_identity", lambda *_: ())
    monkeypatch.setattr(_parallel, "_make", lambda given: ())
    monkeypatch.setattr(_parallel, "_timed", lambda *_: certified("here"))
    monkeypatch.setattr(_parallel, "_certify", lambda given: pickle.dumps(certified("there")))
    certifier = SimpleNamespace(model=None, settings=None, methods={"anchored": SimpleNamespace(seconds=seconds)})
    found = [*_parallel.certified(certifier, read(None), 3, 40)]
    assert [batch.indices[0] for batch, *_ in found] == [*range(40)]
    assert {where for _, where, _ in found} == {"here", "there"}
    indices = []
    with pytest.raises(InputError, match="not an image"):
        indices.extend(batch.indices[0] for batch, *_ in _parallel.certified(certifier, read(20), 3, 40))
    assert indices == [*range(20)]


def test_a_worker_with_another_network_serves_nothing():
    shifted = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    plain = lipcert.load(shifted, mean=(0.0,), std=(1.0,), input_size=(1, 2, 2))
    before = _parallel._identity(Certifier(plain, 0.1, "anchored"))
    assert before == _parallel._identity(Certifier(plain, 0.1, "anchored"))
    with torch.no_grad():
        shifted[1].bias += 1
    assert before != _parallel._identity(Certifier(plain, 0.1, "anchored"))


def test_an_attack_that_contradicts_a_worker_names_the_image():
    batch = Batch((5, 7), torch.zeros(2, 3, 2, 2), None)
    future = Future()
    future.set_result(pickle.dumps({"position": 1, "distance": 0.1, "radius": 0.2, "method": "gloro"}))
    with pytest.raises(BrokenCertificate, match="image 7 of the data"):
        _parallel._received(future, batch)


def test_blocks_are_the_same_in_every_run():
    """Whatever is done and however many parts there are; small at both ends, and none above a sixth of the images."""
    model = load(None)
    images = open_images(None, model, limit=100)
    certifier = Certifier(model, 0.1, "gloro")
    certifier.together = 32
    order = list(images.order)
    whole = [batch.indices for batch in Remaining(certifier, images)._blocks()]
    assert [len(block) for block in whole] == [1, 4, 16, 17, 17, 17, 14, 7, 4, 2, 1]
    assert [index for block in whole for index in block] == order
    for parts in (2, 5):
        for done in ((), order[:3], order[2:11], order):
            for part in range(parts):
                left = Remaining(certifier, images, done, part, parts)
                blocks = [batch.indices for batch in left._blocks()]
                assert blocks == [block for block in whole[part::parts] if not {*done}.issuperset(block)]
                assert left.length == sum(index not in done for block in blocks for index in block)


@pytest.mark.parametrize(("count", "parts", "least"), [(12, 2, 5), (12, 5, 1), (100, 4, 17), (120, 3, 34)])
def test_parts_of_few_images_get_about_as_many(count, parts, least):
    model = load(None)
    certifier = Certifier(model, 0.1, "gloro")
    certifier.together = 32
    images = open_images(None, model, limit=count)
    shares = [Remaining(certifier, images, part=part, parts=parts).length for part in range(parts)]
    assert sum(shares) == min(count, images.total)
    assert min(shares) >= least


def test_a_run_within_a_time_ends_after_a_block_and_continues():
    """A block is certified as a whole, and every start certifies one."""
    command = ["certify", *GLORO, "--out", "r.jsonl"]
    run(*command)
    whole, reached = timeless(), 0
    Path("r.jsonl").unlink()
    for _ in range(len(whole)):
        stopped = run(*command, "--time-budget", "0.001s")
        assert reached < len(timeless())
        reached = len(timeless())
        if reached == len(whole):
            break
        assert re.search(rf"after {reached} of 60 images, as the next \d+, certified together", stopped.stderr)
        assert "; rerun the command to continue; a larger --time-budget reaches more" in stopped.stderr
    assert timeless() == whole


def test_shards_are_put_together(monkeypatch):
    run("certify", *GLORO, "--out", "whole.jsonl")
    for part, following in ((2, " --shard 3/3"), (1, " --shard 2/3"), (3, "")):
        words = ("certify", *GLORO, "--out", "r.jsonl")
        monkeypatch.setattr(sys, "argv", ["lipcert", *words, "--shard", f"{part}/3"])
        shard = run(*words, "--shard", f"{part}/3")
        assert facts(shard.stdout)["next"] == f"lipcert {shlex.join(words)}{following}"
        assert f"r.shard-{part}-of-3.jsonl" in shard.stdout
        assert not Path("r.jsonl").exists()
    result = run("certify", *GLORO, "--out", "r.jsonl")
    assert "continuing after 60 images" in result.stderr
    assert timeless() == timeless("whole.jsonl")
    assert read_summary()["counts"]["images"] == 60


def test_what_shards_have_left_out_is_added():
    run("certify", *GLORO, "--out", "whole.jsonl")
    run("certify", *GLORO, "--out", "r.jsonl", "--shard", "2/2")
    run("certify", *GLORO, "--out", "r.jsonl")
    found, whole = (sorted(timeless(path), key=lambda row: row["index"]) for path in ("r.jsonl", "whole.jsonl"))
    assert found == whole


def test_shards_of_another_run_are_refused():
    run("certify", *GLORO, "--out", "r.jsonl", "--shard", "1/2")
    other = run("certify", "--eps", "0.5", *GLORO[2:], "--out", "r.jsonl", code=2)
    assert other.stderr.endswith("give another --out\n")
    assert "r.shard-1-of-2.jsonl holds results of a run with another eps" in other.stderr


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2", "1/2/3"])
def test_what_is_no_shard(text):
    with pytest.raises(InputError, match="2/5"):
        _parse.parse_shard(text)
    assert "--out" in run("certify", *GLORO, "--shard", "1/2", code=2).stderr
    assert (
        "such as 2/5 (they count from 1)" in run("certify", *GLORO, "--out", "r.jsonl", "--shard", text, code=2).stderr
    )


def killed(start, path, kills):
    """Starts a run and kills it at random moments; ``start`` gives the process id."""
    for seed in range(kills):
        before = path.read_bytes() if path.exists() else b""
        wanted = before.count(b"\n") + random.Random(seed).randint(0, 3)
        process = start()
        ended = 0
        while not ended and not (path.exists() and path.read_bytes().count(b"\n") > wanted):
            time.sleep(0.002)
            ended = os.waitpid(process, os.WNOHANG)[0]
        assert not ended, "the run came to its end before it was killed"
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        after = path.read_bytes()
        assert after.startswith(before[: before.rfind(b"\n") + 1])
        assert after.count(b"\n") > wanted


def test_a_killed_run_loses_nothing_that_was_written(tmp_path, monkeypatch):
    """Killed twice; the rows are those of a run that nothing disturbed."""
    settings = ["certify", "--eps", EPS, "--method", "gloro", "--limit", "12"]
    monkeypatch.setitem(_certifier._TOGETHER, "cpu", 2)
    run(*settings, "--out", "whole.jsonl")
    certified, calls = Certifier.run, itertools.count()

    def waits(*given):
        time.sleep(0.3 if next(calls) < 3 else 1e6)  # the fourth batch is never certified
        return certified(*given)

    def start():
        process = os.fork()
        if not process:
            try:
                run(*settings, "--out", "r.jsonl")
            finally:
                os._exit(0)
        return process

    with monkeypatch.context() as patch:
        patch.setattr(Certifier, "run", waits)
        killed(start, tmp_path / "r.jsonl", kills=2)
    run(*settings, "--out", "r.jsonl")
    assert timeless() == timeless("whole.jsonl")
    assert read_summary()["complete"] is True


@pytest.mark.slow
def test_a_killed_command_goes_on(tmp_path):
    """The same with processes of their own and the strongest certificate."""
    settings = ["--eps", EPS, "--limit", "100"]
    run("certify", *settings, "--out", "whole.jsonl")
    command = [sys.executable, "-m", "lipcert", "certify", *settings, "--out", "r.jsonl"]

    def start():
        process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return process.pid

    killed(start, tmp_path / "r.jsonl", kills=2)
    run("certify", *settings, "--out", "r.jsonl")
    assert timeless() == timeless("whole.jsonl")


WORKING = """
import os, signal, sys, time
from lipcert.workers import worker_pool
from lipcert.results import progress

class Run:
    length = 2

    def __iter__(self):
        with worker_pool(1) as pool:
            pool.submit(os.getpid).result()
            forever = pool.submit(time.sleep, 1e6)
            print(os.getpid(), flush=True)
            yield {}
            forever.result()

def write(row):
    if sys.argv[1] == "writing":
        time.sleep(1e6)

try:
    progress._collect(Run(), write, None)
except KeyboardInterrupt as error:
    kept = error
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("at", ["writing", "waiting"])
def test_an_interrupted_run_ends_its_workers(at):
    """The signal reaches the parent alone, and the worker never ends by itself."""
    command = [sys.executable, "-c", WORKING, at]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline().strip() == str(process.pid)
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            # To its end, and that of the worker, which has the same pipe.
            assert process.communicate(timeout=120)[0] == "interrupted\n"
        finally:
            process.kill()
    assert process.returncode == 0


def torchrun(*arguments, **ways):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "lipcert", "certify"]
    return subprocess.run([*command, *arguments], env=environment(), capture_output=True, text=True, **ways)


@pytest.mark.slow
def test_two_processes_find_what_one_finds(tmp_path):
    settings = ["--eps", EPS, "--limit", "40"]
    run("certify", *settings, "--out", "one.jsonl")
    result = torchrun(*settings, "--out", "two.jsonl", "--json")
    assert result.returncode == 0, result.stderr
    assert timeless("two.jsonl") == timeless("one.jsonl")
    assert json.loads(result.stdout)["counts"]["images"] == 40
    assert sorted(path.name for path in tmp_path.glob("two*")) == ["two.jsonl", "two.summary.json"]

    # Again, from what a killed run has left: some of the rows, in the file of one of three processes.
    run("certify", *settings, "--out", "three.jsonl", "--shard", "2/3")
    kept = len(timeless("three.shard-2-of-3.jsonl"))
    assert 0 < kept < 40
    result = torchrun(*settings, "--out", "three.jsonl", "--fail-under", "1")
    assert f"continuing after {kept} images" in result.stderr
    assert result.returncode == 1
    assert "the certified accuracy at 36/255 is" in result.stderr
    assert timeless("three.jsonl") == timeless("one.jsonl")


def test_processes_are_those_of_torchrun(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert Processes.of_torchrun() == Processes(0, 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert Processes.of_torchrun() == Processes(1, 3)
    assert not Processes(1, 3).first
    assert Processes().gather("x") == ["x"]


def small():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.GELU(), nn.Linear(8, 3))
    return lipcert.load(net, mean=(0.5,) * 3, std=(0.5,) * 3, input_size=(3, 2, 2))


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    ),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8000000000 bytes."),
    MemoryError(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_batches_are_halved_where_memory_ends(error, monkeypatch):
    images = torch.rand(11, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(11) % 3
    expected = Certifier(small(), 0.01, "gloro").run(images, labels)
    certifier = Certifier(small(), 0.01, "gloro")
    honest, sizes = certifier.methods["gloro"].radius, []

    def short_of_memory(x, *rest):
        sizes.append(len(x))
        if len(x) > 3:
            raise error
        return honest(x, *rest)

    certifier.methods["gloro"].radius = short_of_memory
    found = certifier.run(images, labels)
    assert torch.allclose(found.radius, expected.radius, rtol=1e-9)
    assert torch.equal(found.predicted, expected.predicted)
    assert torch.equal(found.labels, labels)
    assert sizes == [11, 6, 3, 3, 5, 3, 2]
    assert certifier.together <= 3


@pytest.mark.parametrize("method", ["gloro", "anchored"])
def test_a_budget_of_memory_chooses_the_batch(method):
    each = Certifier(small(), 0.1, method).methods[method].memory
    assert [Certifier(small(), 0.1, method, memory=count * each).together for count in (0.5, 1, 5, 100)] == [
        1,
        1,
        4,
        64 if method == "gloro" else 32,
    ]


@pytest.mark.parametrize("method", ["gloro", "lofast"])
def test_the_memory_of_an_image_is_about_what_is_stated(method):
    certifier = Certifier(lipcert.load(), 0.1, method)
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    certifier.run(images[:1])
    with torch.profiler.profile(profile_memory=True) as profile:
        certifier.run(images)
    peak = held = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert 0.1 < peak / (2 * certifier.methods[method].memory) < 3


def test_one_image_that_memory_does_not_hold():
    certifier = Certifier(small(), 0.01, "gloro")

    def never(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried")

    certifier.methods["gloro"].radius = never
    with pytest.raises(InputError, match="memory does not hold"):
        certifier.run(torch.rand(4, 3, 2, 2))


def test_other_errors_are_not_taken_for_memory():
    certifier = Certifier(small(), 0.01, "gloro")
    calls = []

    def broken(*_):
        calls.append(1)
        raise RuntimeError("shapes cannot be multiplied")

    certifier.methods["gloro"].radius = broken
    with pytest.raises(InputError, match="multiplied"):
        certifier.run(torch.rand(4, 3, 2, 2))
    assert calls == [1]


def test_a_real_allocation_that_fails_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_how_many_images_go_together(monkeypatch):
    assert memory_left(torch.device("cpu")) > 2**20
    assert Certifier(small(), 0.1, "anchored").together == 32
    assert Certifier(small(), 0.1, "gloro").together == 256
    monkeypatch.setattr(_certifier, "memory_left", lambda _: 4e4)
    few = Certifier(small(), 0.1, "gloro").together
    assert few in (1, 2, 4)
    monkeypatch.setattr(_certifier, "memory_left", lambda _: 0.0)
    assert Certifier(small(), 0.1, "gloro").together == 1
    monkeypatch.setattr(_certifier, "memory_left", lambda _: float("inf"))
    monkeypatch.setattr(_certifier, "_WORK_TOGETHER", 1.0)
    assert Certifier(small(), 0.1, "anchored").together == 32  # calls take longer than their arithmetic
    monkeypatch.setattr(_certifier, "_WORK_OF_A_CALL", 1.0)
    assert Certifier(small(), 0.1, "anchored").together == 1
    assert Certifier(small(), 0.1, "gloro").together == 1
    assert Certifier(small(), 0.1, "gloro", attack="pgd").together == 1
    monkeypatch.undo()
    monkeypatch.setattr(_certifier, "_WORK_OF_A_THREAD", 1.0)
    assert Certifier(small(), 0.1, "anchored").together == 8  # arithmetic takes longer than calls


def test_small_operations_get_one_thread(monkeypatch):
    seen, before = [], torch.get_num_threads()
    certifier = Certifier(small(), 0.01, "gloro")
    monkeypatch.setattr(certifier, "_run", lambda *_: seen.append(torch.get_num_threads()))
    try:
        torch.set_num_threads(2)
        certifier.run(torch.rand(4, 3, 2, 2))
        monkeypatch.setattr(_certifier, "_WORK_OF_A_THREAD", 1e-3)
        certifier.run(torch.rand(4, 3, 2, 2))
        certifier.methods.clear()
        monkeypatch.undo()
        with pytest.raises(InputError, match="gloro cannot handle"):
            certifier.run(torch.rand(4, 3, 2, 2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 2]


def test_a_false_certificate_stops_the_command(monkeypatch, short_attack):
    honest = _global.radii
    monkeypatch.setattr(_global, "radii", lambda gaps, constants: 1e6 * honest(gaps, constants))
    result = run("certify", *GLORO, "--attack", "--out", "r.jsonl", code=3)
    first = next(iter(open_images(None, load(None), limit=60).batches(8)))
    named = [f"A CERTIFICATE IS FALSE: image {index} of the data: an attack changes" for index in first.indices]
    assert any(text in result.stderr for text in named)
    assert "please report this" in result.stderr
    assert read_summary()["complete"] is False
