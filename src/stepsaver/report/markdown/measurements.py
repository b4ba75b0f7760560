"""Tables of stored measurements in Markdown: `measured/speed` is `benchmarks/measured/speed.json`."""

from pathlib import Path

from stepsaver.bench.machine.measurement import Measurement, read_measurement
from stepsaver.engine.errors import UsageError, unknown_name
from stepsaver.report.tables import markdown_table

MEASURED = "measured/"
ABOUT = ("command", "machine", "date")


def measured_table(folder: Path, reference: str) -> str:
    """Returns the whole table of a measurement."""
    found = _read(folder, reference)
    return markdown_table(found.rows, found.columns)


def measured_value(folder: Path, reference: str, column: str) -> str:
    """Returns the entry at `measured/NAME ROW COLUMN`, where a row is named by its first entry, blanks as underscores;
    or a fact such as `measured/NAME date`.
    """
    name, _, row_name = reference.partition(" ")
    found = _read(folder, name)
    if not row_name:
        if column not in ABOUT:
            raise unknown_name("figure of a measurement", column, ABOUT)
        return str(getattr(found, column))
    rows = {row[0].replace(" ", "_"): row for row in found.rows}
    columns = [each.replace(" ", "_") for each in found.columns]
    if row_name not in rows:
        raise unknown_name("row", row_name, rows)
    if column not in columns:
        raise unknown_name("column", column, columns)
    return rows[row_name][columns.index(column)]


def _read(folder: Path, reference: str) -> Measurement:
    path = folder / f"{reference.removeprefix(MEASURED)}.json"
    found = read_measurement(path)
    if found is None:
        raise UsageError(f"{path} is no stored measurement")
    return found
