"""Every new tensor of the library names its device: users may have set another default (torch.set_default_device)."""

import ast
from pathlib import Path

import inloop

FACTORIES = {
    "zeros",
    "ones",
    "full",
    "empty",
    "tensor",
    "arange",
    "linspace",
    "eye",
    "rand",
    "randn",
    "randint",
    "randperm",
}


def is_of_torch(node):
    function = node.func if isinstance(node, ast.Call) else None
    is_factory = isinstance(function, ast.Attribute) and function.attr in FACTORIES
    return is_factory and isinstance(function.value, ast.Name) and function.value.id == "torch"


def test_every_new_tensor_names_its_device():
    calls, without = 0, []
    for path in Path(inloop.__file__).parent.rglob("*.py"):
        for node in filter(is_of_torch, ast.walk(ast.parse(path.read_text()))):
            calls += 1
            if "device" not in {keyword.arg for keyword in node.keywords}:
                without.append(f"{path.name}:{node.lineno}")
    assert calls > 50
    assert not without, without
