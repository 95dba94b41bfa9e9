"""The external family: samples of another program, or of a function that the user provides."""
