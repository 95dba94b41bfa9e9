"""The documentation is true: its Python runs, it names the public API and no local path."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import mobatlas
from bench.report.families import families_table
from bench.report.files import as_markdown
from bench.report.phase2 import cost_table, phase2_tables
from bench.report.questions import question_tables, write_page
from bench.report.real import reweighting_table, write_real_page
from bench.summary import read_result
from mobatlas.data.readers import READERS
from mobatlas.generators.protocol import GENERATORS

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
    assert [name for name in GENERATORS if f"| `{name}` |" not in page] == []


def test_a_generated_table_has_a_row_for_each_model_and_a_cell_for_each_metric() -> None:
    summary = read_result(ROOT / "bench" / "results" / "rq2.json")
    table = question_tables(summary)["average"]
    lines = as_markdown(table).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert table.columns[:4] == ("feature", "model", "Spatial", "gap closed to floor, Spatial")
    assert {line.count("|") for line in rows} == {len(table.columns) + 1}
    models = [(row[0], row[1]) for row in table.rows]
    assert models[:3] == [("", "baseline"), ("", "strong"), ("", "floor")]
    assert ("transitions", "tilt, calibrated") in models and len(rows) == 2 + len(models)


def test_every_page_of_results_can_be_made_from_the_summaries(tmp_path: Path) -> None:
    results = ROOT / "bench" / "results"
    write_page(results, tmp_path / "results.md", all_tables=True)
    write_real_page(results, tmp_path / "real.md", all_tables=True)
    for page in ("results.md", "real.md"):
        text = (tmp_path / page).read_text()
        links = re.findall(r"\]\(([^)]+)\)", text)
        assert links and all((tmp_path / link).exists() for link in links)
    families = families_table(read_result(results / "families.json"))
    assert families.rows and set(phase2_tables(read_result(results / "phase2.json")))
    assert cost_table(read_result(results / "cost.json")).rows
    assert reweighting_table(read_result(results / "santiago_reweighting.json")).rows


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
