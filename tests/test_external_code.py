"""An external generator: a function returns the samples, and is imported only if trusted."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from mobatlas import TrajectoryDataset, build_regions, load_model
from mobatlas.data.types import FIRST_POI
from mobatlas.generators import external
from mobatlas.regions.build import RegionsOptions
from tests.outcomes import refused, run
from tests.tiny import small_city
from tests.written import sequences

GROUP = "30-40, F"
SET = ("calibration.pool=16", "calibration.candidates=2", "calibration.ridge=1", "visits=false")
LEAST = [word for setting in SET for word in ("--set", setting)]


@dataclass(frozen=True)
class World:
    """A city, and its groups as regions."""

    dataset: TrajectoryDataset
    regions: Path

    def train(self, out: Path, entry_point: str) -> list[object]:
        options = ["--set", f"entry_point={entry_point}", "--out", out, "--quiet"]
        return ["train", self.dataset.path, "--generator", "external", *options]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("world")
    dataset = small_city(root, users=120, pois=20)
    build_regions(
        dataset.path, root / "groups", RegionsOptions(partition="demogroups", features=("poi",))
    )
    return World(dataset, root / "groups")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder a user is in, who trusts no code yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(external, "_trusted", set())
    monkeypatch.setenv(external.TRUST, "")
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


def write_code(folder: Path, body: str, name: str = "mine") -> None:
    (folder / f"{name}.py").write_text(body)


GOOD = """
import random
from pathlib import Path

Path("imported").touch()
PLACES = {places!r}

def sample(anchors, seeds):
    assert anchors.shape == (len(seeds), 4)
    return [["HOME", random.Random(seed).choice(PLACES), "HOME"] for seed in seeds]
"""


def test_a_function_becomes_a_model(world: World, here: Path) -> None:
    write_code(here, GOOD.format(places=world.dataset.vocabulary.poi_ids[FIRST_POI:]))
    done = run(*world.train(here / "model", "mine:sample"))
    assert done.code == 0 and "tried 16" in done.out, done.err
    for out, n in (("a", 100), ("b", 100), ("more", 150)):
        assert run("generate", here / "model", "--n", n, "--out", here / out).code == 0
    assert (here / "a").read_bytes() == (here / "b").read_bytes()
    assert sequences(here / "more")[:100] == sequences(here / "a")
    assert len({row[1] for row in sequences(here / "a")}) > 5
    command = (
        "supervise",
        here / "model",
        world.regions,
        *LEAST,
        "--out",
        here / "model2",
        "--quiet",
    )
    assert run(*command).code == 0
    assert (
        run("generate", here / "model2", "--n", 20, "--group", GROUP, "--out", here / "women").code
        == 0
    )
    assert "chooses the lengths of its trajectories" in refused(
        "generate", here / "model", "--n", 9, "--lengths", "empirical", "--out", here / "c"
    )


def test_code_of_a_model_is_imported_only_if_the_user_trusts_it(
    world: World, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_code(here, GOOD.format(places=world.dataset.vocabulary.poi_ids[FIRST_POI:]))
    assert run(*world.train(here / "model", "mine:sample")).code == 0
    monkeypatch.setattr(external, "_trusted", set())  # another day
    monkeypatch.delitem(sys.modules, "mine")
    (here / "imported").unlink()
    assert load_model(here / "model").generator.max_length > 0, "to look at it is harmless"
    command = ("generate", here / "model", "--n", 5, "--out", here / "samples")
    assert re.search(
        r"model: its samples come from the code 'mine:sample'.*--trust-code", refused(*command)
    )
    supervise = ("supervise", here / "model", world.regions, *LEAST, "--out", here / "model2")
    assert "--trust-code" in refused(*supervise)
    assert not (here / "imported").exists() and "mine" not in sys.modules
    assert run(*command, "--trust-code").code == 0
    assert (here / "imported").exists()


BAD_CODE = {
    "syntax": ("def sample(:", r"'mine' cannot be imported \(SyntaxError"),
    "import": (
        "import no_such_module",
        r"cannot be imported \(ModuleNotFoundError: .*, mine.py line 1\)",
    ),
    "exit": ("raise SystemExit(0)", r"cannot be imported \(SystemExit"),
    "name": (
        "def samples(anchors, seeds): ...",
        "'mine' has no function 'sample'; did you mean 'samples'",
    ),
    "no function": ("sample = 3", "'mine' has no function 'sample'"),
    "raises": (
        "def sample(a, s):\n    raise ValueError('boom')",
        r"failed \(ValueError: boom, mine.py line 2\)",
    ),
    "quits": ("def sample(a, s): exit()", r"failed \(SystemExit"),
    "nothing": ("def sample(a, s): ...", r"failed \(TypeError"),
    "arguments": ("def sample(n): return []", r"failed \(TypeError"),
    "number": ("def sample(a, s): return 3", r"failed \(TypeError"),
    "too few": ("def sample(a, s): return [['HOME']]", "returned 1 trajectories for 16 rows"),
    "text": (
        "def sample(a, s): return ['HOME'] * len(s)",
        "returned 'HOME' for a trajectory; return a list",
    ),
    "tokens": (
        "def sample(a, s): return [[1, 2]] * len(s)",
        r"returned '\[1, 2\]' for a trajectory",
    ),
    "empty": ("def sample(a, s): return [[]] * len(s)", "returned an empty trajectory"),
    "elsewhere": (
        "def sample(a, s): return [['x']] * len(s)",
        "none of 16 trajectories visits a place of the dataset",
    ),
}


@pytest.mark.parametrize("name", BAD_CODE)
def test_code_that_does_not_work_is_refused_in_one_sentence(
    world: World, here: Path, name: str
) -> None:
    body, sentence = BAD_CODE[name]
    write_code(here, body)
    said = refused(*world.train(here / "model", "mine:sample"))
    assert re.search(sentence, said), said
    assert not (here / "model").exists()


def test_a_missing_module_is_refused(world: World, here: Path) -> None:
    said = refused(*world.train(here / "model", "no_such.module:sample"))
    assert (
        "cannot be imported (ModuleNotFoundError" in said and "that Python can import here" in said
    )


def test_code_that_ignores_its_seed_causes_a_warning(
    world: World, here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = world.dataset.vocabulary.poi_ids[FIRST_POI]
    write_code(
        here,
        "calls = []\ndef sample(a, s): "
        f"calls.append(0); return [[{place!r}] * len(calls)] * len(s)",
    )
    assert run(*world.train(here / "model", "mine:sample")).code == 0
    assert "depends on more than its row and its seed" in caplog.text
