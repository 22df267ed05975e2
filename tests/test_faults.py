"""Faults around a run: disk, memory, signals; what was written stays valid, and the same command continues."""

import errno
import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from commands import read_summary, run, timeless
from typer.testing import CliRunner

from lipcert.certifier import Certifier, _certifier
from lipcert.cli import app
from lipcert.errors import InputError
from lipcert.report import read_runs
from lipcert.results import ResultFile, progress

certify = partial(run, "certify", "--eps", "36/255", "--method", "gloro", "--limit", "24")
certify_again = partial(certify, "--out", "r.jsonl")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Rows of a run that nothing disturbs."""
    path = tmp_path_factory.mktemp("undisturbed") / "whole.jsonl"
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(_certifier._TOGETHER, "cpu", 4)
        certify("--out", path)
    return timeless(path)


@pytest.fixture
def whole(undisturbed, monkeypatch):
    """The same; blocks are small, so that there are many moments to disturb one."""
    monkeypatch.setitem(_certifier._TOGETHER, "cpu", 4)
    return undisturbed


def goes_on(whole) -> None:
    """What there is can be read, and the same command adds what is missing."""
    before = timeless()
    assert before == whole[: len(before)]
    if before:
        assert len(read_runs(["r.jsonl"])[0]) == len(before)
    certify_again()
    assert timeless() == whole
    assert read_summary()["complete"] is True


@pytest.mark.thinned(2)
@pytest.mark.parametrize("space", [0, 1, 700, 2000])
def test_a_disk_that_fills_up(whole, monkeypatch, space):
    write, left = os.write, [space]

    def limited(handle, content):
        if os.fstat(handle).st_ino != Path("r.jsonl").stat().st_ino:
            return write(handle, content)
        taken = write(handle, content[: left[0]])
        left[0] -= taken
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return taken

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", limited)
        result = certify_again(code=2)
    assert "No space left" in result.stderr
    assert "r.jsonl" in result.stderr
    summary = read_summary()
    assert summary["complete"] is False
    whole_rows = Path("r.jsonl").read_bytes().count(b"\n")
    content = Path("r.jsonl").read_bytes()
    Path("r.jsonl").write_bytes(content)  # the half-written row is still there for the next run to cut off
    assert summary["counts"]["images"] == whole_rows
    certify_again()
    assert timeless() == whole


@pytest.mark.parametrize("device", ["/dev/full", "/dev/zero", "/dev/null"])
def test_devices_are_no_result_files(tmp_path, device):
    """Reading what is there would not end."""
    if not os.path.exists(device):
        pytest.skip(f"there is no {device} here")
    (tmp_path / "r.jsonl").symlink_to(device)
    with pytest.raises(InputError, match="cannot hold the rows"):
        ResultFile(tmp_path / "r.jsonl", {"eps": 0.1})


def test_a_summary_that_the_disk_does_not_take(whole, monkeypatch):
    """The rows stay, and so does the summary before."""
    replaced = os.replace
    calls = []

    def full(source, target):
        calls.append(target)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replaced(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        result = certify_again(code=2)
    assert "No space left" in result.stderr
    assert read_summary()["complete"] is False
    assert not list(Path().glob("*.partial"))
    goes_on(whole)


@pytest.mark.parametrize("place", ["folder", "file"])
def test_a_place_that_cannot_be_written(monkeypatch, place):
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    opened = os.open

    def refuse(path, *arguments, **named):
        if place == "folder" or Path(path).name == "r.jsonl":
            raise denied
        return opened(path, *arguments, **named)

    with monkeypatch.context() as patched:  # the superuser may write anywhere, so modes would prove nothing
        patched.setattr(*((os, "open") if place == "file" else (Path, "write_text")), refuse)
        result = certify_again(code=2)
    assert f"cannot write r.{'jsonl' if place == 'file' else 'summary.json'}" in result.stderr
    assert "Permission denied" in result.stderr


@pytest.mark.thinned(3)
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_user_who_interrupts(whole, monkeypatch, after):
    honest, calls = Certifier.run, []

    def interrupted(self, *arguments):
        calls.append(1)
        if len(calls) > after:
            raise KeyboardInterrupt
        return honest(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Certifier, "run", interrupted)
        result = certify_again(code=130)
    assert f"keeps {(0, 1, 5, 9)[after]} rows" in result.stderr
    assert read_summary()["complete"] is False
    goes_on(whole)


def test_a_user_who_interrupts_while_a_row_is_written(whole, monkeypatch):
    honest = progress.rows

    def interrupted(*arguments):
        found = honest(*arguments)
        if len(calls := [*Path("r.jsonl").read_bytes().splitlines()]) >= 8:
            raise KeyboardInterrupt(len(calls))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(progress, "rows", interrupted)
        certify_again(code=130)
    assert len(timeless()) >= 8
    goes_on(whole)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")])
def test_memory_that_ends_within_a_run(whole, monkeypatch, error):
    """Blocks are halved, and single images that do not fit end the run with what there is."""
    honest = Certifier._run
    for most in (1, 0):
        sizes = []

        def short(self, images, labels, most=most, sizes=sizes):
            sizes.append(len(images))
            if len(images) > most and len(sizes) > 2:
                raise error
            return honest(self, images, labels)

        with monkeypatch.context() as patched:
            patched.setattr(Certifier, "_run", short)
            result = certify_again(code=0 if most else 2)
        if most:
            found = timeless()
            assert [row["index"] for row in found] == [row["index"] for row in whole]
            assert [row["certified"] for row in found] == [row["certified"] for row in whole]
            Path("r.jsonl").unlink()
        else:
            assert "memory does not hold" in result.stderr
            goes_on(whole)


def test_an_error_that_nobody_expected(whole, monkeypatch):
    """Also a defect leaves valid rows behind."""
    honest, calls = Certifier.run, []

    def broken(self, *arguments):
        calls.append(1)
        if len(calls) > 2:
            raise ZeroDivisionError("a defect")
        return honest(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Certifier, "run", broken)
        assert isinstance(CliRunner().invoke(app, [*certify_again.args]).exception, ZeroDivisionError)
    assert len(timeless()) == 5
    goes_on(whole)


def test_what_the_system_refuses_anywhere_is_one_line(whole, monkeypatch):
    """As in a container whose files are all read-only, where torch finds no folder for temporary ones."""

    def refuse(*_):
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(Certifier, "run", refuse)
    result = certify_again(code=2)
    assert "lipcert: [Errno 2] No usable temporary directory" in result.stderr


@pytest.mark.slow
def test_fifty_kills_at_random_moments(whole):
    """Runs killed wherever they are, each going on where the last one was; the rows are those of one run."""
    kills = 0
    random_ = random.Random(0)
    while kills < 50:
        Path("r.jsonl").unlink(missing_ok=True)
        Path("r.summary.json").unlink(missing_ok=True)
        for _ in range(60):
            started = time.monotonic()
            process = os.fork()
            if not process:
                try:
                    certify_again()
                finally:
                    os._exit(0)
            moment = started + random_.uniform(0, 2.0 if kills % 5 == 0 else 0.6)
            ended = 0
            while not ended and time.monotonic() < moment:
                time.sleep(0.002)
                ended = os.waitpid(process, os.WNOHANG)[0]
            if ended:
                break
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            kills += 1
        certify_again()
        assert timeless() == whole
    assert not [path for path in Path().glob("r.*") if path.name not in ("r.jsonl", "r.summary.json")]
