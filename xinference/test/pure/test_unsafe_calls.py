"""No call in the package turns data into code: every source is parsed and walked, so that a comment or another spelling hides nothing."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2]
SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if not {"test", "bench"} & set(path.relative_to(PACKAGE).parts)]
# What runs code that the data names, wherever it is imported from.
MODULES = frozenset({"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"})
FUNCTIONS = frozenset({"eval", "exec", "__import__", "recv_pyobj", "send_pyobj", "unsafe_load", "full_load"})
OF_OS = frozenset({"system", "popen"})
# Function -> the keyword and value without which it must not be called.
ONLY_WITH = {("torch", "load"): ("weights_only", True), ("yaml", "load"): ("Loader", "SafeLoader")}
NEVER_WITH = {"allow_pickle": True, "shell": True, "trust_remote_code": True, "weights_only": False}


def unsafe(source: str) -> Iterator[str]:
    """What a source does that turns data into code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (name for name in names if name.split(".")[0] in MODULES)
        elif isinstance(node, ast.Call):
            yield from _unsafe_call(node)


def _unsafe_call(node: ast.Call) -> Iterator[str]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
    owner = node.func.value.id if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) else ""
    given = {keyword.arg: _value(keyword.value) for keyword in node.keywords}
    if (name in FUNCTIONS and not (name == "eval" and owner)) or (owner == "os" and name in OF_OS):  # model.eval() is torch's
        yield name
    keyword, value = ONLY_WITH.get((owner, name), (None, None))
    if keyword is not None and given.get(keyword) != value:
        yield f"{owner}.{name} without {keyword}={value}"
    yield from (f"{keyword}={value}" for keyword, value in NEVER_WITH.items() if given.get(keyword) is value)


def _value(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else node.attr if isinstance(node, ast.Attribute) else None


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_source_turns_data_into_code(path: Path) -> None:
    assert list(unsafe(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import xml, dill as d",
        "def f():\n    import marshal",
        "eval('1')",
        "exec(code)",
        "socket.recv_pyobj()",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text)",
        "yaml.unsafe_load(text)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_the_walk_finds_what_it_looks_for(source: str) -> None:
    assert len(list(unsafe(source))) >= 1


@pytest.mark.parametrize(
    "source", ["model.eval()", "torch.load(path, weights_only=True)", "yaml.load(text, Loader=yaml.SafeLoader)", "# eval(x)"]
)
def test_the_walk_leaves_alone_what_is_safe(source: str) -> None:
    assert list(unsafe(source)) == []


def test_the_walk_sees_the_whole_package() -> None:
    names = {path.relative_to(PACKAGE).parts[0] for path in SOURCES}
    assert {"api", "client", "core", "deploy", "model", "settings.py"} <= names
    assert len(SOURCES) > 150
