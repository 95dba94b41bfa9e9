"""The steps of a run: train, supervise, and everything from tables to report.html."""
