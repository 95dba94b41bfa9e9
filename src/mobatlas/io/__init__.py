"""Files: user tables, manifests, and output folders that appear complete or not at all."""
