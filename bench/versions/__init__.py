"""Parts of `bench.compare_versions`: its cases, their input files, and the comparison of files."""
