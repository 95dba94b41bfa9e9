"""Write small .xlsx and .ods files, without a library that only tests would need."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

Row = Sequence[str | float]
MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
PACKAGE = "http://schemas.openxmlformats.org/package/2006"
OPEN = "urn:oasis:names:tc:opendocument:xmlns"


def write_xlsx(path: Path, sheets: dict[str, Sequence[Row]], merged: Sequence[str] = ()) -> Path:
    """Write sheets of rows; `merged` has ranges, such as "B1:C1", of the first sheet."""
    names = list(sheets)
    entries = "".join(
        f'<sheet name="{name}" sheetId="{k}" r:id="rId{k}"/>' for k, name in enumerate(names, 1)
    )
    links = "".join(
        f'<Relationship Id="rId{k}" Type="{OFFICE}/worksheet" Target="worksheets/sheet{k}.xml"/>'
        for k in range(1, len(names) + 1)
    )
    types = "".join(
        f'<Override PartName="/xl/{part}.xml" ContentType="application/'
        f'vnd.openxmlformats-officedocument.spreadsheetml.{kind}+xml"/>'
        for part, kind in [
            ("workbook", "sheet.main"),
            *((f"worksheets/sheet{k}", "worksheet") for k in range(1, len(names) + 1)),
        ]
    )
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{PACKAGE}/content-types"><Default Extension="rels" '
        f'ContentType="application/vnd.openxmlformats-package.relationships+xml"/>{types}</Types>',
        "_rels/.rels": f'<Relationships xmlns="{PACKAGE}/relationships"><Relationship Id="rId1" '
        f'Type="{OFFICE}/officeDocument" Target="xl/workbook.xml"/></Relationships>',
        "xl/workbook.xml": f'<workbook xmlns="{MAIN}" xmlns:r="{OFFICE}"><sheets>{entries}'
        "</sheets></workbook>",
        "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{PACKAGE}/relationships">{links}'
        "</Relationships>",
    }
    for number, name in enumerate(names, 1):
        cells = "".join(f'<mergeCell ref="{each}"/>' for each in merged if number == 1)
        parts[f"xl/worksheets/sheet{number}.xml"] = (
            f'<worksheet xmlns="{MAIN}"><sheetData>{_xlsx_rows(sheets[name])}</sheetData>'
            f"{f'<mergeCells>{cells}</mergeCells>' if cells else ''}</worksheet>"
        )
    return _write_zip(path, parts)


def _xlsx_rows(rows: Sequence[Row]) -> str:
    text = ""
    for number, row in enumerate(rows, 1):
        cells = ""
        for column, value in enumerate(row):
            place = f"{chr(65 + column)}{number}"
            if isinstance(value, str):
                content = f'<c r="{place}" t="inlineStr"><is><t>{escape(value)}</t></is></c>'
                cells += content if value else ""
            else:
                cells += f'<c r="{place}"><v>{value}</v></c>'
        text += f'<row r="{number}">{cells}</row>'
    return text


def far_cell(path: Path) -> Path:
    """Write an .xlsx of a kilobyte whose two cells span 17 billion."""
    write_xlsx(path, {"Data": [["A"]]})
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name).decode() for name in archive.namelist()}
    sheet = "xl/worksheets/sheet1.xml"
    far = '<row r="1048576"><c r="XFD1048576"><v>1</v></c></row></sheetData>'
    return _write_zip(path, parts | {sheet: parts[sheet].replace("</sheetData>", far)})


def write_ods(path: Path, rows: Sequence[Row], repeated: int = 1) -> Path:
    """Write one sheet; its last row is repeated."""
    text = ""
    for number, row in enumerate(rows, 1):
        repeat = repeated if number == len(rows) else 1
        text += f'<table:table-row table:number-rows-repeated="{repeat}">'
        for value in row:
            kind = "string" if isinstance(value, str) else "float"
            amount = "" if isinstance(value, str) else f' office:value="{value}"'
            text += (
                f'<table:table-cell office:value-type="{kind}"{amount}>'
                f"<text:p>{escape(str(value))}</text:p></table:table-cell>"
                if value != ""
                else "<table:table-cell/>"
            )
        text += "</table:table-row>"
    spaces = " ".join(f'xmlns:{name}="{OPEN}:{name}:1.0"' for name in ("office", "table", "text"))
    kind = "application/vnd.oasis.opendocument.spreadsheet"
    return _write_zip(
        path,
        {
            "mimetype": kind,
            "META-INF/manifest.xml": f'<manifest:manifest xmlns:manifest="{OPEN}:manifest:1.0">'
            f'<manifest:file-entry manifest:full-path="/" manifest:media-type="{kind}"/>'
            "</manifest:manifest>",
            "content.xml": f"<office:document-content {spaces}><office:body><office:spreadsheet>"
            f'<table:table table:name="Data">{text}</table:table></office:spreadsheet>'
            "</office:body></office:document-content>",
        },
    )


def _write_zip(path: Path, parts: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in parts.items():
            archive.writestr(name, text)
    return path
