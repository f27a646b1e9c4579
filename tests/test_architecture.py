"""The floors of the house: who may import whom, and what importing lordo costs. Read with `ast`; nothing is imported."""

import ast
import json
import subprocess
import sys
import textwrap
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "lordo"

# A room is a module or a package directly in lordo; what is on no floor here belongs to the trainer, above all of these.
FLOORS = [
    {"lowrank", "updates", "suggest", "finite", "shards"},  # pure functions
    {"optim", "sync"},  # rooms that do not know each other
    {"methods"},  # the table, where they meet
    {"optimizer"},  # a row at work
    {"accounting"},  # of a method
]
CORE = set().union(*FLOORS)
TRAINER = len(FLOORS)
STANDARD_LIBRARY = sys.stdlib_module_names


def module_name(path: Path) -> str:
    parts = ("lordo", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def room(module: str) -> str | None:
    """lordo.sync.comm -> sync; lordo itself, which gathers the public names, is in no room."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def floor(module: str) -> int:
    return next((number for number, rooms in enumerate(FLOORS) if room(module) in rooms), TRAINER)


def imports(module: str, *, at_import_only: bool = False) -> set[str]:
    """Full names of the modules that a module imports, anywhere in it or only when it is imported itself."""
    path = MODULES[module]
    tree = ast.parse(path.read_text())
    functions = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)}
    found = set()
    for node in ast.walk(tree):
        if at_import_only and id(node) in functions:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            found |= {full if (full := f"{base}.{alias.name}") in MODULES else base for alias in node.names}
    return found


def own(names: set[str]) -> set[str]:
    return {name for name in names if name.split(".")[0] == "lordo"}


def test_the_files_are_read():
    assert {"lordo", "lordo.lowrank", "lordo.sync", "lordo.sync.comm", "lordo.optim.local"} <= MODULES.keys()
    assert {room(module) for module in MODULES} >= CORE
    assert "lordo.sync.comm" in imports("lordo.sync.rules")


@pytest.mark.parametrize("module", [module for module in MODULES if module != "lordo"])
def test_a_module_imports_from_lower_floors_or_its_own_room(module):
    for imported in own(imports(module)):
        if floor(module) == TRAINER:
            continue
        assert imported != "lordo", f"{module} imports the public names, which are above it"
        same_room = room(imported) == room(module)
        assert same_room or floor(imported) < floor(module), f"{module} must not know {imported}"


def test_the_two_rooms_of_the_first_floor_do_not_know_each_other():
    for here, there in (("optim", "sync"), ("sync", "optim")):
        for module in MODULES:
            if room(module) == here:
                assert there not in {room(imported) for imported in own(imports(module))}, module


def test_imports_do_not_go_in_circles():
    graph = {module: own(imports(module, at_import_only=True)) - {module} for module in MODULES}
    for module, needed in graph.items():  # a package imports its parts by name; the part does not import the package
        graph[module] = {name for name in needed if not module.startswith(f"{name}.")}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("module", [module for module in MODULES if room(module) in {None, *CORE}])
def test_the_core_needs_torch_alone(module):
    others = {name.split(".")[0] for name in imports(module)} - {"lordo", "torch"} - STANDARD_LIBRARY
    assert not others


@pytest.mark.parametrize("module", [module for module in MODULES if floor(module) == 0])
def test_the_ground_floor_knows_no_network_and_no_files(module):
    assert not {name for name in imports(module) if name.split(".")[0] in {"os", "pathlib", "io", "socket", "threading"}}
    assert not {name for name in imports(module) if name.startswith("torch.distributed")}


@pytest.mark.parametrize("module", [module for module in MODULES if room(module) == "optim"])
def test_the_optimizer_knows_no_network(module):
    assert not {name for name in imports(module) if name.startswith("torch.distributed") or name in {"socket", "threading"}}


@pytest.fixture(scope="module")
def cost():
    """Modules that `import lordo` loads on top of torch, the processor seconds that takes, and the threads it leaves behind."""
    script = """
        import json, sys, threading, time, torch
        before, threads, start = set(sys.modules), threading.active_count(), time.process_time()
        import lordo
        seconds = time.process_time() - start
        new = sorted(set(sys.modules) - before)
        print(json.dumps({"modules": new, "seconds": seconds, "threads": threading.active_count() - threads}))
    """
    finished = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=True)
    assert finished.stderr == ""
    return json.loads(finished.stdout)


def test_importing_lordo_loads_no_library_but_torch(cost):
    """The trainer's libraries are an extra: the optimizer must not need them."""
    loaded = {name.split(".")[0] for name in cost["modules"]}
    assert not loaded & {"transformers", "tokenizers", "safetensors", "datasets", "pydantic", "tyro", "rich", "matplotlib", "pandas"}
    assert loaded - STANDARD_LIBRARY <= {"lordo", "torch", "_remote_module_non_scriptable"}  # which torch.distributed.nn makes itself
    assert {room(name) for name in cost["modules"] if name.startswith("lordo.")} <= CORE, "the trainer is imported with the core"


def test_importing_lordo_costs_little_on_top_of_torch(cost):
    """Few modules, and processor time (not wall time, which a busy machine stretches): 0.03 s when this was written."""
    assert len(cost["modules"]) < 60
    assert cost["seconds"] < 0.2
    assert cost["threads"] == 0


def test_the_public_names_are_those_listed():
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    (listed,) = (ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "__all__")
    imported = {alias.asname or alias.name for n in tree.body if isinstance(n, ast.ImportFrom) for alias in n.names}
    assert imported | {"__version__"} == set(listed)
