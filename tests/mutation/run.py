"""Apply known mutants of the pure modules one by one, and list those that the tests do not kill.

`killed.csv` has the mutants (made with cosmic-ray's operators, a seeded sample of each module) that
the suite killed when it was reorganized. A suite that is made smaller must still kill them.

    .venv/bin/python tests/mutation/run.py           # all of them, half an hour on one core
    .venv/bin/python tests/mutation/run.py deadline  # of modules with "deadline" in their path

The tree is copied, and the copy mutated. A mutant whose line is no longer in the code is counted as
gone. Exit status 1 if a mutant survives.
"""

import csv
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0
"""A mutant whose tests take longer is killed: it loops."""


def tests_of(tree: Path, module: str) -> list[str]:
    """The tests of a module's package, the module's own first; of a top-level module its file."""
    path = Path(module).relative_to("rpcwheel")
    name = path.stem.removeprefix("_")
    if len(path.parts) == 1:
        return [f"tests/unit/test_{name}.py", "tests/unit/timer", "tests/unit/failback"]
    found = []
    for layer in ("unit", "contract"):
        directory = Path("tests", layer, path.parent)
        own = sorted((tree / directory).glob(f"test_{name}*.py"))
        found += [str(file.relative_to(tree)) for file in own]
        found += [str(directory)] if (tree / directory).is_dir() else []
    return found


def survives(tree: Path, module: str) -> bool:
    """Whether all tests of a module pass."""
    environment = {**os.environ, "RPCWHEEL_PURE": "1", "PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    try:
        run = subprocess.run(
            [*command, *tests_of(tree, module)],
            cwd=tree,
            env=environment,
            timeout=LIMIT_S,
            capture_output=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return run.returncode == 0


def main(wanted: str) -> int:
    """Try the mutants of the modules whose path contains `wanted`."""
    with Path(__file__).with_name("killed.csv").open(newline="") as file:
        mutants = [one for one in csv.DictReader(file) if wanted in one["module"]]
    survivors, gone = [], 0
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch, "tree")
        ignored = shutil.ignore_patterns(".venv", ".git", ".*_cache", "__pycache__", "*.so")
        shutil.copytree(ROOT, tree, ignore=ignored)
        for mutant in mutants:
            path = tree / mutant["module"]
            text = path.read_text() if path.exists() else ""
            line = f"\n{mutant['before']}\n"
            parts, nth = text.split(line), int(mutant["nth"]) + 1
            if len(parts) <= nth:
                gone += 1
                continue
            before, after = line.join(parts[:nth]), line.join(parts[nth:])
            path.write_text(f"{before}\n{mutant['after']}\n{after}")
            if survives(tree, mutant["module"]):
                survivors.append(mutant)
                print(f"survived: {mutant['module']}:{line}becomes\n{mutant['after']}")
            path.write_text(text)
    print(f"{len(mutants)} mutants, {gone} gone, {len(survivors)} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
