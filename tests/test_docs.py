"""The documentation: it builds without a warning, and every block of code in it runs."""

import ast
import importlib
import json
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from commands import run, write_images
from safetensors.torch import save_file

import lipcert
from benchmarks import make_measurements
from lipcert.certifier._staged import CLASSES
from lipcert.results import read_run
from lipcert.settings import FACTS, add_method

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if "```" in path.read_text())
LONG = ("how-to/from-a-pretrained-checkpoint.md", "how-to/train-a-certifiable-network.md")


# The weights and the model arguments that the how-to pages speak of.
ARGUMENTS = {"img_size": 32, "patch_size": 16, "embed_dim": 24, "depth": 1, "num_classes": 3}
# Without labels of these languages a block is output, or nothing that a reader would run.
RUNNABLE = {"python", "sh"}


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and content of the fenced blocks of a page, in order."""
    return re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S)


@pytest.fixture
def workplace(tmp_path):
    """A folder with what the pages take for granted: weights, artifacts, images to train on and to certify."""
    torch.manual_seed(0)
    save_file(timm.create_model("vit_tiny_patch16_224", **ARGUMENTS).state_dict(), "weights.safetensors")
    for name in ("train", "val"):
        write_images(name, 12, 32)
    return tmp_path


def test_the_page_of_measurements_is_what_the_measurements_say() -> None:
    again = "run python -m benchmarks.make_measurements"
    assert make_measurements.PAGE.read_text() == make_measurements.page(), again
    drawn = make_measurements.shown(make_measurements.PICTURE.read_text())
    assert drawn == {name: [[*point] for point in line] for name, line in make_measurements.points().items()}, again
    assert make_measurements.shown(make_measurements.picture()) == drawn


def test_the_readme_runs(workplace) -> None:
    """Its Python, as it stands, on two images in place of eight."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    space = {}
    exec(compile(re.sub(r"\b8\b", "2", blocks[0]), "README.md", "exec"), space)
    assert len(space["result"].radius) == 2
    assert space["result"].certified.all()


def test_the_readme_shows_the_rows_that_are_printed(workplace) -> None:
    shown = re.search(r"^```text\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)[1]
    names = [re.split(r"  +", line)[0] for line in shown.splitlines() if "  " in line]
    printed = run("certify", "--eps", "36/255", "--limit", "1").stdout
    assert [line.partition("\t")[0] for line in printed.splitlines()] == [n for n in names if n != "not certified"]


@pytest.mark.slow
def test_the_notebook_runs(workplace, short_attack) -> None:
    """On two images in place of eight; nothing is installed. What a notebook shows are values of last lines."""
    pytest.importorskip("matplotlib").use("agg")
    shown = []
    space: dict[str, object] = {}
    for cell in json.loads((DOCS / "lipcert.ipynb").read_text())["cells"]:
        lines = re.sub(r"\b8\b", "2", "".join(cell["source"])).splitlines() if cell["cell_type"] == "code" else []
        for line in lines:
            if line.startswith("!"):
                run_shell(line[1:])
        code = "\n".join(line for line in lines if not line.startswith(("!", "%pip install")))
        body = ast.parse(code).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), "lipcert.ipynb", "exec"), space)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "lipcert.ipynb", "eval"), space)
            shown += [value._repr_html_()] if hasattr(value, "_repr_html_") else []
    assert ["of 2 certified at 36/255" in shown[0], "certified accuracy at 36/255" in shown[1]] == [True, True]


def save_artifacts() -> None:
    """Two models; not for every page, because a command without MODEL takes the newest one."""
    for name in ("model", "other"):
        model = lipcert.load("vit_tiny_patch16_224", checkpoint="weights.safetensors", **ARGUMENTS)
        lipcert.save(model, f"{name}.safetensors")


def reduced(words: list[str], images: int = 1) -> list[str]:
    """The command on few images and by the fastest method, so that a page takes seconds."""
    if "certify" not in words:
        return words
    few = [] if "--limit" in words else ["--limit", str(images)]
    return [*words, *few, *([] if "--method" in words else ["--method", "gloro"])]


def run_shell(line: str) -> None:
    words = shlex.split(line)
    if words[0] == "lipcert":
        run(*reduced(words[1:]))
    elif words[:2] == ["pip", "install"]:
        tomllib = pytest.importorskip("tomllib")  # from Python 3.11
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        wanted = re.findall(r"\[([\w,]+)\]", line)
        assert all(name in extras for group in wanted for name in group.split(",")), line
    else:
        assert words[0] == "torchrun", f"no test runs {line}"  # by a test of its own, below


@pytest.fixture
def own_methods():
    """Methods that are registered in the test are forgotten after it."""
    known = dict(FACTS)
    yield
    for name in FACTS.keys() - known:
        del FACTS[name], CLASSES[name]
    add_method()


