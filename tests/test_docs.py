"""The documentation is true: its Python runs, it names everything public, and it holds no path of a machine."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

import mobatlas
from bench.report.families import families_table
from bench.report.phase2 import cost_table, phase2_tables
from bench.report.questions import question_tables
from bench.report.real import headline_tables, real_tables, reweighting_table
from mobatlas.data.readers import READERS
from mobatlas.generators.protocol import generator_names
from mobatlas.report.tables import Table

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), flags=re.DOTALL
    )
    assert len(blocks) >= 4
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "tutorial.md", "exec"), scope)


def test_everything_public_is_in_the_api_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in mobatlas.__all__ if f"`{name}" not in page] == []


def test_every_reader_is_in_the_how_to() -> None:
    page = (ROOT / "docs" / "how-to.md").read_text()
    assert [name for name in READERS if f"| `{name}` |" not in page] == []


def test_every_family_of_generators_is_in_the_how_to() -> None:
    page = (ROOT / "docs" / "how-to.md").read_text()
    assert [name for name in generator_names() if f"| `{name}` |" not in page] == []


def test_the_table_of_families_is_that_of_the_benchmark() -> None:
    found = json.loads((ROOT / "bench" / "results" / "families.json").read_text())
    assert families_table(found).as_markdown() in (ROOT / "docs" / "choosing.md").read_text()


def test_the_tables_of_phase_2_are_those_of_the_benchmark() -> None:
    found = json.loads((ROOT / "bench" / "results" / "phase2.json").read_text())
    page = (ROOT / "docs" / "phase2.md").read_text()
    assert [
        name for name, table in phase2_tables(found).items() if table.as_markdown() not in page
    ] == []
    cost = json.loads((ROOT / "bench" / "results" / "cost.json").read_text())
    assert (
        cost_table(cost).as_markdown() in page
        and f"{cost['times_faster']:.0f} times faster" in page
    )


def test_the_tables_of_real_people_are_those_of_the_benchmark() -> None:
    results, page = ROOT / "bench" / "results", (ROOT / "docs" / "santiago.md").read_text()
    everything = (ROOT / "docs" / "santiago-tables.md").read_text()
    told = {path.stem: json.loads(path.read_text()) for path in results.glob("real-*.json")}
    other = [f"real-latent-diffusion-{kind}" for kind in ("partitions", "regions")]
    assert set(told) == {"real-autoregressive", *other}
    for stem, found in told.items():
        lacking = [
            name for name, table in real_tables(found).items() if _written(table) not in everything
        ]
        assert lacking == [], stem
    found = told["real-autoregressive"]
    whole = real_tables(found)
    shown = headline_tables(found) | {name: whole[name] for name in ("error-bars", "precautions")}
    shown["rq3"] = question_tables(
        json.loads((results / "rq3-real-autoregressive.json").read_text())
    )["average"]
    shown["limits"] = reweighting_table(
        json.loads((results / "santiago_reweighting_limits.json").read_text())
    )
    shown["draws"] = real_tables(json.loads((results / "santiago_draws.json").read_text()))[
        "closed-population"
    ]
    for stem in other:
        kind = stem.rsplit("-", 1)[1]
        shown[stem] = headline_tables(told[stem])[kind]
    assert [name for name, table in shown.items() if _written(table) not in page] == []


def _written(table: Table) -> str:
    return table.as_markdown().rstrip("\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_no_file_names_a_path_of_a_machine() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not listed:
        pytest.skip("not a git checkout")
    machine = re.compile(r"(?<![\w.])/(?:work|root|home/\w+|Users/\w+)/")
    guilty = [
        name for name in listed
        if Path(name).suffix in {".py", ".md", ".toml", ".yaml", ".json", ".txt"}
        and (ROOT / name).exists()
        and machine.search((ROOT / name).read_text(encoding="utf-8"))
    ]  # fmt: skip
    assert guilty == []
