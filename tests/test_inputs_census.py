"""Census tables as offices publish them: each is read correctly, or refused with the cause."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mobatlas import TrajectoryDataset
from mobatlas.errors import MobatlasError, same_column, suggestion
from mobatlas.groups import DEFAULT_GROUPS, Groups, same_group
from mobatlas.io.limits import refuse_oversized
from mobatlas.io.tables import read_table
from mobatlas.regions.composition import read_composition
from mobatlas.regions.margins import match_regions
from mobatlas.regions.recovery.composition_error import calibrate_composition
from mobatlas.regions.store import RegionsFolder
from tests.spreadsheets import far_cell, write_ods, write_xlsx
from tests.tiny import small_city

AGES = Groups.of({"age": ("0-14", "15+")})
SEXES = Groups.of({"gender": ("M", "F")})
BOTH = Groups.of({"age": ("0-14", "15+"), "gender": ("M", "F")})
# The people of every table of two districts by age and sex, in the order of `BOTH`.
NORTH = [1200, 1100, 5200, 5300]
SOUTH = [900, 950, 2000, 2100]
LONG = """region,group,count
North,"0-14, M",1200
North,"0-14, F",1100
North,"15+, M",5200
North,"15+, F",5300
South,"0-14, M",900
South,"0-14, F",950
South,"15+, M",2000
South,"15+, F",2100
"""


@dataclass(frozen=True)
class Case:
    """A file, and what its readers must say."""

    name: str
    text: str
    notes: Sequence[str] = ()  # parts of notes
    refused: str = ""  # a part of the refusal
    groups: Groups | None = BOTH
    file: str = "census.csv"
    people: Sequence[Sequence[float]] = (NORTH, SOUTH)
    regions: Sequence[str] = ("North", "South")
    encoding: str = "utf-8"


def api(rows: Sequence[Sequence[str]]) -> str:
    """Rows as the API of the US Census Bureau answers."""
    return json.dumps(list(map(list, rows))).replace("], ", "],\n")


ACS_HEADER = [f"B01001_{number:03d}E" for number in range(1, 50)]
ACS_ROW = ["0"] + ["0"] + ["10"] * 23 + ["0"] + ["20"] * 23
ACS_PEOPLE = [90, 180, 20, 40, 20, 40, 100, 200]

READ = [
    Case("long", LONG),
    Case("semicolons", LONG.replace(",", ";").replace("; ", ", ").replace('"', ""), ["semicolons"]),
    Case("tabs", LONG.replace(", ", "#").replace(",", "\t").replace("#", ", "), ["tabs"]),
    Case("a BOM", "\ufeff" + LONG),
    Case(
        "UTF-16",
        LONG.replace(", ", "#").replace(",", "\t").replace("#", ", "),
        ["tabs"],
        encoding="utf-16",
    ),
    Case(
        "Latin letters",
        LONG.replace("North", "\u00d1u\u00f1oa"),
        ["Windows-1252"],
        encoding="cp1252",
        regions=("\u00d1u\u00f1oa", "South"),
    ),
    Case(
        "thousands with a dot",
        LONG.replace(",5", ",5.").replace(",1", ",1.").replace(",2", ",2."),
        ["'.' is read as a thousands separator"],
    ),
    Case(
        "thousands with a comma",
        'region,age,M,F\nNorth,0-14,"1,200","1,100"\nNorth,15+,"5,200","5,300"\n'
        'South,0-14,900,950\nSouth,15+,"2,000","2,100"\n',
        ["',' is read as a thousands separator"],
    ),
    Case(
        "thousands with a space",
        "region;age;M;F\nNorth;0-14;1 200;1 100\nNorth;15+;5 200;5\u00a0300\n"
        "South;0-14;900;950\nSouth;15+;2 000;2 100\n",
        ["spaces or apostrophes are read as thousands separators"],
    ),
    Case(
        "decimal commas",
        "region;group;share\nNorth;M;0,4\nNorth;F;0,6\nSouth;M;0,25\nSouth;F;0,75\n",
        ["',' is read as the decimal mark"],
        groups=SEXES,
        people=[[0.4, 0.6], [0.25, 0.75]],
    ),
    Case(
        "both marks",
        "region;M;F\nNorth;1.200,5;1.100,25\nSouth;900;950\n",
        ["'.' is read as a thousands separator", "',' is read as the decimal mark"],
        groups=SEXES,
        people=[[1200.5, 1100.25], [900, 950]],
    ),
    Case(
        "columns of men and women, with totals",
        "District,Age,Men,Women,Total\nNorth,0-14,1200,1100,2300\nNorth,15+,5200,5300,10500\n"
        "North,All ages,6400,6400,12800\nSouth,0-14,900,950,1850\nSouth,15+,2000,2100,4100\n"
        "South,All ages,2900,3050,5950\n",
        ["totals ('All ages', 'total') equal the sum"],
    ),
    Case(
        "wide by sex and age",
        "Comuna,Male 0-14,Male 15 and over,Female 0-14,Female 15 and over,Area km2\n"
        "North,1200,5200,1100,5300,14.5\nSouth,900,2000,950,2100,7\n",
        ["columns that are not read: Area km2"],
    ),
    Case(
        "wide with short names",
        "district,m_0_14,m_15_plus,f_0_14,f_15_plus,total\n"
        "North,1200,5200,1100,5300,12800\nSouth,900,2000,950,2100,5950\n",
        ["totals ('total')"],
    ),
    Case(
        "titles, merged headers and footnotes",
        "Table 3. Population by sex and age,,,,\n,,,,\n,Male,,Female,\nDistrict,0-14,15+,0-14,15+\n"
        "North,1200,5200,1100,5300\nSouth,900,2000,950,2100\n,,,,\n"
        "Source: National institute of statistics,,,,\n",
        [
            "lines above the table are not read: 'Table 3.",
            "two rows of headers are joined",
            "lines below the table are not read: 'Source",
        ],
    ),
    Case(
        "an unnamed area column and a total row",
        "Area name,Men,Women\nNorth,6400,6400\nSouth,2900,3050\nEast,10,20\nTotal,9310,9470\n",
        [
            "column 'Area name' is read as 'region'",
            "regions 'Total' are left out: a total equals the sum of the other regions",
        ],
        groups=SEXES,
        people=[[6400, 6400], [2900, 3050], [10, 20]],
        regions=("North", "South", "East"),
    ),
    Case(
        "a country that is the sum of its regions",
        "region,M,F\nNorth,6400,6400\nSouth,2900,3050\nEast,10,20\nChile,9310,9470\n",
        ["regions 'Chile' are left out: a total equals"],
        groups=SEXES,
        people=[[6400, 6400], [2900, 3050], [10, 20]],
        regions=("North", "South", "East"),
    ),
    Case(
        "age ranges and the sum of some of them",
        "region,age,population\nNorth,0-4,5\nNorth,5-14,6\nNorth,0-14,11\nNorth,15+,20\n",
        ["totals ('0-14') equal the sum", "column 'population' is read as 'count'"],
        groups=AGES,
        people=[[11, 20]],
        regions=("North",),
    ),
    Case(
        "rounded totals",
        "region,age,count\nNorth,0-14,1200\nNorth,15+,5200\nNorth,Total,6405\n",
        ["differ by at most 5 from the sum"],
        groups=AGES,
        people=[[1200, 5200]],
        regions=("North",),
    ),
    Case(
        "unknown ages",
        "region,age,count\nNorth,0-14,30\nNorth,15+,60\nNorth,Not stated,10\nNorth,Total,100\n",
        ["'Not stated' is no group; these 10.00% of people are left out"],
        groups=AGES,
        people=[[30, 60]],
        regions=("North",),
    ),
    Case(
        "spelling, case and order of groups",
        'region,group,count\nNorth,"F, 0 - 14",1100\nNorth,"MALE, 0-14",1200\n'
        'North,"15+, Women",5300\nNorth,"15+, men",5200\n',
        ["'men' is read as 'MALE'", "those of the groups: 'MALE' as 'M'"],
        people=[NORTH],
        regions=("North",),
    ),
    Case(
        "two spellings of one group",
        "region,group,count\nNorth,>50,3\nNorth,<=50,4\nSouth,> 50,5\nSouth,<=50,1\n",
        ["'> 50' is read as '>50'"],
        groups=None,
        people=[[4, 3], [1, 5]],
    ),
    Case(
        "cells without a row",
        LONG.replace('South,"0-14, F",950\n', ""),
        ["1 of 8 cells have no row and count as zero, such as '0-14, F' in region 'South'"],
        people=[NORTH, [900, 0, 2000, 2100]],
    ),
    Case(
        "counts that are not available",
        LONG.replace("950", ":") + 'East,"0-14, M",..\n',
        ["regions 'South', 'East' are left out: a count is not available"],
        people=[NORTH],
        regions=("North",),
    ),
    Case(
        "regions without people",
        LONG + 'East,"0-14, M",0\n',
        ["regions 'East' are left out: they have no people"],
    ),
    Case(
        "whole percentages",
        "region,group,count\nNorth,M,40\nNorth,F,60\nSouth,M,25\nSouth,F,75\n",
        ["the counts of each region sum to 100; are they percentages?"],
        groups=SEXES,
        people=[[40, 60], [25, 75]],
    ),
    Case(
        "ACS from the API",
        api(
            [
                ["NAME", *ACS_HEADER, "state", "county", "tract"],
                ["Tract 1", *ACS_ROW, "01", "001", "020100"],
            ]
        ),
        ["region ids are state + county + tract"],
        groups=None,
        people=[ACS_PEOPLE],
        regions=("01001020100",),
    ),
    Case(
        "ACS with a second row of headers",
        ",".join(["GEO_ID", "NAME", *ACS_HEADER])
        + "\nGeography,Geographic Area Name"
        + ",Estimate!!Total" * 49
        + "\n"
        + ",".join(["1400000US01001020100", "Tract 1", *ACS_ROW])
        + "\n",
        groups=None,
        people=[ACS_PEOPLE],
        regions=("1400000US01001020100",),
    ),
    Case(
        "ACS as data.census.gov shows it",
        '"Label (Grouping)","Autauga, Alabama!!Estimate","Autauga, Alabama!!Margin of Error"\n'
        + "".join(f'"Row {k}","{value}","\u00b112"\n' for k, value in enumerate(ACS_ROW)),
        ["margins of error are used"],
        groups=None,
        people=[ACS_PEOPLE],
        regions=("Autauga, Alabama",),
    ),
    Case(
        "Eurostat",
        "freq,unit,age,sex,geo\\TIME_PERIOD\t2019 \t2020 \n"
        + "".join(
            f"A,NR,{age},{sex},{geo}\t7 \t{count}\n"
            for geo, counts in (("AT11", (1200, 1100, 5200, 5300)), ("AT12", (900, 950, 2000, ":")))
            for (age, sex), count in zip(
                [("Y_LT15", "M"), ("Y_LT15", "F"), ("Y_GE15", "M"), ("Y_GE15", "F")],
                [f"{each} p" if each != ":" else ": c" for each in counts],
                strict=True,
            )
        ),
        ["of 2 periods, 2020 is read", "flags behind numbers", "'AT12' are left out"],
        file="demo_r_pjangroup.tsv",
        people=[NORTH],
        regions=("AT11",),
    ),
]

READ += [
    Case(
        "keys and values above the table, and titles of sections",
        "Source;Institute\nDate;2020\n\nregion;M;F\nCoast;;\nNorth;10;20\nInland;;\nSouth;5;7\n",
        [
            "lines above the table are not read: 'Source Institute'",
            "rows without any count are not read: 'Coast', 'Inland'",
        ],
        groups=SEXES,
        people=[[10, 20], [5, 7]],
    ),
    Case(
        "German words",
        "Gemeinde;m\u00e4nnlich;weiblich;insgesamt\nNorth;10;20;30\nSouth;5;7;12\n",
        ["column 'Gemeinde' is read as 'region'", "totals ('total') equal"],
        groups=SEXES,
        people=[[10, 20], [5, 7]],
    ),
    Case(
        "Eurostat as SDMX",
        "DATAFLOW,freq,unit,sex,age,geo,TIME_PERIOD,OBS_VALUE,OBS_FLAG\n"
        + "".join(
            f"X,A,NR,{sex},{age},AT1,2020,{count},{flag}\n"
            for sex, age, count, flag in (
                ("M", "Y_LT15", 1200, "p"),
                ("F", "Y_LT15", 1100, ""),
                ("M", "Y_GE15", 5200, ""),
                ("F", "Y_GE15", 5300, "p"),
            )
        ),
        ["column 'OBS_VALUE' is read as 'count'", "column 'geo' is read as 'region'"],
        people=[NORTH],
        regions=("AT1",),
    ),
    Case(
        "years of age below merged headers",
        ",Men,,,Women,,\nArea,0,1,2+,0,1,2+\nNorth,1,2,3,4,5,6\nSouth,1,2,3,4,5,7\n",
        ["two rows of headers are joined"],
        groups=SEXES,
        people=[[6, 15], [6, 16]],
    ),
    Case(
        "several columns of regions",
        "state,county,M,F\nNorthern,North,10,20\nNorthern,South,5,7\n",
        ["column 'county' is read as 'region'"],
        groups=SEXES,
        people=[[10, 20], [5, 7]],
    ),
]

REFUSED = [
    Case(
        "line breaks in names",
        'region,"M\nen","group\nx"\n"No\nrth",1,2\n',
        refused="(columns: region, M en, group x)",
        groups=SEXES,
    ),
    Case(
        "two columns of one name",
        "region,M,M,F\nNorth,1,2,3\n",
        refused="two columns are called 'M'; rename one",
        groups=SEXES,
    ),
    Case(
        "a bad count in a wide table",
        "region,M,F\nNorth,1,2\nSouth,3,four\n",
        refused="column 'F' is empty or not a number in row 2 ('four'); correct it",
        groups=SEXES,
    ),
    Case(
        "a table of years",
        "region,2019,2020\nNorth,10,20\n",
        refused="column 'count' is missing (columns: region, 2019, 2020)",
        groups=SEXES,
    ),
    Case(
        "percentages called percent",
        "region,group,percent\nNorth,M,40\nNorth,F,60\n",
        refused="column 'count' is missing (columns: region, group, percent)",
        groups=SEXES,
    ),
    Case("brackets", "[" * 100_000, refused="the table cannot be read"),
    Case(
        "thousands or thousandths",
        "region,group,count\nNorth,M,2.329\nNorth,F,1.250\n",
        refused="'2.329' can be a whole number or a fraction; write numbers without",
        groups=SEXES,
    ),
    Case(
        "a total that is not the sum",
        "region,age,count\nNorth,0-14,1200\nNorth,15+,5200\nNorth,Total,9000\n",
        refused="'Total' of region 'North' is 9,000, but its parts sum to 6,400",
        groups=AGES,
    ),
    Case(
        "overlapping ages",
        "region,age,count\nNorth,0-14,5\nNorth,10-20,6\nNorth,15+,7\n",
        refused="age ranges '0-14' and '10-20' overlap",
        groups=AGES,
    ),
    Case(
        "fractions",
        "region,group,count\nNorth,M,0.4\nNorth,F,0.6\nSouth,M,0.25\nSouth,F,0.75\n",
        refused="sum to 1; are they fractions? Call the column 'share'",
        groups=SEXES,
    ),
    Case(
        "percentages",
        "region,group,count\nNorth,M,40.5\nNorth,F,59.5\nSouth,M,25\nSouth,F,75\n",
        refused="sum to 100; are they percentages? Divide by 100 and call the column 'share'",
        groups=SEXES,
    ),
    Case(
        "a date in place of an age range",
        "region,age,count\nNorth,0-9,5\nNorth,14-Oct,6\nNorth,15+,7\n",
        refused="'14-Oct' is not an age range like '0-9'",
        groups=None,
    ),
    Case(
        "several years",
        "region,year,group,count\nNorth,2019,M,4\nNorth,2020,M,5\nNorth,2020,F,5\n",
        refused="region 'North' has two rows of 'M'; keep one",
        groups=None,
    ),
    Case(
        "an unquoted comma",
        "region,group,count\nNorth,0-14, M,4\n",
        refused="rows have more fields than the header); quote names that contain a comma",
    ),
    Case("binary data", "PAR1\0\0", refused="it contains binary data"),
    Case(
        "no region",
        "place,group,count\nNorth,M,4\n",
        refused="column 'region' is missing (columns: place, group, count)",
        groups=SEXES,
    ),
    Case(
        "an incomplete B01001",
        "GEO_ID,B01001_003E\n01,4\n",
        refused="column 'B01001_004E' is missing; download the whole table B01001",
        groups=None,
    ),
    Case(
        "another group",
        'region,group,count\nNorth,">50, X",4\n',
        refused="group '>50, X' does not exist (known:",
        groups=DEFAULT_GROUPS,
    ),
    Case(
        "another spelling",
        'region,group,count\nNorth,"F 0-14, x",4\n',
        refused="group 'F 0-14, x' does not exist (known:",
    ),
]


def written(tmp_path: Path, case: Case) -> Path:
    path = tmp_path / case.file
    path.write_bytes(case.text.encode(case.encoding))
    return path


@pytest.mark.parametrize("case", READ, ids=lambda case: case.name)
def test_a_published_census_is_read_and_decisions_are_reported(tmp_path: Path, case: Case) -> None:
    notes: list[str] = []
    composition = read_composition(written(tmp_path, case), case.groups, notes=notes)
    assert composition.regions == tuple(case.regions)
    expected = np.array(case.people, dtype=float)
    assert composition.shares == pytest.approx(expected / expected.sum(1, keepdims=True))
    if np.isfinite(composition.n).all():
        assert composition.n == pytest.approx(expected.sum(1))
    report = "\n".join(notes)
    assert all(part in report for part in case.notes), report
    assert bool(case.notes) == bool(notes), report


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_a_census_that_could_be_misread_is_refused(tmp_path: Path, case: Case) -> None:
    with pytest.raises(MobatlasError) as caught:
        read_composition(written(tmp_path, case), case.groups)
    sentence = str(caught.value)
    assert sentence.startswith(str(tmp_path / case.file)), sentence
    assert case.refused in sentence
    assert "\n" not in sentence and "did you mean" not in sentence


def office_rows(last: Sequence[str | float] = ()) -> list[Sequence[str | float]]:
    return [
        ["Table 3. Population by sex and age, 2020"],
        [],
        ["District", "Male", "", "Female", ""],
        ["", "0-14", "15+", "0-14", "15+"],
        ["North", 1200.0, 5200.0, 1100.0, 5300.0],
        ["South", 900.0, 2000.0, 950.0, "2100"],
        list(last),
        ["Source: National institute of statistics"],
    ]


def test_a_workbook_with_titles_merged_headers_and_two_sheets_is_read(tmp_path: Path) -> None:
    merged = ["A1:E1", "A3:A4", "B3:C3", "D3:E3"]
    sheets: dict[str, Sequence[Sequence[str | float]]] = {
        "Notes": [["About"]],
        "By age": office_rows(),
        "Raw": [["a", "b"], [1.0, 2.0]],
    }
    notes: list[str] = []
    path = write_xlsx(tmp_path / "census.xlsx", sheets)
    read = read_composition(path, BOTH, notes=notes)
    assert (read.regions, read.n.tolist()) == (("North", "South"), [12800, 5950])
    assert read.shares * read.n[:, None] == pytest.approx(np.array([NORTH, SOUTH]))
    assert "census.xlsx: sheet 'By age' is read, and not 'Raw'" in notes
    whole = write_xlsx(tmp_path / "merged.xlsx", {"By age": office_rows()}, merged)
    assert read_composition(whole, BOTH).shares == pytest.approx(read.shares)


def test_a_first_header_merged_downwards_above_many_columns_is_read(tmp_path: Path) -> None:
    ages = ["0-14", "15-29", "30-49", "50-69", "70+"]
    rows: list[list[str | float]] = [
        ["Population by district, sex and age"],
        ["District", "Men", *[""] * 4, "Women", *[""] * 4],
        ["", *ages, *ages],
    ]
    for number, name in enumerate("ABC", 1):
        rows.append([name, *(10.0 * number + column for column in range(10))])
    path = write_xlsx(tmp_path / "c.xlsx", {"t": rows}, ["A1:K1", "A2:A3", "B2:F2", "G2:K2"])
    table = read_table(path)
    assert len(table) == 3
    assert [table.columns[k] for k in (0, 1, 10)] == ["District", "Men 0-14", "Women 70+"]


def test_regions_merged_over_several_rows_are_filled(tmp_path: Path) -> None:
    rows: list[Sequence[str | float]] = [
        ["Region", "Sex", "0-14", "15+"],
        ["North", "Men", 1200.0, 5200.0],
        ["", "Women", 1100.0, 5300.0],
    ]
    path = write_xlsx(tmp_path / "census.xlsx", {"Data": rows}, ["A2:A3"])
    read = read_composition(path, BOTH)
    assert read.shares[0] * 12800 == pytest.approx(NORTH)
    with pytest.raises(MobatlasError, match="column 'region' is empty in row 2"):
        read_composition(write_xlsx(tmp_path / "gap.xlsx", {"Data": rows}), BOTH)


def test_an_open_document_is_read(tmp_path: Path) -> None:
    read = read_composition(write_ods(tmp_path / "census.ods", office_rows()), BOTH)
    assert read.shares * read.n[:, None] == pytest.approx(np.array([NORTH, SOUTH]))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("census.xlsx", b"PK\x03\x04 no workbook", "the table cannot be read"),
        ("census.csv.gz", b"\x1f\x8b no gzip", "the table cannot be read"),
        ("census.parquet", b"PAR1", "the table cannot be read"),
        ("census.csv", b"", "the file is empty"),
    ],
)
def test_a_broken_file_is_refused_in_one_sentence(
    tmp_path: Path, name: str, content: bytes, sentence: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(MobatlasError, match=f"{name}: {sentence}") as caught:
        read_composition(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_margins_of_error_make_a_composition_less_certain(tmp_path: Path) -> None:
    """Margins of 45 are variances of 27.4^2; the first of the 23 cells of each sex has none."""
    columns: dict[str, list[object]] = {"GEO_ID": [f"14000US{k}" for k in range(8)]}
    for number in range(1, 50):
        columns[f"B01001_{number:03d}E"] = [100 + 9 * k * (number < 26) for k in range(8)]
        columns[f"B01001_{number:03d}M"] = [45] * 8
    columns["B01001_003M"] = columns["B01001_027M"] = [-555555555] * 8
    pd.DataFrame(columns).to_csv(tmp_path / "acs.csv", index=False)
    with_margins = read_composition(tmp_path / "acs.csv", SEXES)
    assert with_margins.sample is not None
    men, n = with_margins.shares[:, 0], with_margins.n
    of_a_share = 22 * (45 / 1.645) ** 2 * (men**2 + (1 - men) ** 2) / n**2
    assert with_margins.sample == pytest.approx(men * (1 - men) / of_a_share)
    margins = [f"B01001_{number:03d}M" for number in range(1, 50)]
    pd.DataFrame(columns).drop(columns=margins).to_csv(tmp_path / "plain.csv", index=False)
    without = read_composition(tmp_path / "plain.csv", SEXES)
    assert without.sample is None and without.n.tolist() == with_margins.n.tolist()
    errors = [calibrate_composition(each)[1] for each in (with_margins, without)]
    assert errors[0] is not None and errors[1] is not None
    assert errors[0].variance.sum() > errors[1].variance.sum()


@pytest.mark.parametrize(
    ("ours", "theirs", "rows"),
    [
        (["1", "02"], ["01", "2.0"], [0, 1]),
        ([" sp", "a,b"], ["sp", "a, b"], [0, 1]),
        (["SANTIAGO", "Nunoa"], ["\u00d1u\u00f1oa", "Santiago"], [1, 0]),
        (["01001020100"], ["1400000US01001020100"], [0]),
        (["1", "01"], ["1.0", "x"], [-1, -1]),  # either could be 1.0
        (["1", "2"], ["1.0", "01"], [-1, -1]),
        (["3.5", "R1"], ["3", "R10"], [-1, -1]),
    ],
)
def test_region_ids_meet_where_it_is_unambiguous(
    ours: list[str], theirs: list[str], rows: list[int]
) -> None:
    notes: list[str] = []
    assert match_regions(ours, theirs, "people and census.csv", notes).tolist() == rows
    spelled = [f"'{a}' and '{theirs[k]}'" for a, k in zip(ours, rows, strict=True) if k >= 0]
    different = bool(spelled) and "US" not in theirs[0]
    assert bool(notes) == different
    assert not notes or spelled[0] in notes[0]


@pytest.mark.parametrize(
    ("required", "columns", "meant"),
    [
        ("user_id", ["device_id", "place_id", "timestamp"], "device_id"),
        ("user_id", ["caid", "local_timestamp"], "caid"),
        ("user_id", ["uid", "device_id"], None),  # unsure
        ("user_id", ["place_id", "brand_id"], None),
        ("poi_id", ["placekey", "position"], "placekey"),
        ("poi_id", ["position", "user_id"], None),
        ("lat", ["latitude", "lon"], "latitude"),
        ("lat", ["lon", "flat"], None),
        ("home_lat", ["home_lon", "work_lat"], None),
        ("arrival", ["local_timestamp", "departure"], "local_timestamp"),
        ("arrival", ["Arrival"], "Arrival"),
        ("count", ["percent", "county"], None),
    ],
)
def test_a_missing_column_is_explained_by_a_synonym_or_not_at_all(
    required: str, columns: list[str], meant: str | None
) -> None:
    hint = same_column(required, columns)
    assert hint == (
        f"; did you mean '{meant}'? Rename it (--rename {required}={meant})" if meant else ""
    )


@pytest.mark.parametrize(
    ("group", "meant"),
    [
        ("F >50", ">50, F"),
        ("f,>50", ">50, F"),
        (">50, Female", ">50, F"),
        (">50, women", ">50, F"),
        (">50, W", ">50, F"),
        ("30-4O, F", "30-40, F"),
        (">50, X", None),
        ("50-60, F", None),
        ("<50, F", None),
        ("F", None),
        (">50", None),
        ("30-4, F", None),
    ],
)
def test_a_wrong_group_is_never_answered_with_another_group(group: str, meant: str | None) -> None:
    assert same_group(group, DEFAULT_GROUPS.names) == (
        f"; did you mean '{meant}'?" if meant else ""
    )


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("autoregresive", ["autoregressive", "vae"], "autoregressive"),
        ("tlit", ["tilt", "strong"], "tilt"),
        ("latent_diffusion", ["latent-diffusion"], "latent-diffusion"),
        ("R12", ["R1", "R13"], ""),
        (">30", ["<30"], ""),
        ("male", ["female"], ""),
        ("rq4", ["rq1", "rq2"], ""),
        ("home_lan", ["home_lat", "home_lon"], ""),
    ],
)
def test_a_word_is_suggested_only_if_one_letter_is_wrong(
    word: str, known: list[str], meant: str
) -> None:
    assert suggestion(word, known) == (f"; did you mean '{meant}'?" if meant else "")


def run(*arguments: object) -> tuple[int, str, float, int]:
    """Exit code, stderr, CPU seconds and peak kilobytes of a command."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mobatlas", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    return os.waitstatus_to_exitcode(status), errors, used.ru_utime + used.ru_stime, used.ru_maxrss


