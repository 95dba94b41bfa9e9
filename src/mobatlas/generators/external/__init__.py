"""The external family: bring your own generator."""
