"""Reports: console output, tables, charts and the HTML page of a run."""