def text_bomb(path: Path) -> Path:
    """200 million rows, as copies of one compressed block."""
    block = gzip.compress(b"".join(b"R%d,M,%d\n" % (k % 7, k % 10) for k in range(1_000_000)))
    path.write_bytes(gzip.compress(b"region,group,count\n") + 200 * block)
    return path


def parquet_bomb(path: Path) -> Path:
    """300 million rows in a few megabytes."""
    part = pa.table({name: pa.nulls(10_000_000) for name in ("region", "group", "count")})
    with pq.ParquetWriter(path, part.schema) as writer:
        for _ in range(30):
            writer.write_table(part)
    return path


def test_bombs_are_refused_at_once(tmp_path: Path) -> None:
    good = tmp_path / "good.csv"
    good.write_text(LONG)
    code, _, usual_seconds, usual_memory = run("diagnose", "--composition", good, "--n", 100)
    assert code == 0
    bombs = [
        text_bomb(tmp_path / "bomb.csv.gz"),
        parquet_bomb(tmp_path / "bomb.parquet"),
        far_cell(tmp_path / "far.xlsx"),
        write_ods(tmp_path / "far.ods", [["a", "b"], [1.0, 2.0]], repeated=900_000),
    ]
    for bomb in bombs:
        assert bomb.stat().st_size < 50e6
        code, errors, seconds, memory = run("diagnose", "--composition", bomb, "--n", 100)
        assert (code, len(errors.splitlines())) == (2, 1), errors
        assert bomb.name in errors
        assert seconds < 3 * usual_seconds, "reading it would take a hundred times as long"
        assert memory < usual_memory + 300_000, bomb


