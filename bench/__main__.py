"""`python -m bench NAME`: run a benchmark."""

from mobatlas.cli import run_application


def main() -> None:
    """Run a command of `python -m bench`."""
    run_application("bench.commands", "python -m bench")


if __name__ == "__main__":
    main()
