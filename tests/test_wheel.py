"""What is installed is what is in the tree: every module and data file, and no second copy by a root link."""

import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKS = {"sim", "planner", "models", "executor", "traces"}


def expected_files() -> set[str]:
    files = (path for path in (ROOT / "bidirl").rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    folder = tmp_path_factory.mktemp("wheel")
    [artifact] = builder.build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(artifact) as archive:
        return set(archive.namelist())


def test_wheel_holds_every_module_and_data_file(wheel: set[str]) -> None:
    packed = {name for name in wheel if ".dist-info/" not in name}
    assert packed == expected_files()


def test_wheel_holds_no_link(wheel: set[str]) -> None:
    assert {name.partition("/")[0] for name in wheel} & LINKS == set()


def test_wheel_declares_the_command_and_the_licence(wheel: set[str]) -> None:
    assert any(name.endswith("entry_points.txt") for name in wheel)
    assert any(name.endswith("licenses/LICENSE") for name in wheel)


def test_source_archive_holds_no_link(tmp_path: Path) -> None:
    builder = pytest.importorskip("hatchling.builders.sdist").SdistBuilder(str(ROOT))
    [artifact] = builder.build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(artifact) as archive:
        parts = [name.split("/") for name in archive.getnames()]
    assert {part[1] for part in parts if len(part) > 1} & LINKS == set()
    assert not any(".venv" in part for part in parts)
