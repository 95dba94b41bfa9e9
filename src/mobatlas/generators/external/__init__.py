"""The external family: samples of another program, or of a function of the user's."""
