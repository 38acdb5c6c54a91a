"""The Dockerfile, as far as it goes without a daemon: its sources, its steps in an empty root, its entry point."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tools.harness import ROOT

TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def instructions() -> list[tuple[str, str]]:
    """Keyword and rest of each instruction, continuation lines joined."""
    text = re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1].strip()) for line in text.splitlines() if line.strip()]


def of(keyword: str) -> list[str]:
    return [rest for found, rest in instructions() if found == keyword]


def test_every_copied_source_exists_and_is_tracked() -> None:
    """decisions 31: a COPY of what is not in the checkout fails only on somebody else's machine."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    for rest in of("COPY"):
        *sources, _target = rest.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert not tracked or any(name == source or name.startswith(source + "/") for name in tracked), source


def test_it_installs_what_make_venv_installs() -> None:
    """One list of versions: the same torch, first and alone, then the package."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (torch,) = re.findall(r"pip install --quiet (torch==\S+)$", makefile, re.MULTILINE)
    pips = [rest for rest in of("RUN") if " pip install " in rest]

    assert pips == [f"python -m pip install --quiet {torch}", "python -m pip install --quiet ."]
    low, high = re.findall(r"torch>=([\d.]+),<([\d.]+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[0]

    def version(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split("."))

    assert version(low) <= version(torch.removeprefix("torch==")) < version(high)


def test_it_runs_unprivileged_and_is_probed() -> None:
    """No root in the container, and the orchestrator learns that a rank hangs."""
    order = [keyword for keyword, _ in instructions()]
    assert of("USER") == ["dsparkd"]
    assert order.index("USER") < order.index("ENTRYPOINT")
    assert "RUN" not in order[order.index("USER") :], "what runs later needs no root"
    (probe,) = of("HEALTHCHECK")
    assert "/health_scheduler" in probe
    assert f":{tomllib.loads((ROOT / 'conf' / 'prod.toml').read_text())['server']['port']}/" in probe
    assert of("STOPSIGNAL") == ["SIGTERM"]


def test_the_python_of_the_image_is_supported() -> None:
    """requires-python and the base image agree."""
    (image,) = of("FROM")
    match = re.fullmatch(r"python:(3\.\d+)-slim", image)
    assert match is not None
    assert match[1] in ("3.11", "3.12")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty root with what the COPY instructions put there, and the package installed from it alone."""
    root = tmp_path_factory.mktemp("root")
    directory = ""
    for keyword, rest in instructions():
        if keyword == "WORKDIR":
            directory = rest
            (root / rest.lstrip("/")).mkdir(parents=True)
        elif keyword == "COPY":
            *sources, target = rest.split()
            place = root / target.lstrip("/") if target.startswith("/") else root / directory.lstrip("/") / target
            for source in sources:
                copy_source(ROOT / source, place)
    return root


def copy_source(source: Path, place: Path) -> None:
    """Copy as COPY does, without what git ignores."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "_*.c", "*.egg-info")
    if source.is_dir():
        shutil.copytree(source, place, ignore=ignored, dirs_exist_ok=True)
    elif place.suffix:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, place)
    else:
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, place / source.name)


def test_what_is_copied_is_enough_to_build_the_package(image: Path, tmp_path: Path) -> None:
    """`pip install .` in the image sees these files alone: C sources, metadata and license must be among them."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(tmp_path),
            ".",
        ],
        cwd=image / "opt" / "dsparkd",
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PIP_NO_INDEX": "1"},
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry = next(name for name in names if name.endswith("entry_points.txt"))
        assert "dsparkd = dsparkd.__main__:main" in archive.read(entry).decode()
    assert any(name.endswith(".so") for name in names), "the C parts are built"
    assert "dsparkd/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    packaged = {name for name in names if name.endswith(".py") and name.startswith("dsparkd/")}
    assert packaged == {str(path.relative_to(ROOT)) for path in (ROOT / "dsparkd").rglob("*.py")}


def test_the_entry_point_runs_from_what_was_copied(image: Path) -> None:
    """ENTRYPOINT and CMD, with the console script replaced by its module: the shipped configuration is read."""
    assert of("ENTRYPOINT") == ['["dsparkd"]']
    assert of("CMD")[-1] == '["--config", "/etc/dsparkd/dsparkd.toml"]'
    config = image / "etc" / "dsparkd" / "dsparkd.toml"
    assert config.exists()

    done = subprocess.run(
        [sys.executable, "-m", "dsparkd", "check-config", "--config", str(config)],
        cwd=image / "opt" / "dsparkd",
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(image / "opt" / "dsparkd"), "CUDA_VISIBLE_DEVICES": ""},
    )

    assert done.returncode == 78, "a machine without GPUs"
    assert done.stderr.startswith("dsparkd: engine.device = 'cuda'")