def test_a_large_but_plausible_table_is_not_refused(tmp_path: Path) -> None:
    path = tmp_path / "census.csv.gz"
    path.write_bytes(gzip.compress(b"region,group,count\n" + b"R1,M,10\n" * 5_000_000))
    refuse_oversized(path)


@pytest.fixture(scope="module")
def city(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("census")
    small_city(root)
    return root


def test_columns_are_renamed_by_the_command_and_by_the_configuration(
    city: Path, tmp_path: Path
) -> None:
    source = tmp_path / "city"
    source.mkdir()
    for name in ("visits", "people"):
        table = pd.read_parquet(city / "city" / f"{name}.parquet")
        # Another column has taken the expected name.
        table = table.rename(columns={"user_id": "hashed"}).assign(user_id="x")
        table.to_parquet(source / f"{name}.parquet", index=False)
    options = ["--preset", "small", "--quiet", "--min-people-per-place", "0"]
    code, errors, *_ = run("prepare", source, "--out", tmp_path / "wrong", *options)
    assert code == 2, errors
    for number, renaming in enumerate((["--rename", "user_id=hashed"], ["--config", "c.yaml"])):
        if number:
            (tmp_path / "c.yaml").write_text("prepare:\n  rename: {user_id: hashed}\n")
            renaming = ["--config", str(tmp_path / "c.yaml")]
        out = tmp_path / f"dataset-{number}"
        code, errors, *_ = run("prepare", source, "--out", out, *options, *renaming)
        assert code == 0, errors
        trajectories = [each / "trajectories.parquet" for each in (out, city / "dataset")]
        assert trajectories[0].read_bytes() == trajectories[1].read_bytes()
    code, errors, *_ = run(
        "prepare", source, "--out", tmp_path / "wrong", *options, "--rename", "user_id=hash"
    )
    assert (code, "--rename user_id=hash: no table of" in errors) == (2, True)
    code, errors, *_ = run(
        "prepare", source, "--out", tmp_path / "wrong", *options, "--rename", "user_id"
    )
    assert (code, "write it as expected=theirs" in errors) == (2, True)
    assert not (tmp_path / "wrong").exists()


def test_regions_read_a_census_with_other_ids_and_columns(city: Path, tmp_path: Path) -> None:
    dataset = TrajectoryDataset.open(city / "dataset")
    assert dataset.groups is not None
    districts = sorted(set(dataset.people["home_district"].to_pylist()))
    cells = [
        {"zone": f" {district.lower()} ", "segment": group, "people": 5 + k}
        for k, district in enumerate([*districts, "elsewhere"])
        for group in dataset.groups.names
    ]
    path = tmp_path / "census.csv"
    pd.DataFrame(cells).to_csv(path, index=False, sep=";")
    base = ["regions", city / "dataset", "--by", "home_district", "--composition", path]
    code, errors, *_ = run(*base, "--out", tmp_path / "wrong")
    assert (code, "column 'group' is missing" in errors) == (2, True), errors
    assert "did you mean" not in errors
    code, errors, *_ = run(*base, "--out", tmp_path / "regions", "--rename", "group=segment")
    assert code == 0, errors
    folder = RegionsFolder.open(tmp_path / "regions")
    assert folder.regions.composition.n.tolist() == [8 * (5 + k) for k in range(len(districts))]
    notes = "\n".join(folder.manifest.details["notes"])
    for part in (
        "census.csv: semicolons separate the columns",
        "column 'people' is read as 'count'",
        f"such as '{districts[0]}' and '{districts[0].lower()}'",
    ):
        assert part in notes
    strangers = pd.DataFrame(cells).assign(zone=lambda table: table.zone.str.strip() + " 7")
    strangers.to_csv(path, index=False)
    code, errors, *_ = run(*base, "--out", tmp_path / "wrong", "--rename", "group=segment")
    assert code == 2
    assert f"'{districts[0]}' in one, '{districts[0].lower()} 7' in the other" in errors
    assert not (tmp_path / "wrong").exists()