@pytest.mark.thinned(4)
@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.slow] * (page in LONG)) for page in PAGES])
def test_every_block_runs(page, workplace, short_attack, own_methods):
    if page.endswith("many-machines.md"):
        save_artifacts()
    if page.endswith("a-diffusion-model-as-denoiser.md"):
        pytest.skip("tests/test_denoisers.py runs it, with or without diffusers")
    if page.endswith(("from-a-pretrained-checkpoint.md", "from-pip-to-predict.md")):
        save_file(timm.create_model("tf_efficientnet_lite0").state_dict(), "lite0.safetensors")
    space: dict[str, object] = {"__name__": "__main__"}
    if page.endswith("from-pip-to-predict.md"):
        space["images"] = torch.rand(0, 3, 224, 224)
    for language, content in blocks(page):
        assert language in RUNNABLE | {"text", "yaml"}, f"{page} has a block of the language {language!r}"
        if language == "python":
            exec(compile(content, page, "exec"), space)
        elif language == "sh":
            for line in content.replace("\\\n", " ").splitlines():
                run_shell(line)


def test_the_workflow_certifies_and_writes_a_badge(workplace) -> None:
    """Its own steps, on two images of the workplace; a second run continues the first."""
    yaml = pytest.importorskip("yaml")
    save_artifacts()
    steps = yaml.safe_load(blocks("how-to/continuous-integration.md")[0][1])["jobs"]["certify"]["steps"]
    lines = [step["run"] for step in steps if "run" in step]
    (certify,) = [line for line in lines if line.startswith("lipcert")]
    words = reduced(shlex.split(certify.replace("--limit 500", "--limit 2").replace("0.5", "0"))[1:])
    for _ in range(2):
        run(*words)
    run(*[word if word != "0" else "1" for word in words], code=1)
    (script,) = re.findall(r"<<'END'\n(.*?)^END$", lines[-1], re.M | re.S)
    exec(compile(script, "certify.yml", "exec"), {})
    assert json.loads(Path("badge.json").read_text())["label"] == "certified at 36/255"


def test_the_worked_example_prints_the_numbers_of_the_page(capsys) -> None:
    space: dict[str, object] = {}
    found = blocks("anchored.md")
    assert found
    for (language, content), (kind, expected) in zip(found[::2], found[1::2], strict=True):
        assert (language, kind) == ("python", "text")
        exec(compile(content, "anchored.md", "exec"), space)
        assert capsys.readouterr().out == expected


def test_a_certificate_of_ones_own(workplace, monkeypatch, own_methods) -> None:
    """As its page has it: half of gloro's radii, confirmed by verify; without the module it is unknown."""
    page = "how-to/add-a-certificate.md"
    Path("halved.py").write_text(blocks(page)[0][1])
    monkeypatch.syspath_prepend(".")
    asked = ["--eps", "36/255", "--limit", "4", "--method"]
    assert "there is no method 'halved'" in run("certify", *asked, "halved", code=2).stderr
    for method in ("gloro", "halved"):
        run("--import", "halved", "certify", *asked, method, "--out", f"{method}.jsonl")
    whole, half = (read_run(Path(f"{name}.jsonl")) for name in ("gloro", "halved"))
    assert half.methods == {"halved": 4}
    assert half.radii == pytest.approx(whole.radii / 2, rel=1e-6)
    run("--import", "halved", "verify", "bundled", "halved.jsonl")


@pytest.mark.slow
def test_torchrun_lines_run(workplace):
    lines = [line for page in PAGES for _, block in blocks(page) for line in block.splitlines() if "torchrun" in line]
    assert lines
    save_artifacts()
    for line in lines:
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        done = subprocess.run(
            reduced(shlex.split(line), 2), env={"PATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True
        )
        assert done.returncode == 0, done.stderr.decode()
    assert len(Path("job.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-I", "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "reference" / "lipcert.html").read_text()
    assert 'id="lipcert.certify"' in page
    text = re.sub(r"<details.*?</details>", "", page, flags=re.S)  # without the sources
    assert ":class:" not in text
    assert ":func:" not in text
    assert re.findall(r'(?:src|href)="(https?:[^"]+)"', page) == []
    assert "def certify(" in re.sub(r"<[^>]+>", "", page)  # the source
    commands = re.sub(r"<[^>]+>", "", (tmp_path / "site" / "reference" / "commands.html").read_text())
    for name, option in (("certify", "--eps"), ("finetune", "--loss"), ("report", "--card"), ("verify", "--sample")):
        assert option in commands.partition(f"lipcert {name} ")[2]


def test_what_is_public_is_in_the_reference():
    """Every package exports the names that the reference lists, and lists no others in ``__all__``."""
    text = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    named = set(re.findall(r"^::: (\S+)$", text, re.M))
    modules = {"attacks", "bounds", "errors", "report", "surgery", "__version__"}
    missing = {name for name in lipcert.__all__ if f"lipcert.{name}" not in named} - modules
    assert not missing
    for part in pkgutil.iter_modules(lipcert.__path__, "lipcert."):
        if part.ispkg:
            listed = {name.rpartition(".")[2] for name in named if name.rpartition(".")[0] == part.name}
            assert {*getattr(importlib.import_module(part.name), "__all__", ())} == listed, part.name
