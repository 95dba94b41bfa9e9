"""No code path unpickles, evaluates or starts a shell; test_fuzz.py checks it at run time."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import mobatlas

SOURCE = Path(mobatlas.__file__).parent
# Modules that run what they are given, or read what can.
MODULES = {
    *(
        "pickle",
        "cPickle",
        "_pickle",
        "dill",
        "cloudpickle",
        "joblib",
        "marshal",
        "shelve",
        "subprocess",
        "code",
        "codeop",
    ),
    *("runpy", "pty", "pickletools", "ctypes", "cffi"),
}
CALLS = {
    *(
        "eval",
        "exec",
        "compile",
        "__import__",
        "os.system",
        "os.popen",
        "torch.load",
        "torch.jit.load",
        "pd.read_pickle",
    ),
    *(
        "pandas.read_pickle",
        "yaml.load",
        "yaml.load_all",
        "yaml.unsafe_load",
        "yaml.full_load",
        "torch.hub.load",
    ),
    *("os.startfile", "jinja2.Template", "Template", "from_string", "importlib.reload"),
}
PREFIXES = (
    "os.exec",
    "os.spawn",
    "os.posix_spawn",
    "pickle.",
    "subprocess.",
    "asyncio.create_subprocess",
)
IMPORTS = ("import_module", "importlib.import_module", "spec_from_file_location")
# Modules that may import by a variable name, a name of ours.
MAY_IMPORT = {
    "__init__.py",
    "cli/__init__.py",
    "generators/protocol.py",
}
# Who may start a process: of mobatlas itself, with arguments of its own.
MAY_START: set[str] = set()
# Who may tell the C library of this very process something; no other library is loaded.
MAY_TELL = {"training/resources.py"}


def faults(text: str, where: str) -> Iterator[str]:
    """What a source must not have, with its line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [each.name for each in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
            )
            allowed = {"subprocess": MAY_START, "ctypes": MAY_TELL}
            barred = MODULES - {module for module, who in allowed.items() if where in who}
            yield from (
                f"{where}:{node.lineno} imports {n}" for n in names if n.split(".")[0] in barred
            )
        if not isinstance(node, ast.Call):
            continue
        name, options = (
            ast.unparse(node.func),
            {each.arg: ast.unparse(each.value) for each in node.keywords},
        )
        if name == "subprocess.run" and where in MAY_START and "shell" not in options:
            continue
        if name.startswith("ctypes.") and not ast.unparse(node).startswith("ctypes.CDLL(None)"):
            yield f"{where}:{node.lineno} loads a library"
        if name in CALLS or name.startswith(PREFIXES) or name.endswith(".from_string"):
            yield f"{where}:{node.lineno} calls {name}"
        if name in ("np.load", "numpy.load") and options.get("allow_pickle") != "False":
            yield f"{where}:{node.lineno} loads an array that may be a pickle"
        if (
            options.get("shell") == "True"
            or options.get("allow_pickle") == "True"
            or options.get("trust_remote_code") == "True"
        ):
            yield f"{where}:{node.lineno} allows {options}"
        if (
            name in IMPORTS
            and where not in MAY_IMPORT
            and not isinstance(node.args[0], ast.Constant)
        ):
            yield f"{where}:{node.lineno} imports by a name that it was given"


def test_no_source_unpickles_evaluates_or_shells_out() -> None:
    sources = {
        path.relative_to(SOURCE).as_posix(): path.read_text() for path in SOURCE.rglob("*.py")
    }
    assert len(sources) > 90
    assert [fault for where, text in sources.items() for fault in faults(text, where)] == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import ctypes",
        "ctypes.CDLL('theirs.so')",
        "from subprocess import run",
        "eval(x)",
        "exec(x)",
        "os.system(x)",
        "os.execvp(x, y)",
        "torch.load(path)",
        "yaml.load(text, Loader=yaml.Loader)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "pd.read_pickle(path)",
        "import_module(name)",
        "run(command, shell=True)",
        "environment.from_string(text)",
    ],
)
def test_each_way_to_run_code_would_be_seen(text: str) -> None:
    assert list(faults(text, "data/x.py"))


def test_who_may_tell_the_c_library_something_loads_no_other() -> None:
    assert (
        list(faults("import ctypes\nctypes.CDLL(None).mallopt(1, 2)", "training/resources.py"))
        == []
    )
    assert list(faults("ctypes.CDLL('theirs.so')", "training/resources.py")) and list(
        faults("import pickle", "training/resources.py")
    )
