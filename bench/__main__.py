"""`python -m bench NAME`: run a benchmark."""

from typing import Any

from mobatlas.cli import run_application


def main() -> None:
    """Run a command of `python -m bench`."""
    run_application(_load_app, "python -m bench")


def _load_app() -> Any:
    from bench.commands import app

    return app


if __name__ == "__main__":
    main()
