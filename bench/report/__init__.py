"""Tables, figures and pages of benchmark results."""
