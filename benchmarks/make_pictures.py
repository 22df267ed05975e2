"""The pictures of the documentation from real runs on the bundled model: a terminal, and a report's page in a browser.

python -m benchmarks.make_pictures [--browser chromium]
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
CERTIFY = "lipcert certify --eps 36/255 --attack --out digits.jsonl"
OTHER = "lipcert certify --eps 36/255 --method gloro --out gloro.jsonl"
REPORT = "lipcert report digits.jsonl gloro.jsonl --html report.html"
_COLUMNS = 100


def output(command: str, folder: Path) -> str:
    """What a command prints on a terminal, with its colours, without lines that it writes over and the time it took."""
    main, other = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(_COLUMNS), "LINES": "60", "TERM": "xterm-256color"}
    program = [sys.executable, "-c", "from lipcert.cli import main; main()", *command.split()[1:]]
    with subprocess.Popen(program, cwd=folder, env=environment, stdout=other, stderr=other, stdin=other) as running:
        os.close(other)
        seen = io.BytesIO()
        while True:
            try:
                part = os.read(main, 65536)
            except OSError:  # the end, on Linux
                break
            if not part:
                break
            seen.write(part)
    os.close(main)
    if running.returncode:
        raise SystemExit(f"{command} failed:\n{seen.getvalue().decode()}")
    text = re.sub(r"\x1b\[(?![\d;]*m)[?\d;]*[A-Za-z]", "\r", seen.getvalue().decode())
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return "\n".join(line for line in lines if line and not re.search("[━⠀-⣿]|seconds  ", line))


def terminal(name: str, command: str, folder: Path) -> None:
    """A picture of a command and what it prints; text in an SVG file."""
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {command}", style="bold"))
    console.print(Text.from_ansi(output(command, folder)))
    console.print()  # or the last line would be clipped
    svg = console.export_svg(title="lipcert", unique_id=name)
    # The fonts would be loaded from elsewhere; those of the reader do.
    svg = re.sub(r"@font-face\s*{.*?}", "", svg, flags=re.S).replace("Fira Code", "ui-monospace")
    (PICTURES / f"{name}.svg").write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")


def page(browser: str, folder: Path) -> None:
    """The top of a report's page, light and dark."""
    for scheme, number in (("light", 1), ("dark", 0)):
        with tempfile.TemporaryDirectory() as profile:
            shot = Path(profile) / "shot.png"
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=900,1180"]
            options += [f"--user-data-dir={profile}", f"--blink-settings=preferredColorScheme={number}"]
            command = [browser, *options, f"--screenshot={shot}", (folder / "report.html").as_uri()]
            subprocess.run(command, check=True, capture_output=True, timeout=300)
            Image.open(shot).convert("RGB").quantize(48).save(PICTURES / f"report-{scheme}.png", optimize=True)


def main() -> None:
    """Runs the commands and draws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--browser", default=shutil.which("chromium") or "chromium")
    args = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        terminal("certify", CERTIFY, folder)
        output(OTHER, folder)
        output(REPORT, folder)
        page(args.browser, folder)


if __name__ == "__main__":
    main()
